//! The handle of a decision record that is being written. The events are methods of the handle, in
//! `placement`, `legs` and `reply`; those that concern only the ledger are methods of `Entry`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::record::Decision;
use crate::entry::Entry;

/// The record of a prompt that is being served; clones refer to the same record. Each event takes
/// the lock of the record once.
#[derive(Clone, Debug, Default)]
pub struct DecisionHandle(Arc<Mutex<Decision>>);

impl DecisionHandle {
    /// A record that belongs to no ring.
    pub fn new(start: Decision) -> Self {
        Self(Arc::new(Mutex::new(start)))
    }

    /// Reads a part of the record.
    pub fn with<T>(&self, read: impl FnOnce(&Decision) -> T) -> T {
        read(&self.lock())
    }

    /// Enters an event in the prompt's entry in the ledger.
    pub fn enter<T>(&self, event: impl FnOnce(&mut Entry) -> T) -> T {
        event(&mut self.lock().ledger)
    }

    /// A number that only clones of this handle have.
    pub(super) fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Decision> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
