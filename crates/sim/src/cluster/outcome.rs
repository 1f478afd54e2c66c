//! The results of a run.

use std::io::{self, Write};

use super::router::Peer;

/// The result of one request. Times are nanoseconds from the first arrival.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestResult {
    /// When it arrived.
    pub arrival_ns: u64,
    /// The prefill worker; `None` if it was prefilled locally or refused.
    pub prefill_worker: Option<u32>,
    /// Number of leading blocks that needed no computing.
    pub hit_blocks: u32,
    /// Number of leading blocks that were requested from a peer, whether or not they were still
    /// missing.
    pub fetch_blocks: u32,
    /// When that fetch was complete.
    pub fetch_ready_ns: u64,
    /// The worker that sent the blocks, if they took their turn on the links.
    pub fetch_from: Option<Peer>,
    /// The part of `hit_blocks` that was there because of the fetch.
    pub fetched_blocks: u32,
    /// When it was placed on a worker.
    pub placed_ns: u64,
    /// Maximum number of leading blocks that any worker held at that time.
    pub held_blocks: u32,
    /// Number of leading blocks that the chosen worker held at that time.
    pub chosen_blocks: u32,
    /// When its prefill started.
    pub prefill_start_ns: u64,
    /// When its prefill ended.
    pub prefill_end_ns: u64,
    /// The decode worker; `None` if it was refused.
    pub decode_worker: Option<u32>,
    /// Number of tokens whose KV was moved to the decode worker.
    pub moved_tokens: u32,
    /// When the prompt's KV was complete at the decode worker.
    pub kv_ready_ns: u64,
    /// When it had its first token.
    pub first_token_ns: u64,
    /// When it had its last token.
    pub last_token_ns: u64,
    /// Index of its first step in the decode worker's `steps_ns`.
    pub first_step: u32,
    /// Whether it was refused.
    pub rejected: bool,
}

impl RequestResult {
    /// From arrival to first token, in nanoseconds.
    pub fn ttft_ns(&self) -> u64 {
        self.first_token_ns - self.arrival_ns
    }
}

/// The results of all requests and workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimulationResult {
    /// One row per request, in trace order.
    pub rows: Vec<RequestResult>,
    /// The busy time of each prefill worker.
    pub prefill_busy_ns: Vec<u64>,
    /// The steps of each decode worker, as durations in nanoseconds.
    pub steps_ns: Vec<Vec<u64>>,
}

impl SimulationResult {
    /// Mean of the longest tenth of a request's intervals between tokens, rounded down; 0 if it has
    /// none. `scratch` is working memory.
    pub fn tbt_ns(&self, request: usize, output_tokens: u32, scratch: &mut Vec<u64>) -> u64 {
        let row = &self.rows[request];
        let intervals = output_tokens as usize - 1;
        let Some(worker) = row.decode_worker.filter(|_| intervals > 0) else { return 0 };
        let first = row.first_step as usize + 1;
        let longest = intervals.div_ceil(10);
        scratch.clear();
        scratch.extend_from_slice(&self.steps_ns[worker as usize][first..first + intervals]);
        let (_, _, top) = scratch.select_nth_unstable(intervals - longest);
        // The element at the split belongs to the longest tenth as well.
        let sum: u64 = top.iter().sum::<u64>() + scratch[intervals - longest];
        sum / longest as u64
    }

    /// Writes one tab-separated line per request, under a header, for comparison with another
    /// implementation. Values that do not apply are -1 for a worker and 0 otherwise.
    ///
    /// # Errors
    /// The output cannot be written.
    pub fn dump(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(
            out,
            "req\tarrival_ns\tprefill_worker\thit_blocks\tprefill_start_ns\tprefill_end_ns\t\
             decode_worker\ttokens_moved\tkv_ready_ns\tfirst_token_ns\tlast_token_ns\trejected"
        )?;
        let worker = |worker: Option<u32>| worker.map_or(-1, i64::from);
        for (request, row) in self.rows.iter().enumerate() {
            writeln!(
                out,
                "{request}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}",
                row.arrival_ns,
                worker(row.prefill_worker),
                row.hit_blocks,
                row.prefill_start_ns,
                row.prefill_end_ns,
                worker(row.decode_worker),
                row.moved_tokens,
                row.kv_ready_ns,
                row.first_token_ns,
                row.last_token_ns,
                u8::from(row.rejected),
            )?;
        }
        Ok(())
    }
}
