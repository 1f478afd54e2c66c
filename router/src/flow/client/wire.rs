//! One connection to an engine: HTTP/1.1, one request after the other.
//!
//! It has no task of its own, and nothing in it waits for another part of it: whoever waits for
//! an answer writes the request and reads the answer. That is all there is between a leg and its
//! socket.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use http::header::HeaderValue;
use http::uri::Authority;
use hyper::body::Body;
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::net::TcpStream;

use super::framing::{Framing, Head, Malformed, Piece, begun};
use super::parcel::Parcel;

/// Bytes of an answer that are read at once, and that wait for a client which is slower than
/// its engine.
const READ_BYTES: usize = 8 << 10;
/// The same of one whose length is known: each read is a call of the system. A connection that
/// waits for its next request may keep so much.
const READ_MAX_BYTES: usize = 16 << 10;
/// With less room than this, it is not worth while to read.
const ROOM_MIN_BYTES: usize = 2 << 10;

/// Who has answered, where that is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) IpAddr);

/// The connection broke, or what came over it is not HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the connection to an engine broke")]
pub struct Broken;

impl From<Malformed> for Broken {
    fn from(Malformed: Malformed) -> Self {
        Self
    }
}

impl From<io::Error> for Broken {
    fn from(_: io::Error) -> Self {
        Self
    }
}

/// A request as it is written: a head and the body that follows it.
#[derive(Debug)]
pub(super) struct Ask {
    head: Vec<u8>,
    body: Parcel,
}

impl Ask {
    /// A request without header fields but those that every one has.
    pub(super) fn new(method: &str, authority: &Authority, path: &str, body: Parcel) -> Self {
        let mut head = Vec::with_capacity(320);
        for part in [method, " ", path, " HTTP/1.1\r\nhost: ", authority.as_str(), "\r\n"] {
            head.extend_from_slice(part.as_bytes());
        }
        Self { head, body }
    }

    /// The same with a field. Values have no line ends, as their type knows.
    pub(super) fn field(&mut self, name: &str, value: &HeaderValue) {
        for part in [name.as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            self.head.extend_from_slice(part);
        }
    }

