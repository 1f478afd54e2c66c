//! What one replica says at one moment.

use serde::{Deserialize, Serialize};

/// One replica at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReplicaState {
    /// The replica's version.
    pub(crate) version: String,
    /// The hash of its running configuration.
    pub(crate) config_hash: String,
    /// Why it is not ready; `None` if it is.
    pub(crate) not_ready: Option<String>,
    /// What an operator should look at.
    pub(crate) needs_attention: Vec<Attention>,
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
    /// Requests that wait in the router for a worker; `None` without a queue.
    pub(crate) queue_requests: Option<u64>,
}

/// Something that an operator should look at; the members have the names of `GET /admin/attention`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub(crate) struct Attention {
    pub(crate) kind: String,
    /// Whether nothing is wrong, so that it is only to be known.
    pub(crate) is_note: bool,
    /// The model that it is about; `None` if it is about the replica.
    pub(crate) model: Option<String>,
    /// The ids of the workers that it is about.
    pub(crate) workers: Vec<String>,
    /// What is wrong.
    pub(crate) message: String,
    /// What to do about it.
    pub(crate) advice: Option<String>,
}

/// A worker as one replica sees it; the members have the names of `GET /admin/workers`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct WorkerSnapshot {
    pub(crate) model: String,
    pub(crate) id: String,
    pub(crate) role: String,
    pub(crate) transfer_group: Option<String>,
    pub(crate) url: String,
    pub(crate) state: String,
    pub(crate) state_since_unix_ms: u64,
    pub(crate) state_why: String,
    /// Requests of this replica that are in flight on the worker.
    pub(crate) requests: u64,
    /// Prompt tokens of this replica's requests that the worker has not computed yet.
    pub(crate) prefill_tokens: u64,
    pub(crate) breakers_open: Vec<String>,
    pub(crate) parity: String,
    pub(crate) parity_cause: Option<String>,
    pub(crate) kv_routing: bool,
    /// Whether its cache may hold KV of other tokens.
    pub(crate) quarantined: bool,
    /// Requests that the engine computes, of all replicas.
    pub(crate) engine_running: Option<u64>,
    /// Requests that wait in the engine, of all replicas.
    pub(crate) engine_waiting: Option<u64>,
    /// The share of the engine's KV blocks that is in use.
    pub(crate) engine_kv_used_ratio: Option<f64>,
    /// What an operator should look at.
    pub(crate) needs_attention: Vec<Attention>,
    /// How many times as long as the usual worker of its role it takes.
    pub(crate) slowdown: SlowdownSnapshot,
    /// How much of its prompts the engine had cached.
    pub(crate) hits: HitsSnapshot,
    /// The times of its legs.
    pub(crate) legs: LegsSnapshot,
    /// How the worker's KV events reach the router; `None` if the worker has no source of them.
    pub(crate) events_origin: Option<String>,
    /// Whether the worker has KV events and they do not arrive.
    pub(crate) events_cut_off: bool,
    /// How far the worker is prewarmed; `None` if it was not.
    pub(crate) prewarm: Option<PrewarmSnapshot>,
}

/// How many times as long as the usual worker of its role a worker takes; `None` if that is not known.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
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
}

/// Prompt tokens of a worker.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct HitsSnapshot {
    pub(crate) prompt_tokens: u64,
    pub(crate) hit_tokens: u64,
}

/// The legs of a worker.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct LegsSnapshot {
    pub(crate) prefill: LegTimesSnapshot,
    pub(crate) decode: LegTimesSnapshot,
}

/// The legs of one kind, and their time in total.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct LegTimesSnapshot {
    pub(crate) count: u64,
    pub(crate) seconds: f64,
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
