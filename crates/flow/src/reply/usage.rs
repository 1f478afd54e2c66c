//! Decides the usage in the client's reply; no other place does.
//!
//! The engine's figure has precedence wherever the engine gave one: 0 is a figure, `null`
//! and absence are not. In P/D the figure is the prefill leg's, because this leg computed the
//! prompt; the decode leg counts the blocks that were transferred to it, and old engines report all
//! of them as cached (`ledger::entry` knows the legs). Only where no engine gave a figure, the
//! estimate from confirmed blocks is used, or what `cached_tokens_fallback` says.

use splitrail_engine::dialect::Dialect;
use splitrail_engine::json::scan;

use splitrail_api::JsonObject;
use splitrail_api::text::push_number;

/// A raw `usage` object with the cached tokens set (or taken out) where its dialect has
/// them, and everything else as the engine wrote it.
pub fn rewrite(dialect: Dialect, raw: &str, told: Option<u32>) -> Option<String> {
    let key = match dialect {
        Dialect::Chunks => "prompt_tokens_details",
        Dialect::Responses => "input_tokens_details",
        Dialect::Messages => return of_message(raw, told),
    };
    spliced(raw, key, told).or_else(|| edited(raw, key, told))
}

const CACHED: &str = "cached_tokens";

/// The same in one pass over what needs no closer look.
fn spliced(raw: &str, details: &str, told: Option<u32>) -> Option<String> {
    let members = scan::members(raw)?;
    let mut out = String::with_capacity(raw.len() + details.len() + CACHED.len() + 24);
    out.push('{');
    let mut has_details = false;
    for (key, value) in members {
        let (key, value) = (&raw[key], &raw[value]);
        put_key(&mut out, key);
        match key == details {
            true => {
                has_details = true;
                put_details(&mut out, value, told)?;
            }
            false => out.push_str(value),
        }
    }
    if let (false, Some(tokens)) = (has_details, told) {
        put_key(&mut out, details);
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

fn edited(raw: &str, key: &'static str, told: Option<u32>) -> Option<String> {
    let mut usage = JsonObject::parse_str(raw).ok()?;
    let details = usage.raw(key).filter(|raw| *raw != "null");
    let mut details = JsonObject::parse_str(details.unwrap_or("{}")).ok()?;
    match told {
        Some(tokens) => details.set("cached_tokens", tokens.to_string()),
        None => {
            details.remove("cached_tokens");
        }
    }
    let details = details.to_string();
    if details != "{}" {
        usage.set(key, details);
    }
    Some(usage.to_string())
}

/// A message's prompt is the sum of three figures: what was read of the cache, what was
/// written to it, and the rest, which is `input_tokens`. The sum stays the engine's.
fn of_message(raw: &str, told: Option<u32>) -> Option<String> {
    const READ: &str = "cache_read_input_tokens";
    const WRITTEN: &str = "cache_creation_input_tokens";
    let mut usage = JsonObject::parse_str(raw).ok()?;
    let count = |key| usage.get::<u64>(key, "a count").ok();
    let (rest, written) = (count("input_tokens")??, count(WRITTEN)?);
    let elsewhere = count(READ)?.unwrap_or(0).saturating_add(written.unwrap_or(0));
    let prompt = rest.saturating_add(elsewhere);
    let read = u64::from(told.unwrap_or(0)).min(prompt);
    // In P/D, the two figures are of different engines.
    let fitting = written.map(|written| written.min(prompt - read));
    let rest = prompt - read - fitting.unwrap_or(0);
    usage.set("input_tokens", rest.to_string());
    if let Some(fitting) = fitting {
        usage.set(WRITTEN, fitting.to_string());
    }
    match told {
        Some(_) => usage.set(READ, read.to_string()),
        None => {
            usage.remove(READ);
        }
    }
    Some(usage.to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DETAILS: &str = "prompt_tokens_details";

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
            if let Some(spliced) = spliced(&raw, DETAILS, told) {
                prop_assert_eq!(Some(spliced), edited(&raw, DETAILS, told), "{}", raw);
            }
        }
    }

    #[test]
    fn unknown_details_survive_the_rewrite() {
        let raw = r#"{"prompt_tokens":5,"prompt_tokens_details":{"audio_tokens":3,"cached_tokens":null},"x":[1 ,2]}"#;
        assert_eq!(
            rewrite(Dialect::Chunks, raw, Some(0)).unwrap(),
            r#"{"prompt_tokens":5,"prompt_tokens_details":{"audio_tokens":3,"cached_tokens":0},"x":[1 ,2]}"#
        );
        let null = r#"{"prompt_tokens":5,"prompt_tokens_details":null}"#;
        assert!(
            rewrite(Dialect::Chunks, null, Some(4)).unwrap().contains(r#"{"cached_tokens":4}"#)
        );
        assert_eq!(rewrite(Dialect::Chunks, null, None).unwrap(), null);
        assert_eq!(
            rewrite(Dialect::Chunks, r#"{"prompt_tokens":5}"#, Some(4)).unwrap(),
            r#"{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}"#
        );
    }

    #[test]
    fn each_dialect_has_cached_tokens_in_fields_of_its_own() {
        let raw = r#"{"input_tokens":9,"input_tokens_details":{"cached_tokens":8,"x":1},"y":2}"#;
        let told = |dialect, raw, told| rewrite(dialect, raw, told).unwrap();
        assert_eq!(
            told(Dialect::Responses, raw, Some(0)),
            r#"{"input_tokens":9,"input_tokens_details":{"cached_tokens":0,"x":1},"y":2}"#
        );
        for (raw, tokens, expected) in [
            (
                r#"{"input_tokens":100,"output_tokens":3,"x":1.50}"#,
                Some(64),
                r#"{"input_tokens":36,"output_tokens":3,"x":1.50,"cache_read_input_tokens":64}"#,
            ),
            (
                r#"{"input_tokens":4,"cache_read_input_tokens":96,"cache_creation_input_tokens":0}"#,
                Some(0),
                r#"{"input_tokens":100,"cache_read_input_tokens":0,"cache_creation_input_tokens":0}"#,
            ),
            (
                r#"{"input_tokens":4,"cache_read_input_tokens":0,"cache_creation_input_tokens":96}"#,
                Some(64),
                r#"{"input_tokens":0,"cache_read_input_tokens":64,"cache_creation_input_tokens":36}"#,
            ),
            (r#"{"input_tokens":4,"cache_read_input_tokens":96}"#, None, r#"{"input_tokens":100}"#),
        ] {
            assert_eq!(told(Dialect::Messages, raw, tokens), expected);
        }
        assert_eq!(rewrite(Dialect::Messages, r#"{"output_tokens":3}"#, Some(1)), None);
    }
}
