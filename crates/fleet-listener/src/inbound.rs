//! The messages of a shim's stream.

use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use tonic::{Status, Streaming};

use super::connection::{OpenStream, Peer};

/// The messages of a shim's stream, and the connection that carries them.
pub(super) struct Inbound {
    messages: Streaming<v1::AttachRequest>,
    peer: Peer,
    /// Set once the hello was accepted.
    open: Option<OpenStream>,
}

impl Inbound {
    /// The messages of a stream whose hello has not been read.
    pub(super) fn new(messages: Streaming<v1::AttachRequest>, peer: Peer) -> Self {
        Self { messages, peer, open: None }
    }

    /// Notes that the hello was accepted: the connection then stays open until the stream's end.
    pub(super) fn accept(&mut self) {
        self.open = Some(self.peer.open_stream());
    }

    /// The next message, which is `None` if this version does not know its type; `None` at the end
    /// of the stream. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<Option<Option<Message>>, Status> {
        Ok(self.messages.message().await?.map(|request| request.message))
    }
}
