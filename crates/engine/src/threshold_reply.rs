//! The reply that says that too little of a prompt is cached, made without asking an engine.
//!
//! vLLM sends such a reply if a request's `cache_hit_threshold` is not met: every choice is empty
//! and ends with the finish reason `cache_threshold`. Shims send it in place of their engine, and
//! routers send it to clients of `decode_only`. In vLLM, replies of the Responses and Messages APIs
//! have no such form; there the reason is where clients expect the reason for the end of a reply.

use serde_json::{Value, json};

/// The finish reason of an engine that holds less of the prompt than the threshold requires.
pub const CACHE_THRESHOLD: &str = "cache_threshold";

/// The API whose form a reply has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyForm {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/inference/v1/generate`.
    Generate,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Messages,
}

/// The content of a reply.
#[derive(Clone, Debug)]
pub struct ThresholdReply<'a> {
    /// The API of the request.
    pub form: ReplyForm,
    /// The id of the reply, without the prefix that the API puts before it.
    pub id: &'a str,
    /// The name of the model.
    pub model: &'a str,
    /// Unix time in seconds.
    pub created_s: u64,
    /// Number of choices: samples times prompts. Responses and Messages have one.
    pub choices: u32,
    /// The usage object; null if the number of prompt tokens is not known.
    pub usage: Option<&'a Value>,
}

/// One server-sent event of a streamed reply.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplyEvent {
    /// The name of the event, if the API names its events.
    pub name: Option<&'static str>,
    /// The content of its `data` field.
    pub data: Value,
}

impl ThresholdReply<'_> {
    /// The reply to a request that is not streamed.
    pub fn to_json(&self) -> Value {
        let choices = || -> Vec<Value> { (0..self.choices).map(|at| self.choice(at)).collect() };
        match self.form {
            ReplyForm::Chat => json!({
                "id": self.prefixed_id(), "object": "chat.completion", "created": self.created_s,
                "model": self.model, "choices": choices(), "service_tier": null,
                "system_fingerprint": null, "usage": self.usage, "prompt_logprobs": null,
                "prompt_token_ids": null, "prompt_text": null, "kv_transfer_params": null,
                "ec_transfer_params": null, "metrics": null,
            }),
            ReplyForm::Completions => json!({
                "id": self.prefixed_id(), "object": "text_completion", "created": self.created_s,
                "model": self.model, "choices": choices(), "service_tier": null,
                "system_fingerprint": null, "usage": self.usage, "kv_transfer_params": null,
                "ec_transfer_params": null, "metrics": null,
            }),
            ReplyForm::Generate => json!({
                "request_id": self.prefixed_id(), "model": self.model, "created": self.created_s,
                "usage": self.usage, "prompt_logprobs": null, "prompt_token_id_logprobs": null,
                "prompt_token_ids": null, "mm_placeholders": null, "metrics": null,
                "kv_transfer_params": null, "ec_transfer_params": null, "output_mode": "tokens",
                "choices": choices(),
            }),
            ReplyForm::Responses => json!({
                "id": self.prefixed_id(), "object": "response", "created_at": self.created_s,
                "model": self.model, "status": "incomplete",
                "incomplete_details": {"reason": CACHE_THRESHOLD}, "error": null, "output": [],
                "parallel_tool_calls": true, "tool_choice": "auto", "tools": [],
                "usage": self.usage,
            }),
            ReplyForm::Messages => json!({
                "id": self.prefixed_id(), "type": "message", "role": "assistant",
                "model": self.model, "content": [], "stop_reason": CACHE_THRESHOLD,
                "stop_sequence": null, "usage": self.usage,
            }),
        }
    }

    /// The events of a streamed reply, without the `[DONE]` that ends a stream of chunks. If the
    /// API has a chunk for usage, `include_usage` requests it; it is left out if there is no usage.
    pub fn to_events(&self, include_usage: bool) -> Vec<ReplyEvent> {
        match self.form {
            ReplyForm::Responses => self.response_events(),
            ReplyForm::Messages => self.message_events(),
            ReplyForm::Chat | ReplyForm::Completions | ReplyForm::Generate => {
                let chunks = (0..self.choices).map(|at| self.chunk(vec![self.choice_chunk(at)]));
                let mut chunks: Vec<Value> = chunks.collect();
                if let Some(usage) = self.usage.filter(|_| include_usage) {
                    let mut last = self.chunk(Vec::new());
                    last["usage"] = usage.clone();
                    chunks.push(last);
                }
                chunks.into_iter().map(|data| ReplyEvent { name: None, data }).collect()
            }
        }
    }

    fn prefixed_id(&self) -> String {
        let prefix = match self.form {
            ReplyForm::Chat => "chatcmpl-",
            ReplyForm::Completions => "cmpl-",
            ReplyForm::Generate => "generate-tokens-",
            ReplyForm::Responses => "resp_",
            ReplyForm::Messages => "msg_",
        };
        format!("{prefix}{}", self.id)
    }

    /// A choice of a reply that is not streamed.
    fn choice(&self, index: u32) -> Value {
        match self.form {
            ReplyForm::Chat => json!({
                "index": index,
                "message": {
                    "role": "assistant", "content": "", "refusal": null, "annotations": null,
                    "audio": null, "function_call": null, "reasoning": null,
                },
                "logprobs": null, "finish_reason": CACHE_THRESHOLD, "stop_reason": null,
                "token_ids": null, "routed_experts": null,
            }),
            ReplyForm::Generate => generate_choice(index),
            _ => json!({
                "index": index, "text": "", "logprobs": null, "finish_reason": CACHE_THRESHOLD,
                "stop_reason": null, "token_ids": null, "prompt_logprobs": null,
                "prompt_token_ids": null, "routed_experts": null,
            }),
        }
    }

    /// The same choice in a chunk of a stream.
    fn choice_chunk(&self, index: u32) -> Value {
        match self.form {
            ReplyForm::Chat => json!({
                "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null,
                "finish_reason": CACHE_THRESHOLD, "stop_reason": null,
            }),
            ReplyForm::Generate => generate_choice(index),
            _ => json!({
                "index": index, "text": "", "logprobs": null, "finish_reason": CACHE_THRESHOLD,
                "stop_reason": null, "prompt_token_ids": null, "token_ids": null,
            }),
        }
    }

    fn chunk(&self, choices: Vec<Value>) -> Value {
        let object = match self.form {
            ReplyForm::Generate => {
                return json!({
                    "request_id": self.prefixed_id(), "usage": null, "output_mode": "tokens",
                    "choices": choices,
                });
            }
            ReplyForm::Chat => "chat.completion.chunk",
            _ => "text_completion",
        };
        let mut chunk = json!({
            "id": self.prefixed_id(), "object": object, "created": self.created_s,
            "model": self.model, "choices": choices,
        });
        if self.form == ReplyForm::Chat {
            chunk["prompt_token_ids"] = Value::Null;
            chunk["prompt_text"] = Value::Null;
        }
        chunk
    }

    fn response_events(&self) -> Vec<ReplyEvent> {
        let whole = self.to_json();
        let mut created = whole.clone();
        created["status"] = json!("in_progress");
        created["incomplete_details"] = Value::Null;
        created["usage"] = Value::Null;
        vec![
            named("response.created", json!({"response": created, "sequence_number": 0})),
            named("response.incomplete", json!({"response": whole, "sequence_number": 1})),
        ]
    }

    fn message_events(&self) -> Vec<ReplyEvent> {
        let mut message = self.to_json();
        message["stop_reason"] = Value::Null;
        let delta = json!({
            "delta": {"stop_reason": CACHE_THRESHOLD, "stop_sequence": null},
            "usage": self.usage,
        });
        vec![
            named("message_start", json!({"message": message})),
            named("message_delta", delta),
            named("message_stop", json!({})),
        ]
    }
}

