//! What the choices of a reply or an event say of the engine's decision to run them.

use serde_json::Value;
use splitrail_engine::dialect::Dialect;

/// The finish reason by which an engine says that it holds too little of the prompt.
pub const CACHE_THRESHOLD: &str = "cache_threshold";

/// Whether a choice of this reply or event was turned away for its threshold. Only dialects
/// with choices have a form for that.
pub fn turned_away(dialect: Dialect, data: &[u8]) -> bool {
    if dialect != Dialect::Chunks {
        return false;
    }
    // Few bytes hold the word at all, and those may hold it as text.
    let word = CACHE_THRESHOLD.as_bytes();
    if memchr::memmem::find(data, word).is_none() {
        return false;
    }
    let reply: Value = serde_json::from_slice(data).unwrap_or_default();
    choices(&reply).any(|choice| choice["finish_reason"] == CACHE_THRESHOLD)
}

/// The places of the choices that an event gives some output of, or ends.
pub fn begun(data: &[u8]) -> Vec<u64> {
    let event: Value = serde_json::from_slice(data).unwrap_or_default();
    let shown = choices(&event).filter(|choice| has_output(choice));
    shown.map(|choice| choice["index"].as_u64().unwrap_or(0)).collect()
}

fn choices(reply: &Value) -> impl Iterator<Item = &Value> {
    reply["choices"].as_array().into_iter().flatten()
}

/// A chat's first chunk only names the role: it comes before the engine has decided.
fn has_output(choice: &Value) -> bool {
    let delta = choice["delta"].as_object().into_iter().flatten();
    let said = |(key, value): (&String, &Value)| key != "role" && is_something(value);
    is_something(&choice["finish_reason"])
        || is_something(&choice["text"])
        || is_something(&choice["token_ids"])
        || delta.into_iter().any(said)
}

fn is_something(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(members) => !members.is_empty(),
        Value::Bool(_) | Value::Number(_) => true,
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
            assert!(turned_away(Dialect::Chunks, data.as_bytes()), "{data}");
        }
        for data in [
            r#"{"choices":[{"text":"cache_threshold","finish_reason":null}]}"#,
            r#"{"choices":[{"text":"\"finish_reason\":\"cache_threshold\""}]}"#,
            r#"{"choices":[],"x":"cache_threshold"}"#,
            "cache_threshold",
        ] {
            assert!(!turned_away(Dialect::Chunks, data.as_bytes()), "{data}");
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
        ] {
            assert_eq!(begun(data.as_bytes()), shown, "{data}");
        }
    }
}
