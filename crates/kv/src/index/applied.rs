//! The result of an event: how many blocks were stored, removed, or refused, and why.

use crate::event::EngineHash;
use crate::hash::BlockHash;

/// A block whose chained hash is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashedBlock {
    /// The engine's hash of the block.
    pub engine: EngineHash,
    /// The router's chained hash of the block.
    pub hash: BlockHash,
}

/// The result of an event, in blocks.
///
/// Each block of a [`KvEvent::Stored`](crate::KvEvent::Stored) is counted once among `stored`,
/// `aside`, `orphaned`, `malformed` and `over_limit` (and later among `stored`, if it was `aside`
/// and its parent arrives). Each hash of a [`KvEvent::Removed`](crate::KvEvent::Removed) is counted
/// once among `removed` and `unknown`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AppliedBlocks {
    /// Indexed, as new blocks or as further copies.
    pub stored: usize,
    /// Those of `stored` whose engine hash stood for other content before: a sign that the worker
    /// restarted without being noticed.
    pub replaced: usize,
    /// Copies that were removed; for [`KvEvent::Cleared`](crate::KvEvent::Cleared), distinct blocks
    /// that were dropped.
    pub removed: usize,
    /// Blocks whose parent the worker is not known to hold: kept aside until the parent arrives,
    /// not indexed.
    pub aside: usize,
    /// Not indexed: after a malformed block of the same event, or dropped from the blocks kept
    /// aside because these became too many.
    pub orphaned: usize,
    /// Removals of blocks that were not held in that tier.
    pub unknown: usize,
    /// Not exactly one block size of tokens, or in contradiction to other blocks: not indexed.
    pub malformed: usize,
    /// Beyond [`IndexConfig::max_blocks_per_worker`](crate::IndexConfig::max_blocks_per_worker),
    /// with all following blocks of the event: not indexed. From here on the worker's overlap is a
    /// lower bound, until the worker is resynchronised.
    pub over_limit: usize,
}

impl std::ops::AddAssign for AppliedBlocks {
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
