//! What the workloads do, before any index sees it: prompts as chains of blocks,
//! who stores and evicts what, and the exact answer to every lookup.

mod lru;

use std::collections::HashSet;

pub use self::lru::{Caches, Evict};
use super::adapters::Block;

/// A prompt: its blocks from the first on.
pub type Chain = Vec<Block>;

/// A change of one worker's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Blocks `from..to` of a chain became resident after the block `parent`.
    Store {
        /// The worker.
        worker: u32,
        /// Engine hash of the block before, `None` for a first block.
        parent: Option<u64>,
        /// The chain, by its place.
        chain: u32,
        /// First block.
        from: u32,
        /// One past the last.
        to: u32,
    },
    /// Blocks were evicted.
    Remove {
        /// The worker.
        worker: u32,
        /// Their engine hashes.
        engines: Vec<u64>,
    },
}

impl Op {
    /// How many blocks it names.
    pub fn blocks(&self) -> usize {
        match self {
            Self::Store { from, to, .. } => (to - from) as usize,
            Self::Remove { engines, .. } => engines.len(),
        }
    }
}

/// One request: a lookup, and then the next few events.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// The chain that is looked up, whole.
    pub query: u32,
    /// How many events follow.
    pub events: u32,
}

/// SplitMix64's output function: spreads numbers over 64 bits.
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The worker that request `request` goes to.
pub fn worker_of(request: usize, workers: u32) -> u32 {
    (mix(request as u64) % u64::from(workers)) as u32
}

/// Chains contents into blocks.
pub fn chain_of(contents: impl Iterator<Item = u64>) -> Chain {
    let mut chained = 0;
    contents
        .map(|content| {
            chained = mix(chained ^ content.rotate_left(17));
            Block { engine: mix(chained ^ 0x5151), content, chained }
        })
        .collect()
}

/// The prompts of a trace, each of its block ids expanded to `expand` blocks.
/// Another `salt` gives the same shape with entirely other content.
pub fn chains_of(requests: &[Vec<u32>], expand: u32, salt: u64) -> Vec<Chain> {
    let contents = |id: &u32| {
        let id = mix(salt) ^ (u64::from(*id) << 16);
        (0..expand).map(move |part| mix(id ^ u64::from(part)))
    };
    let chain = |ids: &Vec<u32>| chain_of(ids.iter().flat_map(contents));
    requests.iter().map(chain).collect()
}

/// One store for `chain[from..]`.
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

/// What every worker holds, without evictions: the exact model of the index.
#[derive(Default)]
pub struct Model {
    held: Vec<HashSet<u64>>,
}

impl Model {
    /// Nobody holds anything.
    pub fn new(workers: u32) -> Self {
        Self { held: vec![HashSet::new(); workers as usize] }
    }

    /// How much of a chain's start the worker holds.
    pub fn overlap(&self, worker: u32, chain: &[Block]) -> usize {
        let held = &self.held[worker as usize];
        chain.iter().take_while(|block| held.contains(&block.chained)).count()
    }

    /// The worker stores a chain's blocks from `from` on.
    pub fn store(&mut self, worker: u32, blocks: &[Block]) {
        self.held[worker as usize].extend(blocks.iter().map(|block| block.chained));
    }

    /// The right answer to a lookup, sorted by worker.
    pub fn scores(&self, chain: &[Block]) -> Vec<(u32, u32)> {
        let score = |worker: usize| (worker as u32, self.overlap(worker as u32, chain) as u32);
        (0..self.held.len()).map(score).filter(|&(_, blocks)| blocks > 0).collect()
    }

    /// Entries held, over all workers.
    pub fn entries(&self) -> usize {
        self.held.iter().map(HashSet::len).sum()
    }

    /// Entries that one worker holds.
    pub fn entries_of(&self, worker: u32) -> usize {
        self.held[worker as usize].len()
    }
}

/// Each request stores on its worker what that lacks; nothing is evicted.
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
