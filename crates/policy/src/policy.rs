//! The policies, as a configuration names them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::published::Published;

/// How a worker is chosen among the candidates.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Policy {
    /// Most overlap for least load: the lowest sum of
    /// `overlap_weight` x blocks to compute and `load_weight` x blocks queued.
    KvOverlap {
        /// Weight of the blocks that the candidate would have to compute.
        #[serde(default = "one")]
        #[schemars(range(min = 0.0, max = 1e6))]
        overlap_weight: f64,
        /// Weight of the blocks that are queued on the candidate.
        #[serde(default = "one")]
        #[schemars(range(min = 0.0, max = 1e6))]
        load_weight: f64,
        /// 0 takes the best; above it, candidates are drawn by softmax of their costs.
        #[serde(default)]
        #[schemars(range(min = 0.0, max = 1e6))]
        temperature: f64,
    },
    /// The soonest predicted first token, in milliseconds: the wait for the worker, the
    /// prefill of what it lacks, the hand-off, and what work that another worker would be
    /// spared costs those who come later.
    PredictedTtft {
        /// How many later requests each extra millisecond of prefill delays. Without it, what
        /// the workers' load says: `1 / (1 - busy share)`, and at most 10.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(range(min = 0.0, max = 1e3))]
        extra_work_weight: Option<f64>,
        /// 0 takes the best; above it, candidates are drawn by softmax of their milliseconds.
        #[serde(default, skip_serializing_if = "is_zero")]
        #[schemars(range(min = 0.0, max = 1e6))]
        temperature: f64,
    },
    /// Two are drawn; of them, the one with the fewest tokens in work.
    PowerOfTwo {},
    /// The fewest tokens in work.
    LeastLoaded {},
    /// Each in turn.
    RoundRobin {},
    /// Any, evenly.
    Random {},
    /// To compare with: the fewest blocks to compute, this prompt's and those that are queued.
    Dynamo {},
    /// To compare with: the soonest predicted end of the prefill.
    Mooncake {},
    /// To compare with: twice the share of the prompt that is there, and the shortness of the
    /// queue.
    Llmd {},
}

impl Policy {
    /// What its costs are in: what a margin between two workers means.
    pub fn cost_unit(&self) -> &'static str {
        match self {
            Self::KvOverlap { .. } => "blocks",
            Self::PredictedTtft { .. } => "ms",
            Self::LeastLoaded {} | Self::PowerOfTwo {} => "tokens",
            Self::RoundRobin {} | Self::Random {} => "none",
            Self::Dynamo {} => "blocks",
            Self::Mooncake {} => "ns",
            Self::Llmd {} => "points",
        }
    }

    /// The name in a configuration.
    pub fn name(&self) -> &'static str {
        match self {
            Self::KvOverlap { .. } => "kv_overlap",
            Self::PredictedTtft { .. } => "predicted_ttft",
            Self::PowerOfTwo {} => "power_of_two",
            Self::LeastLoaded {} => "least_loaded",
            Self::RoundRobin {} => "round_robin",
            Self::Random {} => "random",
            Self::Dynamo {} => "dynamo",
            Self::Mooncake {} => "mooncake",
            Self::Llmd {} => "llmd",
        }
    }

    /// Whether it looks at what the workers' work costs, or at how long they are busy.
    pub fn reckons(&self) -> bool {
        match self {
            Self::PredictedTtft { .. } | Self::Mooncake {} | Self::Llmd {} => true,
            Self::KvOverlap { .. } | Self::PowerOfTwo {} | Self::LeastLoaded {} => false,
            Self::RoundRobin {} | Self::Random {} | Self::Dynamo {} => false,
        }
    }

    /// The published policy that it is, if it is one.
    pub fn published(&self) -> Option<Published> {
        match self {
            Self::Dynamo {} => Some(Published::Dynamo),
            Self::Mooncake {} => Some(Published::Mooncake),
            Self::Llmd {} => Some(Published::Llmd),
            _ => None,
        }
    }

    /// `predicted_ttft` as it is without further words.
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
