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
    /// How long the blocks of a prompt count as held by a worker after the prompt was sent to it. Prompts with the same prefix that arrive before KV events confirm the blocks then
    /// follow the first one. Set it to about the duration of a long prefill. `0s` disables it.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub speculative_ttl: Duration,
    /// For a worker without `kv_events`, or whose events are interrupted: how long the blocks of a
    /// prompt count as held by the worker after the prompt was sent to it. Sending the prompt there
    /// again restarts the time. Raise it if the workers' caches keep blocks for longer. `0s` disables it.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub approximate_ttl: Duration,
    /// Maximum number of speculative KV blocks of one worker, for each of the two kinds. If a
    /// worker reports a smaller cache, the size of that cache is the maximum. The blocks of the
    /// prompts that were sent longest ago are removed first.
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
