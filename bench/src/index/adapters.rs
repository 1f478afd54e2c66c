//! One trait for all indexes, ours and the peers', each used in its fastest correct way.
//!
//! Events and queries are converted to the index's own types before time is measured. A worker is a
//! number from 0. All blocks are in the tier `device`.

pub mod chain;
pub mod dynamo;
pub mod none;
pub mod ours;

/// One KV block with its three names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The engine's name, which depends on the blocks before it. It is the same on all workers, as
    /// with one hash seed in the cluster. This is the best case for the peers.
    pub engine: u64,
    /// The hash of the block's own tokens, by which the peers look up.
    pub content: u64,
    /// The hash of the block and of all blocks before it, by which our index looks up.
    pub chained: u64,
}

/// An index that is measured.
pub trait Adapter: Sized + Send + 'static {
    /// The name in rows and on the command line.
    const NAME: &'static str;
    /// A change in the index's own type.
    type Event: Send;
    /// A prompt in the index's own type.
    type Query: Send + Sync;
    /// Looks up prompts while a writer changes the index.
    type Reader: Clone + Send + Sync;
    /// The result of a lookup. Its memory is reused where the index can do that.
    type Found: Default + Send;
    /// A copy of the blocks of several workers.
    type Snapshots: Send;

    /// An empty index for `workers` workers with at most `max_blocks` blocks each.
    fn new(workers: u32, max_blocks: usize) -> Self;

    /// The event that a worker has stored `blocks`, after the block with the engine's name
    /// `parent`, or from the beginning of a prompt if there is no parent.
    fn store_event(worker: u32, parent: Option<u64>, blocks: &[Block]) -> Self::Event;

    /// The event that a worker has evicted the blocks with these engine's names.
    fn remove_event(worker: u32, engines: &[u64]) -> Self::Event;

    /// The query for a whole prompt.
    fn query(blocks: &[Block]) -> Self::Query;

    /// Applies or queues an event.
    fn apply(&mut self, event: Self::Event);

    /// Waits until all applied events are visible to readers.
    fn flush(&mut self);

    /// A reader of this index.
    fn reader(&self) -> Self::Reader;

    /// Looks up a prompt and stores the result in `found`.
    fn find(reader: &Self::Reader, query: &Self::Query, found: &mut Self::Found);

    /// Calls `each` once for every worker of a result, with its overlap in blocks.
    fn each_score(found: &Self::Found, each: impl FnMut(u32, u32));

    /// The overlap of one worker in a result, in blocks; 0 if the result does not contain the
    /// worker.
    fn score_of(found: &Self::Found, worker: u32) -> u32;

    /// Removes a worker. Returns when its memory has been freed.
    fn remove_worker(&mut self, worker: u32);

    /// Copies the blocks of the workers `0..workers`.
    fn snapshots(&self, workers: u32) -> Self::Snapshots;

    /// Fills an empty index from snapshots. Returns the number of loaded blocks, or `None` if the
    /// index cannot load snapshots.
    fn load_snapshots(&mut self, snapshots: Self::Snapshots) -> Option<usize>;
}
