//! `/tokenize` and `/detokenize`: the tokens of a prompt as the engine makes them, and back.

use serde::Deserialize;
use serde_json::{Value, json};

/// The path of the endpoint. vLLM always has it.
pub const TOKENIZE_PATH: &str = "/tokenize";

/// The request for the tokens of a chat, with the defaults of a chat completion.
#[must_use]
pub fn chat_body(model: &str, messages: &Value) -> Value {
    json!({
        "model": model, "messages": messages,
        "add_generation_prompt": true, "add_special_tokens": false,
    })
}

/// The request for the tokens of a text, as of a completion with this `add_special_tokens`.
#[must_use]
pub fn text_body(model: &str, text: &str, add_special_tokens: bool) -> Value {
    json!({"model": model, "prompt": text, "add_special_tokens": add_special_tokens})
}

/// The path of the reverse endpoint.
pub const DETOKENIZE_PATH: &str = "/detokenize";

/// The request for the text of tokens.
#[must_use]
pub fn detokenize_body(model: &str, ids: &[u32]) -> Value {
    json!({"model": model, "tokens": ids})
}

/// The text in a reply of the reverse endpoint; `None` if it has none.
#[must_use]
pub fn reply_text(reply: &[u8]) -> Option<String> {
    let reply: Value = serde_json::from_slice(reply).ok()?;
    Some(reply["prompt"].as_str()?.to_owned())
}

/// The token ids in a reply; `None` if it is not one of this endpoint.
#[must_use]
pub fn reply_ids(reply: &[u8]) -> Option<Vec<u32>> {
    #[derive(Deserialize)]
    struct Reply {
        tokens: Vec<u32>,
    }
    let reply: Reply = serde_json::from_slice(reply).ok()?;
    Some(reply.tokens)
}

/// A list of token ids; `None` if the value is none.
#[must_use]
pub fn ids(value: &Value) -> Option<Vec<u32>> {
    let ids = value.as_array()?.iter();
    ids.map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_list_of_ids_is_taken_as_tokens() {
        assert_eq!(reply_ids(br#"{"count":2,"tokens":[1,2]}"#), Some(vec![1, 2]));
        for other in [&b""[..], b"{}", br#"{"tokens":[-1]}"#, br#"{"tokens":["a"]}"#, b"[1]"] {
            assert_eq!(reply_ids(other), None);
        }
    }
}
