//! Requests to be served: lengths, prefix blocks and arrival times.

use std::collections::HashMap;

use super::cost::CostModel;

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceRequest {
    /// Arrival time in milliseconds of the trace's own clock.
    pub timestamp_ms: f64,
    /// Prompt tokens, at least 1.
    pub input_tokens: u32,
    /// Tokens to generate, at least 1.
    pub output_tokens: u32,
    /// Index of its first block among all blocks.
    first_block: usize,
    /// Number of blocks of its prompt; the last may be partial.
    pub blocks: u32,
}

/// A trace, sorted by time, with blocks renumbered from 0.
#[derive(Clone, Debug)]
pub struct Workload {
    requests: Vec<TraceRequest>,
    blocks: Vec<u32>,
    /// Ids are below this value.
    distinct_blocks: u32,
    block_tokens: u32,
}

/// Collects requests in the order of their file.
#[derive(Debug)]
pub struct WorkloadBuilder {
    workload: Workload,
    dense: HashMap<u64, u32>,
}

impl WorkloadBuilder {
    /// An empty workload with blocks of this many tokens.
    pub fn new(block_tokens: u32) -> Self {
        let workload = Workload {
            requests: Vec::new(),
            blocks: Vec::new(),
            distinct_blocks: 0,
            block_tokens: block_tokens.max(1),
        };
        Self { workload, dense: HashMap::new() }
    }

    /// Adds a request. Lengths below 1 count as 1; blocks are renumbered by first appearance.
    pub fn push(&mut self, timestamp_ms: f64, input: u32, output: u32, hashes: &[u64]) {
        let workload = &mut self.workload;
        let first_block = workload.blocks.len();
        for hash in hashes {
            let next = workload.distinct_blocks;
            let id = *self.dense.entry(*hash).or_insert(next);
            workload.distinct_blocks += u32::from(id == next);
            workload.blocks.push(id);
        }
        workload.requests.push(TraceRequest {
            timestamp_ms,
            input_tokens: input.max(1),
            output_tokens: output.max(1),
            first_block,
            blocks: hashes.len() as u32,
        });
    }

    /// The workload, sorted by time; equal times keep their order.
    pub fn finish(mut self) -> Workload {
        self.workload.requests.sort_by(|a, b| a.timestamp_ms.total_cmp(&b.timestamp_ms));
        self.workload
    }
}

impl Workload {
    /// All requests, in trace order.
    pub fn requests(&self) -> &[TraceRequest] {
        &self.requests
    }

    /// The blocks of a request's prompt, first to last.
    pub fn blocks(&self, request: usize) -> &[u32] {
        let TraceRequest { first_block, blocks, .. } = self.requests[request];
        &self.blocks[first_block..first_block + blocks as usize]
    }

    /// Number of distinct blocks; ids are below it.
    pub fn distinct_blocks(&self) -> u32 {
        self.distinct_blocks
    }

    /// Tokens of a full block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Number of blocks of all requests.
    pub fn total_blocks(&self) -> u64 {
        self.requests.iter().map(|request| u64::from(request.blocks)).sum()
    }

    /// Tokens that `hit_blocks` leading blocks save: the last token is always computed.
    pub fn cached_tokens(&self, request: usize, hit_blocks: u32) -> u32 {
        let hit = u64::from(hit_blocks) * u64::from(self.block_tokens);
        hit.min(u64::from(self.requests[request].input_tokens - 1)) as u32
    }

    /// Number of leading blocks that an unlimited cache, shared by all workers and used by one
    /// request after the other, would have found: the maximum for any placement.
    pub fn ceiling_blocks(&self) -> u64 {
        let mut seen = vec![false; self.distinct_blocks as usize];
        let mut hits = 0;
        for request in 0..self.requests.len() {
            let blocks = self.blocks(request);
            hits += blocks.iter().take_while(|block| seen[**block as usize]).count() as u64;
            blocks.iter().for_each(|block| seen[*block as usize] = true);
        }
        hits
    }

