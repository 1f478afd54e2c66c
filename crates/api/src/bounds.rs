//! Limits on what one request may ask for.

use std::borrow::Cow;
use std::ops::RangeInclusive;

use serde_json::value::RawValue;

use super::json::JsonObject;
use super::list::{self, ListError};
use crate::error::Error;
use splitrail_config::model::Limits;

/// Members whose JSON may be long: schemas, grammars, tools, lists of tokens and template arguments.
const SCHEMAS: [&str; 21] = [
    "tools",
    "functions",
    "response_format",
    "output_config",
    "text",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "stop_regex",
    "logit_bias",
    "allowed_token_ids",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "chat_template_kwargs",
];

/// Checks counts and sizes at the top level and in `sampling_params`.
///
/// # Errors
/// A 400 that names the field and the limit.
pub fn check(body: &JsonObject, limits: &Limits) -> Result<(), Error> {
    check_object(body, limits)?;
    match body.raw("sampling_params") {
        Some(raw) if raw.starts_with('{') => check_object(&JsonObject::parse_str(raw)?, limits),
        _ => Ok(()),
    }
}

fn check_object(body: &JsonObject, limits: &Limits) -> Result<(), Error> {
    body.members().try_for_each(|(key, raw)| check_member(key, raw, limits))
}

fn check_member(key: &str, raw: &str, limits: &Limits) -> Result<(), Error> {
    match key {
        "n" | "best_of" => count(key, raw, 1..=i128::from(limits.n_max), "limits.n_max"),
        "max_tokens" | "max_completion_tokens" | "max_output_tokens" | "min_tokens" => {
            let range = 0..=i128::from(limits.output_tokens_max);
            count(key, raw, range, "limits.output_tokens_max")
        }
        "logprobs" | "top_logprobs" | "prompt_logprobs" => logprobs(key, raw),
        "stop" | "stop_sequences" | "stop_token_ids" | "bad_words" => stops(key, raw, limits),
        _ if raw.len() > limits.schema_max_bytes && SCHEMAS.contains(&key) => {
            let (bytes, max) = (raw.len(), limits.schema_max_bytes);
            let message = format!(
                "`{key}` has {bytes} bytes; at most {max} are allowed (limits.schema_size_max)"
            );
            Err(Error::invalid(key.to_owned(), message))
        }
        _ => Ok(()),
    }
}

fn count(key: &str, raw: &str, range: RangeInclusive<i128>, limit: &str) -> Result<(), Error> {
    match integer(key, raw, "an integer")? {
        Some(value) if !range.contains(&value) => {
            let (min, max) = range.into_inner();
            let message = format!("`{key}` must be from {min} to {max} ({limit})");
            Err(Error::invalid(key.to_owned(), message))
        }
        _ => Ok(()),
    }
}

/// Checks `logprobs`, which is a flag in chat and a number in completions; -1 means all.
fn logprobs(key: &str, raw: &str) -> Result<(), Error> {
    const MAX: i128 = 1 << 18;
    if matches!(raw, "true" | "false") {
        return Ok(());
    }
    match integer(key, raw, "an integer or a boolean")? {
        Some(value) if !(-1..=MAX).contains(&value) => {
            let message = format!("`{key}` must be from -1 to {MAX}");
            Err(Error::invalid(key.to_owned(), message))
        }
        _ => Ok(()),
    }
}

/// The value of a member; `None` for `null`.
fn integer(key: &str, raw: &str, expected: &str) -> Result<Option<i128>, Error> {
    serde_json::from_str(raw)
        .map_err(|_| Error::invalid(key.to_owned(), format!("`{key}` must be {expected}")))
}

fn stops(key: &str, raw: &str, limits: &Limits) -> Result<(), Error> {
    const STOP_MAX_BYTES: usize = 4096;
    if raw == "null" {
        return Ok(());
    }
    let max = limits.stop_max;
    // Engines check these only in the decode leg; checking them here reports a mistake before any
    // prompt is computed.
    let (read, expected) = match (key, raw.starts_with('"')) {
        ("stop_token_ids", _) => (list::entries::<i64>(raw, max).map(drop), "a list of token ids"),
        (_, true) => (Ok(()), ""),
        _ => (list::entries::<Cow<'_, str>>(raw, max).map(drop), "a string or a list of strings"),
    };
    read.map_err(|fault| match fault {
        ListError::Wrong => Error::invalid(key.to_owned(), format!("`{key}` must be {expected}")),
        ListError::TooLong => {
            let message = format!("`{key}` has more than {max} entries (limits.stop_max)");
            Error::invalid(key.to_owned(), message)
        }
    })?;
    let too_long = |raw: &str| raw.len() > STOP_MAX_BYTES;
    let texts = list::entries::<&RawValue>(raw, max).unwrap_or_default();
    if texts.iter().any(|text| too_long(text.get())) || (raw.starts_with('"') && too_long(raw)) {
        let message = format!("an entry of `{key}` has more than {STOP_MAX_BYTES} bytes");
        return Err(Error::invalid(key.to_owned(), message));
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_sizes_are_bounded_wherever_they_stand() {
        let limits = Limits { stop_max: 2, n_max: 8, schema_max_bytes: 1024, ..Limits::default() };
        let tools = format!(r#"{{"tools":"{}"}}"#, "x".repeat(2000));
        for (text, param) in [
            (r#"{"n":2147483648}"#, "n"),
            (r#"{"n":0}"#, "n"),
            (r#"{"n":-1}"#, "n"),
            (r#"{"n":"2"}"#, "n"),
            (r#"{"n":1.5}"#, "n"),
            (r#"{"best_of":9}"#, "best_of"),
            (r#"{"max_tokens":99999999999999999999}"#, "max_tokens"),
            (r#"{"max_completion_tokens":1048577}"#, "max_completion_tokens"),
            (r#"{"min_tokens":-5}"#, "min_tokens"),
            (r#"{"stop":["a","b","c"]}"#, "stop"),
            (r#"{"stop":5}"#, "stop"),
            (r#"{"stop":["a",5]}"#, "stop"),
            (r#"{"stop_token_ids":["a"]}"#, "stop_token_ids"),
            (r#"{"sampling_params":{"n":9}}"#, "n"),
            (r#"{"prompt_logprobs":9999999}"#, "prompt_logprobs"),
            (tools.as_str(), "tools"),
        ] {
            let error = check(&JsonObject::parse_str(text).unwrap(), &limits).unwrap_err();
            assert_eq!(error.status(), 400, "{text}");
            assert!(error.to_openai().contains(&format!("\"param\":\"{param}\"")), "{text}");
        }
        for text in [
            r#"{"n":8,"stop":["a","b"],"logprobs":true,"max_tokens":null}"#,
            r#"{"logprobs":5,"stop":"a","n":null}"#,
        ] {
            assert!(check(&JsonObject::parse_str(text).unwrap(), &limits).is_ok(), "{text}");
        }
    }
}
