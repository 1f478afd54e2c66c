//! Receives a request's body: bounded in size and time, and charged to the memory budget of
//! requests. A request takes no place in flight before its body is complete.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::core::Core;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::memory_budget::{Charge, MemoryBudget, full};
use splitrail_config::model::Limits;

/// Maximum memory in bytes that is reserved for a body because of its announced length.
pub(super) const RESERVED_MAX_BYTES: usize = 128 << 10;

/// Bytes that a request takes while its body arrives, besides the body: its stream in the HTTP
/// library and its futures. Later it has a place in flight.
const ARRIVING_BYTES: usize = 16 << 10;

/// Minimum length in bytes of a body in one piece that is left in its receive buffer. The buffer
/// may be four times as long, which is not charged, so shorter bodies are copied.
const LEFT_MIN_BYTES: usize = 64 << 10;

/// A body that is passed on as it arrives. The error is reported to the client.
pub(super) struct BoundedBody<B> {
    body: B,
    bounds: BodyBounds,
    core: Arc<Core>,
    /// Whether a refusal for want of memory counts as that of a client's request.
    counts_as_shed: bool,
    held: Charge,
    bytes: usize,
    /// Since when the client is waited for, and the timer; `None` while it is not waited for.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

/// The maximum size of a body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyBound {
    /// The maximum in bytes.
    pub(crate) max_bytes: usize,
    /// Whose bound it is, for messages.
    pub(crate) of: &'static str,
}

impl BodyBound {
    /// The bound on requests that have no body.
    pub(crate) const NONE: Self = Self { max_bytes: 0, of: "of requests that only read" };

    /// The bound on bodies of clients.
    pub(crate) fn of_clients(limits: &Limits) -> Self {
        Self { max_bytes: limits.body_max_bytes, of: "limits.body_size_max" }
    }
}

#[derive(Clone, Copy, Debug)]
struct BodyBounds {
    /// Maximum size in bytes including framing.
    max_bytes: usize,
    /// The part of `max_bytes` for the body itself.
    payload: BodyBound,
    /// Maximum memory in bytes of all bodies together.
    all_max_bytes: usize,
    pace: Pace,
}

/// The required pace of a body.
#[derive(Clone, Copy, Debug)]
struct Pace {
    timeout: Duration,
    grace: Duration,
    min_bytes_per_s: u64,
}

impl Pace {
    /// Maximum time from the first wait to the next byte, after this many bytes.
    fn allows(&self, bytes: usize) -> Duration {
        if self.min_bytes_per_s == 0 {
            return self.timeout;
        }
        let allowed_time = Duration::from_secs_f64(bytes as f64 / self.min_bytes_per_s as f64);
        self.timeout.min(self.grace.saturating_add(allowed_time))
    }
}

impl<B: Body<Data = Bytes> + Unpin> BoundedBody<B> {
    /// A body with up to `framing_bytes` of framing in addition to `limits.body_size_max`.
    /// It is charged to `memory`.
    pub(super) fn new(
        body: B,
        core: &Arc<Core>,
        limits: &Limits,
        memory: &Arc<MemoryBudget>,
        framing_bytes: usize,
    ) -> Self {
        let pace = Pace {
            timeout: limits.body_timeout,
            grace: limits.body_grace,
            min_bytes_per_s: limits.body_min_bytes_per_s,
        };
        let bounds = BodyBounds {
            max_bytes: limits.body_max_bytes + framing_bytes,
            payload: BodyBound::of_clients(limits),
            all_max_bytes: limits.request_memory_max_bytes,
            pace,
        };
        let (core, held) = (Arc::clone(core), memory.charge());
        Self { body, bounds, core, counts_as_shed: true, held, bytes: 0, waiting: None }
    }

