//! Reads the choices of a reply or an event one after the other, without a list of them: finds those that the engine
//! rejected for their threshold, and those with output.

use std::fmt;
use std::marker::PhantomData;
use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;
use serde::de::{Deserializer as _, SeqAccess, Visitor};
use serde_json::value::RawValue;
use splitrail_engine::dialect::Dialect;
use splitrail_engine::json;
use splitrail_engine::threshold_reply::CACHE_THRESHOLD;

use splitrail_api::JsonObject;

/// Whether a choice of this reply or event was rejected for its threshold. Only dialects with
/// choices can express that.
pub fn is_below_threshold(dialect: Dialect, data: &[u8]) -> bool {
    if dialect != Dialect::Chunks {
        return false;
    }
    // Few replies contain the word, and some of those contain it only as text.
    static WORD: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(CACHE_THRESHOLD));
    if WORD.find(data).is_none() {
        return false;
    }
    let mut is_below = false;
    each_in(data, |choice: ChunkChoice<'_>| {
        let reason = choice.finish_reason.and_then(|raw| json::string(raw.get()));
        is_below |= reason.is_some_and(|reason| reason == CACHE_THRESHOLD);
    });
    is_below
}

/// The indices of the choices that have output in this event or end with it, of at most `max`
/// choices.
pub fn begun(data: &[u8], max: usize) -> Vec<u64> {
    let mut begun = Vec::new();
    let is_read = each_in(data, |choice: ChunkChoice<'_>| {
        if begun.len() < max && choice.has_output() {
            begun.push(choice.index());
        }
    });
    if is_read { begun } else { Vec::new() }
}

/// Calls `visit` with each choice of a reply or an event. `false` if there are none, or one of them
/// is no `C`; `visit` is called for those before it.
fn each_in<'a, C: Deserialize<'a>>(data: &'a [u8], visit: impl FnMut(C)) -> bool {
    let choices = json::pick_from_slice(data, ["choices"]);
    matches!(choices, Ok([Some(raw)]) if each(raw, visit).is_some())
}

/// Calls `visit` with each item of a list; `None` if it is no list, or an item is no `C`.
pub fn each<'a, C: Deserialize<'a>>(raw: &'a str, visit: impl FnMut(C)) -> Option<()> {
    struct Each<C, F>(F, PhantomData<C>);
    impl<'de, C: Deserialize<'de>, F: FnMut(C)> Visitor<'de> for Each<C, F> {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }

        fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
            while let Some(item) = items.next_element()? {
                (self.0)(item);
            }
            Ok(())
        }
    }
    serde_json::Deserializer::from_str(raw).deserialize_seq(Each(visit, PhantomData)).ok()
}

/// What the choices of an event say.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ReadChoices {
    /// The number of tokens: their token ids, or one for each choice with output.
    pub tokens: u32,
    /// Whether a choice has output and does not name its token ids.
    pub lacks_ids: bool,
    /// The indices of the choices that end.
    pub ended: Vec<u64>,
    /// Why the engine gave a choice up, if it did.
    pub failure: Option<Failure>,
}

/// Why an engine gave a reply up, which is no end of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It met an error.
    Error,
    /// It aborted the request: it was paused or put to sleep, or somebody aborted the request there.
    Abort,
}

impl Failure {
    /// The failure that a finish reason stands for.
    pub fn of_reason(reason: &str) -> Option<Self> {
        match reason {
            "error" => Some(Self::Error),
            "abort" => Some(Self::Abort),
            _ => None,
        }
    }
}

impl ReadChoices {
    /// Reads the choices of an event or of a whole reply, up to the first that is none.
    pub fn read(choices: &str) -> Self {
        let mut read = Self::default();
        let _ = each(choices, |choice: ChunkChoice<'_>| read.add(&choice));
        read
    }

    fn add(&mut self, choice: &ChunkChoice<'_>) {
        self.tokens += choice.tokens();
        self.lacks_ids |= !choice.names_ids() && choice.has_output();
        let Some(reason) = choice.finish_reason.filter(|raw| is_something(raw.get())) else {
            return;
        };
        self.ended.push(choice.index());
        let reason = json::string(reason.get());
        self.failure = self.failure.or_else(|| Failure::of_reason(&reason?));
    }
}

/// The members that show whether a request runs. Their values may be of any type.
#[derive(Deserialize)]
struct ChunkChoice<'a> {
    #[serde(borrow)]
    index: Option<&'a RawValue>,
    #[serde(borrow)]
    finish_reason: Option<&'a RawValue>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    token_ids: Option<&'a RawValue>,
    #[serde(borrow)]
    delta: Option<&'a RawValue>,
}

