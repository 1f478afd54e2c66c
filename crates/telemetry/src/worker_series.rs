//! The metric series of one worker that every leg on it updates, looked up only once.

use prometheus::{Histogram, HistogramVec, IntCounterVec};

use crate::metrics::Metrics;
use crate::series::Series;

/// The series of one worker; without metrics, nothing is counted.
#[derive(Debug, Default)]
pub struct WorkerSeries(Option<Counted>);

#[derive(Debug)]
struct Counted {
    model: Box<str>,
    worker: Box<str>,
    leg_seconds: HistogramVec,
    failures: IntCounterVec,
    kept: Series<Histogram, 1>,
}

impl WorkerSeries {
    /// The series of a worker.
    pub fn new(all: &Metrics, model: &str, worker: &str) -> Self {
        Self(Some(Counted {
            model: model.into(),
            worker: worker.into(),
            leg_seconds: all.worker_leg.clone(),
            failures: all.worker_leg_failures.clone(),
            kept: Series::default(),
        }))
    }

    /// Records the time of a leg on the worker, in seconds.
    pub fn leg_took(&self, leg: &'static str, seconds: f64) {
        let Some(Counted { model, worker, leg_seconds, kept, .. }) = &self.0 else { return };
        let find = || leg_seconds.with_label_values(&[&**model, worker, leg]);
        kept.with([leg], find, |series| series.observe(seconds));
    }

    /// Counts a leg that failed on the worker, by the code of the error.
    pub fn leg_failed(&self, leg: &'static str, reason: &'static str) {
        let Some(Counted { model, worker, failures, .. }) = &self.0 else { return };
        failures.with_label_values(&[&**model, worker, leg, reason]).inc();
    }
}
