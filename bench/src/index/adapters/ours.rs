//! Splitrail's own index.

use std::sync::{Arc, PoisonError, RwLock};

use splitrail_kv::{
    BlockHash, EngineHash, HashSeed, Index, IndexConfig, KvEvent, Namespace, Overlaps,
    SnapshotBlock, StoredBlock, Tier, WorkerKey, chain_hashes,
};

use super::{Adapter, Block};

const SEED: HashSeed = HashSeed(1);
const MODEL: &str = "bench";
/// A block's content hash goes in as two tokens.
const BLOCK_SIZE: u32 = 2;

/// Our index, behind a lock.
pub struct Ours {
    index: Arc<RwLock<Index>>,
}

fn key(worker: u32) -> WorkerKey {
    WorkerKey { worker, rank: 0 }
}

fn tokens(block: &Block) -> [u32; 2] {
    [block.content as u32, (block.content >> 32) as u32]
}

impl Ours {
    fn write<T>(&self, work: impl FnOnce(&mut Index) -> T) -> T {
        work(&mut self.index.write().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Adapter for Ours {
    const NAME: &'static str = "ours";
    type Event = (WorkerKey, KvEvent);
    type Query = Box<[BlockHash]>;
    type Reader = Arc<RwLock<Index>>;
    type Found = Overlaps;
    type Snapshots = Vec<(WorkerKey, Vec<SnapshotBlock>)>;

    fn new(_workers: u32, max_blocks: usize) -> Self {
        let config = IndexConfig {
            model: MODEL.to_owned(),
            block_size: BLOCK_SIZE,
            seed: SEED,
            max_blocks_per_worker: max_blocks,
        };
        Self { index: Arc::new(RwLock::new(Index::new(config))) }
    }

    fn store_event(worker: u32, parent: Option<u64>, blocks: &[Block]) -> (WorkerKey, KvEvent) {
        let stored = |block: &Block| StoredBlock {
            hash: EngineHash(block.engine),
            tokens: tokens(block).to_vec(),
            opaque: false,
        };
        let event = KvEvent::Stored {
            parent: parent.map(EngineHash),
            blocks: blocks.iter().map(stored).collect(),
            adapter: None,
            salt: None,
            tier: Tier::Device,
        };
        (key(worker), event)
    }

    fn remove_event(worker: u32, engines: &[u64]) -> (WorkerKey, KvEvent) {
        let hashes = engines.iter().copied().map(EngineHash).collect();
        (key(worker), KvEvent::Removed { hashes, tier: Tier::Device })
    }

    fn query(blocks: &[Block]) -> Box<[BlockHash]> {
        let tokens: Vec<u32> = blocks.iter().flat_map(tokens).collect();
        let namespace =
            Namespace { salt: None, model: MODEL, adapter: None, block_size: BLOCK_SIZE };
        let mut hashes = Vec::new();
        chain_hashes(&namespace, SEED, &tokens, &mut hashes);
        hashes.into()
    }

    fn apply(&mut self, (worker, event): (WorkerKey, KvEvent)) {
        self.write(|index| index.apply(worker, &event));
    }

    fn flush(&mut self) {}

    fn reader(&self) -> Arc<RwLock<Index>> {
        Arc::clone(&self.index)
    }

    fn find(reader: &Arc<RwLock<Index>>, query: &Box<[BlockHash]>, found: &mut Overlaps) {
        reader.read().unwrap_or_else(PoisonError::into_inner).find(query, found);
    }

    fn each_score(found: &Overlaps, mut each: impl FnMut(u32, u32)) {
        found.iter().for_each(|(worker, overlap)| each(worker.worker, overlap.blocks));
    }

    fn score_of(found: &Overlaps, worker: u32) -> u32 {
        found.get(key(worker)).blocks
    }

    fn remove_worker(&mut self, worker: u32) {
        self.write(|index| index.remove_worker(worker));
    }

    fn snapshots(&self, workers: u32) -> Self::Snapshots {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        (0..workers).map(|worker| (key(worker), index.snapshot(key(worker)))).collect()
    }

    fn load_snapshots(&mut self, snapshots: Self::Snapshots) -> Option<usize> {
        let load = |(worker, blocks): (WorkerKey, Vec<SnapshotBlock>)| {
            self.write(|index| index.restore(worker, blocks).stored)
        };
        Some(snapshots.into_iter().map(load).sum())
    }
}

/// Hashes a prompt's tokens into chained blocks, as the router does.
pub struct Hashing {
    block_size: u32,
    out: Vec<BlockHash>,
}

impl Hashing {
    /// With room that is used again.
    pub fn new(block_size: u32) -> Self {
        Self { block_size, out: Vec::new() }
    }

    /// Returns the last block's hash.
    pub fn run(&mut self, tokens: &[u32]) -> u64 {
        let namespace =
            Namespace { salt: None, model: MODEL, adapter: None, block_size: self.block_size };
        chain_hashes(&namespace, SEED, tokens, &mut self.out);
        self.out.last().map_or(0, |hash| hash.0)
    }
}
