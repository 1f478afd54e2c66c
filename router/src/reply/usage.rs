//! The one place where usage is decided (M4 of the mission).
//!
//! The engine's figure wins wherever the engine gave one: 0 is a figure, `null`
//! and absence are not. In P/D it is the prefill leg's, the leg that did the
//! prompt's work; the decode leg counts what was handed over, and old engines call
//! all of that cached. Only where no engine spoke, the estimate from confirmed
//! blocks stands in, or what `cached_tokens_fallback` says.

use splitrail_engine::usage::EngineUsage;
use splitrail_kv::estimate_cached_tokens;

use crate::api::JsonObject;
use crate::config::model::CachedTokensFallback;

/// Who said how much was cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The engine of the leg that did the prompt's work.
    Engine,
    /// The router, from blocks that the worker's events confirmed.
    Estimate,
}

impl Source {
    /// The label in metrics, records and the route header.
    pub fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Estimate => "estimate",
        }
    }
}

/// A count of cached prompt tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cached {
    /// The count; never more than the prompt has.
    pub tokens: u32,
    /// Who said so.
    pub source: Source,
}

/// What is known, before the answer, of the leg that does the prompt's work.
#[derive(Clone, Copy, Debug)]
pub struct UsageRule {
    /// The prefill leg's own figure, in P/D.
    pub prefill_cached_tokens: Option<u32>,
    /// Whether there was a prefill leg, so that the answering leg's figure is not
    /// about the prompt's work.
    pub handed_over: bool,
    /// Confirmed leading blocks on the worker that does the prompt's work.
    pub overlap_blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Whether the engine reads no prefix cache for this request.
    pub bypasses_cache: bool,
    /// What clients are told where no engine spoke.
    pub fallback: CachedTokensFallback,
}

impl UsageRule {
    /// The router's estimate for a prompt.
    pub fn estimate(&self, prompt_tokens: u32) -> u32 {
        if self.bypasses_cache {
            return 0;
        }
        estimate_cached_tokens(self.overlap_blocks, prompt_tokens, self.block_size)
    }

    /// The figure for metrics and records: the engine's, else the estimate.
    pub fn cached(&self, usage: &EngineUsage) -> Cached {
        let reported =
            if self.handed_over { self.prefill_cached_tokens } else { usage.cached_tokens };
        match reported {
            Some(tokens) => {
                Cached { tokens: tokens.min(usage.prompt_tokens), source: Source::Engine }
            }
            None => Cached { tokens: self.estimate(usage.prompt_tokens), source: Source::Estimate },
        }
    }

    /// The figure that the client is told; `None` leaves the key out.
    pub fn told(&self, cached: Cached) -> Option<u32> {
        match (cached.source, self.fallback) {
            (Source::Engine, _) | (_, CachedTokensFallback::Estimate) => Some(cached.tokens),
            (_, CachedTokensFallback::Zero) => Some(0),
            (_, CachedTokensFallback::Omit) => None,
        }
    }
}

/// A raw `usage` object with `prompt_tokens_details.cached_tokens` set (or taken
/// out), and everything else as the engine wrote it.
pub fn rewrite(raw: &str, told: Option<u32>) -> Option<String> {
    let mut usage = JsonObject::parse_str(raw).ok()?;
    let details = usage.raw("prompt_tokens_details").filter(|raw| *raw != "null");
    let mut details = JsonObject::parse_str(details.unwrap_or("{}")).ok()?;
    match told {
        Some(tokens) => details.set("cached_tokens", tokens.to_string()),
        None => {
            details.remove("cached_tokens");
        }
    }
    let details = details.to_string();
    if details != "{}" {
        usage.set("prompt_tokens_details", details);
    }
    Some(usage.to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn rule() -> UsageRule {
        UsageRule {
            prefill_cached_tokens: None,
            handed_over: false,
            overlap_blocks: 9,
            block_size: 32,
            bypasses_cache: false,
            fallback: CachedTokensFallback::Estimate,
        }
    }

    fn usage(prompt_tokens: u32, cached_tokens: Option<u32>) -> EngineUsage {
        EngineUsage { prompt_tokens, completion_tokens: 4, cached_tokens }
    }

    #[test]
    fn an_engine_figure_is_never_replaced_and_zero_is_one() {
        let engine = |tokens| Cached { tokens, source: Source::Engine };
        assert_eq!(rule().cached(&usage(288, Some(0))), engine(0));
        assert_eq!(rule().cached(&usage(288, Some(256))), engine(256));
        assert_eq!(rule().cached(&usage(100, Some(256))), engine(100));
    }

    #[test]
    fn a_silent_engine_leaves_the_estimate_and_its_last_token_is_always_computed() {
        let cached = rule().cached(&usage(288, None));
        assert_eq!(cached, Cached { tokens: 256, source: Source::Estimate });
        assert_eq!(rule().estimate(0), 0);
        assert_eq!(UsageRule { bypasses_cache: true, ..rule() }.estimate(288), 0);
    }

    #[test]
    fn after_a_hand_off_the_decode_leg_has_no_say() {
        let rule = UsageRule { handed_over: true, prefill_cached_tokens: Some(64), ..rule() };
        // vLLM 0.22 reports the whole prompt on decode.
        assert_eq!(rule.cached(&usage(1142, Some(1142))).tokens, 64);
        let silent = UsageRule { prefill_cached_tokens: None, overlap_blocks: 2, ..rule };
        let cached = silent.cached(&usage(1142, Some(1142)));
        assert_eq!(cached, Cached { tokens: 64, source: Source::Estimate });
    }

    #[test]
    fn the_fallback_decides_only_where_the_engine_is_silent() {
        let cached = rule().cached(&usage(288, None));
        let told = |fallback| UsageRule { fallback, ..rule() }.told(cached);
        assert_eq!(told(CachedTokensFallback::Estimate), Some(256));
        assert_eq!(told(CachedTokensFallback::Zero), Some(0));
        assert_eq!(told(CachedTokensFallback::Omit), None);
        let spoken = rule().cached(&usage(288, Some(32)));
        let omit = UsageRule { fallback: CachedTokensFallback::Omit, ..rule() };
        assert_eq!(omit.told(spoken), Some(32));
    }

    #[test]
    fn unknown_details_survive_the_rewrite() {
        let raw = r#"{"prompt_tokens":5,"prompt_tokens_details":{"audio_tokens":3,"cached_tokens":null},"x":[1 ,2]}"#;
        assert_eq!(
            rewrite(raw, Some(0)).unwrap(),
            r#"{"prompt_tokens":5,"prompt_tokens_details":{"audio_tokens":3,"cached_tokens":0},"x":[1 ,2]}"#
        );
        let null = r#"{"prompt_tokens":5,"prompt_tokens_details":null}"#;
        assert!(rewrite(null, Some(4)).unwrap().contains(r#"{"cached_tokens":4}"#));
        assert_eq!(rewrite(null, None).unwrap(), null);
        assert_eq!(
            rewrite(r#"{"prompt_tokens":5}"#, Some(4)).unwrap(),
            r#"{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}"#
        );
    }
}