impl ChunkChoice<'_> {
    fn index(&self) -> u64 {
        self.index.and_then(|index| index.get().parse().ok()).unwrap_or(0)
    }

    fn names_ids(&self) -> bool {
        self.token_ids.is_some_and(|raw| raw.get() != "null")
    }

    fn tokens(&self) -> u32 {
        match self.token_ids.map_or("null", RawValue::get) {
            "null" => self.has_output().into(),
            ids => u32::from(is_something(ids)) * (1 + ids.matches(',').count() as u32),
        }
    }

    /// The first chunk of a chat only names the role. It is sent before the engine has decided.
    fn has_output(&self) -> bool {
        let of_choice = [self.finish_reason, self.text, self.token_ids];
        of_choice.into_iter().flatten().any(|raw| is_something(raw.get()))
            || self.delta.is_some_and(|delta| {
                let said = |(key, raw): (&str, &str)| key != "role" && is_something(raw);
                JsonObject::parse_str(delta.get()).is_ok_and(|delta| delta.members().any(said))
            })
    }
}

/// Whether a value is neither `null` nor empty.
fn is_something(raw: &str) -> bool {
    match raw.as_bytes() {
        b"null" | b"\"\"" => false,
        [b'[', inside @ .., b']'] | [b'{', inside @ .., b'}'] => !inside.trim_ascii().is_empty(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_choice_turns_the_whole_away_and_text_never_does() {
        for data in [
            r#"{"choices":[{"index":0,"text":"","finish_reason":"cache_threshold"}]}"#,
            r#"{"choices":[{"text":"a"},{"finish_reason":"cache_threshold"}]}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"cache\u005fthreshold"},{"finish_reason":"cache_threshold"}]}"#,
        ] {
            assert!(is_below_threshold(Dialect::Chunks, data.as_bytes()), "{data}");
        }
        for data in [
            r#"{"choices":[{"text":"cache_threshold","finish_reason":null}]}"#,
            r#"{"choices":[{"text":"\"finish_reason\":\"cache_threshold\""}]}"#,
            r#"{"choices":[],"x":"cache_threshold"}"#,
            "cache_threshold",
        ] {
            assert!(!is_below_threshold(Dialect::Chunks, data.as_bytes()), "{data}");
        }
    }

    #[test]
    fn an_event_has_the_tokens_that_it_names_or_one_for_each_choice_with_output() {
        for (choices, expected) in [
            (r#"[{"index":0,"text":"ab","token_ids":[5, 6,7]}]"#, 3),
            (r#"[{"index":0,"text":"ab","token_ids":[]},{"index":1,"token_ids":[ 5 ]}]"#, 1),
            (r#"[{"index":0,"text":"ab","token_ids":null},{"index":2,"text":"c"}]"#, 2),
            (r#"[{"delta":{"content":"a, b"}}]"#, 1),
            (r#"[{"delta":{"role":"assistant","content":""}}]"#, 0),
            (r#"[{"delta":{"tool_calls":[{"id":"x"}]}}]"#, 1),
            ("[]", 0),
            ("7", 0),
        ] {
            assert_eq!(ReadChoices::read(choices).tokens, expected, "{choices}");
        }
    }

    #[test]
    fn a_choice_ends_with_a_reason_and_some_reasons_are_failures() {
        for (choices, ended, failure) in [
            (
                r#"[{"index":1,"finish_reason":"stop"},{"index":0,"finish_reason":null}]"#,
                vec![1],
                None,
            ),
            (r#"[{"finish_reason":"length"}]"#, vec![0], None),
            (r#"[{"index":0,"finish_reason":""}]"#, vec![], None),
            (r#"[{"index":2,"text":"abort"}]"#, vec![], None),
            (r#"[{"index":2,"finish_reason":"\u0061bort"}]"#, vec![2], Some(Failure::Abort)),
            (
                r#"[{"index":0,"finish_reason":"stop"},{"index":1,"finish_reason":"error"}]"#,
                vec![0, 1],
                Some(Failure::Error),
            ),
        ] {
            let read = ReadChoices::read(choices);
            assert_eq!((read.ended, read.failure), (ended, failure), "{choices}");
        }
    }

    #[test]
    fn output_is_what_only_a_running_request_has() {
        for (data, shown) in [
            (r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#, vec![]),
            (r#"{"choices":[{"index":1,"delta":{"content":"a"}}]}"#, vec![1]),
            (r#"{"choices":[{"delta":{"tool_calls":[{"id":"x"}]}}]}"#, vec![0]),
            (r#"{"choices":[{"text":"","token_ids":[5]},{"index":2,"text":"b"}]}"#, vec![0, 2]),
            (r#"{"choices":[{"text":"","finish_reason":"stop"}]}"#, vec![0]),
            (r#"{"choices":[{"text":"","finish_reason":null}]}"#, vec![]),
            (r#"{"choices":[],"usage":{}}"#, vec![]),
            (r#"{"choices":[{"text":"","delta":{"tool_calls":[ ],"content":null}}]}"#, vec![]),
            (r#"{"choices":[{"index":3,"delta":{"a\u0062":{"x":1}}}]}"#, vec![3]),
            (r#"{"choices":[{"index":null,"delta":null,"text":"a"}]}"#, vec![0]),
            (r#"{"choices":null,"error":{}}"#, vec![]),
            ("[]", vec![]),
        ] {
            assert_eq!(begun(data.as_bytes(), 4), shown, "{data}");
        }
    }
}
