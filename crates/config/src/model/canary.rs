//! Settings of the parity canary.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scalar;

/// A known prompt with which each worker is tested when it joins or returns: whether its engine
/// makes the same tokens and KV blocks of the prompt as the router.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct CanaryConfig {
    /// Whether workers are tested. If not, all take part in KV routing.
    pub enabled: bool,
    /// Timeout of the engine's reply, and again of its KV events. Raise it for long queues of
    /// engines.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub timeout: Duration,
    /// Interval between two tests of a worker. One without a clear result is repeated earlier.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub interval: Duration,
}

impl Default for CanaryConfig {
    fn default() -> Self {
        Self { enabled: true, timeout: Duration::from_secs(10), interval: Duration::from_secs(600) }
    }
}

/// What happens to a worker whose `cached_tokens` differ from what the index promised, on a moving
/// average of about its last 16 replies. Finding less than was promised (`over`) lowers the
/// worker's overlap by the same share, has its events read again, and in the end excludes the
/// worker from KV routing. Finding more than was promised (`under`) only has its events read again.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct DriftConfig {
    /// Whether the router acts on drift, or only measures it.
    pub enabled: bool,
    /// KV blocks per reply, on average, that the index promises and the worker may lack. The router
    /// acts if `over_share_max` is exceeded as well. Raise it if prompts wait until their blocks
    /// are evicted.
    #[schemars(range(min = 0.0, max = 1e6))]
    pub over_blocks_max: f64,
    /// The share of the promised blocks that may be missing, 0 to 1.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub over_share_max: f64,
    /// KV blocks per reply, on average, that the worker finds and the index may lack. Events are
    /// read again if `under_share_max` is exceeded as well.
    #[schemars(range(min = 0.0, max = 1e6))]
    pub under_blocks_max: f64,
    /// The share of found blocks that the index may lack, 0 to 1.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub under_share_max: f64,
    /// Minimum number of compared replies before the router acts.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub samples_min: u64,
    /// Minimum time between two resynchronisations of a worker.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub resync_interval_min: Duration,
    /// Resynchronisations in a row without an improvement. Then a worker that finds too little
    /// takes no part in KV routing until its engine restarts.
    #[schemars(range(min = 0, max = 1000))]
    pub resyncs_max: u32,
}

impl Default for DriftConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            over_blocks_max: 4.0,
            over_share_max: 0.25,
            under_blocks_max: 16.0,
            under_share_max: 0.5,
            samples_min: 32,
            resync_interval_min: Duration::from_secs(300),
            resyncs_max: 3,
        }
    }
}
