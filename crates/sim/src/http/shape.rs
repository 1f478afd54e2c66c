//! Reply bodies, field by field as recorded from the engine.

use serde_json::{Value, json};

use super::endpoint::Endpoint;
use crate::config::{ThresholdReply, UsageReport};

mod named;

/// What all bodies of one request have in common.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    /// Whether responses can contain hand-offs.
    pub(crate) names_hand_offs: bool,
    pub(crate) endpoint: Endpoint,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) fingerprint: String,
    pub(crate) report: UsageReport,
    /// Whether usage is told as SGLang does: it does not count what a request has added to the cache,
    /// and its messages leave out a count of 0 cached tokens.
    pub(crate) is_sglang: bool,
    pub(crate) threshold_reply: ThresholdReply,
    /// The request, which responses repeat in part.
    pub(crate) asked: Value,
}

/// The token counts of one request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) cached_tokens: usize,
    /// Prompt tokens in blocks that this request added to the cache; reported in chats.
    pub(crate) created_cache_tokens: usize,
}

/// One choice of a complete reply.
#[derive(Debug, Default, Clone)]
pub(crate) struct ReplyChoice {
    pub(crate) text: String,
    pub(crate) finish_reason: Option<&'static str>,
    pub(crate) stop_reason: Option<String>,
    pub(crate) token_ids: Option<Vec<u32>>,
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
}

impl Shape {
    /// A complete reply.
    pub(crate) fn whole(
        &self,
        choices: &[ReplyChoice],
        usage: Usage,
        params: Option<Value>,
    ) -> Value {
        if let Some(named) = self.whole_named(choices.first(), usage, &params) {
            return named;
        }
        let prompt_token_ids = choices.first().and_then(|choice| choice.prompt_token_ids.clone());
        let choices: Vec<Value> =
            choices.iter().enumerate().map(|(index, choice)| self.choice(index, choice)).collect();
        match self.endpoint {
            Endpoint::Generate => json!({
                "request_id": self.id,
                "model": self.model,
                "created": self.created,
                "usage": self.usage(usage),
                "prompt_logprobs": null,
                "prompt_token_id_logprobs": null,
                "prompt_token_ids": null,
                "mm_placeholders": null,
                "metrics": null,
                "kv_transfer_params": params,
                "ec_transfer_params": null,
                "output_mode": "tokens",
                "choices": choices,
            }),
            Endpoint::Completions => json!({
                "id": self.id,
                "object": "text_completion",
                "created": self.created,
                "model": self.model,
                "choices": choices,
                "service_tier": null,
                "system_fingerprint": self.fingerprint,
                "usage": self.usage(usage),
                "kv_transfer_params": params,
                "ec_transfer_params": null,
                "metrics": null,
            }),
            _ => json!({
                "id": self.id,
                "object": "chat.completion",
                "created": self.created,
                "model": self.model,
                "choices": choices,
                "service_tier": null,
                "system_fingerprint": self.fingerprint,
                "usage": self.usage(usage),
                "prompt_logprobs": null,
                "prompt_token_ids": prompt_token_ids,
                "prompt_text": null,
                "kv_transfer_params": params,
                "ec_transfer_params": null,
                "metrics": null,
            }),
        }
    }

    /// A stream's chunk with one choice.
    pub(crate) fn chunk(&self, index: usize, choice: &ReplyChoice, role: bool) -> Value {
        match self.endpoint {
            Endpoint::Generate => self.envelope(json!([self.choice(index, choice)])),
            Endpoint::Completions => self.envelope(json!([{
                "index": index,
                "text": choice.text,
                "logprobs": null,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "prompt_token_ids": choice.prompt_token_ids,
                "token_ids": choice.token_ids,
            }])),
            _ => {
                let delta = match role {
                    true => json!({"role": "assistant", "content": choice.text}),
                    false => json!({"content": choice.text}),
                };
                let mut body = json!({
                    "index": index,
                    "delta": delta,
                    "logprobs": null,
                    "finish_reason": choice.finish_reason,
                });
                if choice.finish_reason.is_some() {
                    body["stop_reason"] = json!(choice.stop_reason);
                }
                if !role {
                    body["token_ids"] = json!(choice.token_ids);
                }
                let mut chunk = self.envelope(json!([body]));
                if role {
                    chunk["prompt_token_ids"] = json!(choice.prompt_token_ids);
                    chunk["prompt_text"] = Value::Null;
                }
                chunk
            }
        }
    }

    /// A stream's last chunk: usage without choices.
    pub(crate) fn usage_chunk(&self, usage: Usage) -> Value {
        let mut chunk = self.envelope(json!([]));
        chunk["usage"] = self.stream_usage(usage);
        if self.endpoint != Endpoint::Generate {
            chunk["system_fingerprint"] = json!(self.fingerprint);
        }
        chunk
    }

    /// Usage without details, as `continuous_usage_stats` adds it to every chunk.
    pub(crate) fn plain_usage(usage: Usage) -> Value {
        json!({
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "completion_tokens": usage.completion_tokens,
        })
    }

    fn envelope(&self, choices: Value) -> Value {
        let object = match self.endpoint {
            Endpoint::Completions => "text_completion",
            Endpoint::Generate => {
                return json!({
                    "request_id": self.id,
                    "usage": null,
                    "output_mode": "tokens",
                    "choices": choices,
                });
            }
            _ => "chat.completion.chunk",
        };
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn choice(&self, index: usize, choice: &ReplyChoice) -> Value {
        match self.endpoint {
            Endpoint::Generate => json!({
                "index": index,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "token_ids": choice.token_ids,
                "routed_experts": null,
                "sampling_mask": null,
                "weight_versions": null,
                "logprobs": null,
            }),
            Endpoint::Completions => json!({
                "index": index,
                "text": choice.text,
                "logprobs": null,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "token_ids": choice.token_ids,
                "prompt_logprobs": null,
                "prompt_token_ids": choice.prompt_token_ids,
                "routed_experts": null,
            }),
            _ => json!({
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": choice.text,
                    "refusal": null,
                    "annotations": null,
                    "audio": null,
                    "function_call": null,
                    "reasoning": null,
                },
                "logprobs": null,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "token_ids": choice.token_ids,
                "routed_experts": null,
            }),
        }
    }

    fn usage(&self, usage: Usage) -> Value {
        let mut body = Self::plain_usage(usage);
        match self.report {
            UsageReport::Details => {
                body["prompt_tokens_details"] = json!({
                    "cached_tokens": usage.cached_tokens,
                    "created_cache_tokens": self.created_cache_tokens(usage),
                    "multimodal_tokens": null,
                });
            }
            UsageReport::Null => body["prompt_tokens_details"] = Value::Null,
            UsageReport::Absent => {}
        }
        body["completion_tokens_details"] = Value::Null;
        body
    }

    /// Streams omit null members.
    fn stream_usage(&self, usage: Usage) -> Value {
        let mut body = Self::plain_usage(usage);
        if self.report == UsageReport::Details {
            body["prompt_tokens_details"] = json!({"cached_tokens": usage.cached_tokens});
            if let Some(created) = self.created_cache_tokens(usage) {
                body["prompt_tokens_details"]["created_cache_tokens"] = json!(created);
            }
        }
        body
    }

    fn created_cache_tokens(&self, usage: Usage) -> Option<usize> {
        let counts = matches!(self.endpoint, Endpoint::Chat | Endpoint::Messages);
        (counts && !self.is_sglang).then_some(usage.created_cache_tokens)
    }
}
