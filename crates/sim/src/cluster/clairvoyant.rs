//! A cache that knows the future: a reference for eviction that cannot be built.

use std::collections::BinaryHeap;

use super::workload::Workload;

/// Never used again.
const NEVER: u32 = u32::MAX;

/// Evicts the block whose next use is furthest in the future (by position of the request in the
/// trace); of several, the deepest in its prompt. Requests that have started do not count as
/// future.
#[derive(Clone, Debug)]
pub struct Clairvoyant {
    /// Requests that use each block, in order: block `b`'s are `uses[starts[b]..starts[b + 1]]`.
    uses: Vec<u32>,
    starts: Vec<u32>,
    /// The position in `uses` of each block's first use that may be in the future.
    cursor: Vec<u32>,
    started: Vec<bool>,
    held: Vec<bool>,
    /// (next use, depth, block); outdated entries are dropped when they are found.
    order: BinaryHeap<(u32, u32, u32)>,
    len: usize,
    capacity: usize,
}

impl Clairvoyant {
    /// An empty cache of `capacity` blocks for this trace.
    pub fn new(workload: &Workload, capacity: usize) -> Self {
        let blocks = workload.distinct_blocks() as usize;
        let requests = workload.requests().len();
        let mut starts = vec![0u32; blocks + 1];
        for request in 0..requests {
            workload.blocks(request).iter().for_each(|block| starts[*block as usize + 1] += 1);
        }
        for block in 0..blocks {
            starts[block + 1] += starts[block];
        }
        let mut cursor = starts.clone();
        let mut uses = vec![0; starts[blocks] as usize];
        for request in 0..requests {
            for block in workload.blocks(request) {
                let slot = &mut cursor[*block as usize];
                uses[*slot as usize] = request as u32;
                *slot += 1;
            }
        }
        Self {
            uses,
            cursor: starts[..blocks].to_vec(),
            starts,
            started: vec![false; requests],
            held: vec![false; blocks],
            order: BinaryHeap::new(),
            len: 0,
            capacity,
        }
    }

    /// Whether it holds the block.
    pub fn holds(&self, block: u32) -> bool {
        self.held[block as usize]
    }

    /// Notes that a request has started: its uses of its blocks are no longer in the future.
    pub fn started(&mut self, request: usize, blocks: &[u32]) {
        self.started[request] = true;
        for (depth, block) in blocks.iter().enumerate() {
            if self.held[*block as usize] {
                let next = self.next_use(*block);
                self.order.push((next, depth as u32, *block));
            }
        }
    }

    /// Inserts the first blocks up to the capacity, then evicts until the capacity is kept.
    pub fn insert(&mut self, blocks: &[u32]) {
        for (depth, block) in blocks.iter().take(self.capacity).enumerate() {
            if !self.held[*block as usize] {
                self.held[*block as usize] = true;
                self.len += 1;
                let next = self.next_use(*block);
                self.order.push((next, depth as u32, *block));
            }
        }
        while self.len > self.capacity {
            let Some((next, _, block)) = self.order.pop() else { return };
            if self.held[block as usize] && self.next_use(block) == next {
                self.held[block as usize] = false;
                self.len -= 1;
            }
        }
    }

    /// The first future request that uses the block.
    fn next_use(&mut self, block: u32) -> u32 {
        let end = self.starts[block as usize + 1];
        let cursor = &mut self.cursor[block as usize];
        while *cursor < end && self.started[self.uses[*cursor as usize] as usize] {
            *cursor += 1;
        }
        if *cursor < end { self.uses[*cursor as usize] } else { NEVER }
    }
}

#[cfg(test)]
mod tests {
    use super::super::workload::WorkloadBuilder;
    use super::*;

    #[test]
    fn the_block_with_the_furthest_next_use_is_evicted_and_the_deepest_of_several() {
        let mut builder = WorkloadBuilder::new(1);
        for hashes in [&[0, 1][..], &[2, 3], &[2], &[0, 1], &[3]] {
            builder.push(0.0, 2, 1, hashes);
        }
        let trace = builder.finish();
        let mut cache = Clairvoyant::new(&trace, 3);
        cache.started(0, trace.blocks(0));
        cache.insert(trace.blocks(0));
        cache.started(1, trace.blocks(1));
        cache.insert(trace.blocks(1));
        let held: Vec<u32> = (0..4).filter(|block| cache.holds(*block)).collect();
        // Next uses: 0 and 1 by request 3, 2 by request 2, 3 by request 4.
        assert_eq!(held, [0, 1, 2]);
        cache.started(4, trace.blocks(4));
        cache.insert(trace.blocks(4));
        // Block 3 is never used again now, so it is evicted immediately.
        assert!(!cache.holds(3));
    }
}
