//! The state of a connection, and how long the connection may stay in it.
//!
//! The socket and the requests record the state without reading a clock; the connection's own
//! future, which is woken by each change, measures how long a state lasts. So one timer for each
//! connection is enough, however many requests the connection carries.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

use crate::pace::{Observation, RequiredPace, SlowReason, WaitTime};
use crate::wire::{Offence, Protocol};
use splitrail_config::model::Limits;

/// Why the router closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// A request's head took too long.
    HeaderTimeout,
    /// The connection had no request for too long.
    Idle,
    /// The client does not read.
    WriteStall,
    /// The client reads too slowly.
    WritePace,
    /// The client's bytes are ambiguous.
    Framing,
    /// The client sends too many frames that cost work and carry nothing.
    Flood,
}

impl CloseReason {
    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::HeaderTimeout => "header_timeout",
            Self::Idle => "idle",
            Self::WriteStall => "write_stall",
            Self::WritePace => "write_pace",
            Self::Framing => "framing",
            Self::Flood => "flood",
        }
    }
}

impl From<Offence> for CloseReason {
    fn from(offence: Offence) -> Self {
        match offence {
            Offence::Framing => Self::Framing,
            Offence::Flood => Self::Flood,
        }
    }
}

impl From<SlowReason> for CloseReason {
    fn from(slow: SlowReason) -> Self {
        match slow {
            SlowReason::Stalled => Self::WriteStall,
            SlowReason::TooSlow => Self::WritePace,
        }
    }
}

/// The state of a connection.
#[derive(Debug, Default)]
pub struct ConnectionActivity {
    /// Whether the client has begun a head and not ended it.
    in_head: AtomicBool,
    /// Number of heads that have begun.
    heads: AtomicU32,
    /// Number of requests whose replies have not ended.
    active: AtomicU32,
    /// Number of requests so far.
    requests: AtomicU32,
    /// Number of requests for engines that are being answered, or have been to their end.
    work: AtomicU32,
    /// Number of bytes that the client has taken.
    written_bytes: Arc<AtomicU64>,
    /// Whether the last write could not proceed, so that bytes wait.
    is_blocked: AtomicBool,
    /// Number of HTTP/2 streams with bytes that wait for the client.
    waiting_streams: AtomicU32,
    /// Whether unsent bytes are discarded at the end.
    discards: AtomicBool,
    /// Whether the socket must find out by itself that the client has left.
    checks_for_end: AtomicBool,
}

impl ConnectionActivity {
    /// The socket has read bytes: whether they end within a head, and the number of heads so far.
    pub fn reads(&self, in_head: bool, heads: u32) {
        self.in_head.store(in_head, Relaxed);
        self.heads.store(heads, Relaxed);
    }

    /// The client has taken bytes.
    pub fn wrote(&self, bytes: usize) {
        self.written_bytes.fetch_add(bytes as u64, Relaxed);
        self.is_blocked.store(false, Relaxed);
    }

    /// The counter of bytes that the client has taken.
    pub fn written_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.written_bytes)
    }

    /// The client takes no bytes now.
    pub fn blocked(&self) {
        self.is_blocked.store(true, Relaxed);
    }

    /// A request has arrived.
    pub fn request_begins(&self) {
        self.requests.fetch_add(1, Relaxed);
        self.active.fetch_add(1, Relaxed);
    }

    /// A request was answered, or was given up.
    pub fn request_ends(&self) {
        self.active.fetch_sub(1, Relaxed);
    }

    /// A request for an engine has arrived.
    pub fn work_begins(&self) {
        self.work.fetch_add(1, Relaxed);
    }

    /// A request for an engine was cancelled, or refused.
    pub fn work_is_lost(&self) {
        self.work.fetch_sub(1, Relaxed);
    }

    /// Number of requests for engines that are being answered, or have been to their end.
    pub fn work(&self) -> u32 {
        self.work.load(Relaxed)
    }

    /// Whether a head has begun and not ended.
    pub fn is_in_head(&self) -> bool {
        self.in_head.load(Relaxed)
    }

    /// An HTTP/2 stream has bytes that wait for the client.
    pub fn stream_waits(&self) {
        self.waiting_streams.fetch_add(1, Relaxed);
    }

    /// The client has taken what such a stream had.
    pub fn stream_continues(&self) {
        self.waiting_streams.fetch_sub(1, Relaxed);
    }

    /// Number of HTTP/2 streams with bytes that wait for the client.
    pub fn waiting_streams(&self) -> u32 {
        self.waiting_streams.load(Relaxed)
    }

    /// Discards the bytes in the socket's buffers when the connection ends, because the client does
    /// not read them.
    pub fn discard(&self) {
        self.discards.store(true, Relaxed);
    }

    /// Whether unsent bytes are discarded at the end.
    pub fn discards(&self) -> bool {
        self.discards.load(Relaxed)
    }

    /// Whether the socket must find out by itself that the client has left: the library does not
    /// read while it has bytes of a later request.
    pub fn checks_for_end(&self) -> bool {
        self.checks_for_end.load(Relaxed)
    }
}

