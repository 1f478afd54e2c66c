//! The policies that can be configured.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The rule that chooses a worker among the candidates.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Policy {
    /// The lowest sum of `overlap_weight` x blocks to compute and `load_weight` x blocks queued.
    KvOverlap {
        /// Weight of blocks to compute.
        #[serde(default = "one")]
        #[schemars(range(min = 0.0, max = 1e6))]
        overlap_weight: f64,
        /// Weight of queued blocks.
        #[serde(default = "one")]
        #[schemars(range(min = 0.0, max = 1e6))]
        load_weight: f64,
        /// 0: the lowest cost. Above: at random by softmax of the costs.
        #[serde(default)]
        #[schemars(range(min = 0.0, max = 1e6))]
        temperature: f64,
    },
    /// The earliest predicted first token, plus the [price](policies.md#predicted_ttft) of extra
    /// work.
    PredictedTtft {
        /// The price: later requests that each extra millisecond of prefill delays. Default: by the
        /// workers' load, at most 10.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(range(min = 0.0, max = 1e3))]
        extra_work_weight: Option<f64>,
        /// 0: the lowest cost. Above: at random by softmax of the costs in milliseconds.
        #[serde(default, skip_serializing_if = "is_zero")]
        #[schemars(range(min = 0.0, max = 1e6))]
        temperature: f64,
    },
    /// The fewest tokens in work.
    LeastLoaded {},
    /// The candidates in turn.
    RoundRobin {},
}

impl Policy {
    /// The unit of the policy's costs, and so of the margin between two workers.
    pub fn cost_unit(&self) -> &'static str {
        match self {
            Self::KvOverlap { .. } => "blocks",
            Self::PredictedTtft { .. } => "ms",
            Self::LeastLoaded {} => "tokens",
            Self::RoundRobin {} => "none",
        }
    }

    /// The name in the configuration (`kind`).
    pub fn name(&self) -> &'static str {
        match self {
            Self::KvOverlap { .. } => "kv_overlap",
            Self::PredictedTtft { .. } => "predicted_ttft",
            Self::LeastLoaded {} => "least_loaded",
            Self::RoundRobin {} => "round_robin",
        }
    }

    /// Whether the policy needs the cost model or the times for which workers are busy.
    pub fn uses_costs(&self) -> bool {
        match self {
            Self::PredictedTtft { .. } | Self::KvOverlap { .. } => true,
            Self::LeastLoaded {} | Self::RoundRobin {} => false,
        }
    }

    /// `predicted_ttft` with its default settings.
    pub fn predicted_ttft() -> Self {
        Self::PredictedTtft { extra_work_weight: None, temperature: 0.0 }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self::predicted_ttft()
    }
}

fn is_zero(number: &f64) -> bool {
    *number == 0.0
}

fn one() -> f64 {
    1.0
}
