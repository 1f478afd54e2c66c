//! From one completed prompt to the counters: the parts of each leg sum to the
//! whole, and transferred KV is never a cache hit.

use splitrail_engine::usage::EngineUsage;

use crate::reply::usage::{Cached, Source, UsageRule};
use crate::telemetry::metrics::Metrics;

/// Prompt tokens of one leg, by where their KV came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LegTokens {
    /// Found in the worker's own cache.
    pub local_cache_hit: u32,
    /// Handed over by another worker.
    pub external_kv_transfer: u32,
    /// Computed.
    pub local_compute: u32,
}

impl LegTokens {
    /// A leg that computes what it has not cached.
    pub fn computing(prompt_tokens: u32, cached_tokens: u32) -> Self {
        let hit = cached_tokens.min(prompt_tokens);
        Self { local_cache_hit: hit, local_compute: prompt_tokens - hit, ..Self::default() }
    }

    /// A decode leg after a hand-off: what it has not cached is transferred (as
    /// vLLM counts it: nothing is computed).
    pub fn receiving(prompt_tokens: u32, cached_tokens: u32) -> Self {
        let hit = cached_tokens.min(prompt_tokens);
        Self { local_cache_hit: hit, external_kv_transfer: prompt_tokens - hit, ..Self::default() }
    }

    /// All of the prompt.
    pub fn total(self) -> u32 {
        self.local_cache_hit + self.external_kv_transfer + self.local_compute
    }
}

/// One completed prompt.
#[derive(Clone, Copy, Debug)]
pub struct Settled {
    /// What the engine counted.
    pub usage: EngineUsage,
    /// Cached tokens, and who said so.
    pub cached: Cached,
    /// The prefill leg, if there was one.
    pub prefill: Option<LegTokens>,
    /// The answering leg.
    pub decode: LegTokens,
    /// What the router had expected, if it knew the prompt's tokens.
    pub estimate: Option<u32>,
}

impl Settled {
    /// Accounts for a completed prompt. `decode_overlap_blocks` are the leading
    /// blocks that the decode worker itself held.
    pub fn new(
        rule: &UsageRule,
        usage: EngineUsage,
        decode_overlap_blocks: u32,
        tokens_known: bool,
    ) -> Self {
        let prompt_tokens = usage.prompt_tokens;
        let cached = rule.cached(&usage);
        let estimate = tokens_known.then(|| rule.estimate(prompt_tokens));
        let computing = LegTokens::computing(prompt_tokens, cached.tokens);
        if !rule.handed_over {
            return Self { usage, cached, prefill: None, decode: computing, estimate };
        }
        let decode_rule = UsageRule { overlap_blocks: decode_overlap_blocks, ..*rule };
        let decode = LegTokens::receiving(prompt_tokens, decode_rule.estimate(prompt_tokens));
        Self { usage, cached, prefill: Some(computing), decode, estimate }
    }

    /// Adds it to the metrics.
    pub fn count(&self, metrics: &Metrics, model: &str, block_size: u32) {
        if let Some(prefill) = self.prefill {
            count_leg(metrics, model, "prefill", prefill);
        }
        count_leg(metrics, model, "decode", self.decode);
        let generated = u64::from(self.usage.completion_tokens);
        metrics.generation_tokens.with_label_values(&[model]).inc_by(generated);
        let Cached { tokens, source } = self.cached;
        metrics.cached_tokens.with_label_values(&[model, source.name()]).inc_by(tokens.into());
        let result = if tokens > 0 { "hit" } else { "miss" };
        metrics.prefix_cache_requests.with_label_values(&[model, result]).inc();
        if let (Source::Engine, Some(estimate)) = (source, self.estimate) {
            let direction = if estimate > tokens { "over" } else { "under" };
            let blocks = f64::from(estimate.abs_diff(tokens)) / f64::from(block_size.max(1));
            metrics.cached_tokens_error.with_label_values(&[model, direction]).observe(blocks);
        }
    }
}

fn count_leg(metrics: &Metrics, model: &str, leg: &str, tokens: LegTokens) {
    // Engines report hits without their tier; until one does, a hit is the device's.
    for (source, tier, count) in [
        ("local_cache_hit", "device", tokens.local_cache_hit),
        ("external_kv_transfer", "none", tokens.external_kv_transfer),
        ("local_compute", "none", tokens.local_compute),
    ] {
        metrics
            .prompt_tokens
            .with_label_values(&[model, leg, source, tier])
            .inc_by(u64::from(count));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::model::CachedTokensFallback;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_parts_of_each_leg_sum_to_the_prompt(
            prompt_tokens in 0u32..5000, reported in proptest::option::of(0u32..6000),
            overlap in 0u32..400, decode_overlap in 0u32..400, handed_over: bool,
        ) {
            let rule = UsageRule {
                prefill_cached_tokens: reported,
                handed_over,
                overlap_blocks: overlap,
                block_size: 16,
                bypasses_cache: false,
                fallback: CachedTokensFallback::Estimate,
            };
            let usage = EngineUsage { prompt_tokens, completion_tokens: 1, cached_tokens: reported };
            let settled = Settled::new(&rule, usage, decode_overlap, true);
            prop_assert_eq!(settled.decode.total(), prompt_tokens);
            prop_assert!(settled.cached.tokens <= prompt_tokens);
            prop_assert_eq!(settled.prefill.is_some(), handed_over);
            if let Some(prefill) = settled.prefill {
                prop_assert_eq!(prefill.total(), prompt_tokens);
                prop_assert_eq!(prefill.external_kv_transfer, 0);
                prop_assert_eq!(settled.decode.local_compute, 0);
            }
        }
    }
}
