//! Violated invariants of the index. [`check_overlap`] is for tests and fuzzing; the index's own
//! consistency is [`Index::check`](crate::Index::check).

use crate::event::{EngineHash, Tier};
use crate::hash::BlockHash;
use crate::index::{Overlap, WorkerKey};

/// A violated invariant: always a defect of this software, never of a client's or an engine's
/// input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The parts of an overlap do not sum to its total.
    #[error("an overlap of {blocks} blocks has {parts} in its tiers")]
    OverlapParts {
        /// The overlap's blocks.
        blocks: u32,
        /// The sum over its tiers.
        parts: u64,
    },
    /// A block's list of holders is empty or out of order.
    #[error("the holders of block {:016x} are empty or out of order", .hash.0)]
    HolderList {
        /// The block.
        hash: BlockHash,
    },
    /// A run is not at its parent's end, cannot be found, or should not exist.
    #[error("the run that begins with block {:016x} is not attached where it belongs", .hash.0)]
    Run {
        /// The first block of the run.
        hash: BlockHash,
    },
    /// The number of words in use is wrong.
    #[error("{used} words are in use, and {counted} are used")]
    Words {
        /// Words in use according to the allocator.
        used: usize,
        /// Words in use according to their users.
        counted: usize,
    },
    /// The holders of a block differ from the worker's names.
    #[error("worker {worker} and the holders of block {:016x} disagree", .hash.0)]
    Holder {
        /// The block.
        hash: BlockHash,
        /// The worker.
        worker: WorkerKey,
    },
    /// A worker that holds nothing was not removed.
    #[error("worker {worker} holds nothing and was kept")]
    EmptyWorker {
        /// The worker.
        worker: WorkerKey,
    },
    /// A block without a copy is still among a worker's names.
    #[error("worker {worker} has no copy of {:016x} and kept it", .engine.0)]
    EmptyBlock {
        /// The worker.
        worker: WorkerKey,
        /// The engine's name for the block.
        engine: EngineHash,
    },
    /// A worker has more blocks than its bound.
    #[error("worker {worker} has {blocks} blocks, more than {limit}")]
    OverLimit {
        /// The worker.
        worker: WorkerKey,
        /// Its blocks.
        blocks: usize,
        /// The bound.
        limit: usize,
    },
    /// A worker's running counts are wrong.
    #[error("worker {worker} counts {counted:?} blocks by tier and holds {held:?}")]
    Counts {
        /// The worker.
        worker: WorkerKey,
        /// The running counts.
        counted: [usize; Tier::COUNT],
        /// The counts of a recount.
        held: [usize; Tier::COUNT],
    },
}

/// Checks that the parts of an overlap sum to its blocks.
///
/// # Errors
/// [`Violation::OverlapParts`].
pub fn check_overlap(overlap: &Overlap) -> Result<(), Violation> {
    let parts = overlap.by_tier.iter().map(|&blocks| u64::from(blocks)).sum();
    if parts == u64::from(overlap.blocks) {
        return Ok(());
    }
    Err(Violation::OverlapParts { blocks: overlap.blocks, parts })
}
