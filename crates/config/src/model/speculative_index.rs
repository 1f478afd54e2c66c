//! Settings of the speculative index.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scalar;

/// The blocks that workers probably hold beyond those that KV events confirm, so that prompts with
/// the same prefix are sent to the same worker. These blocks influence the choice of a worker and
/// nothing else: they open no gate and are not part of `cached_tokens`.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct SpeculativeIndexConfig {
    /// How long the blocks of a prompt count as held after it was sent, until KV events confirm
    /// them. About the duration of a long prefill. `0s` disables it.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub speculative_ttl: Duration,
    /// The same for a worker without `kv_events`, or whose events are interrupted. Raise it if
    /// caches keep blocks for longer. `0s` disables it.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub approximate_ttl: Duration,
    /// Maximum speculative blocks of one worker and kind, at most the cache that it reports. The
    /// blocks sent longest ago go first.
    #[schemars(range(min = 1, max = 4_194_304))]
    pub blocks_max: usize,
}

impl SpeculativeIndexConfig {
    /// No blocks are speculative.
    pub const OFF: Self =
        Self { speculative_ttl: Duration::ZERO, approximate_ttl: Duration::ZERO, blocks_max: 1 };
}

impl Default for SpeculativeIndexConfig {
    fn default() -> Self {
        Self {
            speculative_ttl: Duration::from_secs(2),
            approximate_ttl: Duration::from_secs(120),
            blocks_max: 65_536,
        }
    }
}
