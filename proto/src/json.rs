//! Messages as JSON, for status pages.

use serde_json::{Value, json};

use crate::v1::Capabilities;

impl Capabilities {
    /// The capabilities as a JSON object with one member per field. What is not known is null.
    pub fn to_json(&self) -> Value {
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        json!({
            "engine": text(&self.engine),
            "engine_version": text(&self.engine_version),
            "block_size": self.block_size,
            "kv_blocks": self.kv_blocks,
            "ranks": self.ranks,
            "context_tokens": self.context_tokens,
            "supports_cache_hit_threshold": self.supports_cache_hit_threshold,
            "reports_cached_tokens": self.reports_cached_tokens,
            "takes_rank_header": self.takes_rank_header,
            "connector": text(&self.connector),
            "connector_engine_id": text(&self.connector_engine_id),
            "lease_ms": self.lease_ms,
            "publishes_kv_events": self.publishes_kv_events,
            "replays_kv_events": self.replays_kv_events,
            "gates": self.gates,
            "bootstrap": text(&self.bootstrap),
            "unfollowed_cache_groups": self.unfollowed_cache_groups,
        })
    }
}
