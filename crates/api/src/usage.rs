//! Makes and edits the usage that clients get. Which figure of cached tokens a client gets is
//! decided in `ledger` (`Entry::cached`, `record::reported_cached_tokens`), by this rule:
//!
//! The engine's figure has precedence if the engine gave one: 0 is a figure, `null` and absence are
//! not. In P/D the figure is the prefill leg's, because this leg computed the prompt; the decode
//! leg counts the blocks that were transferred to it, and old engines report all of them as cached
//! (see `ledger::entry`). With several samples of a leg, an engine counts blocks that one sample
//! computed and another one found: at most the estimate counts (`LegFacts::credible_cached_tokens`).
//! If no engine gave a figure, the estimate from confirmed blocks is used, or the rule of
//! `cached_tokens_fallback`.

use std::borrow::Cow;

use serde_json::{Value, json};
use splitrail_engine::dialect::Dialect;
use splitrail_engine::json::{Member, Members, pick};
use splitrail_engine::usage::read_count;

use crate::JsonObject;
use crate::json::quote;
use crate::text::push_number;

/// Sets (or removes) the cached tokens in a raw `usage` object, at the place that its dialect has
/// for them, and removes counts that cannot be read. Everything else stays as the engine wrote it.
/// `None` if there is no object, or if it has a key twice.
pub fn rewrite(dialect: Dialect, raw: &str, told: Option<u32>) -> Option<String> {
    let (key, counts) = match dialect {
        Dialect::Chunks => {
            ("prompt_tokens_details", ["prompt_tokens", "completion_tokens", "total_tokens"])
        }
        Dialect::Responses => {
            ("input_tokens_details", ["input_tokens", "output_tokens", "total_tokens"])
        }
        Dialect::Messages => return of_message(raw, told),
    };
    let mut out = String::with_capacity(raw.len() + key.len() + CACHED.len() + 24);
    out.push('{');
    let mut has_details = false;
    for member in Members::of(raw).ok()?.list {
        let name = member.name(raw);
        let is_details = name == key;
        if counts.contains(&&*name) && !is_count(member.raw(raw)) {
            continue;
        }
        put_key(&mut out, name);
        match is_details {
            true => {
                has_details = true;
                put_details(&mut out, member.raw(raw), told);
            }
            false => out.push_str(member.raw(raw)),
        }
    }
    if !has_details && told.is_some() {
        put_key(&mut out, key.into());
        put_details(&mut out, "null", told);
    }
    out.push('}');
    Some(out)
}

/// The usage of a reply for which nothing was generated, with the cached tokens if they are known.
/// The `input_tokens` of a message exclude them.
pub fn usage_of_prompt(dialect: Dialect, prompt_tokens: u32, cached_tokens: Option<u32>) -> Value {
    let details = cached_tokens.map(|tokens| json!({"cached_tokens": tokens}));
    let (mut usage, key, details) = match dialect {
        Dialect::Chunks => (
            json!({
                "prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens,
                "completion_tokens": 0,
            }),
            "prompt_tokens_details",
            details,
        ),
        Dialect::Responses => (
            json!({
                "input_tokens": prompt_tokens, "total_tokens": prompt_tokens, "output_tokens": 0,
            }),
            "input_tokens_details",
            details,
        ),
        Dialect::Messages => {
            let rest = prompt_tokens.saturating_sub(cached_tokens.unwrap_or(0));
            let usage = json!({"input_tokens": rest, "output_tokens": 0});
            (usage, "cache_read_input_tokens", cached_tokens.map(Value::from))
        }
    };
    if let Some(details) = details {
        usage[key] = details;
    }
    usage
}

const CACHED: &str = "cached_tokens";

/// Whether a count can be read, or is `null`.
fn is_count(raw: &str) -> bool {
    raw == "null" || read_count(raw).is_some()
}

