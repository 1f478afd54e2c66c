//! A snapshot of `GET /admin/live`, as docs/http.md describes it.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The form of snapshots that this program reads.
pub(super) const SCHEMA: u32 = 1;

/// One router at one moment.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct LiveSnapshot {
    pub(super) schema: u32,
    pub(super) time_unix_ms: u64,
    pub(super) uptime_ms: u64,
    pub(super) router_version: String,
    pub(super) config_hash: String,
    pub(super) ready: bool,
    pub(super) not_ready_why: Option<String>,
    /// Requests that failed or were shed before their model was known, by result.
    pub(super) unplaced_failures_per_s: BTreeMap<String, f64>,
    pub(super) models: Vec<Model>,
    pub(super) decisions: Vec<Decision>,
}

/// A model.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) flow: String,
    pub(super) requests_in_flight: i64,
    pub(super) queue_requests: Option<u64>,
    pub(super) requests_per_s: Option<f64>,
    /// By outcome.
    pub(super) failures_per_s: BTreeMap<String, f64>,
    /// By the kind of the outcome; `None` from a router that does not tell kinds.
    pub(super) results_per_s: Option<BTreeMap<String, f64>>,
    pub(super) generation_tokens_per_s: Option<f64>,
    pub(super) prompt_tokens_per_s: PromptTokens,
    pub(super) ttft_ms: Option<Percentiles>,
    pub(super) inter_token_ms: Option<Percentiles>,
    /// Mean milliseconds of the parts of a prompt up to its first token.
    pub(super) stages_ms: BTreeMap<String, f64>,
    pub(super) workers: Vec<Worker>,
}

/// Prompt tokens per second, by kind of leg. In P/D, both legs have the same prompt.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct PromptTokens {
    pub(super) prefill: Sources,
    pub(super) decode: Sources,
}

/// Where prompt tokens came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Sources {
    pub(super) cached: Option<f64>,
    pub(super) transferred: Option<f64>,
    pub(super) computed: Option<f64>,
}

/// Percentiles in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Percentiles {
    pub(super) p50: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
}

/// A worker.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Worker {
    pub(super) id: String,
    pub(super) url: String,
    pub(super) role: String,
    pub(super) state: String,
    pub(super) state_why: String,
    pub(super) breakers_open: Vec<String>,
    pub(super) requests: u64,
    pub(super) prefill_tokens: u64,
    pub(super) engine_running: Option<u64>,
    pub(super) engine_waiting: Option<u64>,
    pub(super) kv_used_ratio: Option<f64>,
    pub(super) hit_ratio: Option<f64>,
    pub(super) slowdown: Option<f64>,
    pub(super) prefill_tokens_per_s: Option<f64>,
    pub(super) step_ms: Option<f64>,
    pub(super) leg_ms: Option<f64>,
    pub(super) event_lag_ms: Option<f64>,
    pub(super) overlap_issues: Vec<String>,
    pub(super) parity_cause: Option<String>,
}

/// A decision.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Decision {
    pub(super) request_id: String,
    pub(super) model: String,
    pub(super) decided_unix_ms: u64,
    pub(super) local_reason: Option<String>,
    pub(super) prefill_worker: Option<String>,
    pub(super) decode_worker: Option<String>,
    pub(super) prompt_tokens: Option<u64>,
    pub(super) cached_tokens: Option<u64>,
    pub(super) attempts: u32,
    pub(super) outcome: Option<String>,
    pub(super) runner_up: Option<String>,
    pub(super) margin: Option<f64>,
    pub(super) margin_unit: Option<String>,
}
