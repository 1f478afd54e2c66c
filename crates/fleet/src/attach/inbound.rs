//! The messages of a shim, from its stream or from the event plane.

use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use tokio::sync::{mpsc, watch};
use tonic::{Status, Streaming};

/// Where they come from.
#[cfg_attr(not(feature = "nats"), expect(dead_code, reason = "only the event plane makes these"))]
pub(super) enum Inbound {
    /// Its own stream.
    Stream(Box<Streaming<v1::AttachRequest>>),
    /// The event plane.
    Plane(Relayed),
}

/// Words that were taken off the event plane.
pub(super) struct Relayed {
    pub(super) said: mpsc::Receiver<Said>,
    /// Whether the broker is there.
    pub(super) connected: watch::Receiver<bool>,
}

/// What is said.
#[cfg_attr(not(feature = "nats"), expect(dead_code, reason = "only the event plane makes these"))]
pub(super) enum Said {
    /// As on a stream; none if only a later version knows.
    Message(Option<Box<Message>>),
    /// All that was said of blocks is still true.
    InStep,
    /// Nobody can tell whether it is.
    OutOfStep,
}

impl Inbound {
    /// What it says next; `None` once it says nothing more. Nothing is lost if this is dropped.
    pub(super) async fn said(&mut self) -> Result<Option<Said>, Status> {
        match self {
            Self::Stream(stream) => {
                let request = stream.message().await?;
                Ok(request.map(|request| Said::Message(request.message.map(Box::new))))
            }
            Self::Plane(relayed) => Ok(relayed.said.recv().await),
        }
    }

    /// Whether what it says later is true later: load after all changes before it.
    pub(super) fn keeps_order(&self) -> bool {
        matches!(self, Self::Stream(_))
    }

    /// Whether the broker is there, if there is one between.
    pub(super) fn plane(&self) -> Option<watch::Receiver<bool>> {
        match self {
            Self::Stream(_) => None,
            Self::Plane(relayed) => Some(relayed.connected.clone()),
        }
    }
}
