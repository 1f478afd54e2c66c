//! One connection to an engine: HTTP/1.1, one request after another.
//!
//! A connection has no task of its own: the task that waits for a reply writes the request and
//! reads the reply. Nothing else is between a leg and its socket.
//!
//! A connection that was kept since its last reply may have ended meanwhile, or may carry bytes
//! that answer no request: a second reply of a faulty engine, or the `408` of a proxy that gives
//! up waiting. Such bytes must not become the reply of the next request. So the socket is read
//! right before the request is written: bytes that have arrived by then belong to no request. Over
//! TLS, these are bytes of application data (`stream`).

use std::fmt;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use http::StatusCode;
use http::header::HeaderValue;
use http::uri::Authority;
use rustls::AlertDescription;
use tokio::io::{AsyncReadExt, AsyncWrite};

use crate::framing::{Framing, Head, Interim, Malformed, Piece, begun};
use crate::revocable_body::RevocableBody;
use crate::stream::{ArrivedData, Stream};
use splitrail_api::via::own_name;

/// Number of bytes of a body of unknown length that are read together, and that wait for a client
/// that reads more slowly than its engine sends.
const READ_BYTES: usize = 8 << 10;
/// The same for a body of known length, where fewer reads mean fewer system calls. An idle
/// connection may keep a buffer of this size.
const READ_MAX_BYTES: usize = 16 << 10;
/// With less free capacity than this, the buffer is enlarged before a read.
const ROOM_MIN_BYTES: usize = 2 << 10;

/// The address that answered, if known.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub IpAddr);

/// Why a reply that has begun could not be read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// The connection ended.
    #[error("closed the connection in mid-reply")]
    Closed,
    /// The bytes are not valid HTTP.
    #[error("{0}")]
    Malformed(#[from] Malformed),
}

impl From<io::Error> for ReplyError {
    fn from(_: io::Error) -> Self {
        Self::Closed
    }
}

/// Why a request got no reply on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoReplyReason {
    /// Before the request was written, bytes had arrived on a kept connection that answer no
    /// request.
    Unsolicited,
    /// A kept connection had ended, or ended without a reply to this request.
    Stale {
        /// Whether the engine may have received the request nevertheless.
        sent: bool,
    },
    /// A new connection ended before any byte of a reply, or in the middle of its head.
    Closed,
    /// A new connection was refused by an alert of TLS before any byte of a reply: since TLS 1.3,
    /// an engine sees the router's certificate only after the router's part of the handshake.
    Refused(AlertDescription),
    /// A reply other than an error came before the whole request was sent.
    Early,
    /// The bytes are not valid HTTP.
    Malformed(Malformed),
    /// The request's body was taken back, or must not be sent again.
    Withdrawn,
}

/// A request: its head, and the body that follows it.
pub(super) struct EngineRequest {
    head: Vec<u8>,
    /// Offset of the request's id in the head.
    id_at: usize,
    body: RevocableBody,
}

impl EngineRequest {
    /// A request with only those header fields that every request has.
    pub(super) fn new(
        method: &str,
        authority: &Authority,
        path: &str,
        body: RevocableBody,
    ) -> Self {
        let mut head = Vec::with_capacity(384);
        for part in [method, " ", path, " HTTP/1.1\r\nhost: ", authority.as_str(), "\r\n"] {
            head.extend_from_slice(part.as_bytes());
        }
        let length = body.parts().remaining();
        let mut request = Self { head, id_at: 0, body };
        if length > 0 || method != "GET" {
            request.number("content-length", length as u64);
        }
        request
    }

    /// Appends a field. `HeaderValue` cannot contain line ends.
    pub(super) fn field(&mut self, name: &str, value: &HeaderValue) {
        for part in [name.as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            self.head.extend_from_slice(part);
        }
    }

    /// Appends a field with a number.
    pub(super) fn number(&mut self, name: &str, value: u64) {
        self.field(name, &value.into());
    }

    /// Appends the field `via`: the routers that the request has come through, and this one.
    pub(super) fn via(&mut self, passed: Option<&HeaderValue>) {
        let passed = passed.map_or(&b""[..], HeaderValue::as_bytes);
        let separator = if passed.is_empty() { "" } else { ", " };
        for part in
            [b"via: ", passed, separator.as_bytes(), b"1.1 ", own_name().as_bytes(), b"\r\n"]
        {
            self.head.extend_from_slice(part);
        }
    }

