//! Finds the text in an event whose engine does not name the tokens, so that they can be counted.

use serde_json::Value;
use splitrail_engine::dialect::Dialect;

use super::dialect::read;

/// Members that are no output: names and kinds.
const NO_OUTPUT: [&str; 4] = ["role", "type", "id", "index"];

/// Calls `visit` with each piece of generated text in an event's data. A choice that names its token
/// ids is left out.
pub fn each_text(dialect: Dialect, data: &[u8], mut visit: impl FnMut(&str)) {
    let Some(event) = read::<Value>(data) else { return };
    match dialect {
        Dialect::Chunks => {
            for choice in event["choices"].as_array().into_iter().flatten() {
                if choice["token_ids"].is_null() {
                    let texts = [&choice["text"], &choice["delta"]];
                    texts.into_iter().for_each(|text| visit_strings(text, &mut visit));
                }
            }
        }
        Dialect::Responses | Dialect::Messages => visit_strings(&event["delta"], &mut visit),
    }
}

fn visit_strings(value: &Value, visit: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => visit(text),
        Value::Array(items) => items.iter().for_each(|item| visit_strings(item, visit)),
        Value::Object(members) => {
            let output = members.iter().filter(|(key, _)| !NO_OUTPUT.contains(&key.as_str()));
            output.for_each(|(_, member)| visit_strings(member, visit));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generated_text_of_an_event_is_found_in_each_dialect() {
        for (dialect, data, expected) in [
            (
                Dialect::Chunks,
                r#"{"choices":[{"text":"a b"},{"text":"c","token_ids":[1]}]}"#,
                "a b|",
            ),
            (
                Dialect::Chunks,
                r#"{"choices":[{"delta":{"role":"assistant","content":"x","reasoning_content":"y"}}]}"#,
                "x|y|",
            ),
            (
                Dialect::Chunks,
                r#"{"choices":[{"delta":{"tool_calls":[{"id":"c","type":"function","index":0,
                    "function":{"name":"f","arguments":"{\"a\""}}]}}]}"#,
                "f|{\"a\"|",
            ),
            (Dialect::Responses, r#"{"type":"response.output_text.delta","delta":"a"}"#, "a|"),
            (
                Dialect::Messages,
                r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}"#,
                "a|",
            ),
            (Dialect::Chunks, "no JSON", ""),
        ] {
            let mut texts = String::new();
            each_text(dialect, data.as_bytes(), |text| texts.extend([text, "|"]));
            assert_eq!(texts, expected, "{data}");
        }
    }
}
