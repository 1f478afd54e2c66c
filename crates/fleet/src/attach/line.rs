//! The outgoing half of a shim's stream: the messages that are still to be sent.

use std::time::{Duration, Instant};

use splitrail_proto::v1;
use splitrail_proto::v1::attach_response::Message;
use tonic::Status;

use super::inbound::Inbound;
use super::registry::{Outbound, PendingStream};

/// Between two requests for a snapshot.
const BETWEEN: Duration = Duration::from_secs(1);
/// How long a snapshot may take to begin before it is asked for again.
const PATIENCE: Duration = Duration::from_secs(30);
/// Messages without sense that one stream may bring.
const NONSENSE_MAX: u32 = 16;
/// Messages after which it is told how far they are, though more are there.
const ACK_EVERY: u32 = 64;

/// How long changes wait to be acknowledged together. Nothing waits for an acknowledgement; each
/// costs the shim about as much as an event does.
const ACK_AFTER: Duration = Duration::from_millis(100);

/// A stream.
pub(super) struct Line {
    pub(super) inbound: Inbound,
    pub(super) outbound: Outbound,
    pub(super) resync: Resync,
    /// The last change that is in the index, if the shim was not told.
    pub(super) unacked: Option<u64>,
    /// Since when something is.
    unacked_since: Instant,
    since_ack: u32,
    nonsense: u32,
    /// Loads that came while nothing was believed.
    pub(super) loads: u32,
    /// It has said good-bye.
    pub(super) is_leaving: bool,
}

/// The wish for a snapshot.
#[derive(Debug)]
pub(super) struct Resync {
    wanted: Option<&'static str>,
    asked_at: Option<Instant>,
    not_before: Instant,
}

impl Resync {
    fn new(now: Instant) -> Self {
        Self { wanted: None, asked_at: None, not_before: now }
    }

    /// A snapshot is needed, for this reason.
    pub(super) fn need(&mut self, reason: &'static str) {
        if self.asked_at.is_none() {
            self.wanted.get_or_insert(reason);
        }
    }

    /// It is known already that a snapshot is needed.
    pub(super) fn asked(&mut self, now: Instant) {
        (self.wanted, self.asked_at) = (None, Some(now));
    }

    /// A snapshot comes in.
    pub(super) fn answered(&mut self) {
        (self.wanted, self.asked_at) = (None, None);
    }

    /// Whether what comes before a snapshot is of no use.
    pub(super) fn is_open(&self) -> bool {
        self.wanted.is_some() || self.asked_at.is_some()
    }

    /// When it is to be asked for (again).
    pub(super) fn due(&self) -> Option<Instant> {
        match (self.wanted, self.asked_at) {
            (Some(_), _) => Some(self.not_before),
            (None, asked_at) => asked_at.map(|at| at + PATIENCE),
        }
    }

    /// Takes what is to be asked now, if anything.
    fn take(&mut self, now: Instant) -> Option<&'static str> {
        if self.due().is_none_or(|due| now < due) {
            return None;
        }
        let reason = self.wanted.take().unwrap_or("no_snapshot");
        (self.asked_at, self.not_before) = (Some(now), now + BETWEEN);
        Some(reason)
    }
}

impl Line {
    pub(super) fn new(stream: PendingStream, now: Instant) -> (super::greet::AttachRequest, Self) {
        let PendingStream { request, inbound, outbound } = stream;
        let line = Self {
            inbound,
            outbound,
            resync: Resync::new(now),
            unacked: None,
            unacked_since: now,
            since_ack: 0,
            nonsense: 0,
            loads: 0,
            is_leaving: false,
        };
        (request, line)
    }

    /// Sends what is due, as far as there is room; the reason for which a snapshot was asked.
    pub(super) fn say(&mut self, now: Instant) -> Option<&'static str> {
        if self.since_ack >= ACK_EVERY
            && let Some(sequence) = self.unacked
            && self.tell(Message::Ack(v1::Ack { sequence }))
        {
            self.acked();
        }
        // Asked in vain, it is asked again in time.
        let reason = self.resync.take(now)?;
        self.tell(Message::Resync(v1::ResyncRequest { reason: reason.to_owned() }));
        Some(reason)
    }

    /// Changes up to here are in the index.
    pub(super) fn applied(&mut self, sequence: u64) {
        if self.unacked.is_none() {
            self.unacked_since = Instant::now();
        }
        self.unacked = Some(sequence);
        self.since_ack += 1;
    }

    /// When what is applied is said: together with what comes soon after.
    pub(super) fn ack_due(&self) -> Instant {
        self.unacked_since + ACK_AFTER
    }

    pub(super) fn acked(&mut self) {
        (self.unacked, self.since_ack) = (None, 0);
    }

    /// One more message made no sense; says whether that is too much.
    pub(super) fn is_hopeless(&mut self) -> bool {
        self.nonsense += 1;
        self.nonsense >= NONSENSE_MAX
    }

    /// Sends a message if there is room.
    pub(super) fn tell(&self, message: Message) -> bool {
        self.outbound.try_send(Ok(v1::AttachResponse { message: Some(message) })).is_ok()
    }

    /// Ends the stream. A shim that reads nothing does not hear why.
    pub(super) fn end(&self, status: Status) {
        let _in_vain = self.outbound.try_send(Err(status));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_are_asked_for_once_and_not_too_often() {
        let start = Instant::now();
        let mut resync = Resync::new(start);
        assert_eq!(resync.take(start), None);
        resync.need("gap");
        resync.need("nonsense");
        assert_eq!(resync.take(start), Some("gap"));
        resync.need("gap");
        assert!(resync.is_open());
        assert_eq!(resync.take(start + BETWEEN), None, "one is on its way");
        assert_eq!(resync.take(start + PATIENCE), Some("no_snapshot"));
        resync.answered();
        assert!(!resync.is_open());
        resync.need("gap");
        assert_eq!(resync.take(start + PATIENCE), None, "just asked");
        assert_eq!(resync.take(start + PATIENCE + BETWEEN), Some("gap"));
    }
}
