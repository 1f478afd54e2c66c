//! The one place where usage is decided (M4 of the mission).
//!
//! The engine's figure wins wherever the engine gave one: 0 is a figure, `null`
//! and absence are not. In P/D it is the prefill leg's, the leg that did the
//! prompt's work; the decode leg counts what was handed over, and old engines call
//! all of that cached (`ledger::entry` knows the legs). Only where no engine spoke, the
//! estimate from confirmed blocks stands in, or what `cached_tokens_fallback` says.

use crate::api::JsonObject;
use crate::config::model::CachedTokensFallback;
use crate::ledger::entry::Cached;
use crate::ledger::leg::Origin;

/// The figure that the client is told; `None` leaves the key out.
pub fn told(cached: Cached, fallback: CachedTokensFallback) -> Option<u32> {
    match (cached.source, fallback) {
        (Origin::Estimate, CachedTokensFallback::Zero) => Some(0),
        (Origin::Estimate, CachedTokensFallback::Omit) => None,
        _ => Some(cached.tokens),
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

    #[test]
    fn the_fallback_decides_only_where_the_engine_is_silent() {
        let estimate = Cached { tokens: 256, source: Origin::Estimate };
        assert_eq!(told(estimate, CachedTokensFallback::Estimate), Some(256));
        assert_eq!(told(estimate, CachedTokensFallback::Zero), Some(0));
        assert_eq!(told(estimate, CachedTokensFallback::Omit), None);
        for source in [Origin::EnginePrefill, Origin::EngineDecode] {
            for tokens in [0, 32] {
                let spoken = Cached { tokens, source };
                assert_eq!(told(spoken, CachedTokensFallback::Omit), Some(tokens));
                assert_eq!(told(spoken, CachedTokensFallback::Zero), Some(tokens));
            }
        }
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
