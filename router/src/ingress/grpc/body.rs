//! Converts a gRPC request to the equivalent OpenAI body.

use bytes::Bytes;
use serde::Serialize;
use splitrail_proto::v1;
use splitrail_proto::v1::generate_request::Prompt;

use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::json::{Builder, write_text};
use splitrail_api::request::{Prompt as Asked, check_threshold};
use splitrail_api::{Endpoint, JsonObject};
use splitrail_config::model::Limits;
use splitrail_flow::prepare::{BuiltBody, Payload, indentation_bytes, is_harmless};

use super::decode::DecodedMessage;

/// Members for which the message has fields of its own.
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

/// Members whose results have no place in gRPC replies.
const NO_PLACE: [&str; 6] =
    ["logprobs", "top_logprobs", "prompt_logprobs", "tools", "functions", "echo"];

/// The conversion of a request to a body, with an estimate of its work from the request and its
/// encoding.
pub(super) fn payload(request: DecodedMessage<v1::GenerateRequest>, encoded: &[u8]) -> Payload {
    let bytes = encoded.len();
    let parts = match &request.prompt {
        Some(Prompt::Chat(chat)) => chat.messages.len(),
        Some(Prompt::Text(_)) | None => 1,
        // Numbers cannot be counted as words.
        Some(Prompt::TokenIds(_)) => usize::MAX,
    };
    let is_harmless = is_harmless(encoded, parts) && request.extra_body_json.is_empty();
    Payload::Builder {
        bytes: bytes + indentation_bytes(request.extra_body_json.as_bytes()),
        is_harmless,
        build: Box::new(move |limits| body_of(request.into_inner(), bytes, limits)),
    }
}

