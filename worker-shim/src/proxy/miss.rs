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
use splitrail_engine::threshold_reply::{ReplyForm, ThresholdReply};
use tokio::sync::Semaphore;

use self::body::Shape;
use super::paths::Kind;
use super::refusal::Refusal;

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
        shape.map(|shape| reply(kind, &shape, id))
    }
}

/// The reply of an engine that holds too little of the prompt. Without a tokenizer nothing is
/// known of the prompt's tokens, so `usage` is null and streams have no chunk for it.
fn reply(kind: Kind, shape: &Shape, request_id: Option<&str>) -> Response<Bytes> {
    let random = || format!("{:016x}", rand::random::<u64>());
    let id = request_id.map_or_else(random, str::to_owned);
    let reply = ThresholdReply {
        form: match kind {
            Kind::Chat => ReplyForm::Chat,
            Kind::Generate => ReplyForm::Generate,
            Kind::Completions | Kind::Compute | Kind::Tell => ReplyForm::Completions,
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
