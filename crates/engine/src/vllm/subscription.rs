//! A lasting subscription to one engine's KV events: live batches from its
//! publisher, and replays of what was missed from its replay endpoint.
//!
//! The subscriber connects first and asks for a replay then, so that nothing
//! falls between the two; the batches' order is put right in
//! `sequence.rs`. Everything of one engine lives in one future,
//! which starts no task.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

mod message;
mod replay;
mod session;

use super::events::{DecodeError, DecodeLimits, EventBatch};
use crate::zmtp::{Admits, Endpoint, Pace, WireError};
use session::Session;

/// What to subscribe to, and how. [`Subscription::new`] fills in defaults.
#[derive(Clone, Debug)]
pub struct Subscription {
    /// The engine's publisher (a PUB socket).
    pub events_endpoint: Endpoint,
    /// The engine's replay service (a ROUTER socket), where it has one.
    pub replay_endpoint: Option<Endpoint>,
    /// Prefix of the topics to receive; empty for all.
    pub topic: String,
    /// Bounds on one payload.
    pub limits: DecodeLimits,
    /// Bounds on the live batches that wait for a replay to end.
    pub buffer: BufferLimits,
    /// How long to wait for what.
    pub timing: Timing,
    /// Puts reads of a busy stream together; `None` reads it as it comes.
    pub pacing: Option<Pacing>,
    /// Which addresses may be connected to, each time that names are looked up; all without.
    pub admits: Option<Admits>,
    /// Becomes true once the engine's publisher has shaken hands.
    pub connected: Option<watch::Sender<bool>>,
}

/// Reads of a busy stream, put together.
#[derive(Clone, Debug)]
pub struct Pacing {
    /// When it is read.
    pub pace: Pace,
    /// Raised by those who cannot wait for that: each number is answered by
    /// [`Update::Fresh`], though not while the engine cannot be reached.
    pub asks: watch::Receiver<u64>,
}

/// Bounds on live batches that wait; beyond them the oldest are dropped and
/// fetched by another replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferLimits {
    /// Number of batches.
    pub max_batches: usize,
    /// Bytes of their payloads. Not below what one payload may have.
    pub max_bytes: usize,
}

/// Times of a subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// To connect and shake hands.
    pub connect_timeout: Duration,
    /// The silence after which a replay is given up.
    pub replay_timeout: Duration,
    /// Pause before connecting again; it doubles with each failure ...
    pub retry_min: Duration,
    /// ... up to this.
    pub retry_max: Duration,
    /// Silence on the stream after which a replay makes sure that nothing was
    /// missed and that the engine is still there; `None` for never.
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
                retry_min: Duration::from_millis(100),
                retry_max: Duration::from_secs(5),
                idle_check: Some(Duration::from_secs(30)),
            },
            pacing: None,
            admits: None,
            connected: None,
        }
    }

    /// Follows the engine until `cancel` fires or nobody listens to `sink` any
    /// more. A full sink holds the stream back, and in the end makes the engine
    /// drop batches, which are then replayed.
    pub async fn run(self, sink: mpsc::Sender<Update>, cancel: CancellationToken) {
        tokio::select! {
            () = cancel.cancelled() => {}
            // Ends only when the sink is closed.
            _ = Session::new(self, sink).run() => {}
        }
    }
}

/// News of one engine's stream, in order.
#[derive(Debug)]
pub enum Update {
    /// All batches so far are void: clear what is known of the engine's cache.
    Reset {
        /// Why.
        reason: ResetReason,
    },
    /// The next batch. Without a reset between them, batches follow one another
    /// without gap and come from one process.
    Batch {
        /// Its number.
        sequence: u64,
        /// What it says.
        batch: EventBatch,
    },
    /// Batches are missing from the live stream. A replay fetches them, or a reset
    /// follows.
    Gap {
        /// The number that should have come.
        expected: u64,
        /// The number that came.
        sequence: u64,
    },
    /// What the engine had to say up to now is delivered. Said once after each
    /// connect, the first included.
    Synced {
        /// How much of the engine's history that is.
        outcome: SyncOutcome,
    },
    /// A message that makes no sense. Where its payload does not, a reset follows:
    /// what it meant is lost.
    Garbage {
        /// The batch's number, where that much could be read.
        sequence: Option<u64>,
        /// What is wrong with it.
        error: GarbageError,
    },
    /// All that the system had said to be there when [`Pacing::asks`] was raised to this is
    /// delivered, and what waited for its time.
    Fresh {
        /// The number.
        ask: u64,
    },
    /// The engine cannot be reached, so that what is known may be out of date;
    /// `Synced` ends this. Said once for each outage.
    Disconnected {
        /// Why.
        error: WireError,
    },
}

/// Why the batches so far are void.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ResetReason {
    /// The engine is another process than before.
    EngineRestarted,
    /// Batches were lost, and there is no replay endpoint or it had them not.
    Gap,
    /// The replay does not reach back to the last batch.
    ReplayTooShort,
    /// The replay endpoint did not answer, so that continuity is unknown.
    ReplayFailed,
    /// Reconnected without a replay endpoint: continuity is unknown.
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

/// How a synchronisation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SyncOutcome {
    /// With all that the engine keeps for replays.
    Replayed,
    /// The replay failed or ended early; what is delivered may lack history.
    ReplayFailed,
    /// There is no replay endpoint: the history is unknown.
    NoReplay,
}

/// What is wrong with a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GarbageError {
    /// Not a topic, a number of eight bytes and a payload.
    #[error("not a KV event message: {frames} frames")]
    Frames {
        /// Number of its frames.
        frames: usize,
    },
    /// The payload cannot be decoded.
    #[error(transparent)]
    Payload(#[from] DecodeError),
}
