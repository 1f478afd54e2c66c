//! Checks the bodies of requests to auxiliary endpoints: their input and, for vectors,
//! `encoding_format` and `dimensions`. Mistakes in other members are reported by the engine.

use serde_json::value::RawValue;

use super::endpoint::Endpoint;
use super::json::JsonObject;
use super::list::{self, ListError};
use super::request::check_messages;
use crate::error::Error;
use splitrail_config::model::Limits;

/// Checks the members that define the task.
///
/// # Errors
/// A 400 that names the member at fault.
pub(super) fn check(body: &JsonObject, endpoint: Endpoint, limits: &Limits) -> Result<(), Error> {
    match endpoint {
        Endpoint::Embeddings => {
            check_form(body)?;
            input_or_messages(body, limits)
        }
        Endpoint::Pooling => {
            check_form(body)?;
            // What the engine's own plugin reads.
            given(body, "data").map_or_else(|| input_or_messages(body, limits), |_| Ok(()))
        }
        Endpoint::Classify => input_or_messages(body, limits),
        Endpoint::ScoreV1 | Endpoint::Score => score(body, limits),
        Endpoint::RerankV1 | Endpoint::RerankV2 | Endpoint::Rerank => {
            check_texts(body, "query", limits)?;
            check_texts(body, "documents", limits)
        }
        Endpoint::Detokenize => detokenize(body),
        Endpoint::CountTokens => check_messages(body),
        Endpoint::Transcriptions | Endpoint::Translations => Ok(()),
        _ => tokenize(body),
    }
}

