//! Settings of the estimates of blocks beyond those that KV events confirm.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scalar;

/// What workers are assumed to hold beyond what their KV events confirm, so that prompts that
/// begin alike stay together. It helps to choose a worker, and does nothing else: no gate
/// opens for it, and no `cached_tokens` is made of it.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct AssumedConfig {
    /// For how long a worker is assumed to hold a prompt from when it is sent there: prompts
    /// like it that arrive before it is computed, and before KV events tell, follow it.
    /// `0s` is off.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub speculative: Duration,
    /// For how long a worker without `kv_events`, or whose events are cut off, is assumed to
    /// keep a prompt that it has computed; sent there again, it is kept for as long again.
    /// `0s` is off.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub approximate: Duration,
    /// KV blocks assumed of one worker, of either kind; fewer where it says that it has
    /// fewer. What was sent longest ago makes room.
    #[schemars(range(min = 1, max = 4_194_304))]
    pub max_blocks: usize,
}

impl AssumedConfig {
    /// Nothing is assumed.
    pub const OFF: Self =
        Self { speculative: Duration::ZERO, approximate: Duration::ZERO, max_blocks: 1 };
}

impl Default for AssumedConfig {
    fn default() -> Self {
        Self {
            speculative: Duration::from_secs(2),
            approximate: Duration::from_secs(120),
            max_blocks: 65_536,
        }
    }
}
