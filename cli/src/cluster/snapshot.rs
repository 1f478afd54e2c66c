//! What one replica says at one moment.

use serde::{Deserialize, Serialize};

/// One replica at one moment.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ReplicaState {
    /// The replica's version.
    pub(crate) version: String,
    /// The hash of its running configuration.
    pub(crate) config_hash: String,
    /// Why it is not ready; `None` if it is.
    pub(crate) not_ready: Option<String>,
    /// Whether the last reload of the configuration was refused.
    pub(crate) reload_refused: bool,
    /// The sections of its files (`ledger`, `record`, `audit`, `access_log`) of which the last write
    /// failed.
    pub(crate) unwritten_files: Vec<String>,
    /// The files of API keys that cannot be used.
    pub(crate) unusable_key_files: Vec<String>,
    /// The issuers of JSON Web Tokens of which it has no keys.
    pub(crate) issuers_without_keys: Vec<String>,
    /// Whether it shares limits over a broker and is not connected to it.
    pub(crate) broker_disconnected: bool,
    /// Requests that it has refused because of load within the last minute.
    pub(crate) shed: Vec<ShedSnapshot>,
    /// The models that it serves.
    pub(crate) models: Vec<ModelSnapshot>,
    /// The workers of all models.
    pub(crate) workers: Vec<WorkerSnapshot>,
}

/// A model of one replica.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct ModelSnapshot {
    /// The configured name.
    pub(crate) name: String,
    /// The flow of requests that ask for none.
    pub(crate) flow: String,
    /// Requests in flight.
    pub(crate) requests_in_flight: u64,
    /// Requests that wait in the router for a worker.
    pub(crate) queue_depth: u64,
    /// Whether the router knows the tokens of prompts, without which there is no KV routing.
    pub(crate) tokenizer: bool,
    /// Prompts that have failed alike on two workers within the last minutes.
    pub(crate) suspect_prompts: u64,
}

/// Requests of a model that were refused because of load, for one reason; the members have the names
/// of `GET /admin/models`.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct ShedSnapshot {
    /// The model; `none` if it was not known yet.
    pub(crate) model: String,
    /// The reason, as in `splitrail_shed_total`.
    pub(crate) reason: String,
    /// Their number.
    pub(crate) requests: u64,
}

/// A worker as one replica sees it; the members have the names of `GET /admin/workers`.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct WorkerSnapshot {
    pub(crate) model: String,
    pub(crate) id: String,
    pub(crate) role: String,
    pub(crate) url: String,
    pub(crate) state: String,
    pub(crate) state_since_unix_ms: u64,
    pub(crate) state_why: String,
    /// Requests of this replica that are in flight on the worker.
    pub(crate) requests: u64,
    /// Prompt tokens of this replica's requests that the worker has not computed yet.
    pub(crate) prefill_tokens: u64,
    pub(crate) breakers_open: Vec<String>,
    /// The last failure that counted against the worker.
    pub(crate) last_failure: Option<String>,
    pub(crate) index_truncated: bool,
    /// Why the worker's part of the index was rebuilt several times within the last minutes.
    pub(crate) index_rebuilt_often: Option<String>,
    /// Why its engine reports no load.
    pub(crate) load_failure: Option<String>,
    pub(crate) no_hand_off: Vec<String>,
    /// Cache groups of its engine that the index does not follow.
    pub(crate) unfollowed_cache_groups: Vec<String>,
    pub(crate) parity: String,
    pub(crate) parity_cause: Option<String>,
    pub(crate) parity_advice: Option<String>,
    pub(crate) kv_routing: bool,
    /// Whether its cache may hold KV of other tokens.
    pub(crate) quarantined: bool,
    /// Requests that the engine computes, of all replicas.
    pub(crate) engine_running: Option<u64>,
    /// Requests that wait in the engine, of all replicas.
    pub(crate) engine_waiting: Option<u64>,
    /// The share of the engine's KV blocks that is in use.
    pub(crate) engine_kv_used_ratio: Option<f64>,
    /// Whether its engine has refused the last request because it is full.
    pub(crate) full: bool,
    /// How many times as long as the usual worker of its role it takes.
    pub(crate) slowdown: SlowdownSnapshot,
    /// How the worker's KV events reach the router; `None` if the worker has no source of them.
    pub(crate) events_origin: Option<String>,
    /// Whether the worker has KV events and they do not arrive.
    pub(crate) events_cut_off: bool,
    /// How far the worker is prewarmed; `None` if it was not.
    pub(crate) prewarm: Option<PrewarmSnapshot>,
}

/// How many times as long as the usual worker of its role a worker takes; `None` if that is not known.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct SlowdownSnapshot {
    /// To compute a prompt.
    pub(crate) prefill: Option<f64>,
    /// For a decode step.
    pub(crate) decode: Option<f64>,
}

impl SlowdownSnapshot {
    /// The larger of the two.
    pub(crate) fn largest(self) -> Option<f64> {
        [self.prefill, self.decode].into_iter().flatten().max_by(f64::total_cmp)
    }

    /// What the worker is slow at, with how many times as long it takes.
    pub(crate) fn notable(self) -> impl Iterator<Item = (&'static str, f64)> {
        /// From this factor on an operator should know. Hardware of one fleet differs by less.
        const NOTABLE: f64 = 3.0;
        let legs = [("prefills take", self.prefill), ("decode steps take", self.decode)];
        let known = legs.into_iter().filter_map(|(leg, times)| Some((leg, times?)));
        known.filter(|(_, times)| *times >= NOTABLE)
    }
}

/// How far a worker is prewarmed.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct PrewarmSnapshot {
    /// Whether it goes on.
    pub(crate) running: bool,
    /// The number of prefixes that the worker has taken over.
    pub(crate) prefixes: u64,
    /// The number of their tokens.
    pub(crate) tokens: u64,
}

impl WorkerSnapshot {
    /// Whether this is the worker of a model.
    pub(crate) fn is(&self, model: &str, id: &str) -> bool {
        self.model == model && self.id == id
    }
}
