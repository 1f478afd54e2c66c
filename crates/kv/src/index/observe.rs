//! Observers of the changes that events make.

use super::HashedBlock;
use crate::event::{EngineHash, Tier};

/// An actual change by an event. Applied in order by [`Index::store`](crate::Index::store),
/// [`Index::remove`](crate::Index::remove) and [`Index::clear_worker`](crate::Index::clear_worker)
/// to another index, the changes lead to the same state there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<'a> {
    /// Blocks that were indexed, as new blocks or as further copies.
    Stored {
        /// The block before the first; `None` at a prompt's start.
        parent: Option<EngineHash>,
        /// Consecutive blocks; never empty.
        blocks: &'a [HashedBlock],
        /// The tier of the blocks.
        tier: Tier,
    },
    /// One copy of each of the named blocks was removed.
    Removed {
        /// Their names; never empty.
        names: &'a [EngineHash],
        /// The tier from which they were removed.
        tier: Tier,
    },
    /// All blocks of the worker were dropped.
    Cleared,
}

/// Receives the changes.
pub(super) trait Observer {
    /// Whether changes must be reported at all.
    const LISTENS: bool;
    fn see(&mut self, change: Change<'_>);
}

/// Ignores changes, at no cost.
pub(super) struct NoObserver;

impl Observer for NoObserver {
    const LISTENS: bool = false;
    fn see(&mut self, _: Change<'_>) {}
}

/// Calls a function for each change.
pub(super) struct ChangeCallback<'a, F>(pub(super) &'a mut F);

impl<F: FnMut(Change<'_>)> Observer for ChangeCallback<'_, F> {
    const LISTENS: bool = true;
    fn see(&mut self, change: Change<'_>) {
        (self.0)(change);
    }
}
