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
    /// A prefill worker computes the prompt, then a decode worker generates the reply.
    PrefillFirst,
    /// A decode worker that holds enough of the prompt serves the request alone. Otherwise the
    /// request is served as with `prefill_first`.
    DecodeFirst,
    /// The prefill is local or remote, whichever is predicted to be faster by `costs` and `auto`.
    /// If the request or the model sets a `cache_hit_threshold`, the request is served as with
    /// `decode_first`.
    Auto,
}

/// A flow that one request may select.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum RequestFlow {
    /// One worker serves prefill and decode.
    Aggregated,
    /// A prefill worker computes the prompt, then a decode worker generates the reply.
    PrefillFirst,
    /// A decode worker that holds enough of the prompt serves the request alone. Otherwise the
    /// request is served as with `prefill_first`.
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
    /// The engine if it supports the field (each engine is asked once), its shim if it has one, or
    /// otherwise the router.
    #[default]
    Auto,
    /// The engine, which receives the field `cache_hit_threshold`.
    Engine,
    /// The shim, which receives the blocks that are required.
    Shim,
    /// The router, with the blocks that KV events of the worker have confirmed.
    Router,
}

/// The gate of `decode_first` and `decode_only`.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GateConfig {
    /// The component that decides whether a decode worker holds enough of a prompt.
    pub kind: GateKind,
    /// The cache hit threshold of a decode leg after its prefill, from 0 to 1, if the engine
    /// supports the field. A request that the engine preempts before its first output then returns
    /// to the router and is prefilled again, instead of being computed by the decode worker. 0.001
    /// is enough; 0 disables it.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub preemption_guard: f64,
    /// Whether the router asks neither engine nor shim if its index shows that a decode worker
    /// holds too little. Disable it if the index is often incomplete.
    pub index_first: bool,
    /// Number of blocks by which a worker's confirmed blocks must fall short of the threshold for
    /// `index_first`. Raise it if KV events arrive late.
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
    /// Number of consecutive failures on a leg that open the circuit breaker. 0 disables circuit
    /// breakers.
    #[schemars(range(min = 0, max = 1000))]
    pub failures: u32,
    /// How long an open circuit breaker waits before it admits one request as a trial. Each failed
    /// trial doubles the time, up to sixteen times this value.
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
    /// Maximum number of further prefill attempts of a request, each on another worker.
    #[schemars(range(min = 0, max = 10))]
    pub prefill: u32,
    /// Maximum number of further decode attempts of a request. Each needs a new prefill, because a
    /// hand-off is used once. One after a kept connection that turned out to have ended does not count.
    #[schemars(range(min = 0, max = 10))]
    pub decode: u32,
    /// Maximum number of retries as a percentage of all requests of the model, with a reserve of
    /// one hundred retries. The budget keeps retries from multiplying an overload.
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