    /// Time from the first request to the last, in seconds of the trace's clock.
    pub fn span_s(&self) -> f64 {
        match (self.requests.first(), self.requests.last()) {
            (Some(first), Some(last)) => (last.timestamp_ms - first.timestamp_ms) / 1e3,
            _ => 0.0,
        }
    }

    /// The speed, relative to the recording, at which this many prefill workers are busy for the
    /// share `utilisation` of the time if nothing is cached.
    pub fn rate_for(&self, utilisation: f64, prefill_workers: usize, cost: &CostModel) -> f64 {
        let work_ns: u64 =
            self.requests.iter().map(|request| cost.prefill_ns(request.input_tokens, 0)).sum();
        utilisation * prefill_workers as f64 * self.span_s() / (work_ns as f64 / 1e9)
    }

    /// The arrival time of each request, in nanoseconds from the first, at `rate` times the
    /// recorded speed. `spread` spaces requests of the same timestamp evenly up to the next one.
    pub fn arrivals_ns(&self, rate: f64, spread: bool) -> Vec<u64> {
        let mut at_ms: Vec<f64> = self.requests.iter().map(|r| r.timestamp_ms).collect();
        if spread {
            spread_out(&mut at_ms);
        }
        let first = at_ms.first().copied().unwrap_or(0.0);
        at_ms.iter().map(|at| ((at - first) * 1e6 / rate).round() as u64).collect()
    }
}

fn spread_out(at_ms: &mut [f64]) {
    let mut start = 0;
    while start < at_ms.len() {
        let at = at_ms[start];
        let end = start + at_ms[start..].iter().take_while(|other| **other == at).count();
        if let Some(next) = at_ms.get(end).copied() {
            let size = (end - start) as f64;
            for (i, slot) in at_ms[start..end].iter_mut().enumerate() {
                *slot = at + (next - at) * i as f64 / size;
            }
        }
        start = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(rows: &[(f64, &[u64])]) -> Workload {
        let mut builder = WorkloadBuilder::new(512);
        for (at, hashes) in rows {
            builder.push(*at, hashes.len() as u32 * 512, 1, hashes);
        }
        builder.finish()
    }

    #[test]
    fn blocks_are_renamed_in_file_order_and_requests_sorted_stably() {
        let trace = workload(&[(2.0, &[70, 80]), (1.0, &[70, 90]), (2.0, &[90])]);
        let at: Vec<f64> = trace.requests().iter().map(|r| r.timestamp_ms).collect();
        assert_eq!(at, [1.0, 2.0, 2.0]);
        assert_eq!(
            (trace.blocks(0), trace.blocks(1), trace.blocks(2)),
            (&[0, 2][..], &[0, 1][..], &[2][..])
        );
        assert_eq!(trace.distinct_blocks(), 3);
    }

    #[test]
    fn a_missing_block_ends_the_prefix_that_the_ceiling_counts() {
        let trace = workload(&[(0.0, &[1, 2, 3]), (1.0, &[1, 9, 3]), (2.0, &[1, 2, 3, 4])]);
        assert_eq!(trace.ceiling_blocks(), 4);
    }

    #[test]
    fn requests_of_equal_times_are_spread_up_to_the_next_time() {
        let trace = workload(&[(0.0, &[]), (0.0, &[]), (0.0, &[]), (3.0, &[]), (3.0, &[])]);
        assert_eq!(trace.arrivals_ns(1.0, true), [0, 1_000_000, 2_000_000, 3_000_000, 3_000_000]);
        assert_eq!(trace.arrivals_ns(2.0, false), [0, 0, 0, 1_500_000, 1_500_000]);
    }

    #[test]
    fn the_last_token_is_never_cached() {
        let trace = workload(&[(0.0, &[1, 2])]);
        assert_eq!(trace.cached_tokens(0, 1), 512);
        assert_eq!(trace.cached_tokens(0, 2), 1023);
    }
}
