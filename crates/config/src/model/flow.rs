//! Settings of a model's requests: their legs, their gates and their timeouts.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scalar;

/// The order of the legs of a request.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Flow {
    /// One worker serves prefill and decode.
    Aggregated,
    /// A prefill worker computes the prompt, a decode worker generates the reply.
    PrefillFirst,
    /// A decode worker that holds enough of the prompt serves the request alone; otherwise as
    /// `prefill_first`.
    DecodeFirst,
    /// A local or a remote prefill, whichever is predicted to be faster; with a
    /// `cache_hit_threshold` as `decode_first`.
    Auto,
}

/// A flow that one request may select.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum RequestFlow {
    /// One worker serves prefill and decode.
    Aggregated,
    /// A prefill worker computes the prompt, a decode worker generates the reply.
    PrefillFirst,
    /// A decode worker that holds enough of the prompt serves the request alone; otherwise as
    /// `prefill_first`.
    DecodeFirst,
    /// A decode worker that holds enough of the prompt serves the request alone. Otherwise the
    /// client gets the finish reason `cache_threshold`.
    DecodeOnly,
    /// The prefill is local or remote, whichever is predicted to be faster.
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

/// The component that applies `cache_hit_threshold`.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum GateKind {
    /// The engine if it supports the field (each is asked once), otherwise its shim, otherwise the
    /// router.
    #[default]
    Auto,
    /// The engine, which receives the field `cache_hit_threshold`.
    Engine,
    /// The shim, which is sent the required blocks.
    Shim,
    /// The router, by confirmed blocks.
    Router,
}

/// The gate of `decode_first` and `decode_only`.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GateConfig {
    /// Who decides whether a decode worker holds enough.
    pub kind: GateKind,
    /// The cache hit threshold of a decode leg after its prefill, if the engine supports the field:
    /// a request that the engine preempts before its first output is prefilled again. 0.001 is
    /// enough; 0 disables it.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub preemption_guard: f64,
    /// Whether neither engine nor shim is asked if the index shows too little. Disable it if the
    /// index is often incomplete.
    pub index_first: bool,
    /// By how many blocks the index must fall short for `index_first`. Raise it if KV events arrive
    /// late.
    #[schemars(range(min = 0, max = 65_536))]
    pub index_margin_blocks: u32,
}

impl Default for GateConfig {
    fn default() -> Self {
        Self {
            kind: GateKind::Auto,
            preemption_guard: 0.0,
            index_first: true,
            index_margin_blocks: 2,
        }
    }
}

/// When a failing worker gets no requests for a while. Each leg has a circuit breaker of its own.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct BreakerConfig {
    /// Failures in a row on a leg that open the circuit breaker. 0 disables it.
    #[schemars(range(min = 0, max = 1000))]
    pub failures: u32,
    /// How long it is open before one trial. Each failed trial doubles the time, up to sixteen
    /// times.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub cooldown: Duration,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self { failures: 5, cooldown: Duration::from_secs(5) }
    }
}

/// Maximum numbers of retries before the first byte has reached the client.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Retries {
    /// Maximum further prefill attempts of a request, each on another worker.
    #[schemars(range(min = 0, max = 10))]
    pub prefill: u32,
    /// Maximum further decode attempts of a request, each with a new prefill. One after a kept
    /// connection that had ended does not count.
    #[schemars(range(min = 0, max = 10))]
    pub decode: u32,
    /// Maximum retries as a percentage of the model's requests, with a reserve of one hundred.
    #[schemars(range(min = 0, max = 1000))]
    pub budget_percent: u32,
}

impl Default for Retries {
    fn default() -> Self {
        Self { prefill: 2, decode: 1, budget_percent: 20 }
    }
}

/// The flow of a model whose roles are not looked at. Without a value, the flow is derived before
/// the file is read.
pub(crate) fn none() -> Flow {
    Flow::Aggregated
}

/// The default of `read_back_pin`: that of vLLM's NIXL connector.
pub(crate) fn read_back_pin() -> Duration {
    Duration::from_secs(480)
}

/// The default of `read_back_pinned_percent_max`.
pub(crate) fn read_back_pinned_percent_max() -> u32 {
    25
}

/// The default of `lease`: that of vLLM's NIXL connector.
pub(crate) fn lease() -> Duration {
    Duration::from_secs(30)
}
