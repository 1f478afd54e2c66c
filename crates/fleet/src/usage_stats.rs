//! Compares the cached tokens that workers report with the estimates of the index.
//!
//! Every reply's `cached_tokens` is a measurement of the index. The differences are averaged for
//! each worker, so that a lasting difference shows and small random ones do not.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

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
    comparisons: AtomicU64,
    /// Incremented each time that the worker's part of the index is rebuilt: estimates of an
    /// earlier epoch say nothing about the current one.
    epoch: AtomicU64,
    /// Number of comparisons in this epoch.
    samples: AtomicU64,
    promised: MovingAverage,
    found: MovingAverage,
    over: MovingAverage,
    under: MovingAverage,
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

/// A moving average. Relaxed atomics suffice: a lost race loses one sample.
#[derive(Debug, Default)]
struct MovingAverage(AtomicU64);

impl MovingAverage {
    fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }

    fn restart(&self) {
        self.0.store(0.0f64.to_bits(), Relaxed);
    }

    fn add(&self, sample: f64) {
        let old = self.get();
        self.0.store((old + (sample - old) * WEIGHT).to_bits(), Relaxed);
    }
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
        self.samples.store(0, Relaxed);
        for drift in [&self.promised, &self.found, &self.over, &self.under] {
            drift.restart();
        }
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
        self.samples.fetch_add(1, Relaxed);
        self.promised.add(in_blocks(promised_tokens));
        self.found.add(in_blocks(found_tokens));
        self.over.add(in_blocks(promised_tokens.saturating_sub(found_tokens)));
        self.under.add(in_blocks(found_tokens.saturating_sub(promised_tokens)));
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
        Measurements {
            samples: self.samples.load(Relaxed),
            promised_blocks: self.promised.get(),
            found_blocks: self.found.get(),
            over_blocks: self.over.get(),
            under_blocks: self.under.get(),
        }
    }

    /// The audit as shown on the admin listener.
    pub fn view(&self) -> UsageStatsView {
        UsageStatsView {
            usage: self.usage.view(),
            cached_tokens: self.cached_tokens.view(),
            comparisons: self.comparisons.load(Relaxed),
            drift_over_blocks: self.over.get(),
            drift_under_blocks: self.under.get(),
        }
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
        let drift = MovingAverage::default();
        drift.add(16.0);
        assert!((drift.get() - 1.0).abs() < 1e-9);
        for _ in 0..100 {
            drift.add(4.0);
        }
        assert!((drift.get() - 4.0).abs() < 0.01);
        for _ in 0..100 {
            drift.add(0.0);
        }
        assert!(drift.get() < 0.01);
    }
}
