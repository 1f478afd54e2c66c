//! The concurrent compressed radix tree of `dynamo-kv-router`, with its thread pool and one event
//! thread, as in the product. Events are queued; lookups run on the caller's thread.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use dynamo_kv_router::indexer::concurrent_radix_tree_compressed::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{KvIndexerInterface, SyncIndexer, ThreadPoolIndexer};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent, WorkerWithDpRank,
};

use super::{Adapter, Block};

/// Used only by the library's own hashing of tokens, which no workload calls.
const BLOCK_SIZE: u32 = 16;

/// The tree with its event thread.
pub struct Dynamo {
    pool: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
}

fn event(worker: u32, data: KvCacheEventData) -> RouterEvent {
    RouterEvent::new(worker.into(), KvCacheEvent { event_id: 0, data, dp_rank: 0 })
}

impl Adapter for Dynamo {
    const NAME: &'static str = "dynamo";
    type Event = RouterEvent;
    type Query = Box<[LocalBlockHash]>;
    type Reader = Arc<ConcurrentRadixTreeCompressed>;
    /// A new map for every lookup: the library cannot reuse one.
    type Found = OverlapScores;
    type Snapshots = Vec<RouterEvent>;

    fn new(_workers: u32, _max_blocks: usize) -> Self {
        let tree = ConcurrentRadixTreeCompressed::new();
        Self { pool: ThreadPoolIndexer::new(tree, 1, BLOCK_SIZE) }
    }

    fn store_event(worker: u32, parent: Option<u64>, blocks: &[Block]) -> RouterEvent {
        let stored = |block: &Block| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(block.engine),
            tokens_hash: LocalBlockHash(block.content),
            mm_extra_info: None,
        };
        let data = KvCacheStoreData {
            parent_hash: parent.map(ExternalSequenceBlockHash),
            start_position: None,
            blocks: blocks.iter().map(stored).collect(),
        };
        event(worker, KvCacheEventData::Stored(data))
    }

    fn remove_event(worker: u32, engines: &[u64]) -> RouterEvent {
        let block_hashes = engines.iter().copied().map(ExternalSequenceBlockHash).collect();
        event(worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
    }

    fn query(blocks: &[Block]) -> Box<[LocalBlockHash]> {
        blocks.iter().map(|block| LocalBlockHash(block.content)).collect()
    }

    fn apply(&mut self, event: RouterEvent) {
        assert!(self.pool.enqueue_event(event).is_ok(), "the event thread has ended");
    }

    fn flush(&mut self) {
        let flushed = block_on(self.pool.flush_and_wait());
        assert!(flushed.is_ok(), "the event thread has ended");
    }

    fn reader(&self) -> Arc<ConcurrentRadixTreeCompressed> {
        self.pool.backend_arc()
    }

    fn find(
        reader: &Arc<ConcurrentRadixTreeCompressed>,
        query: &Box<[LocalBlockHash]>,
        found: &mut OverlapScores,
    ) {
        *found = reader.find_matches(query, false);
    }

    fn each_score(found: &OverlapScores, mut each: impl FnMut(u32, u32)) {
        for (worker, &blocks) in &found.scores {
            each(worker.worker_id as u32, blocks);
        }
    }

    fn score_of(found: &OverlapScores, worker: u32) -> u32 {
        let worker = WorkerWithDpRank::from_worker_id(worker.into());
        found.scores.get(&worker).copied().unwrap_or_default()
    }

    fn remove_worker(&mut self, worker: u32) {
        block_on(self.pool.remove_worker(worker.into()));
    }

    fn snapshots(&self, _workers: u32) -> Vec<RouterEvent> {
        block_on(self.pool.dump_events()).unwrap_or_default()
    }

    fn load_snapshots(&mut self, snapshots: Vec<RouterEvent>) -> Option<usize> {
        let blocks = |event: &RouterEvent| match &event.event.data {
            KvCacheEventData::Stored(data) => data.blocks.len(),
            _ => 0,
        };
        let loaded = snapshots.iter().map(blocks).sum();
        snapshots.into_iter().for_each(|event| self.apply(event));
        self.flush();
        Some(loaded)
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future of the library to its end. Its futures wait for one-shot channels, so it is enough
/// to park the thread until it is woken.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}