/// The timeouts of a connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionTimeouts {
    /// Maximum time from a head's first byte to its end; also from the start of the connection to
    /// the end of its first head.
    pub head: Duration,
    /// Maximum time between requests.
    pub idle: Duration,
    /// The required pace of reading.
    pub required_pace: RequiredPace,
}

impl From<&Limits> for ConnectionTimeouts {
    fn from(limits: &Limits) -> Self {
        Self {
            head: limits.header_timeout,
            idle: limits.idle_timeout,
            required_pace: limits.into(),
        }
    }
}

/// The interval at which the socket of an HTTP/1 client that has sent bytes beyond its request is
/// checked for its end.
const END_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A state, and since when it has been observed.
#[derive(Debug)]
struct ObservedState<T> {
    state: T,
    at: Instant,
}

impl<T: PartialEq> ObservedState<T> {
    fn see(&mut self, state: T, now: impl Fn() -> Instant) -> Instant {
        if self.state != state {
            *self = Self { state, at: now() };
        }
        self.at
    }
}

/// The state of a connection's reading side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadState {
    Head(u32),
    Idle(u32),
    Serving,
}

/// Measures for how long a connection has been in its state.
#[derive(Debug)]
pub struct IdleMonitor {
    timeouts: ConnectionTimeouts,
    protocol: Protocol,
    doing: ObservedState<ReadState>,
    /// Whether the socket is checked for its end.
    checks_for_end: bool,
    /// The bytes that wait for the socket.
    blocked: WaitTime,
}

impl IdleMonitor {
    /// For a connection that began at this time and whose first head is awaited.
    pub fn new(timeouts: ConnectionTimeouts, protocol: Protocol, at: Instant) -> Self {
        Self {
            timeouts,
            protocol,
            doing: ObservedState { state: ReadState::Head(0), at },
            checks_for_end: false,
            blocked: WaitTime::default(),
        }
    }

    /// The time at which the connection must end if nothing happens until then, and the reason.
    /// `None` while requests are being answered; because HTTP/2 streams end without waking their
    /// connection, it must be called [from time to time](Self::again) nevertheless. The clock is
    /// read only if something has changed.
    pub fn look(
        &mut self,
        activity: &ConnectionActivity,
        now: impl Fn() -> Instant,
    ) -> Option<(Instant, CloseReason)> {
        let (requests, heads) = (activity.requests.load(Relaxed), activity.heads.load(Relaxed));
        let is_blocked = activity.is_blocked.load(Relaxed);
        // The last bytes of a reply may wait after its request has ended.
        let is_serving = activity.active.load(Relaxed) > 0 || is_blocked;
        // Over HTTP/1, the next head is not read before the current reply has ended, so its client
        // is not waited for.
        let in_head = activity.is_in_head() && !(is_serving && self.protocol == Protocol::Http1);
        let doing = if in_head || requests == 0 && heads == 0 {
            ReadState::Head(heads)
        } else if is_serving {
            ReadState::Serving
        } else {
            ReadState::Idle(requests)
        };
        let has_more = doing == ReadState::Serving && heads != requests;
        self.checks_for_end = has_more && self.protocol == Protocol::Http1;
        activity.checks_for_end.store(self.checks_for_end, Relaxed);
        let since = self.doing.see(doing, &now);
        let reading = match doing {
            ReadState::Head(_) => Some((since + self.timeouts.head, CloseReason::HeaderTimeout)),
            ReadState::Idle(_) => Some((since + self.timeouts.idle, CloseReason::Idle)),
            ReadState::Serving => None,
        };
        let taken_bytes = activity.written_bytes.load(Relaxed);
        let seen = Observation { waits: is_blocked, taken_bytes, sharers: 1 };
        let writing = self.blocked.see(seen, &self.timeouts.required_pace, &now);
        let writing = writing.map(|(at, slow)| (at, slow.into()));
        reading.into_iter().chain(writing).min_by_key(|(at, _)| *at)
    }

    /// After how long to poll the connection and to call `look` again if nothing is due.
    pub fn poll_interval(&self) -> Duration {
        match self.checks_for_end {
            true => END_CHECK_INTERVAL.min(self.timeouts.idle),
            false => self.timeouts.idle,
        }
    }

