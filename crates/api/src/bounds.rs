//! Limits on what one request may ask for.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::json::JsonObject;
use super::list::{self, ListError};
use crate::error::Error;
use splitrail_config::model::Limits;

/// Members that set a number of output tokens.
const OUTPUT_TOKENS: [&str; 4] =
    ["max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"];

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
    for key in ["n", "best_of"] {
        count(body, key, 1, u64::from(limits.n_max), "limits.n_max")?;
    }
    for key in OUTPUT_TOKENS {
        let max = u64::from(limits.output_tokens_max);
        count(body, key, 0, max, "limits.output_tokens_max")?;
    }
    for key in ["logprobs", "top_logprobs", "prompt_logprobs"] {
        bounded_logprobs(body, key)?;
    }
    for key in ["stop", "stop_sequences", "stop_token_ids", "bad_words"] {
        stops(body, key, limits)?;
    }
    for key in SCHEMAS {
        let bytes = body.raw(key).map_or(0, str::len);
        if bytes > limits.schema_max_bytes {
            let max = limits.schema_max_bytes;
            return Err(Error::invalid(
                key,
                format!(
                    "`{key}` has {bytes} bytes; at most {max} are allowed (limits.schema_size_max)"
                ),
            ));
        }
    }
    Ok(())
}

fn count(
    body: &JsonObject,
    key: &'static str,
    min: u64,
    max: u64,
    limit: &str,
) -> Result<(), Error> {
    let Some(value) = body.get::<i128>(key, "an integer")? else {
        return Ok(());
    };
    if value < i128::from(min) || value > i128::from(max) {
        return Err(Error::invalid(key, format!("`{key}` must be from {min} to {max} ({limit})")));
    }
    Ok(())
}

/// Checks `logprobs`, which is a flag in chat and a number in completions; -1 means all.
fn bounded_logprobs(body: &JsonObject, key: &'static str) -> Result<(), Error> {
    const MAX: i128 = 1 << 18;
    match body.raw(key) {
        None | Some("true" | "false" | "null") => Ok(()),
        Some(_) => match body.get::<i128>(key, "an integer or a boolean")? {
            Some(value) if !(-1..=MAX).contains(&value) => {
                Err(Error::invalid(key, format!("`{key}` must be from -1 to {MAX}")))
            }
            _ => Ok(()),
        },
    }
}

fn stops(body: &JsonObject, key: &'static str, limits: &Limits) -> Result<(), Error> {
    const STOP_MAX_BYTES: usize = 4096;
    let Some(raw) = body.raw(key).filter(|raw| *raw != "null") else { return Ok(()) };
    let max = limits.stop_max;
    // Engines check these only in the decode leg; checking them here reports a mistake before any
    // prompt is computed.
    let (read, expected) = match (key, raw.starts_with('"')) {
        ("stop_token_ids", _) => (list::entries::<i64>(raw, max).map(drop), "a list of token ids"),
        (_, true) => (Ok(()), ""),
        _ => (list::entries::<Cow<'_, str>>(raw, max).map(drop), "a string or a list of strings"),
    };
    read.map_err(|fault| match fault {
        ListError::Wrong => Error::invalid(key, format!("`{key}` must be {expected}")),
        ListError::TooLong => {
            let message = format!("`{key}` has more than {max} entries (limits.stop_max)");
            Error::invalid(key, message)
        }
    })?;
    let too_long = |raw: &str| raw.len() > STOP_MAX_BYTES;
    let texts = list::entries::<&RawValue>(raw, max).unwrap_or_default();
    if texts.iter().any(|text| too_long(text.get())) || (raw.starts_with('"') && too_long(raw)) {
        return Err(Error::invalid(
            key,
            format!("an entry of `{key}` has more than {STOP_MAX_BYTES} bytes"),
        ));
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
