//! Totals that the engine reports.

use serde::Serialize;

/// Totals since the engine's start, in tokens unless stated otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Of these, computed here.
    pub local_compute_tokens: u64,
    /// Of these, found in this engine's cache.
    pub local_cache_hit_tokens: u64,
    /// Of these, fetched from a prefill engine.
    pub external_kv_transfer_tokens: u64,
    /// Generated tokens.
    pub generation_tokens: u64,
    /// Requests that ended with `length`.
    pub finished_length: u64,
    /// Requests that ended with `stop`.
    pub finished_stop: u64,
    /// Requests that were refused by `cache_hit_threshold`.
    pub finished_cache_threshold: u64,
    /// Requests whose client disconnected.
    pub aborted: u64,
    /// Requests that failed, mostly because of a hand-off.
    pub failed: u64,
    /// Hand-offs staged for decode engines.
    pub hand_offs_staged: u64,
    /// Hand-offs that a decode engine pulled.
    pub hand_offs_pulled: u64,
    /// Hand-offs whose lease ended before they were pulled.
    pub hand_offs_expired: u64,
    /// Decode legs whose blocks were kept for a prefill leg to read.
    pub pins_made: u64,
    /// Of these, read by a prefill leg.
    pub pins_read: u64,
    /// Of these, freed at their end.
    pub pins_expired: u64,
    /// Of these, freed by a prefill leg that read nothing.
    pub pins_released: u64,
    /// Pulls that this engine refused.
    pub pulls_refused: u64,
    /// Requests whose hand-off belongs to another prompt, or has other blocks or another number of
    /// tokens than were staged. The real engine dies of it, or generates from the KV of other tokens
    /// and keeps that KV in its cache, without an error.
    pub hand_offs_misused: u64,
    /// Engine steps.
    pub steps: u64,
    /// KV events that steps have announced.
    pub kv_events: u64,
}

impl Counters {
    /// The sum over two ranks.
    pub(crate) fn with(&self, other: &Self) -> Self {
        Self {
            prompt_tokens: self.prompt_tokens + other.prompt_tokens,
            local_compute_tokens: self.local_compute_tokens + other.local_compute_tokens,
            local_cache_hit_tokens: self.local_cache_hit_tokens + other.local_cache_hit_tokens,
            external_kv_transfer_tokens: self.external_kv_transfer_tokens
                + other.external_kv_transfer_tokens,
            generation_tokens: self.generation_tokens + other.generation_tokens,
            finished_length: self.finished_length + other.finished_length,
            finished_stop: self.finished_stop + other.finished_stop,
            finished_cache_threshold: self.finished_cache_threshold
                + other.finished_cache_threshold,
            aborted: self.aborted + other.aborted,
            failed: self.failed + other.failed,
            hand_offs_staged: self.hand_offs_staged + other.hand_offs_staged,
            hand_offs_pulled: self.hand_offs_pulled + other.hand_offs_pulled,
            hand_offs_expired: self.hand_offs_expired + other.hand_offs_expired,
            pins_made: self.pins_made + other.pins_made,
            pins_read: self.pins_read + other.pins_read,
            pins_expired: self.pins_expired + other.pins_expired,
            pins_released: self.pins_released + other.pins_released,
            pulls_refused: self.pulls_refused + other.pulls_refused,
            hand_offs_misused: self.hand_offs_misused + other.hand_offs_misused,
            steps: self.steps + other.steps,
            kv_events: self.kv_events + other.kv_events,
        }
    }
}
