//! Bodies and events of `/v1/responses` and `/v1/messages`, in the real engine's order.

use bytes::Bytes;
use serde_json::{Value, json};

use super::super::endpoint::Endpoint;
use super::{ReplyChoice, Shape, Usage};
use crate::config::UsageReport;

impl Shape {
    /// A complete reply; `None` for other endpoints.
    pub(super) fn whole_named(
        &self,
        choice: Option<&ReplyChoice>,
        usage: Usage,
        params: &Option<Value>,
    ) -> Option<Value> {
        let choice = choice?;
        match self.endpoint {
            Endpoint::Responses => Some(self.response(Some(choice), usage, params)),
            Endpoint::Messages => Some(self.message(choice, usage, params)),
            _ => None,
        }
    }

    fn message(&self, choice: &ReplyChoice, usage: Usage, params: &Option<Value>) -> Value {
        let (reason, sequence) = stop_reason(choice);
        let mut reply = json!({
            "id": self.id, "type": "message", "role": "assistant",
            "content": [{"type": "text", "text": choice.text}],
            "model": self.model, "stop_reason": reason, "usage": self.message_usage(usage, true),
        });
        // Null members are omitted.
        if let Some(sequence) = sequence {
            reply["stop_sequence"] = json!(sequence);
        }
        if let Some(params) = params {
            reply["kv_transfer_params"] = params.clone();
        }
        reply
    }

    /// Whether cached tokens are reported depends on the flag; before the end they are not known.
    fn message_usage(&self, usage: Usage, is_final: bool) -> Value {
        let mut told = json!({"input_tokens": 0, "output_tokens": usage.completion_tokens});
        let mut input_tokens = usage.prompt_tokens;
        if is_final && self.report == UsageReport::Details {
            let (read, written) = (usage.cached_tokens, self.created_cache_tokens(usage));
            input_tokens = input_tokens.saturating_sub(read + written.unwrap_or(0));
            if let Some(written) = written {
                told["cache_creation_input_tokens"] = json!(written);
            }
            if read > 0 || !self.is_sglang {
                told["cache_read_input_tokens"] = json!(read);
            }
        }
        told["input_tokens"] = json!(input_tokens);
        told
    }

    /// A response; without a choice, one that has just started.
    fn response(
        &self,
        choice: Option<&ReplyChoice>,
        usage: Usage,
        params: &Option<Value>,
    ) -> Value {
        let asked = |key: &str, default: Value| match &self.asked[key] {
            Value::Null => default,
            said => said.clone(),
        };
        let incomplete = choice.is_some_and(|choice| choice.finish_reason == Some("length"));
        let status = match choice {
            None => "in_progress",
            Some(_) if incomplete => "incomplete",
            Some(_) => "completed",
        };
        let told = choice.filter(|choice| !choice.text.is_empty());
        let output: Vec<Value> =
            told.map(|choice| self.item(choice, "completed")).into_iter().collect();
        let mut response = json!({
            "id": self.id, "created_at": self.created,
            "incomplete_details": incomplete.then(|| json!({"reason": "max_output_tokens"})),
            "instructions": self.asked["instructions"], "metadata": self.asked["metadata"],
            "model": self.model, "object": "response", "output": output,
            "parallel_tool_calls": true, "temperature": asked("temperature", json!(1.0)),
            "tool_choice": asked("tool_choice", json!("none")), "tools": asked("tools", json!([])),
            "top_p": asked("top_p", json!(1.0)), "background": false,
            "max_output_tokens": self.asked["max_output_tokens"], "max_tool_calls": null,
            "previous_response_id": null, "prompt": null, "reasoning": self.asked["reasoning"],
            "service_tier": "auto", "status": status, "text": self.asked["text"],
            "top_logprobs": null, "truncation": "disabled",
            "usage": choice.map(|_| response_usage(usage)), "user": null,
            "kv_transfer_params": params, "ec_transfer_params": null,
            "input_messages": null, "output_messages": null,
        });
        if let Some(members) = response.as_object_mut().filter(|_| !self.names_hand_offs) {
            members.remove("kv_transfer_params");
        }
        response
    }

    fn item(&self, choice: &ReplyChoice, status: &str) -> Value {
        let content = match status {
            "completed" => vec![part(&choice.text)],
            _ => Vec::new(),
        };
        json!({
            "id": self.item_id(), "content": content, "role": "assistant", "status": status,
            "type": "message",
        })
    }

    fn item_id(&self) -> String {
        self.id.replacen("resp", "msg", 1)
    }

