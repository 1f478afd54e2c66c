//! Learns for one model from which overlap on a decode worker a local prefill is faster than a
//! remote prefill.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::clock::ns_since;
use splitrail_policy::threshold::DEFAULT_THRESHOLD_RATIO;
use splitrail_policy::threshold::{
    Comparison, ComparisonInput, LearnedThreshold, PredictedWay, Threshold, ThresholdConfig,
};

/// The self-calibrating threshold of one model.
#[derive(Debug)]
pub struct Calibration {
    epoch: Instant,
    state: Mutex<ThresholdState>,
}

#[derive(Debug)]
struct ThresholdState {
    config: ThresholdConfig,
    threshold: Threshold,
}

impl Default for Calibration {
    fn default() -> Self {
        let config = ThresholdConfig::default();
        let threshold = Threshold::new(config, DEFAULT_THRESHOLD_RATIO);
        Self { epoch: Instant::now(), state: Mutex::new(ThresholdState { config, threshold }) }
    }
}

impl Calibration {
    /// Sets the configuration. If it has changed, everything learned is dropped.
    pub fn configure(&self, config: ThresholdConfig) {
        let mut state = self.lock();
        if state.config != config {
            *state = ThresholdState {
                config,
                threshold: Threshold::new(config, DEFAULT_THRESHOLD_RATIO),
            };
        }
    }

    /// Compares local and remote prefill. With `goes`, the request takes the way that the comparison
    /// names, which is recorded.
    pub fn compare(&self, now: Instant, input: &ComparisonInput<'_>, goes: bool) -> Comparison {
        let now_ns = ns_since(self.epoch, now);
        let mut state = self.lock();
        let comparison = state.threshold.compare(now_ns, input);
        if goes {
            state.threshold.record_way_taken(now_ns, &comparison, input);
        }
        comparison
    }

    /// Learns from the time to first token of a request that took a way.
    pub fn observe(&self, now: Instant, local: bool, way: &PredictedWay, ttft_ms: f64) {
        let now_ns = ns_since(self.epoch, now);
        self.lock().threshold.observe(now_ns, local, way, ttft_ms);
    }

    /// What has been learned so far.
    pub fn learned(&self, now: Instant) -> LearnedThreshold {
        let now_ns = ns_since(self.epoch, now);
        self.lock().threshold.learned(now_ns)
    }

    fn lock(&self) -> MutexGuard<'_, ThresholdState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
