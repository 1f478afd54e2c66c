//! A client's bytes after decryption: received bytes are checked by [`WireCheck`], and the position
//! in them is recorded in the connection's [`ConnectionActivity`].

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

use crate::client_stream::ClientStream;
use crate::connection_activity::{CloseReason, ConnectionActivity};
use crate::unread_rest::UnreadRest;
use crate::wire::{PREFACE, Position, Protocol, WireCheck};

/// The checked stream of a client.
pub struct CheckedSocket {
    stream: ClientStream,
    activity: Arc<ConnectionActivity>,
    wire: WireCheck,
    /// The bytes that are read instead of refused bytes; the end follows.
    invalid_bytes: Option<&'static [u8]>,
    refused: Arc<RefusalReason>,
    /// The rest of a request that was answered before its end, once the router's side is closed.
    rest: Option<UnreadRest>,
    /// The bytes that were read to recognise the protocol, their number, and how many of them were
    /// read again.
    first: [u8; PREFACE.len()],
    first_bytes: usize,
    read_again: usize,
}

/// Why the connection's bytes were refused, once they were.
#[derive(Debug, Default)]
pub struct RefusalReason(std::sync::OnceLock<CloseReason>);

impl RefusalReason {
    /// The reason; `None` if no bytes were refused.
    pub fn get(&self) -> Option<CloseReason> {
        self.0.get().copied()
    }
}

impl CheckedSocket {
    /// A socket whose bytes are checked. `refused` learns why bytes are refused.
    pub fn new(
        stream: ClientStream,
        activity: Arc<ConnectionActivity>,
        refused: Arc<RefusalReason>,
    ) -> Self {
        let (wire, first) = (WireCheck::default(), [0; PREFACE.len()]);
        Self {
            stream,
            activity,
            wire,
            invalid_bytes: None,
            refused,
            rest: None,
            first,
            first_bytes: 0,
            read_again: 0,
        }
    }

    /// Reads until the client's protocol is known; `None` if the client disconnects before. The
    /// bytes are kept for the next reader.
    ///
    /// # Errors
    /// An error of the socket.
    pub async fn protocol(&mut self) -> io::Result<Option<Protocol>> {
        let mut first = self.first;
        let mut bytes = 0;
        let protocol = loop {
            match self.read(&mut first[bytes..]).await? {
                0 => return Ok(None),
                more => bytes += more,
            }
            if let Some(protocol) = self.wire.protocol() {
                break protocol;
            }
        };
        (self.first, self.first_bytes) = (first, bytes);
        Ok(Some(protocol))
    }

    /// Whether the client may still be sending what the HTTP library does not read. An HTTP/2
    /// client is told to stop by a reset of its stream.
    fn has_unread_rest(&self) -> bool {
        let is_within_request = self.wire.heads() > 0 && self.wire.position() != Position::Between;
        self.wire.protocol() == Some(Protocol::Http1)
            && (is_within_request || self.invalid_bytes.is_some())
    }
}

impl AsyncRead for CheckedSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.read_again < this.first_bytes {
            let rest = &this.first[this.read_again..this.first_bytes];
            let taken = &rest[..rest.len().min(into.remaining())];
            into.put_slice(taken);
            this.read_again += taken.len();
            return Poll::Ready(Ok(()));
        }
        if this.invalid_bytes.is_none() {
            let before = into.filled().len();
            ready!(Pin::new(&mut this.stream).poll_read(context, into))?;
            let work = || this.activity.work();
            let passed = this.wire.feed(&into.filled()[before..], work, Instant::now);
            this.activity.reads(this.wire.position() == Position::Head, this.wire.heads());
            let Err(refusal) = passed else { return Poll::Ready(Ok(())) };
            into.set_filled(before + refusal.good_bytes);
            this.invalid_bytes = Some(this.wire.invalid_bytes());
            // Only this place sets it, and only once.
            let _first = this.refused.0.set(refusal.offence.into());
            if refusal.good_bytes > 0 {
                return Poll::Ready(Ok(()));
            }
        }
        if let Some(invalid_bytes) = &mut this.invalid_bytes {
            let (now, later) = invalid_bytes.split_at(invalid_bytes.len().min(into.remaining()));
            into.put_slice(now);
            *invalid_bytes = later;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for CheckedSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    /// Closes the router's side, and reads the rest of the client's request.
    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.rest.is_none() {
            ready!(Pin::new(&mut this.stream).poll_shutdown(context))?;
            if !this.has_unread_rest() {
                return Poll::Ready(Ok(()));
            }
            // A head of which no more is read is not waited for.
            this.activity.reads(false, this.wire.heads());
        }
        let rest = this.rest.get_or_insert_with(UnreadRest::begin);
        rest.poll_discard(Pin::new(this.stream.socket()), context).map(Ok)
    }
}
