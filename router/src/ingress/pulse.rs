//! The state of a connection, and how long the connection may stay in it.
//!
//! The socket and the requests record the state without reading a clock; the
//! connection's own future, which is woken by each change, measures how long a state lasts.
//! So one timer for each connection is enough, however many requests the connection carries.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

use super::pace::{Seen, Slow, Taking, Waiting};
use super::wire::Offence;
use splitrail_config::model::Limits;

/// Why the router closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// A request's head took too long.
    HeaderTimeout,
    /// It carried no request for too long.
    Idle,
    /// The client does not read.
    WriteStall,
    /// The client reads too slowly.
    WritePace,
    /// Its bytes can be read in two ways.
    Framing,
    /// It sends too much that costs work and carries nothing.
    Flood,
}

impl Cut {
    /// Its name in metrics.
    pub(super) fn name(self) -> &'static str {
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

impl From<Offence> for Cut {
    fn from(offence: Offence) -> Self {
        match offence {
            Offence::Framing => Self::Framing,
            Offence::Flood => Self::Flood,
        }
    }
}

impl From<Slow> for Cut {
    fn from(slow: Slow) -> Self {
        match slow {
            Slow::Stalled => Self::WriteStall,
            Slow::Dribbling => Self::WritePace,
        }
    }
}

/// What a connection is doing.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    /// Whether the client has begun a head and not ended it.
    in_head: AtomicBool,
    /// Heads that have begun.
    heads: AtomicU32,
    /// Requests whose answers have not ended.
    active: AtomicU32,
    /// Requests up to now.
    requests: AtomicU32,
    /// Bytes that the client's side has taken.
    written_bytes: Arc<AtomicU64>,
    /// Whether it took none of what was offered last: then something waits to be written.
    is_blocked: AtomicBool,
    /// HTTP/2 streams of which something waits for the client.
    waiting_streams: AtomicU32,
    /// Whether what is not sent yet is to be thrown away at the end.
    discards: AtomicBool,
}

impl Pulse {
    pub(super) fn reads(&self, in_head: bool, heads: u32) {
        self.in_head.store(in_head, Relaxed);
        self.heads.store(heads, Relaxed);
    }

    pub(super) fn wrote(&self, bytes: usize) {
        self.written_bytes.fetch_add(bytes as u64, Relaxed);
        self.is_blocked.store(false, Relaxed);
    }

    /// The count of bytes that the client's side has taken.
    pub(super) fn written_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.written_bytes)
    }

    pub(super) fn blocked(&self) {
        self.is_blocked.store(true, Relaxed);
    }

    pub(super) fn request_begins(&self) {
        self.requests.fetch_add(1, Relaxed);
        self.active.fetch_add(1, Relaxed);
    }

    pub(super) fn request_ends(&self) {
        self.active.fetch_sub(1, Relaxed);
    }

    /// Whether a head has begun and not ended.
    pub(super) fn is_in_head(&self) -> bool {
        self.in_head.load(Relaxed)
    }

    pub(super) fn stream_waits(&self) {
        self.waiting_streams.fetch_add(1, Relaxed);
    }

    pub(super) fn stream_goes_on(&self) {
        self.waiting_streams.fetch_sub(1, Relaxed);
    }

    /// HTTP/2 streams of which something waits for the client.
    pub(super) fn waiting_streams(&self) -> u32 {
        self.waiting_streams.load(Relaxed)
    }

    /// The socket's buffers hold what nobody reads: they are not to outlive it.
    pub(super) fn discard(&self) {
        self.discards.store(true, Relaxed);
    }

    pub(super) fn discards(&self) -> bool {
        self.discards.load(Relaxed)
    }
}

/// How long a connection may do what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// From a head's first byte to its last; also from a connection's beginning to its first
    /// head's end.
    pub(super) head: Duration,
    /// Between requests.
    pub(super) idle: Duration,
    /// How what is sent has to be taken.
    pub(super) taking: Taking,
}

impl From<&Limits> for Patience {
    fn from(limits: &Limits) -> Self {
        Self { head: limits.header_timeout, idle: limits.idle_timeout, taking: limits.into() }
    }
}

/// A state, and since when it has been seen.
#[derive(Debug)]
struct Since<T> {
    state: T,
    at: Instant,
}

impl<T: PartialEq> Since<T> {
    fn see(&mut self, state: T, now: impl Fn() -> Instant) -> Instant {
        if self.state != state {
            *self = Self { state, at: now() };
        }
        self.at
    }
}

/// What a connection does on its reading side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Head(u32),
    Idle(u32),
    Serving,
}

/// Sees for how long a connection has been doing what it does.
#[derive(Debug)]
pub(super) struct Watch {
    patience: Patience,
    doing: Since<Doing>,
    /// What waits for the socket.
    blocked: Waiting,
}

impl Watch {
    /// Over a connection that began at this time: its first head is awaited.
    pub(super) fn new(patience: Patience, at: Instant) -> Self {
        Self { patience, doing: Since { state: Doing::Head(0), at }, blocked: Waiting::default() }
    }

