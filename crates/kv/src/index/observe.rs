//! Observers of the changes that events make.

use super::HashedBlock;
use crate::event::{EngineHash, Tier};

/// What an event really changed: told in order to [`Index::store`](crate::Index::store),
/// [`Index::remove`](crate::Index::remove) and
/// [`Index::clear_worker`](crate::Index::clear_worker) of another index, it leads there to the same state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<'a> {
    /// These were indexed, as new blocks or as further copies.
    Stored {
        /// The block before; `None` at a prompt's start.
        parent: Option<EngineHash>,
        /// Consecutive blocks; never empty.
        blocks: &'a [HashedBlock],
        /// Where they are.
        tier: Tier,
    },
    /// One copy of each was taken away.
    Removed {
        /// Their names; never empty.
        names: &'a [EngineHash],
        /// Where they were.
        tier: Tier,
    },
    /// All blocks of the worker were dropped.
    Cleared,
}

/// Who is told.
pub(super) trait Observer {
    /// Whether there is anybody.
    const LISTENS: bool;
    fn see(&mut self, change: Change<'_>);
}

/// Nobody is told, at no cost.
pub(super) struct NoObserver;

impl Observer for NoObserver {
    const LISTENS: bool = false;
    fn see(&mut self, _: Change<'_>) {}
}

/// A function that is told.
pub(super) struct ChangeCallback<'a, F>(pub(super) &'a mut F);

impl<F: FnMut(Change<'_>)> Observer for ChangeCallback<'_, F> {
    const LISTENS: bool = true;
    fn see(&mut self, change: Change<'_>) {
        (self.0)(change);
    }
}
