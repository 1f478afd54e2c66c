//! The handle of a decision record that is being written. The events are methods of the handle:
//! they are in `placement`, `legs` and `reply`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::record::{Decision, DecisionStart};

/// The record of a prompt that is being served; clones refer to the same record. Each event takes
/// the lock of the record once.
#[derive(Clone, Debug)]
pub struct DecisionHandle(Arc<Mutex<Decision>>);

/// The record of a prompt of which nothing is known.
impl Default for DecisionHandle {
    fn default() -> Self {
        Self::new(DecisionStart::default())
    }
}

impl DecisionHandle {
    /// A record that belongs to no ring.
    pub fn new(start: DecisionStart) -> Self {
        Self(Arc::new(Mutex::new(start.into())))
    }

    /// Reads a part of the record.
    pub fn with<T>(&self, read: impl FnOnce(&Decision) -> T) -> T {
        read(&self.lock())
    }

    /// A number that only clones of this handle have.
    pub(super) fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Decision> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