    /// Appends a field with the request's id.
    pub(super) fn id(&mut self, name: &str, id: &HeaderValue) {
        self.field(name, id);
        self.id_at = self.head.len() - b"\r\n".len() - id.len();
    }

    /// Replaces the id by another of the same length.
    pub(super) fn set_id(&mut self, id: &HeaderValue) {
        self.head[self.id_at..][..id.len()].copy_from_slice(id.as_bytes());
    }

    /// Ends the head.
    pub(super) fn ended(mut self) -> Self {
        self.head.extend_from_slice(b"\r\n");
        self
    }

    /// Whether the request may be sent again after an engine may have received it.
    pub(super) fn is_repeatable(&self) -> bool {
        self.body.is_repeatable()
    }
}

/// Heads contain the router's credential and bodies contain prompts: neither is shown.
impl fmt::Debug for EngineRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineRequest").field("body", &self.body).finish_non_exhaustive()
    }
}

/// A connection to an engine.
pub(super) struct Connection {
    socket: Stream,
    pub(super) peer: Option<Peer>,
    /// Whether the connection has carried a reply before.
    is_kept: bool,
    /// Bytes that were read and not yet used.
    read: BytesMut,
}

/// The bytes of replies are not shown.
impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut wire = f.debug_struct("Connection");
        wire.field("peer", &self.peer).field("is_kept", &self.is_kept);
        wire.field("read_bytes", &self.read.len()).finish_non_exhaustive()
    }
}

/// A request that is being written.
struct RequestWrite<'a> {
    request: &'a EngineRequest,
    written: usize,
    length: usize,
}

impl RequestWrite<'_> {
    fn is_done(&self) -> bool {
        self.written == self.length
    }

    fn slices<'a>(&'a self, into: &mut [IoSlice<'a>]) -> usize {
        let (head, body) = (&self.request.head, self.request.body.parts());
        match head.get(self.written..).filter(|left| !left.is_empty()) {
            Some(left) => {
                into[0] = IoSlice::new(left);
                1 + body.slices_from(0, &mut into[1..])
            }
            None => body.slices_from(self.written - head.len(), into),
        }
    }
}

fn is_refusal(head: &Head) -> bool {
    head.status.is_client_error() || head.status.is_server_error()
}

impl Connection {
    pub(super) fn new(socket: impl Into<Stream>, peer: Option<IpAddr>) -> Self {
        let (socket, peer) = (socket.into(), peer.map(Peer));
        Self { socket, peer, is_kept: false, read: BytesMut::new() }
    }

    /// What has arrived since the last reply.
    fn arrived(&mut self) -> ArrivedData {
        if self.read.is_empty() { self.socket.arrived() } else { ArrivedData::Bytes }
    }

    /// Sends a request, and reads until its reply begins.
    ///
    /// # Errors
    /// No reply began.
    pub(super) async fn exchange(
        &mut self,
        request: &EngineRequest,
    ) -> Result<Head, NoReplyReason> {
        let kept = std::mem::replace(&mut self.is_kept, true);
        if kept {
            match self.arrived() {
                ArrivedData::Bytes => return Err(NoReplyReason::Unsolicited),
                ArrivedData::End => return Err(NoReplyReason::Stale { sent: false }),
                ArrivedData::Nothing => {}
            }
        }
        let body = request.body.send().ok_or(NoReplyReason::Withdrawn)?;
        let length = request.head.len() + body.remaining();
        let mut sending = RequestWrite { request, written: 0, length };
        let mut interim = Interim::default();
        poll_fn(|context| {
            // An engine may answer and close the connection before it has read the whole request:
            // its reply counts. If writing fails, reading reports the end of the connection, too.
            let sent = matches!(self.poll_send(&mut sending, context), Poll::Ready(Ok(())));
            let head = ready!(self.poll_begun(&mut interim, context));
            Poll::Ready(self.classify(head, kept, sent, interim))
        })
        .await
    }

