//! What workers report, against what the router expected of them.
//!
//! Every reply's `cached_tokens` is a free oracle for the index: the difference from
//! the estimate is measured per worker, and drifts slowly where it is noise.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use serde::Serialize;

use crate::Served;
use crate::Worker;
use crate::drift::{self, Measured};
use splitrail_ledger::leg::LegFacts;
use splitrail_telemetry::Metrics;

/// Replies after which a worker that has never given a figure is named in the log.
/// One that reports nothing instead of 0 needs a warm prompt to be heard.
const PATIENCE_REPLIES: u64 = 3;

/// Weight of the newest comparison in the drift: about the last 16 count.
const WEIGHT: f64 = 1.0 / 16.0;

/// What one worker has reported so far, and how far the index was off.
#[derive(Debug, Default)]
pub struct Audit {
    usage: Reporting,
    cached_tokens: Reporting,
    comparisons: AtomicU64,
    /// Grows each time that the index of this worker begins anew: what was promised before
    /// says nothing about it.
    epoch: AtomicU64,
    /// Comparisons of this epoch.
    samples: AtomicU64,
    promised: Drift,
    found: Drift,
    over: Drift,
    under: Drift,
}

/// How often a figure was to be had, and was.
#[derive(Debug, Default)]
struct Reporting {
    replies: AtomicU64,
    reported: AtomicU64,
    named: AtomicBool,
}

/// A moving average. It orders nothing: a lost race loses one sample's weight.
#[derive(Debug, Default)]
struct Drift(AtomicU64);

impl Drift {
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

/// An audit as it is shown.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AuditView {
    /// Replies, and how many of them had usage.
    pub usage: ReportingView,
    /// Replies of legs that do a prompt's work, and how many said what was cached.
    pub cached_tokens: ReportingView,
    /// Replies that could be compared with the index.
    pub comparisons: u64,
    /// Moving average of blocks that the index had and the engine did not find.
    pub drift_over_blocks: f64,
    /// Moving average of blocks that the engine found and the index did not have.
    pub drift_under_blocks: f64,
}

/// How often a figure was to be had, and was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ReportingView {
    /// Replies that could have had it.
    pub replies: u64,
    /// Replies that had it.
    pub reported: u64,
    /// Whether there were replies, and none of them had it.
    pub never: bool,
}

impl Reporting {
    /// Counts a reply; says whether it is time to name the worker.
    fn count(&self, reported: bool) -> bool {
        let replies = self.replies.fetch_add(1, Relaxed) + 1;
        let known = self.reported.fetch_add(reported.into(), Relaxed) + u64::from(reported);
        known == 0 && replies >= PATIENCE_REPLIES && !self.named.swap(true, Relaxed)
    }

    fn view(&self) -> ReportingView {
        let (replies, reported) = (self.replies.load(Relaxed), self.reported.load(Relaxed));
        ReportingView { replies, reported, never: replies > 0 && reported == 0 }
    }
}

impl Audit {
    /// Which index of this worker promises are made from now.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Relaxed)
    }

    /// The index of this worker begins anew, and so does the comparison.
    pub fn restart(&self) {
        self.epoch.fetch_add(1, Relaxed);
        self.samples.store(0, Relaxed);
        for drift in [&self.promised, &self.found, &self.over, &self.under] {
            drift.restart();
        }
    }

    /// What was measured of the index as it is.
    pub fn measured(&self) -> Measured {
        Measured {
            samples: self.samples.load(Relaxed),
            promised_blocks: self.promised.get(),
            found_blocks: self.found.get(),
            over_blocks: self.over.get(),
            under_blocks: self.under.get(),
        }
    }

    /// The audit as it is now.
    pub fn view(&self) -> AuditView {
        AuditView {
            usage: self.usage.view(),
            cached_tokens: self.cached_tokens.view(),
            comparisons: self.comparisons.load(Relaxed),
            drift_over_blocks: self.over.get(),
            drift_under_blocks: self.under.get(),
        }
    }
}

/// A worker has answered a leg in full: counts what it reported, compares it with the
/// index, and names it in the log, once, if it never reports. `has_usage` is whether
/// there was a usage object; the leg has what was in it.
pub fn observe(
    metrics: &Metrics,
    served: &Served,
    worker: &Worker,
    leg: &LegFacts,
    has_usage: bool,
) {
    // Whoever has left has no figures any more.
    if worker.gone.is_cancelled() {
        return;
    }
    let (model, id) = (served.name(), worker.id());
    let audit = &worker.audit;
    count(metrics, &audit.usage, [model, id, "usage"], has_usage);
    // What a receiving leg calls cached is not about its own work.
    if leg.receives {
        return;
    }
    count(metrics, &audit.cached_tokens, [model, id, "cached_tokens"], leg.cached_tokens.is_some());
    let Some((engine, prompt_tokens)) = leg.cached_tokens.zip(leg.prompt_tokens) else { return };
    if !leg.expected.comparable || leg.expected.block_size == 0 {
        return;
    }
    let estimate = leg.expected.cached_tokens(prompt_tokens);
    let in_blocks = |tokens: u32| f64::from(tokens) / f64::from(leg.expected.block_size);
    let blocks = in_blocks(estimate.abs_diff(engine));
    let over = estimate > engine;
    let direction = if over { "over" } else { "under" };
    metrics.cached_tokens_error.with_label_values(&[model, direction]).observe(blocks);
    audit.comparisons.fetch_add(1, Relaxed);
    if leg.expected.epoch != audit.epoch() {
        return;
    }
    audit.samples.fetch_add(1, Relaxed);
    audit.promised.add(in_blocks(estimate));
    audit.found.add(in_blocks(engine));
    audit.over.add(if over { blocks } else { 0.0 });
    audit.under.add(if over { 0.0 } else { blocks });
    drift::compared(served, worker);
}

fn count(metrics: &Metrics, reporting: &Reporting, labels: [&str; 3], reported: bool) {
    let [model, worker, figure] = labels;
    let labels = [model, worker, figure, if reported { "yes" } else { "no" }];
    metrics.engine_reports.with_label_values(&labels).inc();
    if reporting.count(reported) {
        tracing::warn!(
            model,
            worker,
            figure,
            "the engine has never reported this figure: what clients are told follows \
             cached_tokens_fallback. vLLM wants --enable-prompt-tokens-details, SGLang \
             --enable-cache-report (said once per worker)"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_named_once_and_only_if_it_has_never_reported() {
        let silent = Reporting::default();
        let named: Vec<bool> = (0..6).map(|_| silent.count(false)).collect();
        assert_eq!(named, [false, false, true, false, false, false]);
        assert!(silent.view().never);
        let late = Reporting::default();
        assert!(!late.count(false) && !late.count(true));
        assert!((0..9).all(|_| !late.count(false)));
        assert!(!late.view().never);
        assert!(!Reporting::default().view().never);
    }

    #[test]
    fn drift_follows_what_lasts_and_forgets_what_does_not() {
        let drift = Drift::default();
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