/// Builds the body of a request of `bytes` encoded bytes, for chat if its prompt is a chat; always
/// streamed and always with usage. The body is written once and never parsed.
///
/// # Errors
/// The request cannot be served as written.
fn body_of(
    request: v1::GenerateRequest,
    bytes: usize,
    limits: &Limits,
) -> Result<BuiltBody, Error> {
    const OWN_BYTES: usize = 512;
    let mut body = Builder::with_capacity(bytes + OWN_BYTES);
    let extra = request.extra_body_json.trim();
    if !extra.is_empty() {
        add_extra_members(&mut body, extra, limits)?;
    }
    body.put_text("model", &request.model);
    let (endpoint, prompt) = match request.prompt {
        None => return Err(Error::invalid("prompt", "a prompt is missing")),
        Some(Prompt::Text(text)) => {
            body.put_text("prompt", &text);
            (Endpoint::Completions, Some(Asked::Text(text)))
        }
        Some(Prompt::TokenIds(v1::TokenIds { ids })) => {
            body.put("prompt", &ids);
            (Endpoint::Completions, Some(Asked::Tokens(ids)))
        }
        Some(Prompt::Chat(chat)) => {
            body.put_with("messages", |text| messages(text, &chat.messages));
            (Endpoint::Chat, None)
        }
    };
    if let Some(salt) = &request.cache_salt {
        body.put_text("cache_salt", salt);
    }
    if let Some(threshold) = request.cache_hit_threshold {
        // A value that is not a JSON number is not a threshold.
        body.put("cache_hit_threshold", check_threshold(threshold)?);
    }
    sampling(&mut body, &request.sampling.unwrap_or_default(), endpoint)?;
    body.put_with("stream", |text| text.push_str("true"));
    body.put_with("stream_options", |text| text.push_str(r#"{"include_usage":true}"#));
    Ok(BuiltBody { body: body.build(), prompt })
}

/// Adds the members of `extra_body_json` unchanged. Only this part is checked.
fn add_extra_members(body: &mut Builder, extra: &str, limits: &Limits) -> Result<(), Error> {
    let text = Bytes::copy_from_slice(extra.as_bytes());
    // A table of this size is not larger than the message's charge.
    let extra = JsonObject::parse_strictly(text, limits.object_members_max, |_| Ok(()))?;
    if let Some((key, _)) = extra.members().find(|(key, _)| OWN_FIELDS.contains(key)) {
        let message = format!("`{key}` has a place of its own; it cannot be in extra_body_json");
        return Err(Error::invalid("extra_body_json", message));
    }
    if let Some((key, _)) = extra.members().find(|(key, _)| NO_PLACE.contains(key)) {
        let message = format!("the result of `{key}` has no place in gRPC replies; use HTTP");
        return Err(Error::invalid("extra_body_json", message));
    }
    for (key, raw) in extra.members() {
        body.put_with(key, |text| text.push_str(raw));
    }
    Ok(())
}

fn messages(text: &mut String, messages: &[v1::ChatMessage]) {
    for (i, message) in messages.iter().enumerate() {
        text.push_str(if i == 0 { r#"[{"role":"# } else { r#",{"role":"# });
        write_text(text, &message.role);
        text.push_str(r#","content":"#);
        write_text(text, &message.content);
        for (key, value) in [("name", &message.name), ("tool_call_id", &message.tool_call_id)] {
            if let Some(value) = value {
                text.push(',');
                write_text(text, key);
                text.push(':');
                write_text(text, value);
            }
        }
        text.push('}');
    }
    text.push_str(if messages.is_empty() { "[]" } else { "]" });
}

fn sampling(
    body: &mut Builder,
    params: &v1::SamplingParams,
    endpoint: Endpoint,
) -> Result<(), Error> {
    fn set(body: &mut Builder, key: &str, value: Option<impl Serialize>) {
        if let Some(value) = value {
            body.put(key, value);
        }
    }
    let max_tokens = match endpoint {
        Endpoint::Chat => "max_completion_tokens",
        _ => "max_tokens",
    };
    set(body, max_tokens, params.max_tokens);
    set(body, "min_tokens", params.min_tokens);
    for (key, value) in [
        ("temperature", params.temperature),
        ("top_p", params.top_p),
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
    ] {
        if value.is_some_and(|value| !value.is_finite()) {
            let message = format!("`{key}` is not a finite number");
            return Err(Error::new(ErrorKind::InvalidRequest, message));
        }
        set(body, key, value);
    }
    set(body, "top_k", params.top_k);
    set(body, "seed", params.seed);
    set(body, "n", params.n);
    set(body, "ignore_eos", params.ignore_eos);
    set(body, "stop", (!params.stop.is_empty()).then_some(&params.stop));
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_chat_becomes_the_same_body_as_over_http() {
        let request = v1::GenerateRequest {
            model: "m".into(),
            prompt: Some(Prompt::Chat(v1::Chat {
                messages: vec![v1::ChatMessage {
                    role: "user".into(),
                    content: "hi \"there\"".into(),
                    name: Some("a\nb".into()),
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
        let body = body_of(request, 0, &Limits::default()).unwrap().body;
        assert_eq!(
            serde_json::from_str::<Value>(&body.to_string()).unwrap(),
            json!({
                "logit_bias": {"5": 1}, "model": "m",
                "messages": [{"role": "user", "content": "hi \"there\"", "name": "a\nb"}],
                "max_completion_tokens": 5, "temperature": 0.0,
                "stream": true, "stream_options": {"include_usage": true}
            })
        );
    }

    #[test]
    fn extra_body_json_must_not_repeat_fields_of_the_message() {
        let request = v1::GenerateRequest {
            prompt: Some(Prompt::Text("x".into())),
            extra_body_json: r#"{"stream":false}"#.into(),
            ..Default::default()
        };
        assert_eq!(body_of(request, 0, &Limits::default()).err().unwrap().status(), 400);
        assert_eq!(
            body_of(v1::GenerateRequest::default(), 0, &Limits::default()).err().unwrap().status(),
            400
        );
    }
}
