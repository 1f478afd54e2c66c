//! Removes fields from a client's body that an engine must not receive; see
//! [`fields`](splitrail_engine::fields).
//!
//! A single `{"do_remote_prefill": true}` from a client stops a vLLM decode server, and `priority`
//! or `lora_path` would give clients what the operator did not offer. Fields are removed wherever
//! engines read them: at the top level, in `sampling_params` and `stream_options`, and in the
//! objects of an operator's own extensions (`vllm_xargs`, `extra_args`, `custom_params`), at any
//! depth and in lists. In other places (a tool's schema with a property of such a name) bytes stay
//! unchanged.

use std::fmt;

use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::endpoint::Endpoint;
use super::json::{JsonObject, quote};
use crate::error::Error;
use splitrail_engine::fields::{Places, Rule, rule, table};
use splitrail_engine::json::{Key, ShapeError};

/// Maximum depth that is searched within an object of extensions. Values that are nested more
/// deeply are replaced by `null`.
const NESTED_MAX: u32 = 8;

/// Maximum total length in bytes of the removed names in the head of the reply.
const NAMES_MAX_BYTES: usize = 256;

/// Why a field was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Only the router may set it.
    RouterOnly,
    /// The field influences the engine, and the model's `pass_unknown` does not list it.
    Steers,
    /// Neither the API nor any known engine has the field in this place.
    Unknown,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 3] = [Self::RouterOnly, Self::Steers, Self::Unknown];

    /// The value of the label `reason` in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::RouterOnly => "router_only",
            Self::Steers => "steers",
            Self::Unknown => "unknown",
        }
    }
}

/// The fields that were removed from a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemovedFields {
    counts: [u32; Reason::ALL.len()],
    names: String,
    /// The number of names in `names`.
    named: u32,
}

impl RemovedFields {
    /// The number of removed fields by reason.
    pub fn counts(&self) -> impl Iterator<Item = (Reason, u32)> {
        Reason::ALL.into_iter().zip(self.counts)
    }

    /// The value of the response header that names the removed fields; `None` if there are none. It
    /// lists names of letters, digits, `-`, `_` and `.`, as far as there is room, and the number of
    /// the others. The names are the client's content and must not be logged.
    pub fn header(&self) -> Option<String> {
        let others: u32 = self.counts.iter().sum::<u32>() - self.named;
        match (self.named, others) {
            (0, 0) => None,
            (_, 0) => Some(self.names.clone()),
            (0, others) => Some(format!("others={others}")),
            (_, others) => Some(format!("{}; others={others}", self.names)),
        }
    }

    fn add(&mut self, reason: Reason, name: &str) {
        self.counts[reason as usize] += 1;
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let separator = if self.names.is_empty() { "" } else { ", " };
        let fits = self.names.len() + separator.len() + name.len() <= NAMES_MAX_BYTES;
        if fits && !name.is_empty() && name.bytes().all(is_plain) {
            self.names.extend([separator, name]);
            self.named += 1;
        }
    }
}

/// Removes all fields from a body that an engine must not receive. `opened` has the names in the
/// model's `pass_unknown`.
///
/// # Errors
/// Only those of parsing a nested object, which cannot occur after the body was checked.
pub fn sanitise(
    body: &mut JsonObject,
    endpoint: Endpoint,
    opened: &[String],
) -> Result<RemovedFields, Error> {
    let mut pass = Pass { opened, removed: RemovedFields::default() };
    pass.body(body, place_of(endpoint))?;
    Ok(pass.removed)
}

/// The place of an endpoint's top-level members in the table of fields.
pub fn place_of(endpoint: Endpoint) -> Places {
    match endpoint {
        Endpoint::Chat => table::CHAT,
        Endpoint::Completions => table::COMPLETIONS,
        Endpoint::Generate => table::GENERATE,
        Endpoint::Responses => table::RESPONSES,
        Endpoint::Messages => table::MESSAGES,
        Endpoint::CountTokens => table::COUNT_TOKENS,
        Endpoint::Embeddings => table::EMBEDDINGS,
        Endpoint::ScoreV1 | Endpoint::Score => table::SCORE,
        Endpoint::RerankV1 | Endpoint::RerankV2 | Endpoint::Rerank => table::RERANK,
        Endpoint::Classify => table::CLASSIFY,
        Endpoint::Pooling => table::POOLING,
        Endpoint::Tokenize => table::TOKENIZE,
        Endpoint::Detokenize => table::DETOKENIZE,
        Endpoint::Transcriptions | Endpoint::Translations => table::AUDIO,
    }
}