    /// When the connection has to end if nothing happens until then, and why. `None` while it
    /// waits for an answer; since HTTP/2 streams end without waking their connection, it is to
    /// be looked after [now and then](Self::again) nevertheless. The clock is read only where
    /// something has changed.
    pub(super) fn look(
        &mut self,
        pulse: &Pulse,
        now: impl Fn() -> Instant,
    ) -> Option<(Instant, Cut)> {
        let (requests, heads) = (pulse.requests.load(Relaxed), pulse.heads.load(Relaxed));
        let is_blocked = pulse.is_blocked.load(Relaxed);
        let doing = if pulse.is_in_head() || requests == 0 && heads == 0 {
            Doing::Head(heads)
        } else if pulse.active.load(Relaxed) == 0 && !is_blocked {
            // The last bytes of an answer may wait after its request has ended.
            Doing::Idle(requests)
        } else {
            Doing::Serving
        };
        let since = self.doing.see(doing, &now);
        let reading = match doing {
            Doing::Head(_) => Some((since + self.patience.head, Cut::HeaderTimeout)),
            Doing::Idle(_) => Some((since + self.patience.idle, Cut::Idle)),
            Doing::Serving => None,
        };
        let taken_bytes = pulse.written_bytes.load(Relaxed);
        let seen = Seen { waits: is_blocked, taken_bytes, sharers: 1 };
        let writing = self.blocked.see(seen, &self.patience.taking, &now);
        let writing = writing.map(|(at, slow)| (at, slow.into()));
        reading.into_iter().chain(writing).min_by_key(|(at, _)| *at)
    }

    /// After how long to look again where nothing is due.
    pub(super) fn again(&self) -> Duration {
        self.patience.idle
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn watch() -> (Watch, Pulse, Instant) {
        let taking = Taking { stall: 300 * MS, grace: 10_000 * MS, min_bytes_per_s: 1 };
        let patience = Patience { head: 100 * MS, idle: 1000 * MS, taking };
        let start = Instant::now();
        (Watch::new(patience, start), Pulse::default(), start)
    }

    #[test]
    fn no_byte_of_a_head_extends_its_timeout() {
        let (mut watch, pulse, start) = watch();
        let due = Some((start + 100 * MS, Cut::HeaderTimeout));
        assert_eq!(watch.look(&pulse, || start), due, "nothing has come");
        let (mut watch, pulse, start) = self::watch();
        pulse.reads(true, 1);
        for i in 0..10 {
            pulse.reads(true, 1);
            let due = Some((start + 100 * MS, Cut::HeaderTimeout));
            assert_eq!(watch.look(&pulse, || start + i * MS), due);
        }
        // A next one has as long.
        pulse.reads(true, 2);
        let due = Some((start + 190 * MS, Cut::HeaderTimeout));
        assert_eq!(watch.look(&pulse, || start + 90 * MS), due);
    }

    #[test]
    fn a_connection_may_be_idle_between_requests_until_its_timeout() {
        let (mut watch, pulse, start) = watch();
        for round in 1..5 {
            pulse.reads(false, round);
            pulse.request_begins();
            assert_eq!(watch.look(&pulse, || start), None, "an answer may take long");
            pulse.request_ends();
            let now = start + round * 500 * MS;
            let due = Some((now + 1000 * MS, Cut::Idle));
            assert_eq!(watch.look(&pulse, || now), due);
            assert_eq!(watch.look(&pulse, || now + 900 * MS), due);
        }
    }

    #[test]
    fn an_answer_that_waits_to_be_written_is_no_idleness() {
        let (mut watch, pulse, start) = watch();
        pulse.reads(false, 1);
        pulse.request_begins();
        pulse.request_ends();
        pulse.blocked();
        let due = Some((start + 300 * MS, Cut::WriteStall));
        assert_eq!(watch.look(&pulse, || start), due);
        pulse.wrote(1);
        let now = start + 200 * MS;
        assert_eq!(watch.look(&pulse, || now), Some((now + 1000 * MS, Cut::Idle)));
    }

    #[test]
    fn a_client_that_takes_nothing_is_cut_and_a_slow_one_is_not() {
        let (mut watch, pulse, start) = watch();
        pulse.reads(false, 1);
        pulse.request_begins();
        for i in 0..20 {
            pulse.blocked();
            let now = start + i * 250 * MS;
            assert_eq!(watch.look(&pulse, || now), Some((now + 300 * MS, Cut::WriteStall)));
            pulse.wrote(1);
            assert_eq!(watch.look(&pulse, || now), None);
        }
        pulse.blocked();
        let due = Some((start + 300 * MS, Cut::WriteStall));
        assert_eq!(watch.look(&pulse, || start), due);
        pulse.blocked();
        assert_eq!(watch.look(&pulse, || start + 200 * MS), due);
    }
}
