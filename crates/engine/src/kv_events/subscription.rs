//! A continuous subscription to one engine's KV events: live batches from its publisher, and
//! replays of missed batches from its replay endpoint.
//!
//! The subscriber connects first and then requests a replay, so that nothing is lost between the
//! two; `sequence.rs` restores the order of the batches. Everything for one engine runs in one
//! future, which spawns no task.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

mod check;
mod message;
mod replay;
mod session;

use super::decode::{DecodeError, DecodeLimits, EventBatch};
use crate::zmtp::{AddressFilter, Endpoint, Pace, WireError};
pub use check::{LiveStream, ReplayCheckError};
use session::Session;

/// The endpoints and settings of a subscription. [`Subscription::new`] sets defaults.
#[derive(Clone, Debug)]
pub struct Subscription {
    /// The engine's publisher (a PUB socket).
    pub events_endpoint: Endpoint,
    /// The engine's replay service (a ROUTER socket), if it has one.
    pub replay_endpoint: Option<Endpoint>,
    /// Prefix of the topics to receive; empty for all.
    pub topic: String,
    /// Bounds on one payload.
    pub limits: DecodeLimits,
    /// Bounds on the live batches that wait for the end of a replay.
    pub buffer: BufferLimits,
    /// Timeouts and intervals.
    pub timing: Timing,
    /// Combines the reads of a busy stream; `None` reads each message when it arrives.
    pub pacing: Option<Pacing>,
    /// Which addresses are allowed, checked at each look-up; `None` allows all.
    pub admits: Option<AddressFilter>,
    /// Becomes true after the handshake with the engine's publisher.
    pub connected: Option<watch::Sender<bool>>,
}

/// Combines the reads of a busy stream.
#[derive(Clone, Debug)]
pub struct Pacing {
    /// The times at which the stream is read.
    pub pace: Pace,
    /// Raised by callers that cannot wait for the next read: each number is answered by
    /// [`Update::Fresh`], except while the engine cannot be reached.
    pub asks: watch::Receiver<u64>,
}

/// Bounds on waiting live batches; beyond them the oldest are dropped and fetched by another
/// replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferLimits {
    /// Maximum number of batches.
    pub max_batches: usize,
    /// Maximum size of their payloads in bytes. Must not be less than the maximum of one payload.
    pub max_bytes: usize,
}

/// Timeouts and intervals of a subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Maximum time to connect, including the handshake.
    pub connect_timeout: Duration,
    /// Maximum silence before a replay is given up.
    pub replay_timeout: Duration,
    /// Time after a failed replay until the next one.
    pub replay_retry: Duration,
    /// Pause before connecting again; it doubles with each failure ...
    pub retry_min: Duration,
    /// ... up to this value.
    pub retry_max: Duration,
    /// Silence on the stream after which a replay checks that nothing was missed and that the
    /// engine still exists; `None` for never.
    pub idle_check: Option<Duration>,
}

impl Subscription {
    /// A subscription to everything that an engine publishes.
    pub fn new(events_endpoint: Endpoint, replay_endpoint: Option<Endpoint>) -> Self {
        Self {
            events_endpoint,
            replay_endpoint,
            topic: String::new(),
            limits: DecodeLimits::default(),
            buffer: BufferLimits { max_batches: 16_384, max_bytes: 64 << 20 },
            timing: Timing {
                connect_timeout: Duration::from_secs(5),
                replay_timeout: Duration::from_secs(5),
                replay_retry: Duration::from_secs(10),
                retry_min: Duration::from_millis(100),
                retry_max: Duration::from_secs(5),
                idle_check: Some(Duration::from_secs(30)),
            },
            pacing: None,
            admits: None,
            connected: None,
        }
    }

