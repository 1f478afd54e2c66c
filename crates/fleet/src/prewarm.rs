//! The progress of a worker's prewarming.
//!
//! Which workers are prewarmed, and with what, is decided in `transfer::prewarm`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;

/// How far a worker is prewarmed since its last start; `None` if it has not been.
#[derive(Debug, Default)]
pub struct PrewarmState(Mutex<Option<PrewarmView>>);

/// How far a worker is prewarmed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrewarmView {
    /// Whether it goes on.
    pub running: bool,
    /// The number of prefixes that the worker has taken over.
    pub prefixes: u32,
    /// The number of their tokens that it did not hold before.
    pub tokens: u64,
}

impl PrewarmState {
    /// Records that prewarming begins.
    pub fn begin(&self) {
        *self.lock() = Some(PrewarmView { running: true, ..PrewarmView::default() });
    }

    /// Records that the worker has taken over a prefix.
    pub fn took(&self, tokens: u64) {
        let mut state = self.lock();
        let state = state.get_or_insert_default();
        (state.prefixes, state.tokens) = (state.prefixes + 1, state.tokens + tokens);
    }

    /// Records that prewarming is over.
    pub fn end(&self) {
        self.lock().get_or_insert_default().running = false;
    }

    /// What was taken over since the worker's last start; `None` if it has not been prewarmed.
    pub fn view(&self) -> Option<PrewarmView> {
        *self.lock()
    }

    /// A poisoned lock is still used: each figure is valid by itself.
    fn lock(&self) -> MutexGuard<'_, Option<PrewarmView>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
