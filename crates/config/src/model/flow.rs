//! Settings of a model's requests: their legs, their gates and their timeouts.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scalar;

/// How requests are served.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Flow {
    /// One worker does prefill and decode.
    Aggregated,
    /// A prefill worker computes the prompt, a decode worker generates.
    PrefillFirst,
    /// A decode worker that holds enough of the prompt does it all; else as `prefill_first`.
    DecodeFirst,
    /// A remote prefill where it pays, by the costs under `auto`; where a request or the
    /// model names a `cache_hit_threshold`, as `decode_first`.
    Auto,
}

/// A flow that one request may ask for.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum RequestFlow {
    /// One worker does prefill and decode.
    Aggregated,
    /// A prefill worker computes the prompt, a decode worker generates.
    PrefillFirst,
    /// A decode worker that holds enough of the prompt does it all; else as `prefill_first`.
    DecodeFirst,
    /// A decode worker that holds enough of the prompt does it all; else the client is told
    /// `cache_threshold`.
    DecodeOnly,
    /// A remote prefill where it pays.
    Auto,
}

impl RequestFlow {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Aggregated, Self::PrefillFirst, Self::DecodeFirst, Self::DecodeOnly, Self::Auto];

    /// The flow as headers, metrics and records spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aggregated => "aggregated",
            Self::PrefillFirst => "prefill_first",
            Self::DecodeFirst => "decode_first",
            Self::DecodeOnly => "decode_only",
            Self::Auto => "auto",
        }
    }

    /// Whether it may hand a prompt's KV over.
    pub fn hands_over(self) -> bool {
        matches!(self, Self::PrefillFirst | Self::DecodeFirst | Self::Auto)
    }
}

impl From<Flow> for RequestFlow {
    fn from(flow: Flow) -> Self {
        match flow {
            Flow::Aggregated => Self::Aggregated,
            Flow::PrefillFirst => Self::PrefillFirst,
            Flow::DecodeFirst => Self::DecodeFirst,
            Flow::Auto => Self::Auto,
        }
    }
}

/// Who applies `cache_hit_threshold`.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum GateKind {
    /// The engine where it is known to honour the field (each is asked once), its shim
    /// where it has one, else the router's index.
    #[default]
    Auto,
    /// The engine: it is sent the field.
    Engine,
    /// The shim: it is sent which blocks are needed.
    Shim,
    /// The router, by its index: only blocks that a worker's events confirm count.
    Router,
}

/// The gate of `decode_first` and `decode_only`.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Gate {
    /// Who decides whether a decode worker holds enough of a prompt.
    pub kind: GateKind,
    /// Threshold that a decode leg carries after its prefill, where the engine honours it:
    /// a request preempted before its first output then comes back and is prefilled again
    /// instead of being computed on the decode worker. 0 is off; 0.001 is enough.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub preemption_guard: f64,
    /// Whether the index may skip the question to engine or shim where a decode worker
    /// surely holds too little.
    pub index_first: bool,
    /// Blocks by which a worker's confirmed ones must fall short for that.
    #[schemars(range(min = 0, max = 65_536))]
    pub index_margin_blocks: u32,
}

impl Default for Gate {
    fn default() -> Self {
        Self {
            kind: GateKind::Auto,
            preemption_guard: 0.0,
            index_first: true,
            index_margin_blocks: 2,
        }
    }
}

/// When a worker that fails is left alone for a while, for each leg by itself.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct BreakerConfig {
    /// Failures in a row that open it; 0 never does.
    #[schemars(range(min = 0, max = 1000))]
    pub failures: u32,
    /// How long it stays open before one request may try. Doubles with each trial that
    /// fails, up to sixteen times this.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub open: Duration,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self { failures: 5, open: Duration::from_secs(5) }
    }
}

/// Retries of each leg, before the first byte has reached the client.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Retries {
    /// Further prefill attempts, each on another worker.
    #[schemars(range(min = 0, max = 10))]
    pub prefill: u32,
    /// Further decode attempts, each with a new prefill: a hand-off is single-use.
    #[schemars(range(min = 0, max = 10))]
    pub decode: u32,
    /// Retries over all requests of the model, as a percentage of them; a hundred are
    /// in reserve. So retries never multiply an overload.
    #[schemars(range(min = 0, max = 1000))]
    pub budget_percent: u32,
}

impl Default for Retries {
    fn default() -> Self {
        Self { prefill: 2, decode: 1, budget_percent: 20 }
    }
}

/// The default of `lease`: that of vLLM's NIXL connector.
pub(crate) fn lease() -> Duration {
    Duration::from_secs(30)
}
