//! Settings of health checks, circuit breakers and outlier ejection.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scalar;

/// How the health of a model's workers is observed.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct HealthConfig {
    /// Interval between probes, which also read the load.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "10ms"))]
    pub probe_interval: Duration,
    /// Timeout of a probe.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "10ms"))]
    pub probe_timeout: Duration,
    /// Failed probes in a row after which a worker is down. A request that cannot reach it has the
    /// same effect at once.
    #[schemars(range(min = 1, max = 100))]
    pub unhealthy_threshold: u32,
    /// Successful probes in a row after which it is up.
    #[schemars(range(min = 1, max = 100))]
    pub healthy_threshold: u32,
    /// The time in which a worker that joins or returns gets a growing share of requests, from a
    /// tenth to all. `0s` disables it.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub slow_start: Duration,
    /// Takes a worker that performs much worse than the others out of service for a while.
    pub ejection: EjectionConfig,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self {
            probe_interval: Duration::from_secs(1),
            probe_timeout: Duration::from_secs(2),
            unhealthy_threshold: 3,
            healthy_threshold: 1,
            slow_start: Duration::ZERO,
            ejection: EjectionConfig::default(),
        }
    }
}

/// When a worker is ejected. Circuit breakers count consecutive failures; ejection considers
/// the share of failures.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct EjectionConfig {
    /// Interval between evaluations.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "10ms"))]
    pub interval: Duration,
    /// Failed legs in percent from which a worker is ejected, if the others' median is less than
    /// half of it. 0 disables it.
    #[schemars(range(min = 0, max = 100))]
    pub failure_percent: u32,
    /// A worker is ejected if its mean time to first token is more than this many times the others'
    /// median. 0 disables it.
    #[schemars(range(min = 0, max = 1000))]
    pub slow_factor: u32,
    /// Minimum number of legs within `interval` for a worker to be evaluated.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub requests_min: u32,
    /// Duration of the first ejection. Each further one in a row lasts this much longer, up to ten
    /// times.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "10ms"))]
    pub base_time: Duration,
    /// Maximum share of ejected workers of one role in percent, rounded down but at least one worker.
    /// The last worker is never ejected.
    #[schemars(range(min = 0, max = 100))]
    pub ejected_percent_max: u32,
}

impl Default for EjectionConfig {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(10),
            failure_percent: 50,
            slow_factor: 8,
            requests_min: 20,
            base_time: Duration::from_secs(30),
            ejected_percent_max: 34,
        }
    }
}
