//! Settings of one worker.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::CostsConfig;
pub use splitrail_settings::Role;

/// The value of `kv_events` for a worker whose KV events are not followed.
pub const NO_EVENTS: &str = "none";

/// How a worker may be written in a list. Only the schema is of this type: a URL becomes a
/// [`WorkerConfig`] before the file is read.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "the schema has this type, and no value does")]
pub(super) enum WorkerEntry {
    /// The URL of an engine that does both parts.
    Url(String),
    /// A worker with its keys.
    Worker(Box<WorkerConfig>),
}

/// One engine.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct WorkerConfig {
    /// The worker's id, unique in its model.
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z0-9._:-]+$"))]
    pub id: String,
    /// The worker's role.
    pub role: Role,
    /// The worker's HTTP address, `http://HOST:PORT` or `https://HOST:PORT`.
    pub url: String,
    /// The address of KV events, `tcp://HOST:PORT`, or `none`. Default: the engine is asked
    /// (`/kv_event_sources`, SGLang's `/server_info`), for `kv_replay` too.
    #[serde(default)]
    pub kv_events: Option<String>,
    /// The address of replays of KV events, `tcp://HOST:PORT`.
    #[serde(default)]
    pub kv_replay: Option<String>,
    /// The bootstrap server of a prefill worker, `http://HOST:PORT`, for `mooncake` and `sglang`.
    /// Default: port 8998 of the host in `url`.
    #[serde(default)]
    pub bootstrap: Option<String>,
    /// Whether `url` is the address of a shim.
    #[serde(default)]
    pub shim: bool,
    /// Whether the engine supports `cache_hit_threshold`. Default: it is asked once.
    #[serde(default)]
    pub supports_cache_hit_threshold: Option<bool>,
    /// Its cost model before costs have been learned. Default: the model's.
    #[serde(default)]
    pub costs: Option<CostsConfig>,
    /// Data-parallel ranks behind the address. Default: as the engine or shim reports. Rank r has
    /// the ports of `kv_events` and `kv_replay` plus r.
    #[serde(default)]
    #[schemars(range(min = 1, max = 256))]
    pub data_parallel_ranks: Option<u16>,
    /// The worker's transfer group, such as a revision of its deployment. KV moves only between workers
    /// of one group: no prompt is computed in one and its reply generated in another. Workers without
    /// the key are a group of their own.
    #[serde(default)]
    #[schemars(length(min = 1, max = 63))]
    pub transfer_group: Option<String>,
    /// Where the worker is, `ZONE` or `ZONE/HOST`. A hand-off between zones is expected to take twice as
    /// long, and what it really takes on one host and between zones is learned.
    #[serde(default)]
    #[schemars(length(min = 1, max = 320))]
    pub location: Option<String>,
    /// Whether the engine obeys `X-data-parallel-rank`. Default: an engine with several ranks is
    /// asked once. If not, only blocks that all ranks hold count.
    #[serde(default)]
    pub takes_rank_header: Option<bool>,
}

impl WorkerConfig {
    /// The address at which the worker publishes KV events, if it is written down.
    pub fn written_events(&self) -> Option<&str> {
        self.kv_events.as_deref().filter(|address| *address != NO_EVENTS)
    }

    /// Whether the engine is asked where it publishes KV events. A shim reports them itself.
    pub fn asks_for_events(&self) -> bool {
        self.kv_events.is_none() && !self.shim
    }
}
