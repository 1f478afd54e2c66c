//! From a gRPC request to the OpenAI body that it stands for.

use bytes::Bytes;
use serde_json::{Value, json};
use splitrail_proto::v1;
use splitrail_proto::v1::generate_request::Prompt;

use crate::api::{Endpoint, JsonObject, json};
use crate::error::{Error, Kind};

/// Members that the message has a place for.
const OWN_FIELDS: [&str; 19] = [
    "model",
    "prompt",
    "messages",
    "stream",
    "stream_options",
    "cache_hit_threshold",
    "cache_salt",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "n",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
];

/// Members whose answers have no place in this door's replies.
const NO_PLACE: [&str; 6] =
    ["logprobs", "top_logprobs", "prompt_logprobs", "tools", "functions", "echo"];

/// The body of a request, for chat if its prompt is one; always streamed, always with usage.
///
/// # Errors
/// A request that cannot be served as written.
pub(super) fn body_of(request: v1::GenerateRequest) -> Result<Bytes, Error> {
    let extra = request.extra_body_json.trim();
    let mut body = JsonObject::parse_str(if extra.is_empty() { "{}" } else { extra })?;
    if let Some((key, _)) = body.members().find(|(key, _)| OWN_FIELDS.contains(key)) {
        let message = format!("`{key}` has a place of its own; it cannot be in extra_body_json");
        return Err(Error::invalid("extra_body_json", message));
    }
    if let Some((key, _)) = body.members().find(|(key, _)| NO_PLACE.contains(key)) {
        let message = format!("what `{key}` asks for has no place in gRPC replies; use HTTP");
        return Err(Error::invalid("extra_body_json", message));
    }
    body.set("model", json::quote(&request.model));
    let endpoint = match request.prompt {
        None => return Err(Error::invalid("prompt", "a prompt is missing")),
        Some(Prompt::Text(text)) => {
            body.set("prompt", json::quote(&text));
            Endpoint::Completions
        }
        Some(Prompt::TokenIds(v1::TokenIds { ids })) => {
            body.set("prompt", json!(ids).to_string());
            Endpoint::Completions
        }
        Some(Prompt::Chat(chat)) => {
            let messages: Vec<Value> = chat.messages.into_iter().map(message).collect();
            body.set("messages", Value::from(messages).to_string());
            Endpoint::Chat
        }
    };
    if let Some(salt) = &request.cache_salt {
        body.set("cache_salt", json::quote(salt));
    }
    if let Some(threshold) = request.cache_hit_threshold {
        // What is no JSON number is no threshold either.
        crate::api::request::check_threshold(threshold)?;
        body.set("cache_hit_threshold", json!(threshold).to_string());
    }
    sampling(&mut body, request.sampling.unwrap_or_default(), endpoint)?;
    body.set("stream", "true");
    body.set("stream_options", r#"{"include_usage":true}"#);
    Ok(body.to_bytes())
}

fn message(message: v1::ChatMessage) -> Value {
    let mut object = json!({"role": message.role, "content": message.content});
    if let Some(name) = message.name {
        object["name"] = name.into();
    }
    if let Some(id) = message.tool_call_id {
        object["tool_call_id"] = id.into();
    }
    object
}

fn sampling(
    body: &mut JsonObject,
    params: v1::SamplingParams,
    endpoint: Endpoint,
) -> Result<(), Error> {
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            body.set(key, value.to_string());
        }
    };
    let max_tokens = match endpoint {
        Endpoint::Chat => "max_completion_tokens",
        _ => "max_tokens",
    };
    set(max_tokens, params.max_tokens.map(Value::from));
    set("min_tokens", params.min_tokens.map(Value::from));
    for (key, value) in [
        ("temperature", params.temperature),
        ("top_p", params.top_p),
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
    ] {
        if value.is_some_and(|value| !value.is_finite()) {
            let message = format!("`{key}` is not a finite number");
            return Err(Error::new(Kind::InvalidRequest, message));
        }
        set(key, value.map(Value::from));
    }
    set("top_k", params.top_k.map(Value::from));
    set("seed", params.seed.map(Value::from));
    set("n", params.n.map(Value::from));
    set("ignore_eos", params.ignore_eos.map(Value::from));
    set("stop", (!params.stop.is_empty()).then(|| params.stop.into()));
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_chat_becomes_the_same_body_as_over_http() {
        let request = v1::GenerateRequest {
            model: "m".into(),
            prompt: Some(Prompt::Chat(v1::Chat {
                messages: vec![v1::ChatMessage {
                    role: "user".into(),
                    content: "hi \"there\"".into(),
                    ..Default::default()
                }],
            })),
            sampling: Some(v1::SamplingParams {
                max_tokens: Some(5),
                temperature: Some(0.0),
                ..Default::default()
            }),
            extra_body_json: r#"{"logit_bias":{"5":1}}"#.into(),
            ..Default::default()
        };
        let body = body_of(request).unwrap();
        assert_eq!(
            serde_json::from_slice::<Value>(&body).unwrap(),
            json!({
                "logit_bias": {"5": 1}, "model": "m",
                "messages": [{"role": "user", "content": "hi \"there\""}],
                "max_completion_tokens": 5, "temperature": 0.0,
                "stream": true, "stream_options": {"include_usage": true}
            })
        );
    }

    #[test]
    fn fields_with_a_place_of_their_own_are_refused_elsewhere() {
        let request = v1::GenerateRequest {
            prompt: Some(Prompt::Text("x".into())),
            extra_body_json: r#"{"stream":false}"#.into(),
            ..Default::default()
        };
        assert_eq!(body_of(request).unwrap_err().status(), 400);
        assert_eq!(body_of(v1::GenerateRequest::default()).unwrap_err().status(), 400);
    }
}
