//! Replies to requests whose required blocks the engine does not hold, as an engine that supports
//! `cache_hit_threshold` would, without asking the engine.
//!
//! The prompt has not been tokenised, so `usage` is null and streams have no usage chunk.

mod reply_shape;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Response};
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Incoming};
use splitrail_engine::threshold_reply::{ReplyForm, ThresholdReply};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use self::reply_shape::ReplyShape;
use super::paths::EndpointKind;
use super::refusal::Refusal;

/// Maximum size in bytes of a body that is parsed on the async thread.
const INLINE_MAX_BYTES: usize = 64 << 10;

/// Maximum size in bytes of a request's id, which each event of a reply repeats. The ids of routers
/// are shorter.
const REQUEST_ID_MAX_BYTES: usize = 256;

/// Maximum time for reading a body, because the body occupies memory that others need.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Answers misses, and limits the memory of their bodies and replies.
#[derive(Debug)]
pub(super) struct MissResponder {
    /// Maximum size of one body in bytes.
    body_max_bytes: usize,
    /// The memory of all bodies, and of replies that clients have not read: one permit per KiB.
    memory: Arc<Semaphore>,
}

/// The text of a reply, with its share of the memory of all misses.
struct ReservedText {
    text: String,
    _reserved: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for ReservedText {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

impl MissResponder {
    /// `total_max_bytes` limits all bodies that are read at the same time, and all replies that are
    /// not read.
    pub(super) fn new(body_max_bytes: usize, total_max_bytes: usize) -> Self {
        Self { body_max_bytes, memory: Arc::new(Semaphore::new(total_max_bytes >> 10)) }
    }

    /// Reserves memory until the permit is dropped.
    ///
    /// # Errors
    /// If there is none left.
    fn reserve(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Refusal> {
        let permits =
            u32::try_from(bytes.div_ceil(1 << 10)).map_err(|_| Refusal::UnreadableBody)?;
        let memory = Arc::clone(&self.memory);
        memory.try_acquire_many_owned(permits).map_err(|_| Refusal::UnreadableBody)
    }

    /// Reads the request and makes the reply.
    ///
    /// # Errors
    /// If the body is not a valid request or cannot be read, or there is no memory for the reply.
    pub(super) async fn answer(
        &self,
        kind: EndpointKind,
        headers: &HeaderMap,
        body: &mut Incoming,
    ) -> Result<Response<Bytes>, Refusal> {
        let id = headers.get("x-request-id").and_then(|id| id.to_str().ok());
        if headers.get_all(CONTENT_ENCODING).iter().any(|coding| coding != "identity")
            || id.is_some_and(|id| id.len() > REQUEST_ID_MAX_BYTES)
        {
            return Err(Refusal::UnreadableBody);
        }
        let most = body.size_hint().upper().map_or(self.body_max_bytes, |most| most as usize);
        if most > self.body_max_bytes {
            return Err(Refusal::UnreadableBody);
        }
        let reserved = self.reserve(most)?;
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
        let (content_type, mut text) = reply(kind, &shape?, id);
        text.shrink_to_fit();
        let reserved = self.reserve(text.len())?;
        let body = Bytes::from_owner(ReservedText { text, _reserved: reserved });
        let mut response = Response::new(body);
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        Ok(response)
    }
}

/// Makes the reply of an engine that holds too little of the prompt: its content type and its text.
fn reply(
    kind: EndpointKind,
    shape: &ReplyShape,
    request_id: Option<&str>,
) -> (&'static str, String) {
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
    match shape.stream {
        true => ("text/event-stream; charset=utf-8", stream(&reply)),
        false => ("application/json", reply.to_json().to_string()),
    }
}

fn stream(reply: &ThresholdReply<'_>) -> String {
    let events = reply.to_events(false);
    let mut stream: String =
        events.iter().map(|event| format!("data: {}\n\n", event.data)).collect();
    stream.push_str("data: [DONE]\n\n");
    stream
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_reply_has_less_than_four_mebibytes() {
        let id = "\"".repeat(REQUEST_ID_MAX_BYTES);
        for (kind, stream) in [
            (EndpointKind::Chat, true),
            (EndpointKind::Completions, true),
            (EndpointKind::Generate, true),
            (EndpointKind::Completions, false),
        ] {
            let model = "\u{1}".repeat(reply_shape::MODEL_MAX_BYTES);
            let shape = ReplyShape { model, stream, choices: reply_shape::CHOICES_MAX as u32 };
            let (_, text) = reply(kind, &shape, Some(&id));
            assert!(text.len() < 4 << 20, "{kind:?} {stream} {}", text.len());
        }
    }
}