    /// The result of an exchange; `sent` if the whole request was written.
    fn classify(
        &self,
        head: Result<Head, ReplyError>,
        kept: bool,
        sent: bool,
        interim: Interim,
    ) -> Result<Head, NoReplyReason> {
        const STALE: NoReplyReason = NoReplyReason::Stale { sent: true };
        const PAYLOAD_TOO_LARGE: StatusCode = StatusCode::PAYLOAD_TOO_LARGE;
        match head {
            // No byte of a reply has arrived.
            Err(ReplyError::Closed) if kept && self.read.is_empty() && interim.is_empty() => {
                Err(STALE)
            }
            Err(ReplyError::Closed) => match self.socket.alert().filter(|_| self.read.is_empty()) {
                Some(alert) if !kept => Err(NoReplyReason::Refused(alert)),
                _ => Err(NoReplyReason::Closed),
            },
            Err(ReplyError::Malformed(malformed)) => Err(NoReplyReason::Malformed(malformed)),
            // A server that stops waiting sends 408 before it closes the connection.
            Ok(head) if kept && head.status == StatusCode::REQUEST_TIMEOUT => Err(STALE),
            Ok(head) if sent => Ok(head),
            // A refusal may come before the whole request was sent. On a kept connection it may be
            // the late refusal of another request, unless it is about a long body.
            Ok(head) if is_refusal(&head) && (!kept || head.status == PAYLOAD_TOO_LARGE) => {
                Ok(Head { keeps: false, ..head })
            }
            // Another reply before the whole request was sent cannot be for this request.
            Ok(_) if kept => Err(STALE),
            Ok(_) => Err(NoReplyReason::Early),
        }
    }

    fn poll_send(
        &mut self,
        sending: &mut RequestWrite<'_>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), ReplyError>> {
        const AT_ONCE: usize = 16;
        while !sending.is_done() {
            let mut slices = [IoSlice::new(&[]); AT_ONCE];
            let count = sending.slices(&mut slices);
            let slices = &slices[..count];
            let bytes = ready!(Pin::new(&mut self.socket).poll_write_vectored(context, slices))?;
            if bytes == 0 {
                return Poll::Ready(Err(ReplyError::Closed));
            }
            sending.written += bytes;
        }
        // TLS may hold encrypted bytes that the socket has not taken yet.
        Pin::new(&mut self.socket).poll_flush(context).map_err(ReplyError::from)
    }

    fn poll_begun(
        &mut self,
        interim: &mut Interim,
        context: &mut Context<'_>,
    ) -> Poll<Result<Head, ReplyError>> {
        loop {
            if let Some(head) = begun(&mut self.read, interim)? {
                return Poll::Ready(Ok(head));
            }
            if ready!(self.poll_read(READ_BYTES, context))? == 0 {
                return Poll::Ready(Err(ReplyError::Closed));
            }
        }
    }

    /// Reads about this number of bytes; 0 at the end of the connection.
    fn poll_read(&mut self, bytes: usize, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let room = self.read.capacity() - self.read.len();
        if room < ROOM_MIN_BYTES || room < bytes && bytes > READ_BYTES {
            // Counting the unused bytes lets the buffer's memory be used again.
            self.read.reserve(bytes - self.read.len().min(bytes / 2));
        }
        let read = pin!(self.socket.read_buf(&mut self.read)).poll(context);
        if read.is_pending() && self.read.is_empty() {
            // Thousands of streams wait for their next token; none of them holds a buffer
            // meanwhile.
            self.read = BytesMut::new();
        }
        read
    }

    /// The next piece of a body; `None` at its end.
    pub(super) fn poll_piece(
        &mut self,
        framing: &mut Framing,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, ReplyError>>> {
        loop {
            match framing.next(&mut self.read) {
                Ok(Piece::Data(data)) => return Poll::Ready(Some(Ok(data))),
                Ok(Piece::End) => return Poll::Ready(None),
                Ok(Piece::More) => {}
                Err(malformed) => return Poll::Ready(Some(Err(malformed.into()))),
            }
            let bytes = framing.left().clamp(READ_BYTES, READ_MAX_BYTES);
            match ready!(self.poll_read(bytes, context)) {
                Ok(0) if framing.ends_with_connection() => return Poll::Ready(None),
                Ok(0) | Err(_) => return Poll::Ready(Some(Err(ReplyError::Closed))),
                Ok(_) => {}
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
