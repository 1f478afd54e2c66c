//! The one place where usage is decided (M4 of the mission).
//!
//! The engine's figure wins wherever the engine gave one: 0 is a figure, `null`
//! and absence are not. In P/D it is the prefill leg's, the leg that did the
//! prompt's work; the decode leg counts what was handed over, and old engines call
//! all of that cached (`ledger::entry` knows the legs). Only where no engine spoke, the
//! estimate from confirmed blocks stands in, or what `cached_tokens_fallback` says.

use crate::api::{JsonObject, scan};
use crate::config::model::CachedTokensFallback;
use crate::ledger::entry::Cached;
use crate::ledger::leg::Origin;
use crate::stages::push_number;

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
    spliced(raw, told).or_else(|| edited(raw, told))
}

const DETAILS: &str = "prompt_tokens_details";
const CACHED: &str = "cached_tokens";

/// The same in one pass over what needs no closer look.
fn spliced(raw: &str, told: Option<u32>) -> Option<String> {
    let members = scan::members(raw)?;
    let mut out = String::with_capacity(raw.len() + DETAILS.len() + CACHED.len() + 24);
    out.push('{');
    let mut has_details = false;
    for (key, value) in members {
        let (key, value) = (&raw[key], &raw[value]);
        put_key(&mut out, key);
        match key == DETAILS {
            true => {
                has_details = true;
                put_details(&mut out, value, told)?;
            }
            false => out.push_str(value),
        }
    }
    if let (false, Some(tokens)) = (has_details, told) {
        put_key(&mut out, DETAILS);
        put_cached(&mut out, tokens);
    }
    out.push('}');
    Some(out)
}

fn put_details(out: &mut String, raw: &str, told: Option<u32>) -> Option<()> {
    let members = if raw == "null" { Vec::new() } else { scan::members(raw)? };
    let mut kept = members.iter().filter(|(key, _)| raw[key.clone()] != *CACHED).peekable();
    match told {
        // As it was: nothing is left to say in another way.
        None if kept.peek().is_none() => out.push_str(raw),
        Some(tokens) if members.is_empty() => put_cached(out, tokens),
        _ => {
            out.push('{');
            for (key, value) in &members {
                match (raw[key.clone()] == *CACHED, told) {
                    (true, None) => {}
                    (true, Some(tokens)) => put_member(out, CACHED, tokens),
                    (false, _) => {
                        put_key(out, &raw[key.clone()]);
                        out.push_str(&raw[value.clone()]);
                    }
                }
            }
            if let Some(tokens) = told.filter(|_| kept.count() == members.len()) {
                put_member(out, CACHED, tokens);
            }
            out.push('}');
        }
    }
    Some(())
}

fn put_cached(out: &mut String, tokens: u32) {
    out.push('{');
    put_member(out, CACHED, tokens);
    out.push('}');
}

fn put_member(out: &mut String, key: &str, tokens: u32) {
    put_key(out, key);
    push_number(out, tokens.into());
}

/// A key that needs no escapes, after whatever stands before it.
fn put_key(out: &mut String, key: &str) {
    if !out.ends_with('{') {
        out.push(',');
    }
    out.extend(["\"", key, "\":"]);
}

fn edited(raw: &str, told: Option<u32>) -> Option<String> {
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
    use proptest::prelude::*;

    /// A part of a JSON object's text, with what may stand around it.
    fn member() -> impl Strategy<Value = String> {
        let value = prop::sample::select(vec![
            "0",
            "17",
            "null",
            "{}",
            "{ }",
            "[1 ,2]",
            "\"}{,\"",
            "{\"a\": 1}",
            "1e3",
            "{\"cached_tokens\":5}",
            "{\"cached_tokens\": null , \"b\":{}}",
            "{\"b\": 2, \"cached_tokens\":1}",
            "{\"b\" : 2}",
        ]);
        let key = prop::sample::select(vec![DETAILS, CACHED, "prompt_tokens", "x", "y\\u0041"]);
        (key, value).prop_map(|(key, value)| format!("\"{key}\" : {value}"))
    }

    proptest! {
        #[test]
        fn both_ways_of_rewriting_say_the_same(
            members in prop::collection::vec(member(), 0..5), told in prop::option::of(0..200_u32),
        ) {
            let raw = format!("{{ {} }}", members.join(" , "));
            if let Some(spliced) = spliced(&raw, told) {
                prop_assert_eq!(Some(spliced), edited(&raw, told), "{}", raw);
            }
        }
    }

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