    /// The same with a field that is a number.
    pub(super) fn number(&mut self, name: &str, value: u64) {
        self.field(name, &value.into());
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct Wire {
    socket: TcpStream,
    pub(super) peer: Option<Peer>,
    /// What was read and nobody has taken.
    read: BytesMut,
}

/// What of a request is not written yet.
struct Unsent {
    head: Bytes,
    body: Vec<<Parcel as Body>::Data>,
}

impl Unsent {
    fn is_empty(&self) -> bool {
        !self.head.has_remaining() && !self.body.iter().any(Buf::has_remaining)
    }

    fn slices<'a>(&'a self, into: &mut [IoSlice<'a>]) -> usize {
        let mut count = self.head.chunks_vectored(into);
        for data in &self.body {
            count += data.chunks_vectored(&mut into[count..]);
        }
        count
    }

    fn wrote(&mut self, mut bytes: usize) {
        for data in std::iter::once(&mut self.head as &mut dyn Buf)
            .chain(self.body.iter_mut().map(|data| data as &mut dyn Buf))
        {
            let of_this = bytes.min(data.remaining());
            data.advance(of_this);
            bytes -= of_this;
        }
    }
}

impl Wire {
    pub(super) fn new(socket: TcpStream) -> Self {
        let peer = socket.peer_addr().ok().map(|address| Peer(address.ip()));
        Self { socket, peer, read: BytesMut::new() }
    }

    /// Whether a request can be sent: the engine has neither hung up nor said anything that it
    /// was not asked for.
    pub(super) fn is_quiet(&self) -> bool {
        let nothing = |error: io::Error| error.kind() == io::ErrorKind::WouldBlock;
        self.read.is_empty() && self.socket.try_read(&mut [0]).is_err_and(nothing)
    }

    /// Whether nothing of what was read is left: what follows an answer belongs to no request.
    pub(super) fn is_drained(&self) -> bool {
        self.read.is_empty()
    }

    /// Sends a request, and reads until its answer begins.
    ///
    /// # Errors
    /// If none does.
    pub(super) async fn exchange(&mut self, ask: Ask) -> Result<Head, Broken> {
        let mut unsent = written(ask).await?;
        poll_fn(|context| {
            // An engine may answer before it has read all, and hang up: what it says counts. A
            // socket that cannot be written to is at its end for reading, too.
            let sent = self.poll_send(&mut unsent, context);
            let begun = ready!(self.poll_begun(context));
            let keeps = |begun: &Head| begun.keeps && matches!(sent, Poll::Ready(Ok(())));
            Poll::Ready(begun.map(|begun| Head { keeps: keeps(&begun), ..begun }))
        })
        .await
    }

    fn poll_send(
        &mut self,
        unsent: &mut Unsent,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Broken>> {
        const AT_ONCE: usize = 16;
        while !unsent.is_empty() {
            let mut slices = [IoSlice::new(&[]); AT_ONCE];
            let count = unsent.slices(&mut slices);
            let slices = &slices[..count];
            let bytes = ready!(Pin::new(&mut self.socket).poll_write_vectored(context, slices))?;
            if bytes == 0 {
                return Poll::Ready(Err(Broken));
            }
            unsent.wrote(bytes);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_begun(&mut self, context: &mut Context<'_>) -> Poll<Result<Head, Broken>> {
        loop {
            if let Some(head) = begun(&mut self.read)? {
                return Poll::Ready(Ok(head));
            }
            if ready!(self.poll_read(READ_BYTES, context))? == 0 {
                return Poll::Ready(Err(Broken));
            }
        }
    }

    /// Reads more, about so much at once; 0 at the end.
    fn poll_read(&mut self, bytes: usize, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let room = self.read.capacity() - self.read.len();
        if room < ROOM_MIN_BYTES || room < bytes && bytes > READ_BYTES {
            // What is not taken yet counts, so that the same memory can be used again.
            self.read.reserve(bytes - self.read.len().min(bytes / 2));
        }
        let read = pin!(self.socket.read_buf(&mut self.read)).poll(context);
        if read.is_pending() && self.read.is_empty() {
            // Thousands of streams wait for their next word: none of them holds memory for it.
            self.read = BytesMut::new();
        }
        read
    }

    /// The next piece of an answer's body; `None` at its end.
    pub(super) fn poll_piece(
        &mut self,
        framing: &mut Framing,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Broken>>> {
        loop {
            match framing.next(&mut self.read) {
                Ok(Piece::Data(data)) => return Poll::Ready(Some(Ok(data))),
                Ok(Piece::End) => return Poll::Ready(None),
                Ok(Piece::More) => {}
                Err(Malformed) => return Poll::Ready(Some(Err(Broken))),
            }
            let bytes = framing.left().clamp(READ_BYTES, READ_MAX_BYTES);
            match ready!(self.poll_read(bytes, context)) {
                Ok(0) if framing.ends_with_connection() => return Poll::Ready(None),
                Ok(0) | Err(_) => return Poll::Ready(Some(Err(Broken))),
                Ok(_) => {}
            }
        }
    }
}

/// A request as it goes over the wire: from now on it may have been sent.
async fn written(ask: Ask) -> Result<Unsent, Broken> {
    let Ask { mut head, mut body } = ask;
    let length = body.size_hint().exact().ok_or(Broken)?;
    if length > 0 || !head.starts_with(b"GET ") {
        let value = HeaderValue::from(length);
        for part in [b"content-length: ", value.as_bytes(), b"\r\n"] {
            head.extend_from_slice(part);
        }
    }
    head.extend_from_slice(b"\r\n");
    let (head, mut pieces) = (head.into(), Vec::with_capacity(1));
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        pieces.extend(frame?.into_data());
    }
    Ok(Unsent { head, body: pieces })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http::StatusCode;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (Wire, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (Wire::new(near), listener.accept().await.unwrap().0)
    }

    fn ask(body: Bytes) -> Ask {
        let mut ask = Ask::new("POST", &"engine:8000".parse().unwrap(), "/v1/x", body.into());
        ask.field("x-request-id", &HeaderValue::from_static("id"));
        ask
    }

    async fn all(wire: &mut Wire, mut begun: Head) -> Result<Vec<u8>, Broken> {
        let mut all = Vec::new();
        while let Some(piece) =
            poll_fn(|context| wire.poll_piece(&mut begun.framing, context)).await
        {
            all.extend_from_slice(&piece?);
        }
        Ok(all)
    }

    #[tokio::test]
    async fn a_request_is_written_as_it_is_and_its_answer_read_to_its_end() {
        let (mut wire, mut engine) = pair().await;
        let expected = "POST /v1/x HTTP/1.1\r\nhost: engine:8000\r\nx-request-id: id\r\n\
                        content-length: 4\r\n\r\nbody";
        for answer in [
            "content-length: 5\r\n\r\nhello",
            "transfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
        ] {
            let exchange = wire.exchange(ask("body".into()));
            let engine = async {
                let mut request = vec![0; expected.len()];
                engine.read_exact(&mut request).await.unwrap();
                assert_eq!(String::from_utf8_lossy(&request), expected);
                let interim = "HTTP/1.1 102 Processing\r\n\r\n";
                let answer = format!("{interim}HTTP/1.1 200 OK\r\n{answer}");
                engine.write_all(answer.as_bytes()).await.unwrap();
            };
            let (begun, ()) = tokio::join!(exchange, engine);
            let begun = begun.unwrap();
            assert_eq!((begun.status, begun.keeps), (StatusCode::OK, true));
            assert_eq!(all(&mut wire, begun).await.unwrap(), b"hello");
            assert!(wire.is_quiet());
        }
    }

    #[tokio::test]
    async fn an_answer_before_the_end_of_a_request_counts_and_the_connection_is_spent() {
        let (mut wire, mut engine) = pair().await;
        let answer = "HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n";
        engine.write_all(answer.as_bytes()).await.unwrap();
        let begun = wire.exchange(ask(vec![0; 64 << 20].into())).await.unwrap();
        assert_eq!((begun.status.as_u16(), begun.keeps), (413, false));
        let (mut wire, mut engine) = pair().await;
        engine.write_all(answer.as_bytes()).await.unwrap();
        drop(engine);
        let begun = wire.exchange(ask(vec![0; 64 << 20].into())).await.unwrap();
        assert_eq!((begun.status.as_u16(), begun.keeps), (413, false), "it has hung up since");
    }

    #[tokio::test]
    async fn an_engine_that_breaks_off_or_talks_unasked_is_found_out() {
        for answer in [
            "",
            "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhel",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n",
        ] {
            let (mut wire, mut engine) = pair().await;
            engine.write_all(answer.as_bytes()).await.unwrap();
            engine.shutdown().await.unwrap();
            let read = async {
                let begun = wire.exchange(ask("x".into())).await?;
                all(&mut wire, begun).await
            };
            assert_eq!(read.await, Err(Broken), "{answer}");
        }
        let (wire, mut engine) = pair().await;
        assert!(wire.is_quiet());
        engine.write_all(b"HTTP/1.1 408 Late\r\n\r\n").await.unwrap();
        wire.socket.readable().await.unwrap();
        assert!(!wire.is_quiet());
    }

    #[tokio::test]
    async fn an_answer_that_ends_with_its_connection_is_read_to_that_end() {
        let (mut wire, mut engine) = pair().await;
        engine.write_all(b"HTTP/1.1 200 OK\r\n\r\nhello").await.unwrap();
        engine.shutdown().await.unwrap();
        let begun = wire.exchange(ask("x".into())).await.unwrap();
        assert_eq!(all(&mut wire, begun).await.unwrap(), b"hello");
    }
}
