//! Receives a request's body: bounded in bytes and time, and charged to the memory budget of
//! requests. A body takes no place in flight before it is complete.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::core::Core;
use splitrail_api::error::{Error, Kind};
use splitrail_api::memory_budget::Charge;
use splitrail_config::model::Limits;

/// Room that is made for a body on its word, before its bytes are there.
pub(super) const RESERVED_MAX_BYTES: usize = 128 << 10;

/// A body from this length on that comes in one piece is left in the buffer it came in. Such a
/// buffer may be four times as long, which is not counted: shorter bodies are copied.
const LEFT_MIN_BYTES: usize = 64 << 10;

/// A body, passed on as it comes. The error is what the client is told.
pub(super) struct Arriving<B> {
    body: B,
    bounds: Bounds,
    core: Arc<Core>,
    held: Charge,
    bytes: usize,
    /// Since when the client is waited for, and until when: only once it is.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Of this body, with its framing.
    max_bytes: usize,
    /// What of that is the body's own, for people.
    told_max_bytes: usize,
    /// Of all bodies.
    all_max_bytes: usize,
    pace: Pace,
}

/// How a body has to come.
#[derive(Clone, Copy, Debug)]
struct Pace {
    timeout: Duration,
    grace: Duration,
    min_bytes_per_s: u64,
}

impl Pace {
    /// How long the next byte may be waited for, since the first wait, after so many.
    fn allows(&self, bytes: usize) -> Duration {
        if self.min_bytes_per_s == 0 {
            return self.timeout;
        }
        let paid_for = Duration::from_secs_f64(bytes as f64 / self.min_bytes_per_s as f64);
        self.timeout.min(self.grace.saturating_add(paid_for))
    }
}

impl<B> Arriving<B>
where
    B: Body<Data = Bytes> + Unpin,
{
    /// A body that may have so many bytes of framing beside `limits.body_max_bytes`.
    pub(super) fn new(body: B, core: &Arc<Core>, limits: &Limits, framing_bytes: usize) -> Self {
        let pace = Pace {
            timeout: limits.body_timeout,
            grace: limits.body_grace,
            min_bytes_per_s: limits.body_min_bytes_per_s,
        };
        let bounds = Bounds {
            max_bytes: limits.body_max_bytes + framing_bytes,
            told_max_bytes: limits.body_max_bytes,
            all_max_bytes: limits.request_memory_max_bytes,
            pace,
        };
        let (core, held) = (Arc::clone(core), core.memory.charge());
        Self { body, bounds, core, held, bytes: 0, waiting: None }
    }

    /// All of it, and what it takes of the router's room.
    ///
    /// # Errors
    /// If it is too large or too slow, there is no room for it, or the client leaves.
    pub(super) async fn whole(mut self) -> Result<(Bytes, Charge), Error> {
        if self.body.size_hint().lower() > self.bounds.max_bytes as u64 {
            return Err(self.too_large());
        }
        let told = usize::try_from(self.body.size_hint().lower()).unwrap_or(usize::MAX);
        let (mut left, mut whole) = (Bytes::new(), Vec::new());
        while let Some(frame) = poll_fn(|context| Pin::new(&mut self).poll_frame(context)).await {
            let Ok(piece) = frame?.into_data() else { continue };
            if piece.len() == told && told >= LEFT_MIN_BYTES && left.is_empty() {
                left = piece;
                continue;
            }
            // Each piece goes to its place at once, so that the buffer it came in is free for
            // the next one.
            if whole.is_empty() {
                whole.reserve_exact(told.min(RESERVED_MAX_BYTES));
                whole.extend_from_slice(&std::mem::take(&mut left));
            }
            whole.extend_from_slice(&piece);
        }
        let whole = if whole.is_empty() { left } else { whole.into() };
        Ok((whole, self.held))
    }

    /// What has come of it takes so much of the router's room.
    pub(super) fn into_held(self) -> Charge {
        self.held
    }

    fn too_large(&self) -> Error {
        let max_bytes = self.bounds.told_max_bytes;
        let message = format!("the body has more than {max_bytes} bytes (limits.body_max_bytes)");
        Error::new(Kind::BodyTooLarge, message)
    }

    fn too_slow(&self, waited: Duration) -> Error {
        let Pace { timeout, min_bytes_per_s, .. } = self.bounds.pace;
        let message = match waited >= timeout {
            true => format!("the body took longer than {timeout:?} (limits.body_timeout)"),
            false => format!(
                "the body comes with less than {min_bytes_per_s} bytes per second \
                 (limits.body_min_bytes_per_s)"
            ),
        };
        Error::new(Kind::BodyTimeout, message)
    }

    fn took(&mut self, bytes: usize) -> Result<(), Error> {
        self.bytes += bytes;
        if self.bytes > self.bounds.max_bytes {
            return Err(self.too_large());
        }
        if !self.held.grow(bytes, self.bounds.all_max_bytes) {
            return Err(self.core.shed_memory());
        }
        Ok(())
    }

    /// The client is waited for: for how long it may be.
    fn poll_patience(&mut self, context: &mut Context<'_>) -> Poll<Error> {
        let allowed = self.bounds.pace.allows(self.bytes);
        let (since, timer) = self.waiting.get_or_insert_with(|| {
            let now = Instant::now();
            (now, Box::pin(sleep_until(now + allowed)))
        });
        loop {
            // The timer is moved when it fires, not with every piece that comes.
            ready!(timer.as_mut().poll(context));
            let waited = since.elapsed();
            if waited >= allowed {
                return Poll::Ready(self.too_slow(waited));
            }
            timer.as_mut().reset(*since + allowed);
        }
    }
}

impl<B> Body for Arriving<B>
where
    B: Body<Data = Bytes> + Unpin,
{
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = self.get_mut();
        let frame = match Pin::new(&mut this.body).poll_frame(context) {
            Poll::Ready(frame) => frame,
            Poll::Pending => {
                return this.poll_patience(context).map(|error| Some(Err(error)));
            }
        };
        Poll::Ready(frame.map(|frame| {
            let gone = |_| Error::new(Kind::ClientGone, "the body could not be read to its end");
            let frame = frame.map_err(gone)?;
            this.took(frame.data_ref().map_or(0, Bytes::len))?;
            Ok(frame)
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_for_a_body_is_the_grace_and_more_for_each_byte() {
        let s = Duration::from_secs;
        let pace = Pace { timeout: s(60), grace: s(5), min_bytes_per_s: 1000 };
        assert_eq!(pace.allows(0), s(5));
        assert_eq!(pace.allows(10_000), s(15));
        assert_eq!(pace.allows(1 << 30), s(60), "and never more than the time-out");
        assert_eq!(Pace { min_bytes_per_s: 0, ..pace }.allows(0), s(60));
    }
}
