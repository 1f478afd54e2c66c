//! The messages of a shim, from its stream or from the event plane.

use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use tokio::sync::{mpsc, watch};
use tonic::{Status, Streaming};

use super::connection::{OpenStream, Peer};

/// The source of a shim's messages.
#[cfg_attr(not(feature = "nats"), expect(dead_code, reason = "only the event plane makes these"))]
pub(super) enum Inbound {
    /// The shim's own stream.
    Stream(Box<OwnStream>),
    /// The event plane.
    Plane(RelayedMessages),
}

/// A shim's own stream, and the connection that carries it.
pub(super) struct OwnStream {
    messages: Streaming<v1::AttachRequest>,
    peer: Peer,
    /// Set once the hello was accepted.
    open: Option<OpenStream>,
}

/// Messages that a relay took from the event plane.
pub(super) struct RelayedMessages {
    pub(super) received: mpsc::Receiver<ShimInput>,
    /// Whether the broker is connected.
    pub(super) connected: watch::Receiver<bool>,
}

/// One item of a shim's input.
#[cfg_attr(not(feature = "nats"), expect(dead_code, reason = "only the event plane makes these"))]
pub(super) enum ShimInput {
    /// A message, as on a stream; `None` if this version does not know the message's type.
    Message(Option<Box<Message>>),
    /// The index agrees with the shim's mirror.
    InStep,
    /// It is not known whether the index agrees with the shim's mirror.
    OutOfStep,
}

impl Inbound {
    /// The messages of a stream whose hello has not been read.
    pub(super) fn of_stream(messages: Streaming<v1::AttachRequest>, peer: Peer) -> Self {
        Self::Stream(Box::new(OwnStream { messages, peer, open: None }))
    }

    /// Notes that the hello was accepted: a stream's connection then stays open until its end.
    pub(super) fn accept(&mut self) {
        if let Self::Stream(stream) = self {
            stream.open = Some(stream.peer.open_stream());
        }
    }

    /// The next item; `None` at the end of the input. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<Option<ShimInput>, Status> {
        match self {
            Self::Stream(stream) => {
                let request = stream.messages.message().await?;
                Ok(request.map(|request| ShimInput::Message(request.message.map(Box::new))))
            }
            Self::Plane(relayed) => Ok(relayed.received.recv().await),
        }
    }

    /// Whether the messages arrive in the order in which the shim sent them, so that a load report
    /// comes after all earlier changes.
    pub(super) fn keeps_order(&self) -> bool {
        matches!(self, Self::Stream(_))
    }

    /// Whether the broker is connected; `None` if the shim has a stream of its own.
    pub(super) fn plane(&self) -> Option<watch::Receiver<bool>> {
        match self {
            Self::Stream(_) => None,
            Self::Plane(relayed) => Some(relayed.connected.clone()),
        }
    }
}
