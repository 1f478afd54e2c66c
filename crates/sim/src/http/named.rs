//! `/v1/responses` and `/v1/messages`: like the real engine, this one converts a request to a chat
//! from the members that it knows, and ignores the others.

use http::StatusCode;
use serde_json::{Map, Value, json};

use super::endpoint::Endpoint;
use crate::config::{KvConnector, SimConfig};
use crate::error::ApiError;

/// Members of a messages request with the same meaning in a chat.
const OF_MESSAGES: [&str; 11] = [
    "model",
    "stream",
    "temperature",
    "max_tokens",
    "cache_salt",
    "kv_transfer_params",
    "vllm_xargs",
    "top_p",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
];

/// Members of a responses request with the same meaning in a chat.
const OF_RESPONSES: [&str; 14] = [
    "model",
    "stream",
    "temperature",
    "seed",
    "stop",
    "ignore_eos",
    "cache_salt",
    "kv_transfer_params",
    "vllm_xargs",
    "top_p",
    "stop_token_ids",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
];

/// The chat that corresponds to a request of this endpoint.
pub(super) fn chat_of(
    endpoint: Endpoint,
    body: &Value,
    config: &SimConfig,
) -> Result<Value, ApiError> {
    let mut chat = match endpoint {
        Endpoint::Messages if body["max_tokens"].as_u64().is_none_or(|tokens| tokens == 0) => {
            return Err(ApiError::bad_request("max_tokens", "max_tokens must be positive"));
        }
        Endpoint::Messages if config.connector == KvConnector::Sglang => {
            // SGLang's messages have no salt.
            let unsalted = body.as_object().into_iter().flatten();
            let unsalted = unsalted.filter(|(key, _)| *key != "cache_salt");
            of_message(&unsalted.map(|(key, value)| (key.clone(), value.clone())).collect())?
        }
        Endpoint::Messages => of_message(body)?,
        _ => of_response(body)?,
    };
    if let Some(chat) = chat.as_object_mut().filter(|_| !config.names_hand_offs) {
        chat.remove("kv_transfer_params");
    }
    Ok(chat)
}

fn taken(body: &Value, known: &[&str]) -> Map<String, Value> {
    let members = body.as_object().into_iter().flatten();
    let members = members.filter(|(key, _)| known.contains(&key.as_str()));
    members.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// The chat that corresponds to a messages request; the maximum length is optional here.
pub(super) fn of_message(body: &Value) -> Result<Value, ApiError> {
    let mut chat = taken(body, &OF_MESSAGES);
    let wrong = |what| ApiError::bad_request("messages", what);
    let messages = body["messages"].as_array().ok_or(wrong("messages must be a list"))?;
    let mut made = Vec::new();
    let system = match &body["system"] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        blocks => texts(blocks, "text").ok_or(wrong("only text is supported"))?.concat(),
    };
    if !system.is_empty() {
        made.push(json!({"role": "system", "content": system}));
    }
    for message in messages {
        let role = &message["role"];
        if !["user", "assistant", "system"].iter().any(|known| role == known) {
            return Err(wrong("a role that is not known"));
        }
        let content = match &message["content"] {
            Value::String(text) => json!(text),
            blocks => {
                let texts = texts(blocks, "text").ok_or(wrong("only text is supported"))?;
                match &texts[..] {
                    [one] => json!(one),
                    all => all.iter().map(|t| json!({"type": "text", "text": t})).collect(),
                }
            }
        };
        made.push(json!({"role": role, "content": content}));
    }
    chat.insert("messages".into(), made.into());
    if !body["stop_sequences"].is_null() {
        chat.insert("stop".into(), body["stop_sequences"].clone());
    }
    Ok(chat.into())
}

fn of_response(body: &Value) -> Result<Value, ApiError> {
    let mut chat = taken(body, &OF_RESPONSES);
    if let Some(id) = body["previous_response_id"].as_str() {
        let message = format!("Response with id '{id}' not found.");
        let error = ApiError::new(StatusCode::NOT_FOUND, message);
        return Err(ApiError { param: Some("response_id"), ..error });
    }
    if body["background"] == true {
        return Err(ApiError::bad_request("background", "This engine does not store responses."));
    }
    let wrong = || ApiError::bad_request("input", "input must be a text or items of text");
    let mut made = Vec::new();
    if let Some(text) = body["instructions"].as_str().filter(|text| !text.is_empty()) {
        made.push(json!({"role": "system", "content": text}));
    }
    match &body["input"] {
        Value::String(text) => made.push(json!({"role": "user", "content": text})),
        Value::Array(items) => {
            for item in items {
                let role = item["role"].as_str().ok_or_else(wrong)?;
                let kind = if role == "assistant" { "output_text" } else { "input_text" };
                let content = match &item["content"] {
                    Value::String(text) => json!(text),
                    parts => {
                        let texts = texts(parts, kind).ok_or_else(wrong)?;
                        match role {
                            "assistant" => json!(texts.first().ok_or_else(wrong)?),
                            _ => texts.iter().map(|t| json!({"type": "text", "text": t})).collect(),
                        }
                    }
                };
                made.push(json!({"role": role, "content": content}));
            }
        }
        _ => return Err(wrong()),
    }
    chat.insert("messages".into(), made.into());
    chat.insert("max_tokens".into(), body["max_output_tokens"].clone());
    Ok(chat.into())
}

/// The texts of blocks or parts of one kind; empty ones are skipped.
fn texts(list: &Value, kind: &str) -> Option<Vec<String>> {
    let text = |part: &Value| {
        let text = part["text"].as_str().filter(|_| part["type"] == kind);
        text.map(str::to_owned)
    };
    let texts = list.as_array()?.iter().map(text).collect::<Option<Vec<_>>>()?;
    Some(texts.into_iter().filter(|text| !text.is_empty()).collect())
}