    /// By when to poll the connection again, if that is not left to its wakers. The clock is read
    /// only in that case.
    pub fn next_check(&self, now: impl Fn() -> Instant) -> Option<Instant> {
        self.checks_for_end.then(|| now() + self.poll_interval())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn watch() -> (IdleMonitor, ConnectionActivity, Instant) {
        watch_of(Protocol::Http1)
    }

    fn watch_of(protocol: Protocol) -> (IdleMonitor, ConnectionActivity, Instant) {
        let required_pace =
            RequiredPace { stall: 300 * MS, grace: 10_000 * MS, min_bytes_per_s: 1 };
        let timeouts = ConnectionTimeouts { head: 100 * MS, idle: 1000 * MS, required_pace };
        let start = Instant::now();
        (IdleMonitor::new(timeouts, protocol, start), ConnectionActivity::default(), start)
    }

    #[test]
    fn bytes_of_a_head_do_not_extend_its_timeout() {
        let (mut watch, activity, start) = watch();
        let due = Some((start + 100 * MS, CloseReason::HeaderTimeout));
        assert_eq!(watch.look(&activity, || start), due, "nothing has come");
        let (mut watch, activity, start) = self::watch();
        activity.reads(true, 1);
        for i in 0..10 {
            activity.reads(true, 1);
            let due = Some((start + 100 * MS, CloseReason::HeaderTimeout));
            assert_eq!(watch.look(&activity, || start + i * MS), due);
        }
        // The next head has the same time.
        activity.reads(true, 2);
        let due = Some((start + 190 * MS, CloseReason::HeaderTimeout));
        assert_eq!(watch.look(&activity, || start + 90 * MS), due);
    }

    #[test]
    fn a_connection_may_be_idle_between_requests_until_its_timeout() {
        let (mut watch, activity, start) = watch();
        for round in 1..5 {
            activity.reads(false, round);
            activity.request_begins();
            assert_eq!(watch.look(&activity, || start), None, "a reply may take long");
            activity.request_ends();
            let now = start + round * 500 * MS;
            let due = Some((now + 1000 * MS, CloseReason::Idle));
            assert_eq!(watch.look(&activity, || now), due);
            assert_eq!(watch.look(&activity, || now + 900 * MS), due);
        }
    }

    #[test]
    fn the_time_of_the_next_head_begins_after_the_reply_over_http1() {
        let (mut watch, activity, start) = watch();
        activity.reads(false, 1);
        activity.request_begins();
        activity.reads(true, 2);
        assert_eq!(watch.look(&activity, || start), None, "the next head has begun");
        assert_eq!(watch.look(&activity, || start + 900 * MS), None);
        activity.request_ends();
        activity.blocked();
        let due = Some((start + 1200 * MS, CloseReason::WriteStall));
        assert_eq!(watch.look(&activity, || start + 900 * MS), due);
        activity.wrote(1);
        let due = Some((start + 1050 * MS, CloseReason::HeaderTimeout));
        assert_eq!(watch.look(&activity, || start + 950 * MS), due);

        let (mut watch, activity, start) = watch_of(Protocol::Http2);
        activity.reads(false, 1);
        activity.request_begins();
        activity.reads(true, 2);
        let due = Some((start + 100 * MS, CloseReason::HeaderTimeout));
        assert_eq!(watch.look(&activity, || start), due, "a head of HTTP/2 is read at once");
    }

    #[test]
    fn a_connection_with_an_unwritten_response_is_not_idle() {
        let (mut watch, activity, start) = watch();
        activity.reads(false, 1);
        activity.request_begins();
        activity.request_ends();
        activity.blocked();
        let due = Some((start + 300 * MS, CloseReason::WriteStall));
        assert_eq!(watch.look(&activity, || start), due);
        activity.wrote(1);
        let now = start + 200 * MS;
        assert_eq!(watch.look(&activity, || now), Some((now + 1000 * MS, CloseReason::Idle)));
    }

    #[test]
    fn a_client_that_reads_nothing_is_disconnected_and_a_slow_one_is_not() {
        let (mut watch, activity, start) = watch();
        activity.reads(false, 1);
        activity.request_begins();
        for i in 0..20 {
            activity.blocked();
            let now = start + i * 250 * MS;
            assert_eq!(
                watch.look(&activity, || now),
                Some((now + 300 * MS, CloseReason::WriteStall))
            );
            activity.wrote(1);
            assert_eq!(watch.look(&activity, || now), None);
        }
        activity.blocked();
        let due = Some((start + 300 * MS, CloseReason::WriteStall));
        assert_eq!(watch.look(&activity, || start), due);
        activity.blocked();
        assert_eq!(watch.look(&activity, || start + 200 * MS), due);
    }
}
