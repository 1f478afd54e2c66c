//! The time of a request by stage, for `server-timing` and the stage histogram.

use std::sync::{Mutex, PoisonError};

use serde::{Serialize, Serializer};

use splitrail_api::text::{digit, push_number};
use splitrail_telemetry::{LabelledSeries, Metrics};

/// The stages of a request in the order in which they ended. The times of a batch's prompts are
/// added up.
pub struct Stages {
    seconds: Mutex<Vec<(&'static str, f64)>>,
}

/// The usual number of stages of a request, for which memory is reserved.
const USUAL: usize = 6;

/// The time of one request in each stage, in milliseconds. The JSON form is an object.
#[derive(Clone, Debug, Default)]
pub struct StageTimes(Vec<(&'static str, f64)>);

impl Serialize for StageTimes {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().copied())
    }
}

impl Default for Stages {
    /// No stages yet.
    fn default() -> Self {
        Self { seconds: Mutex::new(Vec::with_capacity(USUAL)) }
    }
}

impl Stages {
    /// Adds `seconds` to a stage of a request, and observes them in the stage's histogram.
    pub fn add(
        &self,
        metrics: &Metrics,
        labelled: LabelledSeries<'_>,
        stage: &'static str,
        seconds: f64,
    ) {
        let LabelledSeries { model, series } = labelled;
        series.stage(metrics, model, stage, seconds);
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

    /// The milliseconds that the legs took until the first token. If both legs run at the same time,
    /// the last one includes the first.
    pub fn legs_ms(&self, at_the_same_time: bool) -> f64 {
        let stages = self.seconds.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = |stage| stage == "first_token" || (stage == "prefill" && !at_the_same_time);
        let of_legs = stages.iter().filter(|(stage, _)| counts(*stage));
        of_legs.map(|(_, seconds)| seconds * 1e3).sum()
    }

    /// The value of the `server-timing` header: milliseconds per stage.
    pub fn server_timing(&self) -> String {
        let stages = self.seconds.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = String::with_capacity(32 * stages.len());
        for (stage, seconds) in stages.iter() {
            let separator = if out.is_empty() { "" } else { ", " };
            let us = (seconds * 1e6 + 0.5) as u64;
            out.extend([separator, stage, ";dur="]);
            push_number(&mut out, us / 1000);
            let [hundreds, tens, ones] = [us / 100 % 10, us / 10 % 10, us % 10];
            out.push('.');
            out.extend([hundreds, tens, ones].map(digit));
        }
        out
    }
}