    /// The same body as one of an operator: with another bound on its size, framing included, and
    /// not counted among the requests that are refused because of load.
    pub(super) fn of_operator(mut self, bound: BodyBound) -> Self {
        (self.bounds.max_bytes, self.bounds.payload) = (bound.max_bytes, bound);
        self.counts_as_shed = false;
        self
    }

    /// Receives the whole body; also returns its charge to the memory budget.
    ///
    /// # Errors
    /// The body is too large or too slow, there is no memory for it, or the client disconnects.
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
            // Each piece is copied immediately, so that its receive buffer is free for the next
            // piece.
            if whole.is_empty() {
                whole.reserve_exact(told.min(RESERVED_MAX_BYTES));
                whole.extend_from_slice(&std::mem::take(&mut left));
            }
            whole.extend_from_slice(&piece);
        }
        let whole = if whole.is_empty() { left } else { whole.into() };
        Ok((whole, self.into_held()))
    }

    /// Returns the charge for what was received.
    pub(super) fn into_held(mut self) -> Charge {
        if self.waiting.is_some() {
            self.held.shrink(ARRIVING_BYTES);
        }
        self.held
    }

    fn too_large(&self) -> Error {
        let BodyBound { max_bytes, of } = self.bounds.payload;
        let message = format!("the body has more than {max_bytes} bytes ({of})");
        Error::new(ErrorKind::BodyTooLarge, message)
    }

    fn too_slow(&self, waited: Duration) -> Error {
        let Pace { timeout, min_bytes_per_s, .. } = self.bounds.pace;
        let message = match waited >= timeout {
            true => format!("the body took longer than {timeout:?} (limits.body_timeout)"),
            false => format!(
                "the body arrives with less than {min_bytes_per_s} bytes per second \
                 (limits.body_rate_min)"
            ),
        };
        Error::new(ErrorKind::BodyTimeout, message)
    }

    fn took(&mut self, bytes: usize) -> Result<(), Error> {
        self.bytes += bytes;
        if self.bytes > self.bounds.max_bytes {
            return Err(self.too_large());
        }
        self.charge(bytes)
    }

    fn charge(&mut self, bytes: usize) -> Result<(), Error> {
        match self.held.grow(bytes, self.bounds.all_max_bytes) {
            true => Ok(()),
            false if self.counts_as_shed => Err(self.core.shed_memory()),
            false => Err(full()),
        }
    }

    /// Polls the timer of the wait for the client.
    fn poll_wait_timer(&mut self, context: &mut Context<'_>) -> Poll<Error> {
        let allowed = self.bounds.pace.allows(self.bytes);
        let (since, timer) = self.waiting.get_or_insert_with(|| {
            let now = Instant::now();
            (now, Box::pin(sleep_until(now + allowed)))
        });
        loop {
            // The timer is reset when it fires and not at every piece.
            ready!(timer.as_mut().poll(context));
            let waited = since.elapsed();
            if waited >= allowed {
                return Poll::Ready(self.too_slow(waited));
            }
            timer.as_mut().reset(*since + allowed);
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for BoundedBody<B> {
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
                if this.waiting.is_none()
                    && let Err(error) = this.charge(ARRIVING_BYTES)
                {
                    return Poll::Ready(Some(Err(error)));
                }
                return this.poll_wait_timer(context).map(|error| Some(Err(error)));
            }
        };
        Poll::Ready(frame.map(|frame| {
            let gone =
                |_| Error::new(ErrorKind::ClientGone, "the body could not be read to its end");
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
    fn a_body_has_the_grace_period_and_more_time_for_each_byte() {
        let s = Duration::from_secs;
        let pace = Pace { timeout: s(60), grace: s(5), min_bytes_per_s: 1000 };
        assert_eq!(pace.allows(0), s(5));
        assert_eq!(pace.allows(10_000), s(15));
        assert_eq!(pace.allows(1 << 30), s(60), "and never more than the timeout");
        assert_eq!(Pace { min_bytes_per_s: 0, ..pace }.allows(0), s(60));
    }
}