/// Checks the form of vectors. vLLM's `bytes` is refused, because such a reply is no JSON.
fn check_form(body: &JsonObject) -> Result<(), Error> {
    match body.raw("encoding_format") {
        None | Some("null" | r#""float""# | r#""base64""#) => {}
        Some(_) => {
            let message = "`encoding_format` must be `float` or `base64`";
            return Err(Error::invalid("encoding_format", message));
        }
    }
    if body.get::<u32>("dimensions", "a count from 1")? == Some(0) {
        return Err(Error::invalid("dimensions", "`dimensions` must be a count from 1"));
    }
    Ok(())
}

/// Checks `input`: a text, token ids, or a list of either. Engines also accept messages, in its
/// place or as its entries.
fn input_or_messages(body: &JsonObject, limits: &Limits) -> Result<(), Error> {
    match (given(body, "input"), given(body, "messages")) {
        (Some(input), _) => check_input(input, limits),
        (None, Some(messages)) if messages.starts_with('[') => Ok(()),
        (None, Some(_)) => Err(Error::invalid("messages", "`messages` must be a list")),
        (None, None) => Err(Error::invalid("input", "`input` is missing")),
    }
}

fn check_input(raw: &str, limits: &Limits) -> Result<(), Error> {
    const EXPECTED: &str =
        "`input` must be a string, a list of strings, a list of token ids or a list of those";
    let wrong = || Error::invalid("input", EXPECTED);
    if first(raw) == b'"' {
        return Ok(());
    }
    let inside = raw.strip_prefix('[').ok_or_else(wrong)?.trim_start();
    if matches!(first(inside), b'-' | b'0'..=b'9') {
        return if list::is_of::<u32>(raw) { Ok(()) } else { Err(wrong()) };
    }
    let max = limits.embedding_inputs_max;
    let entries: Vec<&RawValue> = list::entries(raw, max).map_err(|fault| match fault {
        ListError::Wrong => wrong(),
        ListError::TooLong => too_long("input", max),
    })?;
    if entries.is_empty() {
        return Err(Error::invalid("input", "`input` is an empty list"));
    }
    let is_good = |entry: &&RawValue| match first(entry.get()) {
        b'"' | b'{' => true,
        b'[' => {
            let inside = entry.get().trim_start_matches(['[', ' ', '\t', '\n', '\r']);
            first(inside) == b'{' || list::is_of::<u32>(entry.get())
        }
        _ => false,
    };
    let alike = entries.iter().all(|entry| first(entry.get()) == first(entries[0].get()));
    if alike && entries.iter().all(is_good) { Ok(()) } else { Err(wrong()) }
}

fn first(raw: &str) -> u8 {
    raw.bytes().next().unwrap_or_default()
}

fn too_long(key: &'static str, max: usize) -> Error {
    let message = format!("`{key}` has more than {max} entries (limits.embedding_inputs_max)");
    Error::invalid(key, message)
}

/// The names under which engines take two lists of texts to compare: the last one is SGLang's.
const PAIRS: [[&str; 2]; 5] = [
    ["text_1", "text_2"],
    ["queries", "documents"],
    ["queries", "items"],
    ["data_1", "data_2"],
    ["query", "items"],
];

/// Checks for a pair of texts or lists of them, and each list that the engine may read.
fn score(body: &JsonObject, limits: &Limits) -> Result<(), Error> {
    if !PAIRS.iter().any(|pair| pair.iter().all(|key| given(body, key).is_some())) {
        let message = "`text_1` and `text_2` are missing, or another pair of texts: `queries` with \
             `documents` or `items`, `data_1` with `data_2`, `query` with `items`";
        return Err(Error::invalid("text_1", message));
    }
    let all = PAIRS.iter().flatten().filter(|key| given(body, key).is_some());
    all.copied().try_for_each(|key| check_texts(body, key, limits))
}

/// Checks texts to compare: one, or a list. Engines also accept objects with media, and SGLang lists
/// of token ids.
fn check_texts(body: &JsonObject, key: &'static str, limits: &Limits) -> Result<(), Error> {
    let raw = given(body, key).ok_or_else(|| Error::invalid(key, format!("`{key}` is missing")))?;
    let wrong = || Error::invalid(key, format!("`{key}` must be a string or a list"));
    match first(raw) {
        b'"' | b'{' => return Ok(()),
        b'[' if list::is_of::<u32>(raw) => return Ok(()),
        b'[' => {}
        _ => return Err(wrong()),
    }
    let max = limits.embedding_inputs_max;
    match list::entries::<&RawValue>(raw, max) {
        Ok(_) => Ok(()),
        Err(ListError::TooLong) => Err(too_long(key, max)),
        Err(ListError::Wrong) => Err(wrong()),
    }
}

/// Checks for a text or a chat.
fn tokenize(body: &JsonObject) -> Result<(), Error> {
    match (given(body, "prompt"), given(body, "messages")) {
        (Some(prompt), _) if prompt.starts_with('"') => Ok(()),
        (Some(_), None) => Err(Error::invalid("prompt", "`prompt` must be a string")),
        (_, Some(messages)) if messages.starts_with('[') => Ok(()),
        (_, Some(_)) => Err(Error::invalid("messages", "`messages` must be a list")),
        (None, None) => Err(Error::invalid("prompt", "`prompt` is missing")),
    }
}

fn detokenize(body: &JsonObject) -> Result<(), Error> {
    match given(body, "tokens") {
        Some(tokens) if list::is_of::<u64>(tokens) => Ok(()),
        Some(_) => Err(Error::invalid("tokens", "`tokens` must be a list of token ids")),
        None => Err(Error::invalid("tokens", "`tokens` is missing")),
    }
}

/// The raw JSON of a member that is present and not null.
fn given<'a>(body: &'a JsonObject, key: &str) -> Option<&'a str> {
    body.raw(key).filter(|raw| *raw != "null")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn checked(endpoint: Endpoint, text: &str) -> Result<(), Error> {
        let limits = Limits { embedding_inputs_max: 3, ..Limits::default() };
        check(&JsonObject::parse_str(text).unwrap(), endpoint, &limits)
    }

    fn refused(endpoint: Endpoint, text: &str, param: &str) {
        let error = checked(endpoint, text).expect_err(text);
        assert_eq!((error.status().as_u16(), error.param()), (400, Some(param)), "{text}");
    }

    #[test]
    fn embeddings_are_of_texts_token_ids_or_messages() {
        for input in [
            r#""text""#,
            "[1, 2,3,4,5]",
            "[ 1]",
            r#"["a","b","c"]"#,
            "[[1,2],[3]]",
            r#"[{"role":"user","content":"x"}]"#,
            r#"[[{"role":"user","content":"x"}]]"#,
        ] {
            let body = format!(r#"{{"input":{input},"encoding_format":"base64","dimensions":8}}"#);
            checked(Endpoint::Embeddings, &body).unwrap_or_else(|error| panic!("{input} {error}"));
        }
        assert!(checked(Endpoint::Embeddings, r#"{"input":null,"messages":[]}"#).is_ok());
        for input in [
            "[]",
            "{}",
            "1",
            "true",
            "[-1]",
            "[1.5]",
            "[1,\"a\"]",
            "[\"a\",1]",
            "[[1],\"a\"]",
            "[[-1]]",
            "[[\"a\"]]",
            "[null]",
            r#"["a","b","c","d"]"#,
            "null",
        ] {
            refused(Endpoint::Embeddings, &format!(r#"{{"input":{input}}}"#), "input");
        }
        for (members, param) in [
            (r#""encoding_format":"bytes""#, "encoding_format"),
            (r#""encoding_format":1"#, "encoding_format"),
            (r#""dimensions":0"#, "dimensions"),
            (r#""dimensions":"8""#, "dimensions"),
        ] {
            refused(Endpoint::Embeddings, &format!(r#"{{"input":"x",{members}}}"#), param);
        }
        refused(Endpoint::Embeddings, r#"{"messages":"x"}"#, "messages");
    }

    #[test]
    fn texts_are_compared_in_pairs_of_every_form_that_engines_take() {
        for pair in PAIRS {
            let [one, other] = pair;
            for (given, list) in [
                (r#""a""#, r#"["a","b","c"]"#),
                (r#"["a"]"#, r#"[{"content":[]}]"#),
                ("[1,2,3,4,5]", "[[1],[2]]"),
                ("[]", "{}"),
            ] {
                let body = format!(r#"{{"{one}":{given},"{other}":{list}}}"#);
                checked(Endpoint::Score, &body).unwrap_or_else(|error| panic!("{body} {error}"));
            }
            refused(Endpoint::ScoreV1, &format!(r#"{{"{one}":"a"}}"#), "text_1");
            let long = format!(r#"{{"{one}":"a","{other}":["a","b","c","d"]}}"#);
            refused(Endpoint::Score, &long, other);
            refused(Endpoint::Score, &format!(r#"{{"{one}":7,"{other}":"a"}}"#), one);
        }
        // A list of which the engine may take notice although another pair is complete.
        let both = r#"{"text_1":"a","text_2":"b","queries":["a","b","c","d"]}"#;
        refused(Endpoint::Score, both, "queries");
        for endpoint in [Endpoint::RerankV1, Endpoint::RerankV2, Endpoint::Rerank] {
            assert!(checked(endpoint, r#"{"query":"a","documents":["b"]}"#).is_ok());
            for (body, param) in [
                (r#"{"documents":["b"]}"#, "query"),
                (r#"{"query":"a","documents":null}"#, "documents"),
                (r#"{"query":"a","documents":["a","b","c","d"]}"#, "documents"),
                (r#"{"query":true,"documents":["a"]}"#, "query"),
            ] {
                refused(endpoint, body, param);
            }
        }
    }

    #[test]
    fn classes_and_pools_are_of_the_inputs_of_embeddings() {
        for endpoint in [Endpoint::Classify, Endpoint::Pooling] {
            for body in [r#"{"input":["a","b"]}"#, r#"{"messages":[]}"#, r#"{"input":[1,2]}"#] {
                assert!(checked(endpoint, body).is_ok(), "{body}");
            }
            refused(endpoint, "{}", "input");
            refused(endpoint, r#"{"input":["a","b","c","d"]}"#, "input");
        }
        assert!(checked(Endpoint::Pooling, r#"{"data":{"of":["a plugin"]}}"#).is_ok());
        refused(Endpoint::Pooling, r#"{"input":"x","encoding_format":"bytes"}"#, "encoding_format");
    }

    #[test]
    fn texts_and_chats_become_tokens_and_tokens_text() {
        for body in [r#"{"prompt":""}"#, r#"{"messages":[]}"#, r#"{"prompt":[1],"messages":[]}"#] {
            assert!(checked(Endpoint::Tokenize, body).is_ok(), "{body}");
        }
        for (body, param) in [
            ("{}", "prompt"),
            (r#"{"prompt":["a"]}"#, "prompt"),
            (r#"{"messages":{}}"#, "messages"),
        ] {
            refused(Endpoint::Tokenize, body, param);
        }
        assert!(checked(Endpoint::CountTokens, r#"{"messages":[],"system":1}"#).is_ok());
        for body in ["{}", r#"{"messages":null}"#, r#"{"messages":"x"}"#, r#"{"prompt":"x"}"#] {
            refused(Endpoint::CountTokens, body, "messages");
        }
        assert!(checked(Endpoint::Detokenize, r#"{"tokens":[]}"#).is_ok());
        for body in ["{}", r#"{"tokens":"1"}"#, r#"{"tokens":[-1]}"#, r#"{"tokens":[[1]]}"#] {
            refused(Endpoint::Detokenize, body, "tokens");
        }
    }
}