/// One pass over a body.
struct Pass<'a> {
    opened: &'a [String],
    removed: RemovedFields,
}

/// Which members of a nested object are kept.
#[derive(Clone, Copy)]
enum Inside {
    /// Members that the table lists for this place.
    Listed(Places),
    /// All members except those that influence an engine.
    Open,
}

impl Inside {
    /// The rule for the members of an object, if it has its own.
    fn of(rule: Option<Rule>) -> Option<Self> {
        match rule {
            Some(Rule::PassesWith(_, place)) => Some(Self::Listed(place)),
            Some(Rule::PassesOpen(_)) => Some(Self::Open),
            _ => None,
        }
    }
}

impl Pass<'_> {
    fn body(&mut self, body: &mut JsonObject, place: Places) -> Result<(), Error> {
        let mut nested: Vec<(String, Inside)> = Vec::new();
        body.retain(|name| {
            let rule = rule(name);
            let kept = self.keeps(name, rule, Inside::Listed(place));
            if kept && let Some(inside) = Inside::of(rule) {
                nested.push((name.to_owned(), inside));
            }
            kept
        });
        for (name, inside) in nested {
            let Some(raw) = body.raw(&name).filter(|raw| raw.starts_with(['{', '['])) else {
                continue;
            };
            let before = self.removed.counts;
            let mut cleaned = String::with_capacity(raw.len());
            self.nested(raw, inside, NESTED_MAX, &mut cleaned).map_err(ShapeError::from)?;
            if before != self.removed.counts {
                body.set(&name, cleaned);
            }
        }
        Ok(())
    }

    /// Whether a member is kept. Otherwise it is counted as removed.
    fn keeps(&mut self, name: &str, rule: Option<Rule>, inside: Inside) -> bool {
        let passes = match (inside, rule) {
            (Inside::Listed(place), rule) => rule.is_some_and(|rule| rule.passes_in(place)),
            (Inside::Open, Some(Rule::Steers(_) | Rule::RouterOnly)) => false,
            (Inside::Open, _) => true,
        };
        passes || self.may_pass(name, rule)
    }

    /// Writes a value without the members that are not kept, at any depth and in lists. Takes no
    /// memory beyond what is written, regardless of the number of members.
    fn nested(
        &mut self,
        raw: &str,
        inside: Inside,
        levels: u32,
        out: &mut String,
    ) -> Result<(), serde_json::Error> {
        if !raw.starts_with(['{', '[']) {
            out.push_str(raw);
            return Ok(());
        }
        if levels == 0 {
            self.removed.add(Reason::Unknown, "");
            out.push_str("null");
            return Ok(());
        }
        let writing = MemberWriter { pass: self, inside, levels: levels - 1, out };
        serde_json::Deserializer::from_str(raw).deserialize_any(writing)
    }

    /// Whether a field is kept because it is listed in `pass_unknown`. Otherwise it is counted as
    /// removed.
    fn may_pass(&mut self, name: &str, rule: Option<Rule>) -> bool {
        let reason = match rule {
            Some(Rule::RouterOnly) => Reason::RouterOnly,
            _ if self.opened.iter().any(|opened| opened == name) => return true,
            Some(Rule::Steers(_)) => Reason::Steers,
            _ => Reason::Unknown,
        };
        self.removed.add(reason, name);
        false
    }
}

/// Writes the members of an object or the items of a list.
struct MemberWriter<'p, 'o, 'out> {
    pass: &'p mut Pass<'o>,
    inside: Inside,
    levels: u32,
    out: &'out mut String,
}

