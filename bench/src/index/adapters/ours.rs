//! The index of `splitrail-kv`. Its writer runs on the caller's thread, and readers run
//! concurrently.

use splitrail_kv::{
    BlockHash, EngineHash, HashSeed, HashedBlock, Index, IndexConfig, IndexReader, Namespace,
    Overlaps, SnapshotRun, Tier, WorkerKey, chain_hashes,
};

use super::{Adapter, Block};

const SEED: HashSeed = HashSeed(1);
const MODEL: &str = "bench";

/// Our index with its only writer.
pub struct Ours {
    index: Index,
}

/// An event whose blocks are already hashed, as in the peers' events.
pub enum Event {
    /// Blocks were stored.
    Stored(WorkerKey, Option<EngineHash>, Box<[HashedBlock]>),
    /// Blocks were evicted.
    Removed(WorkerKey, Box<[EngineHash]>),
}

fn key(worker: u32) -> WorkerKey {
    WorkerKey { worker, rank: 0 }
}

impl Adapter for Ours {
    const NAME: &'static str = "ours";
    type Event = Event;
    type Query = Box<[BlockHash]>;
    type Reader = IndexReader;
    type Found = Overlaps;
    type Snapshots = Vec<(WorkerKey, Vec<SnapshotRun>)>;

    fn new(_workers: u32, max_blocks: usize) -> Self {
        let config = IndexConfig {
            model: MODEL.to_owned(),
            block_size: 16,
            seed: SEED,
            max_blocks_per_worker: max_blocks,
        };
        Self { index: Index::new(config) }
    }

    fn store_event(worker: u32, parent: Option<u64>, blocks: &[Block]) -> Event {
        let hashed = |block: &Block| HashedBlock {
            engine: EngineHash(block.engine),
            hash: BlockHash(block.chained),
        };
        let blocks = blocks.iter().map(hashed).collect();
        Event::Stored(key(worker), parent.map(EngineHash), blocks)
    }

    fn remove_event(worker: u32, engines: &[u64]) -> Event {
        Event::Removed(key(worker), engines.iter().copied().map(EngineHash).collect())
    }

    fn query(blocks: &[Block]) -> Box<[BlockHash]> {
        blocks.iter().map(|block| BlockHash(block.chained)).collect()
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Stored(worker, parent, blocks) => {
                self.index.store(worker, parent, &blocks, Tier::Device);
            }
            Event::Removed(worker, hashes) => {
                self.index.remove(worker, &hashes, Tier::Device);
            }
        }
    }

    fn flush(&mut self) {}

    fn reader(&self) -> IndexReader {
        self.index.reader()
    }

    fn find(reader: &IndexReader, query: &Box<[BlockHash]>, found: &mut Overlaps) {
        reader.find(query, found);
    }

    fn each_score(found: &Overlaps, mut each: impl FnMut(u32, u32)) {
        found.iter().for_each(|(worker, overlap)| each(worker.worker, overlap.blocks));
    }

    fn score_of(found: &Overlaps, worker: u32) -> u32 {
        found.get(key(worker)).blocks
    }

    fn remove_worker(&mut self, worker: u32) {
        self.index.remove_worker(worker);
    }

    fn snapshots(&self, workers: u32) -> Self::Snapshots {
        (0..workers)
            .map(|worker| (key(worker), self.index.snapshot(key(worker)).collect()))
            .collect()
    }

    fn load_snapshots(&mut self, snapshots: Self::Snapshots) -> Option<usize> {
        // As in a router: run by run, with the number of names known before.
        let load = |(worker, runs): (WorkerKey, Vec<SnapshotRun>)| {
            let names = runs.iter().map(|run| run.names.len()).sum();
            let (mut restore, _) = self.index.begin_restore(worker, names);
            let run = |run: SnapshotRun| self.index.restore_run(&mut restore, &run).stored;
            let stored: usize = runs.into_iter().map(run).sum();
            self.index.end_restore(restore);
            stored
        };
        Some(snapshots.into_iter().map(load).sum())
    }
}

/// Computes the chained block hashes of a prompt, as the router does.
pub struct Hashing {
    block_size: u32,
    out: Vec<BlockHash>,
}

impl Hashing {
    /// Creates a hasher, whose memory is reused.
    pub fn new(block_size: u32) -> Self {
        Self { block_size, out: Vec::new() }
    }

    /// Hashes all full blocks. Returns the hash of the last one.
    pub fn run(&mut self, tokens: &[u32]) -> u64 {
        let namespace =
            Namespace { salt: None, model: MODEL, adapter: None, block_size: self.block_size };
        chain_hashes(&namespace, SEED, tokens, &mut self.out);
        self.out.last().map_or(0, |hash| hash.0)
    }
}
