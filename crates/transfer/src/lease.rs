//! Computes how long a hand-off is valid.
//!
//! A prefill engine keeps the blocks of a hand-off for the time of its lease, and then gives them to other
//! requests. A decode engine that takes them later gets no error: vLLM answers 200 from whatever the
//! blocks hold by then. Therefore the router enforces the deadline.

use std::pin::pin;
use std::time::Duration;

use splitrail_api::error::{Error, ErrorKind};
use splitrail_engine::connectors::nixl::HandOff;
use splitrail_fleet::Worker;
use splitrail_telemetry::clock::unix_ms;
use tokio::time::{Instant, timeout_at};

use crate::repair::Registration;

/// The time by which a decode worker must have taken a hand-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    ends: Instant,
}

impl Lease {
    /// The lease of a hand-off whose reply began at `begun`.
    pub fn of(configured: Duration, hand_off: &HandOff, begun: Instant) -> Self {
        let now_unix_s = unix_ms() as f64 / 1e3;
        let said = hand_off.remote_blocks_expiry_s().and_then(|at| left_by_engine(at, now_unix_s));
        Self::new(begun, configured, said, Instant::now())
    }

    /// A lease that started when the first byte of the prefill reply arrived; the engine had staged
    /// the blocks by then. `engine` is the time that is left at `now` according to the engine. The
    /// earlier end counts, and a tenth of the time is kept as a margin for the transfer.
    pub fn new(
        started: Instant,
        configured: Duration,
        engine: Option<Duration>,
        now: Instant,
    ) -> Self {
        let own = started + usable(configured);
        let said = engine.map(|left| now + usable(left));
        Self { ends: said.map_or(own, |said| said.min(own)) }
    }

    /// The end of the lease.
    pub fn ends(&self) -> Instant {
        self.ends
    }

    /// The time that is left of the lease; zero after its end.
    pub fn left(&self, now: Instant) -> Duration {
        self.ends.saturating_duration_since(now)
    }
}

/// The middle of the time since an instant at which a leg was on its way. Load reports before it say
/// nothing of the leg, which may have reached the worker after them.
pub fn middle_since(then: std::time::Instant) -> std::time::Instant {
    then + then.elapsed() / 2
}

/// The part of a lease in which a request may be sent to a decode worker: a tenth is kept as a
/// margin for the transfer.
pub fn usable(lease: Duration) -> Duration {
    lease - lease / 10
}

/// The time until an engine's expiry; both times are in seconds since 1970. `None` for the expiry
/// of an engine that uses a clock of its own (since the machine's start, say), and for an expiry in
/// the past: no engine hands over blocks that it has freed, so the clocks must differ.
pub fn left_by_engine(expiry_unix_s: f64, now_unix_s: f64) -> Option<Duration> {
    const DAY_S: f64 = 86_400.0;
    let left_s = expiry_unix_s - now_unix_s;
    (left_s > 0.0 && left_s < DAY_S).then(|| Duration::from_secs_f64(left_s))
}

/// Limits a call by the lease of its hand-off. An engine that has not begun to answer by the end of
/// the lease may have taken the blocks too late, and would not report this.
///
/// # Errors
/// As the call, or the lease has ended.
pub async fn in_lease<T>(
    lease: Option<Lease>,
    worker: &Worker,
    call: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let Some(lease) = lease else { return call.await };
    let in_time = timeout_at(lease.ends(), call).await;
    in_time.unwrap_or_else(|_| Err(lease_expired(worker)))
}

/// The error for a decode leg that has not taken its hand-off in time.
pub fn lease_expired(worker: &Worker) -> Error {
    let message = format!("worker {} has not taken a hand-off within its lease", worker.id());
    Error::new(ErrorKind::LeaseExpired, message)
}

/// Completes at the end of a lease if the leg, sent at `sent`, may still be in the worker's queue.
///
/// A reply that is not streamed comes only after all tokens are generated, so its time says nothing
/// about the lease. Only the worker's load reports show whether the request left the queue in time.
pub async fn queued_past(lease: Lease, worker: &Worker, sent: std::time::Instant) {
    tokio::time::sleep_until(lease.ends()).await;
    if !worker.has_queued_since(middle_since(sent)) {
        std::future::pending::<()>().await;
    }
}

/// Waits for a decode leg whose prefill leg has finished. Blocks that decode has not registered for
/// by the end of the lease are never pushed.
///
/// A reply that is not streamed comes only after all tokens are generated, so its time says nothing
/// about the lease. Only the worker's load reports show whether the leg left the queue in time. With
/// several samples, a leg that only takes the hand-off comes first; once it has ended, no lease matters.
///
/// # Errors
/// As the decode leg, or the lease has ended.
pub async fn within_lease<T>(
    worker: &Worker,
    is_streamed: bool,
    lease: Lease,
    registration: &Registration,
    decoding: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let prefilled = std::time::Instant::now();
    let mut decoding = pin!(decoding);
    if let Ok(reply) = timeout_at(lease.ends(), decoding.as_mut()).await {
        return reply;
    }
    if registration.is_over() {
        return decoding.await;
    }
    let middle = middle_since(prefilled);
    if is_streamed || worker.has_queued_since(middle) {
        return Err(lease_expired(worker));
    }
    if worker.has_been_idle_since(middle) {
        registration.received();
    }
    decoding.await
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn the_clock_starts_with_the_reply_and_a_tenth_is_kept() {
        let started = Instant::now();
        let lease = Lease::new(started, 30 * S, None, started + 5 * S);
        assert_eq!(lease.left(started), 27 * S);
        assert_eq!(lease.left(started + 20 * S), 7 * S);
        assert_eq!(lease.left(started + 27 * S), Duration::ZERO);
        assert_eq!(lease.left(started + 40 * S), Duration::ZERO);
    }

    #[test]
    fn the_engine_s_own_expiry_counts_if_it_is_earlier() {
        let started = Instant::now();
        let now = started + S;
        let lease = |engine| Lease::new(started, 30 * S, Some(engine), now).left(started);
        assert_eq!(lease(10 * S), 10 * S);
        assert_eq!(lease(100 * S), 27 * S);
    }

    #[test]
    fn only_an_expiry_by_the_calendar_can_be_understood() {
        let now = 1_800_000_000.0;
        assert_eq!(left_by_engine(now + 30.0, now), Some(30 * S));
        assert_eq!(left_by_engine(now - 1.0, now), None);
        assert_eq!(left_by_engine(4_711.5, now), None);
        assert_eq!(left_by_engine(now * 1000.0, now), None);
        assert_eq!(left_by_engine(f64::NAN, now), None);
    }
}
