//! The chain index of `kv-index`. Events are applied on the caller's thread, with one lane map per
//! worker. Lookups use `score_into` with a reused vector.

use std::sync::Arc;

use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};

use super::{Adapter, Block};

/// The chain index and the lane maps of its writer.
pub struct Chain {
    index: Arc<ChainIndex>,
    /// For each worker number, the worker's slot in the index and its lane map.
    lanes: Vec<(u32, ChainBlockMap)>,
}

/// An event in the form of `kv-index`.
pub enum Event {
    /// Blocks were stored.
    Stored {
        /// The worker's number.
        worker: u32,
        /// The block before them.
        parent: Option<SequenceHash>,
        /// The blocks.
        blocks: Box<[StoredBlock]>,
    },
    /// Blocks were evicted.
    Removed {
        /// The worker's number.
        worker: u32,
        /// Their names.
        hashes: Box<[SequenceHash]>,
    },
}

impl Adapter for Chain {
    const NAME: &'static str = "chain";
    type Event = Event;
    type Query = Box<[ContentHash]>;
    type Reader = Arc<ChainIndex>;
    type Found = Vec<(u32, u32)>;
    type Snapshots = ();

    fn new(workers: u32, _max_blocks: usize) -> Self {
        // The index gets as many coverage bits as there are workers, because more would only use
        // more memory. Slots are assigned from 0, so they equal the worker numbers.
        let index = ChainIndex::with_max_workers(workers as usize);
        let lane = |worker: u32| {
            let slot = index.intern_worker(&worker.to_string()).unwrap_or(u32::MAX);
            assert_eq!(slot, worker, "more workers than kv-index takes");
            (slot, ChainBlockMap::new())
        };
        let lanes = (0..workers).map(lane).collect();
        Self { index: Arc::new(index), lanes }
    }

    fn store_event(worker: u32, parent: Option<u64>, blocks: &[Block]) -> Event {
        let stored = |block: &Block| StoredBlock {
            seq_hash: SequenceHash(block.engine),
            content_hash: ContentHash(block.content),
        };
        let blocks = blocks.iter().map(stored).collect();
        Event::Stored { worker, parent: parent.map(SequenceHash), blocks }
    }

    fn remove_event(worker: u32, engines: &[u64]) -> Event {
        Event::Removed { worker, hashes: engines.iter().copied().map(SequenceHash).collect() }
    }

    fn query(blocks: &[Block]) -> Box<[ContentHash]> {
        blocks.iter().map(|block| ContentHash(block.content)).collect()
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Stored { worker, parent, blocks } => {
                let (slot, map) = &mut self.lanes[worker as usize];
                // An unknown parent is not a failure of the benchmark: the comparison of results
                // shows its effect.
                let _unknown_parent = self.index.apply_stored(*slot, &blocks, parent, map);
            }
            Event::Removed { worker, hashes } => {
                let (slot, map) = &mut self.lanes[worker as usize];
                self.index.apply_removed(*slot, &hashes, map);
            }
        }
    }

    fn flush(&mut self) {}

    fn reader(&self) -> Arc<ChainIndex> {
        Arc::clone(&self.index)
    }

    // Compiled once, separately from the loops that call it; Cargo.toml says why.
    #[inline(never)]
    fn find(reader: &Arc<ChainIndex>, query: &Box<[ContentHash]>, found: &mut Vec<(u32, u32)>) {
        found.clear();
        reader.score_into(
            query,
            |hash| hash.0,
            false,
            |worker, blocks| {
                found.push((worker, blocks));
            },
        );
    }

    fn each_score(found: &Vec<(u32, u32)>, mut each: impl FnMut(u32, u32)) {
        found.iter().for_each(|&(worker, blocks)| each(worker, blocks));
    }

    fn score_of(found: &Vec<(u32, u32)>, worker: u32) -> u32 {
        found.iter().find(|score| score.0 == worker).map_or(0, |score| score.1)
    }

    fn remove_worker(&mut self, worker: u32) {
        let (slot, map) = &mut self.lanes[worker as usize];
        // The worker is cleared and not removed, so that it keeps its slot. The work is the same,
        // except that the name is not released.
        self.index.apply_cleared(*slot, map);
    }

    fn snapshots(&self, _workers: u32) {}

    fn load_snapshots(&mut self, (): ()) -> Option<usize> {
        None
    }
}
