//! One stream of a shim: its messages, and the acknowledgements and snapshot requests that are due.

use std::time::{Duration, Instant};

use splitrail_proto::v1;
use splitrail_proto::v1::attach_response::Message;
use tonic::Status;

use super::inbound::Inbound;
use super::registry::{Outbound, PendingStream};

/// Minimum time between two requests for a snapshot.
const RESYNC_INTERVAL_MIN: Duration = Duration::from_secs(1);
/// Maximum time for a snapshot to begin before it is requested again.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of invalid messages after which a stream is closed.
const INVALID_MAX: u32 = 16;
/// Number of applied messages after which an acknowledgement is sent although more messages follow.
const ACK_EVERY: u32 = 64;

/// Maximum time for which applied changes wait for a common acknowledgement. No work depends on an
/// acknowledgement, and each one costs the shim about as much as an event does.
const ACK_AFTER: Duration = Duration::from_millis(100);

/// One stream of a shim.
pub(super) struct ShimStream {
    pub(super) inbound: Inbound,
    pub(super) outbound: Outbound,
    pub(super) resync: SnapshotRequest,
    /// The last change in the index, if it has not been acknowledged.
    pub(super) unacked: Option<u64>,
    /// When the oldest change that is not acknowledged was applied.
    unacked_since: Instant,
    since_ack: u32,
    invalid: u32,
    /// The block size, in tokens, with which the shim hashes by its welcome, and that of the model
    /// at that time; 0 before the welcome.
    pub(super) block_size: u32,
    pub(super) model_block_size: u32,
    /// Number of load reports received on this stream.
    pub(super) load_reports: u32,
    /// Whether the shim has sent `Bye`.
    pub(super) is_leaving: bool,
}

/// The state of the requests for a snapshot.
#[derive(Debug)]
pub(super) struct SnapshotRequest {
    wanted: Option<&'static str>,
    asked_at: Option<Instant>,
    not_before: Instant,
}

impl SnapshotRequest {
    fn new(now: Instant) -> Self {
        Self { wanted: None, asked_at: None, not_before: now }
    }

    /// Notes that a snapshot is needed, unless one has been requested.
    pub(super) fn need(&mut self, reason: &'static str) {
        if self.asked_at.is_none() {
            self.wanted.get_or_insert(reason);
        }
    }

    /// Notes that the shim will send a snapshot without a request.
    pub(super) fn asked(&mut self, now: Instant) {
        (self.wanted, self.asked_at) = (None, Some(now));
    }

    /// Notes that a snapshot has begun to arrive.
    pub(super) fn answered(&mut self) {
        (self.wanted, self.asked_at) = (None, None);
    }

    /// Whether a snapshot is needed or requested, so that events before it are useless.
    pub(super) fn is_open(&self) -> bool {
        self.wanted.is_some() || self.asked_at.is_some()
    }

    /// When a snapshot must be requested, for the first time or again.
    pub(super) fn due(&self) -> Option<Instant> {
        match (self.wanted, self.asked_at) {
            (Some(_), _) => Some(self.not_before),
            (None, asked_at) => asked_at.map(|at| at + SNAPSHOT_TIMEOUT),
        }
    }

    /// If a snapshot must be requested now, notes that and returns the reason.
    fn take(&mut self, now: Instant) -> Option<&'static str> {
        if self.due().is_none_or(|due| now < due) {
            return None;
        }
        let reason = self.wanted.take().unwrap_or("no_snapshot");
        (self.asked_at, self.not_before) = (Some(now), now + RESYNC_INTERVAL_MIN);
        Some(reason)
    }
}

impl ShimStream {
    pub(super) fn new(stream: PendingStream, now: Instant) -> (super::hello::CheckedHello, Self) {
        let PendingStream { hello, inbound, outbound } = stream;
        let opened = Self {
            inbound,
            outbound,
            resync: SnapshotRequest::new(now),
            unacked: None,
            unacked_since: now,
            since_ack: 0,
            invalid: 0,
            block_size: 0,
            model_block_size: 0,
            load_reports: 0,
            is_leaving: false,
        };
        (hello, opened)
    }

    /// Sends the acknowledgement and the snapshot request that are due, if the queue has room.
    /// Returns the reason of the request.
    pub(super) fn send_due(&mut self, now: Instant) -> Option<&'static str> {
        if self.since_ack >= ACK_EVERY
            && let Some(sequence) = self.unacked
            && self.try_send(Message::Ack(v1::Ack { sequence }))
        {
            self.mark_acked();
        }
        // If the queue is full, the request is repeated after `SNAPSHOT_TIMEOUT`.
        let reason = self.resync.take(now)?;
        self.try_send(Message::Resync(v1::ResyncRequest { reason: reason.to_owned() }));
        Some(reason)
    }

    /// Notes that all changes up to this one are in the index.
    pub(super) fn note_applied(&mut self, sequence: u64) {
        if self.unacked.is_none() {
            self.unacked_since = Instant::now();
        }
        self.unacked = Some(sequence);
        self.since_ack += 1;
    }

    /// When the pending acknowledgement must be sent.
    pub(super) fn ack_due(&self) -> Instant {
        self.unacked_since + ACK_AFTER
    }

    pub(super) fn mark_acked(&mut self) {
        (self.unacked, self.since_ack) = (None, 0);
    }

    /// Counts an invalid message; returns whether the stream has brought too many.
    pub(super) fn count_invalid(&mut self) -> bool {
        self.invalid += 1;
        self.invalid >= INVALID_MAX
    }

    /// Sends a message if the queue has room; returns whether it had.
    pub(super) fn try_send(&self, message: Message) -> bool {
        self.outbound.try_send(Ok(v1::AttachResponse { message: Some(message) })).is_ok()
    }

    /// Ends the stream with a status, which is lost if the queue is full.
    pub(super) fn end(&self, status: Status) {
        let _in_vain = self.outbound.try_send(Err(status));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_requested_once_and_not_too_often() {
        let start = Instant::now();
        let mut resync = SnapshotRequest::new(start);
        assert_eq!(resync.take(start), None);
        resync.need("gap");
        resync.need("nonsense");
        assert_eq!(resync.take(start), Some("gap"));
        resync.need("gap");
        assert!(resync.is_open());
        assert_eq!(resync.take(start + RESYNC_INTERVAL_MIN), None, "one has been requested");
        assert_eq!(resync.take(start + SNAPSHOT_TIMEOUT), Some("no_snapshot"));
        resync.answered();
        assert!(!resync.is_open());
        resync.need("gap");
        assert_eq!(resync.take(start + SNAPSHOT_TIMEOUT), None, "just asked");
        assert_eq!(resync.take(start + SNAPSHOT_TIMEOUT + RESYNC_INTERVAL_MIN), Some("gap"));
    }
}
