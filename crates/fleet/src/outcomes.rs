//! Counts the outcomes of a worker's requests since the last evaluation.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use splitrail_workload::ejection::Record;

/// Counts of one worker's legs.
#[derive(Debug, Default)]
pub struct OutcomeCounters {
    legs: AtomicU32,
    failed: AtomicU32,
    began: AtomicU32,
    first_token_us: AtomicU64,
}

impl OutcomeCounters {
    /// Counts a leg that has ended, and whether it failed.
    pub fn ended(&self, failed: bool) {
        self.legs.fetch_add(1, Relaxed);
        self.failed.fetch_add(failed.into(), Relaxed);
    }

    /// Counts a reply that began `after` its leg was sent.
    pub fn began(&self, after: Duration) {
        self.began.fetch_add(1, Relaxed);
        let us = u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
        self.first_token_us.fetch_add(us, Relaxed);
    }

    /// Returns the counts since the last call and resets them. A leg that ends during the call is
    /// in this result or in the next.
    pub(super) fn take(&self) -> Record {
        let began = self.began.swap(0, Relaxed);
        let first_token_us = self.first_token_us.swap(0, Relaxed);
        let mean = first_token_us as f64 / 1e3 / f64::from(began.max(1));
        let legs = self.legs.swap(0, Relaxed);
        let failed = self.failed.swap(0, Relaxed).min(legs);
        let first_token_ms = (began > 0).then_some(mean);
        Record { legs, failed, first_token_ms, ..Record::default() }
    }
}
