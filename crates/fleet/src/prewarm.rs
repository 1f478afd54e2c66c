//! The progress of a worker's prewarming.
//!
//! Which workers are prewarmed, and with what, is decided in `transfer::prewarm`.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use serde::Serialize;

/// How far a worker is prewarmed since its last start.
#[derive(Debug, Default)]
pub struct PrewarmState {
    /// 0: not prewarmed. 1: being prewarmed. 2: done.
    phase: AtomicU32,
    prefixes: AtomicU32,
    tokens: AtomicU64,
}

/// How far a worker is prewarmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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
        self.prefixes.store(0, Relaxed);
        self.tokens.store(0, Relaxed);
        self.phase.store(1, Relaxed);
    }

    /// Records that the worker has taken over a prefix.
    pub fn took(&self, tokens: u64) {
        self.prefixes.fetch_add(1, Relaxed);
        self.tokens.fetch_add(tokens, Relaxed);
    }

    /// Records that prewarming is over.
    pub fn end(&self) {
        self.phase.store(2, Relaxed);
    }

    /// What was taken over since the worker's last start; `None` if it has not been prewarmed.
    pub fn view(&self) -> Option<PrewarmView> {
        let phase = self.phase.load(Relaxed);
        (phase > 0).then(|| PrewarmView {
            running: phase == 1,
            prefixes: self.prefixes.load(Relaxed),
            tokens: self.tokens.load(Relaxed),
        })
    }
}
