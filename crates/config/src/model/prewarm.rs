//! Settings of prewarming: a worker that joins takes hot prefixes from the workers that hold them.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use splitrail_settings::size;

use crate::scalar;

/// What a prefill worker that has joined or restarted takes over from other workers.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct PrewarmConfig {
    /// Whether it takes over hot prefixes. Needs `peer_fetch`.
    pub enabled: bool,
    /// Maximum tokens that a worker takes over after one start.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub tokens_max: u32,
    /// Maximum duration after one start. The worker serves requests meanwhile.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub time_max: Duration,
    /// Maximum concurrent fetches to a prewarmed worker, and from each source. Less than
    /// `peer_fetch_max_per_worker`.
    #[schemars(range(min = 1, max = 1024))]
    pub fetches_max: u32,
    /// Maximum share of the time in which a fetch may use the links, 0 to 1.
    #[schemars(range(min = 0.01, max = 1.0))]
    pub link_share: f64,
    /// Maximum bytes of remembered prefixes, part of `limits.request_memory_max`.
    #[serde(rename = "memory_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 65_536, max = 1_073_741_824_u64))]
    pub memory_max_bytes: usize,
}

impl Default for PrewarmConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            tokens_max: 262_144,
            time_max: Duration::from_secs(60),
            fetches_max: 2,
            link_share: 0.5,
            memory_max_bytes: 16 << 20,
        }
    }
}