/// A choice of `/inference/v1/generate`, which is the same in complete and in streamed replies.
fn generate_choice(index: u32) -> Value {
    json!({
        "index": index, "finish_reason": CACHE_THRESHOLD, "stop_reason": null,
        "token_ids": [], "routed_experts": null, "sampling_mask": null,
        "weight_versions": null, "logprobs": null,
    })
}

/// An event whose data repeats its name as `type`.
fn named(name: &'static str, mut data: Value) -> ReplyEvent {
    data["type"] = json!(name);
    ReplyEvent { name: Some(name), data }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMS: [ReplyForm; 5] = [
        ReplyForm::Chat,
        ReplyForm::Completions,
        ReplyForm::Generate,
        ReplyForm::Responses,
        ReplyForm::Messages,
    ];

    fn reply(form: ReplyForm, usage: Option<&Value>) -> ThresholdReply<'_> {
        ThresholdReply { form, id: "abc", model: "m", created_s: 1, choices: 2, usage }
    }

    #[test]
    fn every_choice_ends_with_the_threshold_and_a_stream_has_one_chunk_for_each() {
        for form in &FORMS[..3] {
            let reply = reply(*form, None);
            let whole = reply.to_json();
            let chunks = reply.to_events(true);
            assert_eq!(chunks.len(), 2);
            for index in 0..2 {
                for choice in [&whole["choices"][index], &chunks[index].data["choices"][0]] {
                    assert_eq!(choice["index"], json!(index));
                    assert_eq!(choice["finish_reason"], CACHE_THRESHOLD);
                }
            }
        }
    }

    #[test]
    fn usage_is_in_the_last_chunk_only_if_it_is_requested_and_known() {
        let usage = json!({"prompt_tokens": 7});
        let events = |usage, include| reply(ReplyForm::Chat, usage).to_events(include);
        assert_eq!(events(Some(&usage), true).len(), 3);
        assert_eq!(events(Some(&usage), true)[2].data["usage"], usage);
        assert_eq!((events(Some(&usage), false).len(), events(None, true).len()), (2, 2));
        for form in FORMS {
            assert_eq!(reply(form, Some(&usage)).to_json()["usage"], usage);
            assert!(reply(form, None).to_json()["usage"].is_null());
        }
    }

    #[test]
    fn the_last_named_event_gives_the_reason_for_the_end() {
        let last = |form| {
            let events = reply(form, None).to_events(false);
            let names: Vec<_> = events.iter().map(|event| event.name).collect();
            (names, events)
        };
        let (names, events) = last(ReplyForm::Responses);
        assert_eq!(names, [Some("response.created"), Some("response.incomplete")]);
        let details = &events[1].data["response"]["incomplete_details"];
        assert_eq!(details["reason"], CACHE_THRESHOLD);
        let (names, events) = last(ReplyForm::Messages);
        assert_eq!(names, [Some("message_start"), Some("message_delta"), Some("message_stop")]);
        assert_eq!(events[1].data["delta"]["stop_reason"], CACHE_THRESHOLD);
        assert_eq!(events[0].data["message"]["stop_reason"], Value::Null);
    }
}
