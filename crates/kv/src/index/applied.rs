//! The result of an event: what became of it, and the blocks that it names.

use crate::event::EngineHash;
use crate::hash::BlockHash;

/// A block whose chained hash is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashedBlock {
    /// The engine's name for it.
    pub engine: EngineHash,
    /// Our own chained hash of it.
    pub hash: BlockHash,
}

/// What became of an event, in blocks.
///
/// Of a [`KvEvent::Stored`](crate::KvEvent::Stored), each block is counted once among `stored`, `aside`,
/// `orphaned`, `malformed` and `over_limit` (and among `stored` later, when it
/// joins); of a [`KvEvent::Removed`](crate::KvEvent::Removed), each hash once among `removed`
/// and `unknown`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Indexed, as new blocks or as further copies.
    pub stored: usize,
    /// Those of `stored` whose engine hash stood for other content before: a
    /// sign that the worker restarted and nobody noticed.
    pub replaced: usize,
    /// Copies taken away; for [`KvEvent::Cleared`](crate::KvEvent::Cleared),
    /// distinct blocks dropped.
    pub removed: usize,
    /// Stored under a parent that the worker is not known to hold (yet): kept
    /// aside, not indexed.
    pub aside: usize,
    /// Not indexed: behind a malformed block of the same event, or dropped from
    /// what was kept aside because that became too much.
    pub orphaned: usize,
    /// Removed without being held in that tier.
    pub unknown: usize,
    /// Not exactly one block size of tokens, or at odds with other blocks: not indexed.
    pub malformed: usize,
    /// Beyond [`IndexConfig::max_blocks_per_worker`](crate::IndexConfig::max_blocks_per_worker), with all that follows in the
    /// event: not indexed. The worker's overlap is a lower bound from here on,
    /// until it is resynchronised.
    pub over_limit: usize,
}

impl std::ops::AddAssign for Applied {
    fn add_assign(&mut self, other: Self) {
        self.stored += other.stored;
        self.replaced += other.replaced;
        self.removed += other.removed;
        self.aside += other.aside;
        self.orphaned += other.orphaned;
        self.unknown += other.unknown;
        self.malformed += other.malformed;
        self.over_limit += other.over_limit;
    }
}
