//! Gathers a reply that is not streamed from its pieces.

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Body as _;
use prometheus::IntCounterVec;

use super::engine::Engine;
use crate::connections::EngineBody;
use crate::wire::Broken;
use splitrail_api::error::{Error, Kind};
use splitrail_api::memory_budget::{Charge, MemoryBudget, shed};
use splitrail_api::unread::Unread;

/// Room that is made at first for a reply of several pieces, if it may become as long.
const RESERVED_MIN_BYTES: usize = 128 << 10;

/// The memory that replies may take, with all else that requests hold.
#[derive(Clone)]
pub struct ReplyMemory {
    /// What is held by all requests.
    pub budget: Arc<MemoryBudget>,
    /// `limits.request_memory_max_bytes`.
    pub max_bytes: usize,
    /// Counts requests that are refused for load.
    pub shed: IntCounterVec,
}

impl ReplyMemory {
    /// Counts a request whose answer cannot be held, and says why.
    pub(crate) fn shed(&self) -> Error {
        shed(&self.shed)
    }
}

/// Why there is no whole reply.
#[derive(Debug)]
pub(super) enum NotWhole {
    /// It breaks off.
    Broken(Broken),
    /// It is longer than is allowed.
    TooLong,
    /// Requests hold as much memory as they may.
    NoMemory,
    /// Its client does not take its other answers.
    NoRoom(Error),
}

impl NotWhole {
    /// What it means for a request, whose bound is named `key`.
    pub(super) fn of(self, worker: &dyn Engine, key: &str, memory: &ReplyMemory) -> Error {
        match self {
            Self::NoMemory => memory.shed(),
            Self::Broken(broken) => Error::engine(worker.id(), &broken.to_string()),
            Self::TooLong => too_large(key),
            Self::NoRoom(error) => error,
        }
    }

    /// What it means for what an engine says of itself.
    pub(super) fn of_report(self, worker: &dyn Engine, memory: &ReplyMemory) -> Error {
        match self {
            Self::NoMemory => memory.shed(),
            Self::Broken(broken) => Error::engine(worker.id(), &broken.to_string()),
            Self::TooLong => {
                Error::engine(worker.id(), "says more of itself than is read of that (4 MiB)")
            }
            Self::NoRoom(error) => error,
        }
    }
}

/// An answer is larger than the configuration allows.
pub fn too_large(key: &str) -> Error {
    let message = format!(
        "the answer is larger than {key} allows: ask for fewer choices, log probabilities or \
         tokens"
    );
    Error::new(Kind::ReplyTooLarge, message)
}

/// All of a body. One that comes in one piece is not copied; of one that does not, each byte is
/// charged before it is held, for as long as any part of it is. A long one waits for room among
/// what its client has not taken.
pub(super) async fn gather(
    body: &mut EngineBody,
    max_bytes: usize,
    memory: &ReplyMemory,
    unread: Option<&Unread>,
) -> Result<Bytes, NotWhole> {
    let mut first = Bytes::new();
    let mut whole: Option<Gathered> = None;
    let mut length = 0;
    while !body.is_end_stream() {
        let data = match body.frame().await {
            None => break,
            Some(Err(broken)) => return Err(NotWhole::Broken(broken)),
            Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
        };
        length += data.len();
        if length > max_bytes {
            return Err(NotWhole::TooLong);
        }
        if first.is_empty() && whole.is_none() {
            // Most replies are one piece.
            first = data;
            continue;
        }
        let left = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        if let Some(unread) = unread {
            let whole_bytes = body.size_hint().exact().map(|_| length.saturating_add(left));
            unread.room_for(length, whole_bytes).await.map_err(NotWhole::NoRoom)?;
        }
        let whole = whole.get_or_insert_with(|| Gathered::new(memory));
        for data in [std::mem::take(&mut first), data] {
            whole.push(&data, left.min(max_bytes - length), memory.max_bytes)?;
        }
    }
    Ok(whole.map_or(first, Gathered::into_bytes))
}

/// What was gathered of a reply.
struct Gathered {
    bytes: Vec<u8>,
    charge: Charge,
}

impl Gathered {
    fn new(memory: &ReplyMemory) -> Self {
        Self { bytes: Vec::new(), charge: memory.budget.charge() }
    }

    /// Adds bytes, after which so many are `left` as far as is known.
    fn push(&mut self, data: &[u8], left: usize, max_bytes: usize) -> Result<(), NotWhole> {
        let (had, needed) = (self.bytes.capacity(), self.bytes.len() + data.len());
        if needed > had {
            // No more than the whole, and no more on its engine's word than twice what came.
            let grown = (2 * had).max(RESERVED_MIN_BYTES);
            let room = if left == 0 { had + had / 2 } else { grown.min(needed + left) };
            let room = room.max(needed);
            // For a moment, there are both.
            if !self.charge.grow(room, max_bytes) {
                return Err(NotWhole::NoMemory);
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
