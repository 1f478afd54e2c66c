//! Counts the outcomes of a worker's requests since the last evaluation, and its ejections.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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

    /// Takes back a failure that was not the worker's fault.
    pub(super) fn forgive(&self) {
        let less = |failed: u32| failed.checked_sub(1);
        let _ = self.failed.fetch_update(Relaxed, Relaxed, less);
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

/// The ejections of one worker in a row.
#[derive(Debug, Default)]
pub(super) struct Ejections(Mutex<Option<EjectionRun>>);

#[derive(Clone, Copy, Debug)]
struct EjectionRun {
    /// Number of ejections in a row.
    times: u32,
    /// The end of the last one.
    until: Instant,
}

impl Ejections {
    /// Counts one, which begins now and lasts as long as `lasts` says of their number.
    pub(super) fn begin(&self, now: Instant, lasts: impl FnOnce(u32) -> Duration) {
        let mut last = self.last();
        let times = last.map_or(0, |last| last.times).saturating_add(1);
        *last = Some(EjectionRun { times, until: now + lasts(times) });
    }

    /// Whether the time of the last one is over.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.last().is_none_or(|last| now >= last.until)
    }

    /// Ends the row: the worker performs well.
    pub(super) fn forget(&self) {
        *self.last() = None;
    }

    /// Takes over the ejections of the worker that this one replaces.
    pub(super) fn succeed_to(&self, before: &Self) {
        *self.last() = *before.last();
    }

    /// A poisoned lock is still used: the value is replaced as a whole.
    fn last(&self) -> MutexGuard<'_, Option<EjectionRun>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
