//! The operations of the workloads, independent of any index: prompts as chains of blocks, stores
//! and evictions of workers, and the exact result of each lookup.

mod lru;

use std::collections::HashSet;

pub use self::lru::{Caches, Evict};
use super::adapters::Block;
use crate::splitmix::mix;

/// The blocks of a prompt, or of the rest of a prompt.
pub type Chain = Vec<Block>;

/// A change of the cache of one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// The worker has stored the blocks `from..to` of a chain.
    Store {
        /// The worker.
        worker: u32,
        /// The engine's name of the block before them; `None` at the beginning of a prompt.
        parent: Option<u64>,
        /// The place of the chain in the list of chains.
        chain: u32,
        /// The first block.
        from: u32,
        /// The end: one more than the last block.
        to: u32,
    },
    /// The worker has evicted blocks.
    Remove {
        /// The worker.
        worker: u32,
        /// The engine's names of the blocks.
        engines: Vec<u64>,
    },
}

impl Op {
    /// Number of blocks that are stored or evicted.
    pub fn blocks(&self) -> usize {
        match self {
            Self::Store { from, to, .. } => (to - from) as usize,
            Self::Remove { engines, .. } => engines.len(),
        }
    }
}

/// One request: a lookup, followed by events.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// The place of the chain that is looked up.
    pub query: u32,
    /// Number of events that follow.
    pub events: u32,
}

/// The worker that serves the request with a number.
pub fn worker_of(request: usize, workers: u32) -> u32 {
    (mix(request as u64) % u64::from(workers)) as u32
}

/// Makes a chain of blocks from the hashes of their own tokens.
pub fn chain_of(contents: impl Iterator<Item = u64>) -> Chain {
    let mut chained = 0;
    contents
        .map(|content| {
            chained = mix(chained ^ content.rotate_left(17));
            Block { engine: mix(chained ^ 0x5151), content, chained }
        })
        .collect()
}

/// The prompts of a trace. Each block id of the trace becomes `expand` blocks. With another `salt`,
/// the prompts have the same lengths and the same blocks in common, but entirely different blocks.
pub fn chains_of(requests: &[Vec<u32>], expand: u32, salt: u64) -> Vec<Chain> {
    let contents = |id: &u32| {
        let id = mix(salt) ^ (u64::from(*id) << 16);
        (0..expand).map(move |part| mix(id ^ u64::from(part)))
    };
    let chain = |ids: &Vec<u32>| chain_of(ids.iter().flat_map(contents));
    requests.iter().map(chain).collect()
}

/// The operation that a worker stores the blocks of a chain from `from` on.
pub fn store(worker: u32, chains: &[Chain], chain: usize, from: usize) -> Op {
    let blocks = &chains[chain];
    Op::Store {
        worker,
        parent: from.checked_sub(1).map(|before| blocks[before].engine),
        chain: chain as u32,
        from: from as u32,
        to: blocks.len() as u32,
    }
}

/// An exact model of an index: the blocks of all workers, without evictions.
#[derive(Default)]
pub struct Model {
    held: Vec<HashSet<u64>>,
}

impl Model {
    /// A model in which no worker holds a block.
    pub fn new(workers: u32) -> Self {
        Self { held: vec![HashSet::new(); workers as usize] }
    }

    /// Number of leading blocks of a chain that the worker holds.
    pub fn overlap(&self, worker: u32, chain: &[Block]) -> usize {
        let held = &self.held[worker as usize];
        chain.iter().take_while(|block| held.contains(&block.chained)).count()
    }

    /// Stores blocks on a worker.
    pub fn store(&mut self, worker: u32, blocks: &[Block]) {
        self.held[worker as usize].extend(blocks.iter().map(|block| block.chained));
    }

    /// The right result of a lookup: workers with their overlaps in blocks, sorted by worker.
    pub fn scores(&self, chain: &[Block]) -> Vec<(u32, u32)> {
        let score = |worker: usize| (worker as u32, self.overlap(worker as u32, chain) as u32);
        (0..self.held.len()).map(score).filter(|&(_, blocks)| blocks > 0).collect()
    }

    /// Number of blocks of all workers.
    pub fn entries(&self) -> usize {
        self.held.iter().map(HashSet::len).sum()
    }

    /// Number of blocks of one worker.
    pub fn entries_of(&self, worker: u32) -> usize {
        self.held[worker as usize].len()
    }
}

/// The operations of a trace without evictions: each request stores on its worker the blocks that
/// the worker does not hold.
pub fn without_eviction(chains: &[Chain], workers: u32) -> (Vec<Op>, Model) {
    let mut model = Model::new(workers);
    let mut ops = Vec::with_capacity(chains.len());
    for (request, chain) in chains.iter().enumerate() {
        let worker = worker_of(request, workers);
        let held = model.overlap(worker, chain);
        if held < chain.len() {
            ops.push(store(worker, chains, request, held));
            model.store(worker, &chain[held..]);
        }
    }
    (ops, model)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn chains_with_a_common_start_share_its_blocks_and_nothing_after() {
        let chains = chains_of(&[vec![0, 1, 2], vec![0, 1, 3], vec![7, 1, 2]], 2, 0);
        assert_eq!(chains[0][..4], chains[1][..4]);
        assert_ne!(chains[0][4].chained, chains[1][4].chained);
        assert_eq!(chains[0][2].content, chains[2][2].content);
        assert_ne!(chains[0][2].chained, chains[2][2].chained);
        assert_ne!(chains_of(&[vec![0]], 1, 1)[0], chains[0][..1]);
    }

    #[test]
    fn a_worker_stores_only_what_it_lacks() {
        let chains = chains_of(&[vec![0, 1], vec![0, 1, 2], vec![0, 1]], 1, 0);
        let (ops, model) = without_eviction(&chains, 1);
        assert_eq!(ops.len(), 2);
        assert_eq!(ops[1], store(0, &chains, 1, 2));
        assert_eq!((model.entries(), model.scores(&chains[1])), (3, vec![(0, 3)]));
    }
}
