//! Settings of peer fetches: a worker takes a prefix from another worker instead of computing it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whether a worker takes a prefix that another worker holds, and how.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum PeerFetch {
    /// As `two_step`, between workers that have done it in a trial; nothing without `connector: nixl`, a
    /// tokenizer, `policy: predicted_ttft` and `canary.enabled`.
    #[default]
    Auto,
    /// The worker computes what it does not hold.
    Off,
    /// One request to the worker that holds the prefix, one to the other, then the leg. Engines
    /// need no flag.
    TwoStep,
    /// As `two_step`, but a prefill leg takes the prefix itself, on engines with
    /// `bidirectional_kv_xfer` (the router finds out which). Needs `kv_load_failure_policy: fail`.
    OneShot,
}

/// What an engine does if it cannot read KV from another engine (vLLM's `kv_load_failure_policy`).
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum KvLoadFailurePolicy {
    /// The engine fails the request.
    Fail,
    /// The engine computes what it cannot read. With vLLM 0.32, a leg that reads then waits without
    /// end and keeps its blocks.
    Recompute,
}

/// The default of `peer_fetch_min_tokens`: shorter prefixes are computed in the time that two
/// further requests take.
pub(crate) fn min_tokens() -> u32 {
    256
}

/// The default of `peer_fetch_max_per_worker`.
pub(crate) fn max_per_worker() -> u32 {
    4
}
