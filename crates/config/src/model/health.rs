//! How workers are watched, and what is made of it.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scalar;

/// How a model's workers are watched.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct HealthConfig {
    /// Between two questions to one worker, which ask for its load as well.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub probe_interval: Duration,
    /// How long it may take to answer one.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub probe_timeout: Duration,
    /// Questions in a row without an answer after which it is down. A request that cannot
    /// reach it says so at once.
    #[schemars(range(min = 1, max = 100))]
    pub fail_after: u32,
    /// Answers in a row after which it is up again.
    #[schemars(range(min = 1, max = 100))]
    pub pass_after: u32,
    /// For how long a worker that joins a running fleet, or comes back, gets a growing share
    /// of the requests that others could take, from a tenth on. `0s` is off.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub slow_start: Duration,
    /// When a worker that does much worse than the others is left alone for a while.
    pub ejection: EjectionConfig,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self {
            probe_interval: Duration::from_secs(1),
            probe_timeout: Duration::from_secs(2),
            fail_after: 1,
            pass_after: 1,
            slow_start: Duration::ZERO,
            ejection: EjectionConfig::default(),
        }
    }
}

/// When a worker is ejected: while breakers heed failures in a row, this heeds their share.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct EjectionConfig {
    /// Between two looks at what the workers have done since the one before.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub interval: Duration,
    /// The share of failed legs from which a worker is ejected, if the others' median is less
    /// than half of it; 0 never does.
    #[schemars(range(min = 0, max = 100))]
    pub failure_percent: u32,
    /// How many times the others' median time to the first token a worker's mean may be; 0
    /// is any.
    #[schemars(range(min = 0, max = 1000))]
    pub slow_factor: u32,
    /// Legs that a worker must have had in the interval to be judged.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub min_requests: u32,
    /// For how long; times the number of ejections in a row, up to ten times.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub time: Duration,
    /// The most workers of one role that are out at once, as a share of them, rounded down.
    /// Never the last one.
    #[schemars(range(min = 0, max = 100))]
    pub cap_percent: u32,
}

impl Default for EjectionConfig {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(10),
            failure_percent: 50,
            slow_factor: 0,
            min_requests: 20,
            time: Duration::from_secs(30),
            cap_percent: 34,
        }
    }
}
