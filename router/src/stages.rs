//! Where a request's time goes, for `server-timing` and the stage histogram.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::{Serialize, Serializer};

use crate::core::{Core, Served};

/// Stages in the order in which they ended. A batch adds up its prompts.
pub struct Stages {
    core: Arc<Core>,
    served: Arc<Served>,
    seconds: Mutex<Vec<(&'static str, f64)>>,
}

/// The stages of one request, in milliseconds; as JSON, an object.
#[derive(Clone, Debug, Default)]
pub struct StageTimes(Vec<(&'static str, f64)>);

impl Serialize for StageTimes {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().copied())
    }
}

impl Stages {
    /// None yet, of a request to a model.
    pub fn new(core: &Arc<Core>, served: &Arc<Served>) -> Self {
        Self { core: Arc::clone(core), served: Arc::clone(served), seconds: Mutex::default() }
    }

    /// Adds a stage that began at `started` and ends now.
    pub fn mark(&self, stage: &'static str, started: Instant) {
        let seconds = started.elapsed().as_secs_f64();
        let find = || self.core.metrics.stage.with_label_values(&[self.served.name(), stage]);
        self.served.stage_seconds.with([stage], find, |series| series.observe(seconds));
        let mut stages = self.seconds.lock().unwrap_or_else(PoisonError::into_inner);
        match stages.iter_mut().find(|(name, _)| *name == stage) {
            Some((_, sum)) => *sum += seconds,
            None => stages.push((stage, seconds)),
        }
    }

    /// The stages so far.
    pub fn times(&self) -> StageTimes {
        let stages = self.seconds.lock().unwrap_or_else(PoisonError::into_inner);
        StageTimes(stages.iter().map(|(stage, seconds)| (*stage, seconds * 1e3)).collect())
    }

    /// The `server-timing` header: milliseconds per stage.
    pub fn server_timing(&self) -> String {
        let stages = self.seconds.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = String::new();
        for (stage, seconds) in stages.iter() {
            let separator = if out.is_empty() { "" } else { ", " };
            // Writing to a string cannot fail.
            let us = (seconds * 1e6).round() as u64;
            let _infallible = write!(out, "{separator}{stage};dur={}.{:03}", us / 1000, us % 1000);
        }
        out
    }
}