/// Details that are no object count as absent.
fn put_details(out: &mut String, raw: &str, told: Option<u32>) {
    let object = raw.starts_with('{').then(|| Members::of(raw).ok()).flatten();
    let raw = if object.is_some() { raw } else { "null" };
    let members = object.unwrap_or_default().list;
    let says_nothing = |member: &Member| member.name(raw) == CACHED && member.raw(raw) == "null";
    if told.is_none() && members.iter().all(says_nothing) {
        // Unchanged: there is nothing to remove.
        out.push_str(raw);
        return;
    }
    out.push('{');
    let mut missing = told;
    for member in &members {
        let name = member.name(raw);
        match (name == CACHED, told) {
            (true, None) => {}
            (true, Some(_)) => put_cached(out, &mut missing),
            (false, _) => {
                put_key(out, name);
                out.push_str(member.raw(raw));
            }
        }
    }
    put_cached(out, &mut missing);
    out.push('}');
}

/// Writes the count, unless it was already written.
fn put_cached(out: &mut String, missing: &mut Option<u32>) {
    if let Some(tokens) = missing.take() {
        put_key(out, CACHED.into());
        push_number(out, tokens.into());
    }
}

/// Writes a key, with a comma before it if it is not the first.
fn put_key(out: &mut String, name: Cow<'_, str>) {
    if !out.ends_with('{') {
        out.push(',');
    }
    match name {
        // A borrowed name contains no escapes.
        Cow::Borrowed(name) => out.extend(["\"", name, "\":"]),
        Cow::Owned(name) => out.extend([&quote(&name), ":"]),
    }
}

const INPUT: &str = "input_tokens";
const READ: &str = "cache_read_input_tokens";
const WRITTEN: &str = "cache_creation_input_tokens";

/// The tokens of a message's prompt in its first event. Engines may leave them out of the usage at the
/// end, as Anthropic's own API did.
#[derive(Clone, Copy)]
pub struct MessageStart {
    rest: u32,
    read: Option<u32>,
    written: Option<u32>,
}

impl MessageStart {
    /// Reads the usage of the first event; `None` if it does not have the prompt's tokens, or zeros in
    /// their place.
    pub fn read(raw: &str) -> Option<Self> {
        let [rest, read, written] = pick(raw, [INPUT, READ, WRITTEN]).ok()?;
        let (read, written) = (read.and_then(read_count), written.and_then(read_count));
        let start = Self { rest: read_count(rest?)?, read, written };
        let is_zero = start.rest == 0 && read.unwrap_or(0) == 0 && written.unwrap_or(0) == 0;
        Some(start).filter(|_| !is_zero)
    }

    /// The usage at the end of the message with the prompt's tokens of its beginning; `None` if it has
    /// figures of its own for them.
    pub fn complete(self, raw: &str) -> Option<String> {
        let mut usage = JsonObject::parse_str(raw).ok()?;
        let lacks = |usage: &JsonObject, key| matches!(usage.raw(key), None | Some("null"));
        if !lacks(&usage, INPUT) {
            return None;
        }
        for (key, tokens) in [(INPUT, Some(self.rest)), (READ, self.read), (WRITTEN, self.written)]
        {
            if let Some(tokens) = tokens.filter(|_| lacks(&usage, key)) {
                usage.set(key, tokens.to_string());
            }
        }
        Some(usage.to_string())
    }
}

/// Whether the usage of a message has no tokens that were read from a cache.
pub fn lacks_cached_tokens(raw: &str) -> bool {
    matches!(pick(raw, [READ]), Ok([None]))
}

