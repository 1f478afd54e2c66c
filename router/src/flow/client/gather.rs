//! A whole reply, gathered from its pieces.

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Body as _;

use super::connections::EngineBody;
use super::wire::Broken;
use crate::error::{Error, Kind};
use crate::fleet::Worker;

/// Room that is made for a reply on its engine's word, before its bytes are there.
const RESERVED_MAX_BYTES: usize = 128 << 10;

/// Why there is no whole reply.
#[derive(Clone, Copy, Debug)]
pub(super) enum NotWhole {
    /// It breaks off.
    Broken(Broken),
    /// It is longer than is allowed.
    TooLong,
}

impl NotWhole {
    /// What it means for a request, whose bound is named `key`.
    pub(super) fn of(self, worker: &Worker, key: &str) -> Error {
        match self {
            Self::Broken(broken) => Error::engine(worker.id(), &broken.to_string()),
            Self::TooLong => too_large(key),
        }
    }

    /// What it means for what an engine says of itself.
    pub(super) fn of_report(self, worker: &Worker) -> Error {
        match self {
            Self::Broken(broken) => Error::engine(worker.id(), &broken.to_string()),
            Self::TooLong => {
                Error::engine(worker.id(), "says more of itself than is read of that (4 MiB)")
            }
        }
    }
}

/// An answer is larger than the configuration allows.
pub(crate) fn too_large(key: &str) -> Error {
    let message = format!(
        "the answer is larger than {key} allows: ask for fewer choices, log probabilities or \
         tokens"
    );
    Error::new(Kind::ReplyTooLarge, message)
}

/// All of a body, which is not copied if it comes in one piece.
pub(super) async fn gather(body: &mut EngineBody, max_bytes: usize) -> Result<Bytes, NotWhole> {
    let (mut first, mut whole) = (Bytes::new(), Vec::new());
    while !body.is_end_stream() {
        let data = match body.frame().await {
            None => break,
            Some(Err(broken)) => return Err(NotWhole::Broken(broken)),
            Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
        };
        if first.len() + whole.len() + data.len() > max_bytes {
            return Err(NotWhole::TooLong);
        }
        if first.is_empty() && whole.is_empty() {
            // Most replies are one piece.
            first = data;
            continue;
        }
        if whole.is_empty() {
            let left = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
            whole.reserve_exact(first.len() + data.len() + left.min(RESERVED_MAX_BYTES));
            whole.extend_from_slice(&std::mem::take(&mut first));
        }
        whole.extend_from_slice(&data);
    }
    Ok(if whole.is_empty() { first } else { whole.into() })
}
