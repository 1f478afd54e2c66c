//! Policies as a configuration names them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
    /// The fewest tokens in work.
    LeastLoaded {},
    /// Each in turn.
    RoundRobin {},
    /// Any, evenly.
    Random {},
}

impl Policy {
    /// What its costs are in: what a margin between two workers means.
    pub fn cost_unit(&self) -> &'static str {
        match self {
            Self::KvOverlap { .. } => "blocks",
            Self::LeastLoaded {} => "tokens",
            Self::RoundRobin {} | Self::Random {} => "none",
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self::LeastLoaded {}
    }
}

fn one() -> f64 {
    1.0
}