    /// The number of the oldest batch that the engine keeps for replays; `None` if there is none, or
    /// if the replay service does not answer in time. If it is not 0, a replay does not show
    /// everything that the engine holds.
    pub async fn oldest_batch(&self) -> Option<u64> {
        let endpoint = self.replay_endpoint.as_ref()?;
        let max_bytes = session::message_max_bytes(&self.limits);
        let timeout = self.timing.replay_timeout;
        let mut client = replay::ReplayClient::new(timeout, max_bytes, self.admits.clone());
        client.start(endpoint, 0);
        match client.next().await {
            Ok(message::ReplayMessage::Batch(batch)) => Some(batch.sequence),
            Ok(message::ReplayMessage::End) | Err(replay::ReplayFailed) => None,
        }
    }

    /// Follows the engine until `cancel` fires or the receiver of `sink` is dropped. A full sink
    /// delays the stream, and finally makes the engine drop batches, which are then replayed.
    pub async fn run(self, sink: mpsc::Sender<Update>, cancel: CancellationToken) {
        tokio::select! {
            () = cancel.cancelled() => {}
            // This future ends only when the sink is closed.
            _ = Session::new(self, sink).run() => {}
        }
    }
}

/// An item of one engine's stream, in order.
#[derive(Debug)]
pub enum Update {
    /// All batches so far are void: drop what is known of the engine's cache.
    Reset {
        /// The reason for the reset.
        reason: ResetReason,
    },
    /// The next batch. Without a reset between them, batches are consecutive and come from one
    /// process.
    Batch {
        /// The number of the batch.
        sequence: u64,
        /// The content of the batch.
        batch: EventBatch,
    },
    /// Batches are missing from the live stream. A replay fetches them, or a reset follows.
    Gap {
        /// The expected number.
        expected: u64,
        /// The number that arrived.
        sequence: u64,
    },
    /// The engine's history up to now is delivered. Reported once after each connect, including the
    /// first.
    Synced {
        /// How complete the history is.
        outcome: SyncOutcome,
    },
    /// An invalid message. If its payload cannot be decoded, a reset follows, because its changes
    /// are lost.
    Garbage {
        /// The batch's number, if it could be read.
        sequence: Option<u64>,
        /// What is wrong with it.
        error: GarbageError,
    },
    /// Everything that had arrived when [`Pacing::asks`] was raised to this number is delivered.
    Fresh {
        /// The number.
        ask: u64,
    },
    /// The engine cannot be reached, so that what is known may be out of date, until the next
    /// `Synced`. Reported once for each outage.
    Disconnected {
        /// The error that ended the connection.
        error: WireError,
    },
}

/// Why the batches so far are void.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ResetReason {
    /// The engine is another process than before.
    EngineRestarted,
    /// Batches were lost, and there is no replay endpoint or it no longer has them.
    Gap,
    /// The replay does not include the last delivered batch.
    ReplayTooShort,
    /// The replay endpoint did not answer, so continuity is unknown; or it answers again, and all
    /// batches are delivered once more.
    ReplayFailed,
    /// There was a new connection without a replay endpoint, so continuity is unknown.
    Unverified,
    /// A batch could not be decoded.
    Garbage,
}

impl ResetReason {
    /// The name used in metrics and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::EngineRestarted => "engine_restarted",
            Self::Gap => "gap",
            Self::ReplayTooShort => "replay_too_short",
            Self::ReplayFailed => "replay_failed",
            Self::Unverified => "unverified",
            Self::Garbage => "garbage",
        }
    }
}

/// How complete the history is after a synchronisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SyncOutcome {
    /// Everything that the engine keeps for replays.
    Replayed,
    /// The replay failed or ended early; some history may be missing. The replay is repeated, and
    /// followed by a reset when it delivers something.
    ReplayFailed,
    /// There is no replay endpoint: the history is unknown.
    NoReplay,
}

/// What is wrong with a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GarbageError {
    /// The message is not a topic, a number of eight bytes and a payload.
    #[error("not a KV event message: {frames} frames")]
    Frames {
        /// Number of its frames.
        frames: usize,
    },
    /// The payload cannot be decoded.
    #[error(transparent)]
    Payload(#[from] DecodeError),
}