/// The prompt of a message is the sum of three figures: tokens read from the cache, tokens written
/// to the cache, and the rest, which is `input_tokens`. The sum of the engine is kept.
fn of_message(raw: &str, told: Option<u32>) -> Option<String> {
    let mut usage = JsonObject::parse_str(raw).ok()?;
    for key in [INPUT, "output_tokens", READ, WRITTEN] {
        if usage.raw(key).is_some_and(|raw| !is_count(raw)) {
            usage.remove(key);
        }
    }
    let count = |key| usage.raw(key).and_then(read_count).map(u64::from);
    let (rest, written) = (count(INPUT), count(WRITTEN));
    let Some(rest) = rest else {
        // The sum is not known.
        usage.remove(READ);
        return Some(usage.to_string());
    };
    let elsewhere = count(READ).unwrap_or(0).saturating_add(written.unwrap_or(0));
    let prompt = rest.saturating_add(elsewhere);
    let read = u64::from(told.unwrap_or(0)).min(prompt);
    // In P/D, the two figures come from different engines and may not fit together.
    let fitting = written.map(|written| written.min(prompt - read));
    let rest = prompt - read - fitting.unwrap_or(0);
    usage.set(INPUT, rest.to_string());
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
    fn a_figure_that_clients_must_not_see_is_removed_everywhere() {
        for (details, expected) in [
            (r#"{"cached_tokens":4}"#, "{}"),
            (r#"{"cached_tokens":4,"x":1}"#, r#"{"x":1}"#),
            (r#"{"cached_tokens":null}"#, r#"{"cached_tokens":null}"#),
            ("{ }", "{ }"),
        ] {
            let usage =
                |details| format!(r#"{{"prompt_tokens":5,"prompt_tokens_details":{details}}}"#);
            let told = rewrite(Dialect::Chunks, &usage(details), None);
            assert_eq!(told, Some(usage(expected)));
        }
    }

    #[test]
    fn unusual_members_of_usage_survive_the_rewrite() {
        let raw = r#"{ "x" : 1e3, "y\u0041\"": {"a": 1}, "prompt_tok\u0065ns_details": {"b" : 2e5, "c\n":[1 ,2]} }"#;
        let told = |told| rewrite(Dialect::Chunks, raw, told).unwrap();
        let kept = r#"{"x":1e3,"yA\"":{"a": 1},"prompt_tokens_details":{"b":2e5,"c\n":[1 ,2]"#;
        assert_eq!(told(Some(7)), format!("{kept},\"cached_tokens\":7}}}}"));
        assert_eq!(told(None), format!("{kept}}}}}"));
        for raw in ["[]", "7", r#"{"x":1,"x":2}"#] {
            assert_eq!(rewrite(Dialect::Chunks, raw, Some(7)), None, "{raw}");
        }
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
    }

    #[test]
    fn counts_that_cannot_be_read_are_removed_and_the_others_stay() {
        for (dialect, raw, told, expected) in [
            (
                Dialect::Chunks,
                r#"{"prompt_tokens":9,"completion_tokens":3.0,"total_tokens":-1,"x":1.5}"#,
                Some(4),
                r#"{"prompt_tokens":9,"x":1.5,"prompt_tokens_details":{"cached_tokens":4}}"#,
            ),
            (
                Dialect::Chunks,
                r#"{"prompt_tokens":"9","prompt_tokens_details":7}"#,
                None,
                r#"{"prompt_tokens_details":null}"#,
            ),
            (
                Dialect::Responses,
                r#"{"input_tokens":9,"output_tokens":99999999999}"#,
                None,
                r#"{"input_tokens":9}"#,
            ),
            (
                Dialect::Messages,
                r#"{"input_tokens":9,"output_tokens":1.5,"cache_read_input_tokens":-1}"#,
                Some(4),
                r#"{"input_tokens":5,"cache_read_input_tokens":4}"#,
            ),
            (
                Dialect::Messages,
                r#"{"output_tokens":3,"cache_read_input_tokens":96}"#,
                Some(1),
                r#"{"output_tokens":3}"#,
            ),
        ] {
            assert_eq!(rewrite(dialect, raw, told).as_deref(), Some(expected), "{raw}");
        }
    }

    #[test]
    fn the_end_of_a_message_has_the_prompt_of_its_beginning_unless_it_has_its_own() {
        let start = r#"{"input_tokens":4,"cache_read_input_tokens":96,"output_tokens":1}"#;
        let start = MessageStart::read(start).unwrap();
        let complete = |raw| start.complete(raw);
        assert_eq!(
            complete(r#"{"output_tokens":7}"#).as_deref(),
            Some(r#"{"output_tokens":7,"input_tokens":4,"cache_read_input_tokens":96}"#)
        );
        assert_eq!(
            complete(r#"{"output_tokens":7,"cache_read_input_tokens":80}"#).as_deref(),
            Some(r#"{"output_tokens":7,"cache_read_input_tokens":80,"input_tokens":4}"#)
        );
        assert_eq!(complete(r#"{"input_tokens":100,"output_tokens":7}"#), None);
        assert!(MessageStart::read(r#"{"output_tokens":1}"#).is_none());
    }
}
