//! The answer to a request whose blocks the engine does not hold: what an engine that
//! honours `cache_hit_threshold` would say, made without asking it.
//!
//! Nothing was tokenised, so nothing is said of tokens: `usage` is null, and streams have no
//! chunk for it.

mod body;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Response};
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Incoming};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use self::body::Shape;
use super::paths::Kind;
use super::refusal::Refusal;

/// The finish reason of an engine that holds too little of the prompt.
const CACHE_THRESHOLD: &str = "cache_threshold";

/// Bodies up to here are looked into on the spot.
const INLINE_MAX_BYTES: usize = 64 << 10;

/// How long a body that is read whole may take: it holds room that others want.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Bodies of misses, which are read whole, in memory.
#[derive(Debug)]
pub(super) struct Misses {
    /// Of one of them.
    body_max_bytes: usize,
    /// Of all of them: one permit for each KiB.
    room: Semaphore,
}

impl Misses {
    /// `room_max_bytes` is for all bodies that are read at once.
    pub(super) fn new(body_max_bytes: usize, room_max_bytes: usize) -> Self {
        Self { body_max_bytes, room: Semaphore::new(room_max_bytes >> 10) }
    }

    /// Reads what is needed of the request and makes the answer.
    ///
    /// # Errors
    /// If the body is no request, or cannot be looked into.
    pub(super) async fn answer(
        &self,
        kind: Kind,
        headers: &HeaderMap,
        body: &mut Incoming,
    ) -> Result<Response<Bytes>, Refusal> {
        if headers.get_all(CONTENT_ENCODING).iter().any(|coding| coding != "identity") {
            return Err(Refusal::BodyUnread);
        }
        let most = body.size_hint().upper().map_or(self.body_max_bytes, |most| most as usize);
        if most > self.body_max_bytes {
            return Err(Refusal::BodyUnread);
        }
        let permits = u32::try_from(most.div_ceil(1 << 10)).map_err(|_| Refusal::BodyUnread)?;
        let room = self.room.try_acquire_many(permits).map_err(|_| Refusal::BodyUnread)?;
        let reading = Limited::new(body, self.body_max_bytes).collect();
        // Too long, too slow, or cut short: then nobody reads the answer.
        let body = match tokio::time::timeout(BODY_TIMEOUT, reading).await {
            Ok(Ok(collected)) => collected.to_bytes(),
            Ok(Err(_)) | Err(_) => return Err(Refusal::BodyUnread),
        };
        let shape = match body.len() <= INLINE_MAX_BYTES {
            true => Shape::read(kind, &body),
            false => tokio::task::spawn_blocking(move || Shape::read(kind, &body))
                .await
                .unwrap_or(Err(Refusal::BodyUnread)),
        };
        drop(room);
        let id = headers.get("x-request-id").and_then(|id| id.to_str().ok());
        shape.map(|shape| Made::new(kind, &shape, id).response())
    }
}

/// A made-up answer.
struct Made<'a> {
    kind: Kind,
    shape: &'a Shape,
    id: String,
    created_s: u64,
}

impl<'a> Made<'a> {
    fn new(kind: Kind, shape: &'a Shape, id: Option<&str>) -> Self {
        let prefix = match kind {
            Kind::Chat => "chatcmpl",
            Kind::Generate => "generate-tokens",
            Kind::Completions | Kind::Compute | Kind::Tell => "cmpl",
        };
        let id = match id {
            Some(id) => format!("{prefix}-{id}"),
            None => format!("{prefix}-{:016x}", rand::random::<u64>()),
        };
        let created_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Self { kind, shape, id, created_s }
    }

    fn response(&self) -> Response<Bytes> {
        let (content_type, body) = match self.shape.stream {
            true => ("text/event-stream; charset=utf-8", self.events()),
            false => ("application/json", self.whole().to_string()),
        };
        let mut response = Response::new(body.into());
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        response
    }

    /// One chunk for each choice, each its only one.
    fn events(&self) -> String {
        let mut events = String::new();
        for index in 0..self.shape.choices {
            events += &format!("data: {}\n\n", self.chunk(index));
        }
        events + "data: [DONE]\n\n"
    }

    fn chunk(&self, index: u32) -> Value {
        let choice = match self.kind {
            Kind::Chat => json!({
                "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null,
                "finish_reason": CACHE_THRESHOLD, "stop_reason": null,
            }),
            Kind::Generate => json!({
                "index": index, "finish_reason": CACHE_THRESHOLD, "stop_reason": null,
                "token_ids": [], "routed_experts": null, "sampling_mask": null,
                "weight_versions": null, "logprobs": null,
            }),
            _ => json!({
                "index": index, "text": "", "logprobs": null, "finish_reason": CACHE_THRESHOLD,
                "stop_reason": null, "prompt_token_ids": null, "token_ids": null,
            }),
        };
        let object = match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Generate => {
                return json!({
                    "request_id": self.id, "usage": null, "output_mode": "tokens",
                    "choices": [choice],
                });
            }
            _ => "text_completion",
        };
        let mut chunk = json!({
            "id": self.id, "object": object, "created": self.created_s,
            "model": self.shape.model, "choices": [choice],
        });
        if self.kind == Kind::Chat {
            chunk["prompt_token_ids"] = Value::Null;
            chunk["prompt_text"] = Value::Null;
        }
        chunk
    }

    fn whole(&self) -> Value {
        let choices: Vec<Value> = (0..self.shape.choices).map(|index| self.choice(index)).collect();
        match self.kind {
            Kind::Chat => json!({
                "id": self.id, "object": "chat.completion", "created": self.created_s,
                "model": self.shape.model, "choices": choices, "service_tier": null,
                "system_fingerprint": null, "usage": null, "prompt_logprobs": null,
                "prompt_token_ids": null, "prompt_text": null, "kv_transfer_params": null,
                "ec_transfer_params": null, "metrics": null,
            }),
            Kind::Generate => json!({
                "request_id": self.id, "model": self.shape.model, "created": self.created_s,
                "usage": null, "prompt_logprobs": null, "prompt_token_id_logprobs": null,
                "prompt_token_ids": null, "mm_placeholders": null, "metrics": null,
                "kv_transfer_params": null, "ec_transfer_params": null, "output_mode": "tokens",
                "choices": choices,
            }),
            _ => json!({
                "id": self.id, "object": "text_completion", "created": self.created_s,
                "model": self.shape.model, "choices": choices, "service_tier": null,
                "system_fingerprint": null, "usage": null, "kv_transfer_params": null,
                "ec_transfer_params": null, "metrics": null,
            }),
        }
    }

    fn choice(&self, index: u32) -> Value {
        match self.kind {
            Kind::Chat => json!({
                "index": index,
                "message": {
                    "role": "assistant", "content": "", "refusal": null, "annotations": null,
                    "audio": null, "function_call": null, "reasoning": null,
                },
                "logprobs": null, "finish_reason": CACHE_THRESHOLD, "stop_reason": null,
                "token_ids": null, "routed_experts": null,
            }),
            Kind::Generate => json!({
                "index": index, "finish_reason": CACHE_THRESHOLD, "stop_reason": null,
                "token_ids": [], "routed_experts": null, "sampling_mask": null,
                "weight_versions": null, "logprobs": null,
            }),
            _ => json!({
                "index": index, "text": "", "logprobs": null, "finish_reason": CACHE_THRESHOLD,
                "stop_reason": null, "token_ids": null, "prompt_logprobs": null,
                "prompt_token_ids": null, "routed_experts": null,
            }),
        }
    }
}
