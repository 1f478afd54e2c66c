//! Gathers a reply that is not streamed from its pieces.

use std::ops::Deref;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Body as _;
use prometheus::IntCounterVec;

use super::engine::Engine;
use crate::connections::EngineBody;
use crate::wire::ReplyError;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::memory_budget::{Charge, MemoryBudget, full, shed};
use splitrail_api::unread::UnreadReply;

/// Capacity in bytes that is reserved first for a reply of several pieces, if the limit allows.
const RESERVED_MIN_BYTES: usize = 128 << 10;

/// The memory budget that replies share with everything else that requests hold.
#[derive(Clone)]
pub struct ReplyMemory {
    /// The memory that all requests hold.
    pub budget: Arc<MemoryBudget>,
    /// `limits.request_memory_max`.
    pub max_bytes: usize,
    /// Counts requests that are refused for load.
    pub shed: IntCounterVec,
}

/// What a reply for a client may take.
#[derive(Clone)]
pub struct ReplyRoom {
    /// The room among the unread replies of the client's connection.
    pub unread: Arc<UnreadReply>,
    /// The memory of the client's requests.
    pub memory: Arc<MemoryBudget>,
}

impl Deref for ReplyRoom {
    type Target = UnreadReply;

    fn deref(&self) -> &UnreadReply {
        &self.unread
    }
}

impl ReplyMemory {
    /// Counts a request whose reply cannot be held, and returns the error for it.
    pub(crate) fn shed(&self) -> Error {
        shed(&self.shed)
    }
}

/// Why a reply could not be read completely.
#[derive(Debug)]
pub(super) enum GatherError {
    /// The reply was truncated or invalid.
    Broken(ReplyError),
    /// The reply is longer than allowed.
    TooLong,
    /// All requests together hold as much memory as they may.
    NoMemory,
    /// The client does not read its other replies.
    NoRoom(Error),
}

impl GatherError {
    /// The error for a request; `key` names the limit in the configuration.
    pub(super) fn of(self, worker: &dyn Engine, key: &str, memory: &ReplyMemory) -> Error {
        self.or_else(worker, || memory.shed(), || too_large(key))
    }

    /// The error for a report that an engine makes about itself. It belongs to no request, so no
    /// request is counted as refused.
    pub(super) fn of_report(self, worker: &dyn Engine) -> Error {
        self.or_else(worker, full, || {
            Error::engine(worker.id(), "sent a report about itself of more than 4 MiB")
        })
    }

    fn or_else(
        self,
        worker: &dyn Engine,
        no_memory: impl FnOnce() -> Error,
        too_long: impl FnOnce() -> Error,
    ) -> Error {
        match self {
            Self::NoMemory => no_memory(),
            Self::Broken(broken) => Error::engine(worker.id(), &broken.to_string()),
            Self::TooLong => too_long(),
            Self::NoRoom(error) => error,
        }
    }
}

/// The error for a reply that is larger than the configuration allows.
pub fn too_large(key: &str) -> Error {
    let message = format!(
        "the reply is larger than {key} allows: ask for fewer choices, log probabilities or \
         tokens"
    );
    Error::new(ErrorKind::ReplyTooLarge, message)
}

/// Reads a complete body. A body that arrives in one piece is not copied. Otherwise each byte is
/// charged to the budget before it is held, and stays charged while any part of the body is held. A
/// long body waits until its client has read enough of its other replies.
pub(super) async fn gather(
    body: &mut EngineBody,
    max_bytes: usize,
    memory: &ReplyMemory,
    room: Option<&ReplyRoom>,
) -> Result<Bytes, GatherError> {
    let mut first = Bytes::new();
    let mut whole: Option<GatheredReply> = None;
    let mut length = 0;
    while !body.is_end_stream() {
        let data = match body.frame().await {
            None => break,
            Some(Err(broken)) => return Err(GatherError::Broken(broken)),
            Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
        };
        length += data.len();
        if length > max_bytes {
            return Err(GatherError::TooLong);
        }
        if first.is_empty() && whole.is_none() {
            // Most replies are one piece.
            first = data;
            continue;
        }
        let left = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        if let Some(room) = room {
            let whole_bytes = body.size_hint().exact().map(|_| length.saturating_add(left));
            room.unread.room_for(length, whole_bytes).await.map_err(GatherError::NoRoom)?;
        }
        let budget = room.map_or(&memory.budget, |room| &room.memory);
        let whole = whole.get_or_insert_with(|| GatheredReply::new(budget));
        for data in [std::mem::take(&mut first), data] {
            whole.push(&data, left.min(max_bytes - length), memory.max_bytes)?;
        }
    }
    Ok(whole.map_or(first, GatheredReply::into_bytes))
}

/// The pieces of a reply that were gathered so far.
struct GatheredReply {
    bytes: Vec<u8>,
    charge: Charge,
}

impl GatheredReply {
    fn new(budget: &Arc<MemoryBudget>) -> Self {
        Self { bytes: Vec::new(), charge: budget.charge() }
    }

    /// Appends bytes; `left` is the number of bytes after these, as far as it is known.
    fn push(&mut self, data: &[u8], left: usize, max_bytes: usize) -> Result<(), GatherError> {
        let (had, needed) = (self.bytes.capacity(), self.bytes.len() + data.len());
        if needed > had {
            // Reserves no more than the whole body, and, as long as only the engine's announcement
            // is known, at most twice what has arrived.
            let grown = (2 * had).max(RESERVED_MIN_BYTES);
            let room = if left == 0 { had + had / 2 } else { grown.min(needed + left) };
            let room = room.max(needed);
            // While the buffer grows, the old and the new one exist.
            if !self.charge.grow(room, max_bytes) {
                return Err(GatherError::NoMemory);
            }
            self.bytes.reserve_exact(room - self.bytes.len());
            self.charge.shrink(had);
        }
        self.bytes.extend_from_slice(data);
        Ok(())
    }

    fn into_bytes(self) -> Bytes {
        self.charge.hold(self.bytes)
    }
}
