//! Replies to requests whose required blocks the engine does not hold, as an engine that supports
//! `cache_hit_threshold` would, without asking the engine.
//!
//! The prompt has not been tokenised, so `usage` is null and streams have no usage chunk.

mod reply_shape;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Response};
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Incoming};
use splitrail_engine::threshold_reply::{ReplyForm, ThresholdReply};
use tokio::sync::Semaphore;

use self::reply_shape::ReplyShape;
use super::paths::EndpointKind;
use super::refusal::Refusal;

/// Maximum size in bytes of a body that is parsed on the async thread.
const INLINE_MAX_BYTES: usize = 64 << 10;

/// Maximum time for reading a body, because the body occupies memory that others need.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Answers misses, and limits the memory of their bodies.
#[derive(Debug)]
pub(super) struct MissResponder {
    /// Maximum size of one body in bytes.
    body_max_bytes: usize,
    /// The memory of all bodies: one permit per KiB.
    memory: Semaphore,
}

impl MissResponder {
    /// `total_max_bytes` limits all bodies that are read at the same time.
    pub(super) fn new(body_max_bytes: usize, total_max_bytes: usize) -> Self {
        Self { body_max_bytes, memory: Semaphore::new(total_max_bytes >> 10) }
    }

    /// Reads the request and makes the reply.
    ///
    /// # Errors
    /// If the body is not a valid request, or cannot be read.
    pub(super) async fn answer(
        &self,
        kind: EndpointKind,
        headers: &HeaderMap,
        body: &mut Incoming,
    ) -> Result<Response<Bytes>, Refusal> {
        if headers.get_all(CONTENT_ENCODING).iter().any(|coding| coding != "identity") {
            return Err(Refusal::UnreadableBody);
        }
        let most = body.size_hint().upper().map_or(self.body_max_bytes, |most| most as usize);
        if most > self.body_max_bytes {
            return Err(Refusal::UnreadableBody);
        }
        let permits = u32::try_from(most.div_ceil(1 << 10)).map_err(|_| Refusal::UnreadableBody)?;
        let reserved =
            self.memory.try_acquire_many(permits).map_err(|_| Refusal::UnreadableBody)?;
        let reading = Limited::new(body, self.body_max_bytes).collect();
        // The body is too long, too slow or incomplete.
        let body = match tokio::time::timeout(BODY_TIMEOUT, reading).await {
            Ok(Ok(collected)) => collected.to_bytes(),
            Ok(Err(_)) | Err(_) => return Err(Refusal::UnreadableBody),
        };
        let shape = match body.len() <= INLINE_MAX_BYTES {
            true => ReplyShape::read(kind, &body),
            false => tokio::task::spawn_blocking(move || ReplyShape::read(kind, &body))
                .await
                .unwrap_or(Err(Refusal::UnreadableBody)),
        };
        drop(reserved);
        let id = headers.get("x-request-id").and_then(|id| id.to_str().ok());
        shape.map(|shape| reply(kind, &shape, id))
    }
}

/// Makes the reply of an engine that holds too little of the prompt.
fn reply(kind: EndpointKind, shape: &ReplyShape, request_id: Option<&str>) -> Response<Bytes> {
    let random = || format!("{:016x}", rand::random::<u64>());
    let id = request_id.map_or_else(random, str::to_owned);
    let reply = ThresholdReply {
        form: match kind {
            EndpointKind::Chat => ReplyForm::Chat,
            EndpointKind::Generate => ReplyForm::Generate,
            EndpointKind::Completions | EndpointKind::Compute | EndpointKind::Inexpensive => {
                ReplyForm::Completions
            }
        },
        id: &id,
        model: &shape.model,
        created_s: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        choices: shape.choices,
        usage: None,
    };
    let (content_type, body) = match shape.stream {
        true => ("text/event-stream; charset=utf-8", stream(&reply)),
        false => ("application/json", reply.to_json().to_string()),
    };
    let mut response = Response::new(body.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

fn stream(reply: &ThresholdReply<'_>) -> String {
    let events = reply.to_events(false);
    let mut stream: String =
        events.iter().map(|event| format!("data: {}\n\n", event.data)).collect();
    stream.push_str("data: [DONE]\n\n");
    stream
}
