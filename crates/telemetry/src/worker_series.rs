//! The metric series of one worker that every leg on it updates, looked up only once.

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec};

use crate::metrics::Metrics;
use crate::series::Series;

/// The series of one worker; without metrics, nothing is counted.
#[derive(Debug, Default)]
pub struct WorkerSeries(Option<CountedSeries>);

#[derive(Debug)]
struct CountedSeries {
    model: Box<str>,
    worker: Box<str>,
    leg_seconds: HistogramVec,
    failures: IntCounterVec,
    reports: IntCounterVec,
    kept: Series<Histogram, 1>,
    kept_reports: Series<IntCounter, 2>,
}

impl WorkerSeries {
    /// The series of a worker.
    pub fn new(all: &Metrics, model: &str, worker: &str) -> Self {
        Self(Some(CountedSeries {
            model: model.into(),
            worker: worker.into(),
            leg_seconds: all.worker_leg.clone(),
            failures: all.worker_leg_failures.clone(),
            reports: all.engine_reports.clone(),
            kept: Series::default(),
            kept_reports: Series::default(),
        }))
    }

    /// Records the time of a leg on the worker, in seconds.
    pub fn leg_took(&self, leg: &'static str, seconds: f64) {
        let Some(CountedSeries { model, worker, leg_seconds, kept, .. }) = &self.0 else { return };
        let find = || leg_seconds.with_label_values(&[&**model, worker, leg]);
        kept.with([leg], find, |series| series.observe(seconds));
    }

    /// The legs of this kind whose time was recorded, and their time in total, in seconds.
    pub fn legs_taken(&self, leg: &'static str) -> (u64, f64) {
        let Some(CountedSeries { model, worker, leg_seconds, .. }) = &self.0 else {
            return (0, 0.0);
        };
        let series = leg_seconds.with_label_values(&[&**model, worker, leg]);
        (series.get_sample_count(), series.get_sample_sum())
    }

    /// Counts whether the worker has reported a figure at the end of a leg.
    pub fn reported(&self, figure: &'static str, is_reported: bool) {
        let Some(CountedSeries { model, worker, reports, kept_reports, .. }) = &self.0 else {
            return;
        };
        let reported = if is_reported { "yes" } else { "no" };
        let find = || reports.with_label_values(&[&**model, worker, figure, reported]);
        kept_reports.with([figure, reported], find, IntCounter::inc);
    }

    /// Counts a leg that failed on the worker, by the code of the error.
    pub fn leg_failed(&self, leg: &'static str, reason: &'static str) {
        let Some(CountedSeries { model, worker, failures, .. }) = &self.0 else { return };
        failures.with_label_values(&[&**model, worker, leg, reason]).inc();
    }
}