impl<'de> Visitor<'de> for MemberWriter<'_, '_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or a list")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let mut separator = '{';
        while let Some(Key(name)) = members.next_key::<Key<'de>>()? {
            let raw = members.next_value::<&'de RawValue>()?.get();
            let rule = rule(&name);
            if !self.pass.keeps(&name, rule, self.inside) {
                continue;
            }
            self.out.push(separator);
            separator = ',';
            self.out.push_str(&quote(&name));
            self.out.push(':');
            let inside = match self.inside {
                Inside::Listed(_) => Inside::of(rule),
                Inside::Open => Some(Inside::Open),
            };
            let Some(inside) = inside else {
                self.out.push_str(raw);
                continue;
            };
            let written = self.pass.nested(raw, inside, self.levels, self.out);
            written.map_err(A::Error::custom)?;
        }
        self.out.push_str(if separator == '{' { "{}" } else { "}" });
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let mut separator = '[';
        while let Some(item) = items.next_element::<&'de RawValue>()? {
            self.out.push(separator);
            separator = ',';
            let written = self.pass.nested(item.get(), self.inside, self.levels, self.out);
            written.map_err(A::Error::custom)?;
        }
        self.out.push_str(if separator == '[' { "[]" } else { "]" });
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn clean(text: &str, opened: &[&str]) -> (String, [u32; 3], String) {
        let mut object = JsonObject::parse_str(text).unwrap();
        let opened: Vec<String> = opened.iter().map(|&name| name.to_owned()).collect();
        let removed = sanitise(&mut object, Endpoint::Completions, &opened).unwrap();
        (object.to_string(), removed.counts, removed.names)
    }

    #[test]
    fn unlisted_fields_are_removed_and_equal_text_within_values_stays() {
        let tools = r#"[{"function":{"parameters":{"properties":{"kv_transfer_params":{"type":"string"}}}}}]"#;
        let text = format!(
            r#"{{"model":"m","kv\u005ftransfer_params":{{"do_remote_prefill":true}},"response_format":{tools},"bootstrap_room":7,"priority":1,"ünknown":1,"made_up":2}}"#
        );
        let (left, counts, names) = clean(&text, &[]);
        assert_eq!(left, format!(r#"{{"model":"m","response_format":{tools}}}"#));
        assert_eq!(counts, [2, 1, 2]);
        assert_eq!(names, "kv_transfer_params, bootstrap_room, priority, made_up");
    }

    #[test]
    fn extensions_keep_all_but_what_steers_at_any_depth_and_in_lists() {
        for (extensions, left) in [
            (r#"{"a":1.50,"kv_transfer_params":{}}"#, r#"{"a":1.50}"#),
            (r#"{"kv_transfer_params":{}}"#, "{}"),
            (r#"[{"rid":1},2,[{"x":{"priority":1}}]]"#, r#"[{},2,[{"x":{}}]]"#),
            (
                r#"{"vllm_xargs":{"kv\u005ftransfer_params":1,"é":[ ]}}"#,
                r#"{"vllm_xargs":{"é":[]}}"#,
            ),
            (r#"[[[[[[[[[{"rid":1}]]]]]]]]]"#, "[[[[[[[[null]]]]]]]]"),
        ] {
            let (out, counts, _) = clean(&format!(r#"{{"vllm_xargs":{extensions}}}"#), &[]);
            assert_eq!(out, format!(r#"{{"vllm_xargs":{left}}}"#));
            assert_ne!(counts, [0; 3], "{extensions}");
        }
        let untouched = r#"{"vllm_xargs":{ "a" : [ 1 , {"b":null} ], "c": "rid" }}"#;
        let spaces_gone = untouched.replacen("{\"vllm_xargs\":", "", 1);
        assert!(
            clean(untouched, &[]).0.contains(spaces_gone.trim_end_matches('}')),
            "byte for byte"
        );
    }

    #[test]
    fn fields_opened_for_a_model_pass_except_those_that_only_the_router_may_set() {
        let text = r#"{"priority":1,"made_up":2,"rid":3,"bootstrap_host":"h","vllm_xargs":{"session_id":"s","rid":4}}"#;
        let opened = ["priority", "made_up", "rid", "bootstrap_host", "session_id"];
        let (left, counts, names) = clean(text, &opened);
        assert_eq!(left, r#"{"priority":1,"made_up":2,"vllm_xargs":{"session_id":"s"}}"#);
        assert_eq!((counts, &*names), ([3, 0, 0], "rid, bootstrap_host, rid"));
    }

    #[test]
    fn a_reply_names_as_many_removed_fields_as_fit() {
        let members: Vec<String> = (0..1000).map(|i| format!(r#""unknown_{i}":0"#)).collect();
        let (_, counts, names) = clean(&format!("{{{}}}", members.join(",")), &[]);
        assert_eq!(counts, [0, 0, 1000]);
        assert!(names.len() <= NAMES_MAX_BYTES && names.starts_with("unknown_0, unknown_1"));
        let (_, _, odd) = clean(r#"{"a b":1,"":2}"#, &[]);
        assert_eq!(odd, "");
    }
}
