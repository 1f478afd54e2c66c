//! Where a request's time goes, for `server-timing` and the stage histogram.

use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::flow::context::Context;
use crate::telemetry::metrics::Metrics;

/// Stages in the order in which they ended. A batch adds up its prompts.
#[derive(Debug, Default)]
pub struct Stages(Mutex<Vec<(&'static str, f64)>>);

impl Stages {
    /// Adds a stage that began at `started` and ends now.
    pub fn mark(&self, context: &Context, stage: &'static str, started: Instant) {
        self.record(&context.core.metrics, context.served.name(), stage, started);
    }

    /// The same, before there is a context.
    pub fn record(&self, metrics: &Metrics, model: &str, stage: &'static str, started: Instant) {
        let seconds = started.elapsed().as_secs_f64();
        metrics.stage.with_label_values(&[model, stage]).observe(seconds);
        let mut stages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match stages.iter_mut().find(|(name, _)| *name == stage) {
            Some((_, sum)) => *sum += seconds,
            None => stages.push((stage, seconds)),
        }
    }

    /// The `server-timing` header: milliseconds per stage.
    pub fn server_timing(&self) -> String {
        let stages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = String::new();
        for (stage, seconds) in stages.iter() {
            let separator = if out.is_empty() { "" } else { ", " };
            // Writing to a string cannot fail.
            let _infallible = write!(out, "{separator}{stage};dur={:.3}", seconds * 1e3);
        }
        out
    }
}
