//! Requests and replies of `/v1/responses` and `/v1/messages`, and what they say in the words of
//! chats.

use serde_json::{Value, json};

use crate::client::{Client, Events};

/// OpenAI's Responses.
pub const RESPONSES: &str = "/v1/responses";

/// Anthropic's Messages.
pub const MESSAGES: &str = "/v1/messages";

/// Both.
pub const BOTH: [&str; 2] = [RESPONSES, MESSAGES];

/// A system prompt that tells texts apart before the first block is full.
fn system(text: &str) -> String {
    format!("{} - be brief.", text.chars().take(8).collect::<String>())
}

/// A request for so many tokens, which stands for a chat of a system and a user message.
pub fn request(path: &str, text: &str, tokens: u32) -> Value {
    match path {
        RESPONSES => json!({
            "model": "sim", "instructions": system(text), "input": text,
            "max_output_tokens": tokens, "temperature": 0,
        }),
        MESSAGES => json!({
            "model": "sim", "system": system(text), "max_tokens": tokens, "temperature": 0,
            "messages": [{"role": "user", "content": text}],
        }),
        _ => panic!("another endpoint"),
    }
}

/// The chat that it stands for.
pub fn chat_of(text: &str, tokens: u32) -> Value {
    let messages = json!([
        {"role": "system", "content": system(text)}, {"role": "user", "content": text},
    ]);
    json!({"model": "sim", "max_tokens": tokens, "temperature": 0, "messages": messages})
}

/// Text and usage of an answer, whole or streamed; the usage as a chat would have it, with the
/// three parts of a message's prompt added up.
pub async fn ask(http: &Client, path: &str, body: &Value) -> (String, Value) {
    if body["stream"] == true {
        let events = http.stream(path, body).await.named().await;
        let (text, usage) = of_events(path, &events);
        return (text, in_chat_words(path, &usage));
    }
    let reply = http.post(path, body).await;
    assert_eq!(reply.status, 200, "{path}: {}", reply.text());
    let reply = reply.json();
    (text_of(path, &reply), in_chat_words(path, &reply["usage"]))
}

/// The text of a whole reply.
pub fn text_of(path: &str, reply: &Value) -> String {
    let content = match path {
        RESPONSES => &reply["output"][0]["content"],
        _ => &reply["content"],
    };
    let parts = content.as_array().into_iter().flatten();
    parts.filter_map(|part| part["text"].as_str()).collect()
}

/// The text of a stream, which must be in the right order, and its usage.
pub fn of_events(path: &str, events: &[(String, Value)]) -> (String, Value) {
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    for (name, data) in events {
        assert_eq!(data["type"], name.as_str(), "a name is its data's type");
    }
    let (_, last) = events.last().expect("events");
    if path == MESSAGES {
        assert_eq!(names[0], "message_start", "{names:?}");
        assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"], "{names:?}");
        let deltas = events.iter().filter_map(|(_, data)| data["delta"]["text"].as_str());
        return (deltas.collect(), events[events.len() - 2].1["usage"].clone());
    }
    assert_eq!(names[..2], ["response.created", "response.in_progress"], "{names:?}");
    assert_eq!(names.last(), Some(&"response.completed"), "{names:?}");
    for (at, (_, data)) in events.iter().enumerate() {
        assert_eq!(data["sequence_number"], at, "none is missing and none is twice");
    }
    let deltas = events.iter().filter(|(name, _)| name == "response.output_text.delta");
    let text: String = deltas.filter_map(|(_, data)| data["delta"].as_str()).collect();
    assert_eq!(text, text_of(path, &last["response"]), "the end repeats the whole");
    (text, last["response"]["usage"].clone())
}

/// A usage in the words of chats.
pub fn in_chat_words(path: &str, usage: &Value) -> Value {
    let count = |key: &str| usage[key].as_u64().unwrap_or(0);
    let prompt = count("input_tokens")
        + count("cache_read_input_tokens")
        + count("cache_creation_input_tokens");
    let cached = match path {
        RESPONSES => &usage["input_tokens_details"]["cached_tokens"],
        _ => &usage["cache_read_input_tokens"],
    };
    let completion = count("output_tokens");
    if path == RESPONSES {
        assert_eq!(count("total_tokens"), prompt + completion, "{usage}");
    }
    json!({
        "prompt_tokens": prompt, "completion_tokens": completion,
        "total_tokens": prompt + completion, "prompt_tokens_details": {"cached_tokens": cached},
    })
}

impl Events {
    /// All events up to the end of the connection, with their names.
    pub async fn named(&mut self) -> Vec<(String, Value)> {
        assert_eq!(self.status, 200);
        let text = self.rest_text().await;
        let whole = text.strip_suffix("\n\n").unwrap_or_else(|| panic!("cut short: {text:?}"));
        let event = |event: &str| {
            let lines = event.split_once('\n').expect("two lines");
            let name = lines.0.strip_prefix("event: ").expect("a name");
            let data = lines.1.strip_prefix("data: ").expect("data");
            (name.to_owned(), serde_json::from_str(data).expect("JSON"))
        };
        whole.split("\n\n").map(event).collect()
    }
}
