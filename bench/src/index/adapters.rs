//! One index behind one trait: ours and the peers', each in its fastest correct
//! form.
//!
//! Events and queries are prepared in the form that the index takes, before any
//! clock runs. A worker is a number from 0; all blocks are in device memory.

pub mod chain;
pub mod dynamo;
pub mod none;
pub mod ours;

/// One KV block under its three names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The engine's name: covers the blocks before it, the same on all workers
    /// (one hash seed in the cluster), which is the peers' best case.
    pub engine: u64,
    /// Hash of the block's own tokens: what the peers match by.
    pub content: u64,
    /// Hash of the block and of everything before it: what we match by.
    pub chained: u64,
}

/// An index to be measured.
pub trait Adapter: Sized + Send + 'static {
    /// Name in rows and on the command line.
    const NAME: &'static str;
    /// A change, ready to be applied.
    type Event: Send;
    /// A prompt, ready to be looked up.
    type Query: Send + Sync;
    /// What lookups go through, beside a writer.
    type Reader: Clone + Send + Sync;
    /// A result whose memory is used again.
    type Found: Default + Send;
    /// What several workers hold, as a value.
    type Snapshots: Send;

    /// An empty index for `workers` workers of at most `max_blocks` each.
    fn new(workers: u32, max_blocks: usize) -> Self;

    /// `blocks` became resident after the block `parent`, or as a first block.
    fn store_event(worker: u32, parent: Option<u64>, blocks: &[Block]) -> Self::Event;

    /// The blocks with these engine hashes were evicted.
    fn remove_event(worker: u32, engines: &[u64]) -> Self::Event;

    /// A lookup of a whole prompt.
    fn query(blocks: &[Block]) -> Self::Query;

    /// Applies or queues an event.
    fn apply(&mut self, event: Self::Event);

    /// Returns when all that was applied is visible to readers.
    fn flush(&mut self);

    /// A reader of this index.
    fn reader(&self) -> Self::Reader;

    /// Looks a prompt up into `found`.
    fn find(reader: &Self::Reader, query: &Self::Query, found: &mut Self::Found);

    /// Calls `each` with all (worker, overlap in blocks) of a result, once each.
    fn each_score(found: &Self::Found, each: impl FnMut(u32, u32));

    /// One worker's overlap of a result; 0 where it has none.
    fn score_of(found: &Self::Found, worker: u32) -> u32;

    /// Forgets a worker; returns when its memory has been given back.
    fn remove_worker(&mut self, worker: u32);

    /// All that the workers `0..workers` hold.
    fn snapshots(&self, workers: u32) -> Self::Snapshots;

    /// Fills an empty index from snapshots; returns the blocks loaded, or
    /// `None` where there is no such thing.
    fn load_snapshots(&mut self, snapshots: Self::Snapshots) -> Option<usize>;
}
