//! Checks the bodies of requests to auxiliary endpoints: their input and, for embeddings,
//! `encoding_format` and `dimensions`. Mistakes in other members are reported by the engine.

use serde_json::value::RawValue;

use super::json::JsonObject;
use super::list::{self, ListError};
use super::request::{Endpoint, check_messages};
use crate::error::Error;
use splitrail_config::model::Limits;

/// Checks the members that define the task.
///
/// # Errors
/// A 400 that names the member at fault.
pub(super) fn check(body: &JsonObject, endpoint: Endpoint, limits: &Limits) -> Result<(), Error> {
    match endpoint {
        Endpoint::Embeddings => embeddings(body, limits),
        Endpoint::Detokenize => detokenize(body),
        Endpoint::CountTokens => check_messages(body),
        _ => tokenize(body),
    }
}

/// Checks `input`: a text, token ids, or a list of either. Engines also accept messages, in its
/// place or as its entries.
fn embeddings(body: &JsonObject, limits: &Limits) -> Result<(), Error> {
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
    let first = |raw: &str| raw.bytes().next().unwrap_or_default();
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
        ListError::TooLong => {
            let limit = "limits.embedding_inputs_max";
            Error::invalid("input", format!("`input` has more than {max} entries ({limit})"))
        }
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