    /// The first events of a stream, before the request runs.
    pub(crate) fn first_events(&self) -> Vec<Value> {
        match self.endpoint {
            Endpoint::Responses => ["response.created", "response.in_progress"]
                .map(|name| {
                    let response = self.response(None, Usage::default(), &None);
                    json!({"type": name, "response": response})
                })
                .to_vec(),
            _ => Vec::new(),
        }
    }

    /// The events of the first output; of a response, those of its first text.
    pub(crate) fn opening_events(&self, usage: Usage, has_text: bool) -> Vec<Value> {
        match self.endpoint {
            Endpoint::Messages => {
                let usage = self.message_usage(Usage { completion_tokens: 0, ..usage }, false);
                vec![json!({"type": "message_start", "message": {
                    "id": self.id, "type": "message", "role": "assistant", "content": [],
                    "model": self.model, "stop_reason": null, "stop_sequence": null,
                    "usage": usage,
                }})]
            }
            _ if !has_text => Vec::new(),
            _ => {
                let item = self.item(&ReplyChoice::default(), "in_progress");
                vec![
                    json!({"type": "response.output_item.added", "output_index": 0, "item": item}),
                    json!({
                        "type": "response.content_part.added", "item_id": self.item_id(),
                        "output_index": 0, "content_index": 0, "part": part(""),
                    }),
                ]
            }
        }
    }

    /// The events of some text; `first` starts a message's block.
    pub(crate) fn text_events(&self, text: &str, first: bool) -> Vec<Value> {
        if self.endpoint == Endpoint::Responses {
            return vec![json!({
                "type": "response.output_text.delta", "item_id": self.item_id(),
                "output_index": 0, "content_index": 0, "delta": text, "logprobs": [],
            })];
        }
        let block = first.then(|| {
            let block = json!({"type": "text", "text": ""});
            json!({"type": "content_block_start", "content_block": block, "index": 0})
        });
        let delta = json!({"type": "text_delta", "text": text});
        let delta = json!({"type": "content_block_delta", "delta": delta, "index": 0});
        block.into_iter().chain([delta]).collect()
    }

    /// The last events of a stream. `choice` is the complete reply.
    pub(crate) fn closing_events(&self, choice: &ReplyChoice, usage: Usage) -> Vec<Value> {
        let has_text = !choice.text.is_empty();
        if self.endpoint == Endpoint::Messages {
            let (reason, sequence) = stop_reason(choice);
            let stop = has_text.then(|| json!({"type": "content_block_stop", "index": 0}));
            let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
            let usage = self.message_usage(usage, true);
            let last = [
                json!({"type": "message_delta", "delta": delta, "usage": usage}),
                json!({"type": "message_stop"}),
            ];
            return stop.into_iter().chain(last).collect();
        }
        let at = json!({"item_id": self.item_id(), "output_index": 0, "content_index": 0});
        let placed = |name: &str, key: &str, value: Value| {
            let mut event = at.clone();
            event["type"] = json!(name);
            event[key] = value;
            event
        };
        let item = self.item(choice, "completed");
        let of_text = [
            placed("response.output_text.done", "text", json!(choice.text)),
            placed("response.content_part.done", "part", part(&choice.text)),
            json!({"type": "response.output_item.done", "output_index": 0, "item": item}),
        ];
        // The real engine also reports `completed` for a reply that ended because of its length.
        let response = self.response(Some(choice), usage, &None);
        let last = json!({"type": "response.completed", "response": response});
        of_text.into_iter().filter(|_| has_text).chain([last]).collect()
    }

    /// An event as bytes; the events of a response are numbered.
    pub(crate) fn named(&self, mut event: Value, number: u64) -> Bytes {
        if self.endpoint == Endpoint::Responses {
            event["sequence_number"] = json!(number);
        }
        let name = event["type"].as_str().unwrap_or_default();
        Bytes::from(format!("event: {name}\ndata: {event}\n\n"))
    }
}

fn part(text: &str) -> Value {
    json!({"annotations": [], "text": text, "type": "output_text", "logprobs": null})
}

/// The usage of a response, which includes cached tokens even if the configuration omits them.
fn response_usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.created_cache_tokens,
            "input_tokens_per_turn": [], "cached_tokens_per_turn": [],
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0, "tool_output_tokens": 0,
            "output_tokens_per_turn": [], "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}

/// Why a message ended, and the stop sequence that was found.
fn stop_reason(choice: &ReplyChoice) -> (Option<&'static str>, Option<&str>) {
    match (choice.finish_reason, &choice.stop_reason) {
        (Some("length"), _) => (Some("max_tokens"), None),
        (Some("stop"), Some(met)) => (Some("stop_sequence"), Some(met)),
        (Some("stop"), None) => (Some("end_turn"), None),
        _ => (None, None),
    }
}
