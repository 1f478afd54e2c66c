//! Compares the cached tokens that workers report with the estimates of the index.
//!
//! Every reply's `cached_tokens` is a measurement of the index. The differences are averaged for
//! each worker, so that a lasting difference shows and small random ones do not.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use crate::drift::Measurements;

/// Number of replies after which a worker that has never reported a figure is named in the log. A
/// worker that reports nothing instead of 0 only reports once a prompt is cached.
const PATIENCE_REPLIES: u64 = 3;

/// Weight of the newest comparison in the moving averages: about the last 16 count.
const WEIGHT: f64 = 1.0 / 16.0;

/// How often one worker has reported figures, and how far the index was off.
#[derive(Debug, Default)]
pub struct UsageStats {
    pub(super) usage: ReportingCounts,
    pub(super) cached_tokens: ReportingCounts,
    /// Incremented each time that the worker's part of the index is rebuilt: estimates of an
    /// earlier epoch say nothing about the current one.
    epoch: AtomicU64,
    comparisons: AtomicU64,
    /// The comparisons of this epoch.
    measured: Mutex<Measurements>,
    /// Prompt tokens of legs that computed their prompt and reported cached tokens.
    prompt_tokens: AtomicU64,
    /// The part of these tokens that the engine had cached.
    hit_tokens: AtomicU64,
}

/// Prompt tokens of a worker since the router knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HitTotals {
    /// Prompt tokens of legs that computed their prompt and reported cached tokens.
    pub prompt_tokens: u64,
    /// The part of these tokens that the engine had cached.
    pub hit_tokens: u64,
}

/// How many replies could have contained a figure, and how many did.
#[derive(Debug, Default)]
pub(super) struct ReportingCounts {
    replies: AtomicU64,
    reported: AtomicU64,
    named: AtomicBool,
}

/// An audit as shown on the admin listener.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct UsageStatsView {
    /// All replies, and how many had a usage object.
    pub usage: ReportingView,
    /// Replies of legs that compute the prompt, and how many reported cached tokens.
    pub cached_tokens: ReportingView,
    /// Number of replies that could be compared with the index.
    pub comparisons: u64,
    /// Moving average of blocks that the index estimated and the engine did not find.
    pub drift_over_blocks: f64,
    /// Moving average of blocks that the engine found and the index did not have.
    pub drift_under_blocks: f64,
}

/// How many replies could have contained a figure, and how many did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ReportingView {
    /// Replies that could have contained the figure.
    pub replies: u64,
    /// Replies that contained the figure.
    pub reported: u64,
    /// Whether there were replies and none of them contained the figure.
    pub never: bool,
}

impl ReportingCounts {
    /// Counts a reply. Returns whether the worker should now be named in the log.
    pub(super) fn count(&self, reported: bool) -> bool {
        let replies = self.replies.fetch_add(1, Relaxed) + 1;
        let known = self.reported.fetch_add(reported.into(), Relaxed) + u64::from(reported);
        known == 0 && replies >= PATIENCE_REPLIES && !self.named.swap(true, Relaxed)
    }

    fn view(&self) -> ReportingView {
        let (replies, reported) = (self.replies.load(Relaxed), self.reported.load(Relaxed));
        ReportingView { replies, reported, never: replies > 0 && reported == 0 }
    }
}

impl UsageStats {
    /// The current epoch of the worker's part of the index.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Relaxed)
    }

    /// Starts a new epoch, because the worker's part of the index is rebuilt.
    pub fn restart(&self) {
        self.epoch.fetch_add(1, Relaxed);
        *self.measurements() = Measurements::default();
    }

    /// Compares a reply's cached tokens with the estimate that was made in `epoch`. Returns whether
    /// that is the current epoch, so that the comparison counts.
    pub(super) fn compare(
        &self,
        epoch: u64,
        block_size: u32,
        promised_tokens: u32,
        found_tokens: u32,
    ) -> bool {
        self.comparisons.fetch_add(1, Relaxed);
        if epoch != self.epoch() {
            return false;
        }
        let in_blocks = |tokens: u32| f64::from(tokens) / f64::from(block_size);
        let measured = &mut *self.measurements();
        measured.samples += 1;
        for (average, tokens) in [
            (&mut measured.promised_blocks, promised_tokens),
            (&mut measured.found_blocks, found_tokens),
            (&mut measured.over_blocks, promised_tokens.saturating_sub(found_tokens)),
            (&mut measured.under_blocks, found_tokens.saturating_sub(promised_tokens)),
        ] {
            *average += (in_blocks(tokens) - *average) * WEIGHT;
        }
        true
    }

    /// Counts the prompt of a leg, of which the engine had a part cached.
    pub(super) fn count_hits(&self, prompt_tokens: u32, hit_tokens: u32) {
        self.prompt_tokens.fetch_add(prompt_tokens.into(), Relaxed);
        self.hit_tokens.fetch_add(hit_tokens.into(), Relaxed);
    }

    /// What the engine had cached so far.
    pub fn hit_totals(&self) -> HitTotals {
        let hit_tokens = self.hit_tokens.load(Relaxed);
        HitTotals { prompt_tokens: self.prompt_tokens.load(Relaxed), hit_tokens }
    }

    /// Whether none of several replies said how many tokens were cached.
    pub fn reports_no_cached_tokens(&self) -> bool {
        let ReportingView { replies, never, .. } = self.cached_tokens.view();
        never && replies >= PATIENCE_REPLIES
    }

    /// The measurements of the current epoch.
    pub fn measured(&self) -> Measurements {
        *self.measurements()
    }

    /// The audit as shown on the admin listener.
    pub fn view(&self) -> UsageStatsView {
        let measured = self.measured();
        UsageStatsView {
            usage: self.usage.view(),
            cached_tokens: self.cached_tokens.view(),
            comparisons: self.comparisons.load(Relaxed),
            drift_over_blocks: measured.over_blocks,
            drift_under_blocks: measured.under_blocks,
        }
    }

    /// A poisoned lock is still used: each average is valid by itself.
    fn measurements(&self) -> MutexGuard<'_, Measurements> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_named_once_and_only_if_it_has_never_reported() {
        let silent = ReportingCounts::default();
        let named: Vec<bool> = (0..6).map(|_| silent.count(false)).collect();
        assert_eq!(named, [false, false, true, false, false, false]);
        assert!(silent.view().never);
        let late = ReportingCounts::default();
        assert!(!late.count(false) && !late.count(true));
        assert!((0..9).all(|_| !late.count(false)));
        assert!(!late.view().never);
        assert!(!ReportingCounts::default().view().never);
    }

    #[test]
    fn drift_follows_what_lasts_and_forgets_what_does_not() {
        let stats = UsageStats::default();
        let found = |blocks: u32| {
            assert!(stats.compare(0, 16, 0, 16 * blocks));
            stats.measured().under_blocks
        };
        assert!((found(16) - 1.0).abs() < 1e-9);
        let after_many = |blocks| (0..100).fold(0.0, |_, _| found(blocks));
        assert!((after_many(4) - 4.0).abs() < 0.01);
        assert!(after_many(0) < 0.01);
    }
}
