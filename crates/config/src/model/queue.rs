//! The queue of a model, and its cache hit threshold that is learned.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use splitrail_policy::queue::Order;
use splitrail_policy::{queue, threshold};

use crate::scalar;

/// The settings of the queue.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct QueueConfig {
    /// The order among equal priority, fairness and deadline.
    pub order: Order,
    /// Maximum requests that wait; further ones are refused.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_waiting: usize,
    /// Maximum wait; then the request is refused. The default is that of official clients.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub max_wait: Duration,
    /// A worker gets its next request when it is predicted to be free within this time.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-maximum" = "1m"))]
    pub lead: Duration,
    /// The share of the released work for the request that has waited longest.
    #[schemars(range(min = 0.01, max = 1.0))]
    pub oldest_share: f64,
    /// The prefill time by which a client may be ahead of a waiting one; `limits.fair_by` tells
    /// clients apart.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub fairness: Duration,
    /// A request whose first token is predicted later is refused on arrival, unless its prefill
    /// alone takes longer or it need not wait. Default: none is.
    #[serde(
        deserialize_with = "scalar::optional_duration",
        serialize_with = "scalar::optional_duration_text"
    )]
    #[schemars(with = "Option<scalar::DurationText>", extend("x-minimum" = "1ms"))]
    pub ttft_goal: Option<Duration>,
    /// The highest `x-splitrail-priority`. Higher classes are served first, those below 0 after
    /// class 0.
    #[schemars(range(min = 0, max = 100))]
    pub priority_max: i32,
    /// Requests that one scheduling round examines, the first ones in the order.
    #[schemars(range(min = 1, max = 4096))]
    pub window: usize,
}

impl Default for QueueConfig {
    fn default() -> Self {
        let queue = queue::QueueConfig::default();
        Self {
            order: queue.order,
            max_waiting: queue.max_waiting,
            max_wait: duration(queue.max_wait_ms),
            lead: duration(queue.lead_ms),
            oldest_share: queue.oldest_share,
            fairness: duration(queue.fairness_ms),
            ttft_goal: queue.ttft_goal_ms.map(duration),
            priority_max: queue.priority_max,
            window: queue.window,
        }
    }
}

impl From<QueueConfig> for queue::QueueConfig {
    fn from(config: QueueConfig) -> Self {
        Self {
            order: config.order,
            max_waiting: config.max_waiting,
            max_wait_ms: ms(config.max_wait),
            lead_ms: ms(config.lead),
            oldest_share: config.oldest_share,
            fairness_ms: ms(config.fairness),
            ttft_goal_ms: config.ttft_goal.map(ms),
            priority_max: config.priority_max,
            window: config.window,
        }
    }
}

/// The settings of `cache_hit_threshold: auto`.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct ThresholdConfig {
    /// Maximum time between tokens that a local prefill may cause in a stream, as the mean of its
    /// slowest tenth.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms", "x-maximum" = "1m"))]
    pub tbt_goal: Duration,
    /// Prompt tokens that a decode worker computes in one step; 0: the whole prompt.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub chunk_tokens: u32,
    /// Initial interference, then learned: the part of the shorter of a step's two parts that is
    /// added to the longer one. 0: both overlap; 1: one waits for the other.
    #[schemars(range(min = 0.01, max = 10.0))]
    pub interference: f64,
}

impl Default for ThresholdConfig {
    fn default() -> Self {
        let threshold = threshold::ThresholdConfig::default();
        Self {
            tbt_goal: duration(threshold.tbt_goal_ms),
            chunk_tokens: threshold.chunk_tokens,
            interference: threshold.interference,
        }
    }
}

impl From<ThresholdConfig> for threshold::ThresholdConfig {
    fn from(config: ThresholdConfig) -> Self {
        Self {
            tbt_goal_ms: ms(config.tbt_goal),
            chunk_tokens: config.chunk_tokens,
            interference: config.interference,
        }
    }
}

fn duration(ms: f64) -> Duration {
    Duration::from_secs_f64(ms / 1e3)
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_policies() {
        let queue = queue::QueueConfig::from(QueueConfig::default());
        assert_eq!(queue, queue::QueueConfig::default());
        let threshold = threshold::ThresholdConfig::from(ThresholdConfig::default());
        assert_eq!(threshold, threshold::ThresholdConfig::default());
    }
}
