//! Settings of the parity canary.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scalar;

/// A known prompt that each worker is asked when it joins or comes back: whether its engine
/// makes the same tokens and KV blocks of it as the router.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct CanaryConfig {
    /// Whether workers are asked. If not, all of them are believed.
    pub enabled: bool,
    /// How long an engine may take to answer, and its KV events to come after that.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub timeout: Duration,
    /// When a worker is asked again, whatever came of it.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub again_after: Duration,
}

impl Default for CanaryConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            timeout: Duration::from_secs(10),
            again_after: Duration::from_secs(600),
        }
    }
}

/// What happens to a worker whose `cached_tokens` are not what the index promised, on a moving
/// average of about its last 16 replies. A promise that is not kept (`over`) lowers the
/// worker's overlap in the same measure, has the index read it anew, and in the end shuts the
/// worker out of KV routing. Finding more than was promised (`under`) only has it read anew.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct DriftConfig {
    /// Whether anything happens.
    pub enabled: bool,
    /// KV blocks that may be missing of what was promised ...
    #[schemars(range(min = 0.0, max = 1e6))]
    pub bound_blocks: f64,
    /// ... and the share of it: only beyond both something happens.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub bound_share: f64,
    /// KV blocks that a worker may find and the index did not know of ...
    #[schemars(range(min = 0.0, max = 1e6))]
    pub under_bound_blocks: f64,
    /// ... and their share of what it finds.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub under_bound_share: f64,
    /// Replies before anything is made of them.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub samples_min: u64,
    /// Between two readings of one worker.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub resync_min: Duration,
    /// Readings in a row that did not help, after which the worker takes no part in KV routing
    /// until it comes back as a new process.
    #[schemars(range(min = 0, max = 1000))]
    pub resyncs_max: u32,
}

impl Default for DriftConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            bound_blocks: 4.0,
            bound_share: 0.25,
            under_bound_blocks: 16.0,
            under_bound_share: 0.5,
            samples_min: 32,
            resync_min: Duration::from_secs(300),
            resyncs_max: 3,
        }
    }
}
