//! What comes over a client's HTTP/1 connection, as the router frames it and as the HTTP library
//! behind it does. The first byte chooses where the rest is cut into reads.
//!
//! The router decides where a request ends, and the library parses the same bytes once more. A
//! difference between the two is request smuggling: so the library must find in the whole stream
//! exactly the requests that it finds in each message of it alone.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use hyper::body::{Body, Incoming};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use splitrail_client_connection::wire::{Position, WireCheck};

/// Polls after which a connection in memory must have come to its end.
const POLLS_MAX: usize = 10_000;

pub(crate) fn check(data: &[u8]) {
    let [cuts, stream @ ..] = data else {
        return;
    };
    let Some(messages) = messages(stream) else {
        return;
    };
    let length = usize::from(*cuts % 61) + 2;
    for pieces in [vec![stream], stream.chunks(1).collect(), stream.chunks(length).collect()] {
        let passed = passed(&pieces);
        assert_eq!(passed.refused, messages.refused, "cuts change what passes");
        let seen = served(&passed.pieces);
        // Of a message that is refused, the library sees no end.
        let whole = seen.iter().filter(|request| request.is_whole).count();
        assert!(whole <= messages.whole.len(), "{seen:?} of {} messages", messages.whole.len());
        let apart = apart(&messages, stream);
        for (together, alone) in seen.iter().zip(&apart) {
            assert_eq!(together, alone, "a request is another one when it stands alone");
        }
        assert!(seen.len() <= apart.len() + usize::from(messages.refused), "{seen:?}");
    }
}

/// Where messages end, as the router sees it.
struct Messages {
    /// The range of each whole message.
    whole: Vec<std::ops::Range<usize>>,
    /// Where the message begins that is not whole, or does not pass.
    rest_at: usize,
    /// Whether something does not pass.
    refused: bool,
}

/// Reads byte by byte, so that each end shows. `None` for what may become HTTP/2: its first
/// bytes are judged together.
fn messages(stream: &[u8]) -> Option<Messages> {
    if stream.starts_with(b"PRI") || b"PRI".starts_with(stream) {
        return None;
    }
    let mut check = WireCheck::default();
    let mut messages = Messages { whole: Vec::new(), rest_at: 0, refused: false };
    for at in 0..stream.len() {
        if check.feed(&stream[at..=at], || 0, Instant::now).is_err() {
            messages.refused = true;
            break;
        }
        if check.position() == Position::Between {
            messages.whole.push(messages.rest_at..at + 1);
            messages.rest_at = at + 1;
        }
    }
    assert_eq!(
        check.heads() as usize,
        messages.whole.len() + usize::from(messages.refused || messages.rest_at < stream.len())
    );
    Some(messages)
}

/// The library's reading of each message by itself: at most one request.
fn apart(messages: &Messages, stream: &[u8]) -> Vec<Seen> {
    let mut all = Vec::new();
    for range in &messages.whole {
        let seen = served(&[stream[range.clone()].to_vec()]);
        assert!(seen.len() <= 1, "{seen:?} in one message");
        all.extend(seen);
    }
    if !messages.refused {
        let seen = served(&[stream[messages.rest_at..].to_vec()]);
        assert!(seen.iter().all(|request| !request.is_whole), "{seen:?} without its end");
        all.extend(seen);
    }
    all
}

/// What the library is given of these reads, and what it is given instead of the rest.
struct Passed {
    pieces: Vec<Vec<u8>>,
    refused: bool,
}

fn passed(pieces: &[&[u8]]) -> Passed {
    let mut check = WireCheck::default();
    let mut passed = Passed { pieces: Vec::new(), refused: false };
    for piece in pieces {
        match check.feed(piece, || 0, Instant::now) {
            Ok(()) => passed.pieces.push(piece.to_vec()),
            Err(refusal) => {
                passed.pieces.push(piece[..refusal.good_bytes].to_vec());
                passed.pieces.push(check.invalid_bytes().to_vec());
                passed.refused = true;
                break;
            }
        }
    }
    passed
}

/// A request that the library made of bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Seen {
    method: String,
    target: String,
    fields: Vec<(String, Vec<u8>)>,
    body: Vec<u8>,
    is_whole: bool,
}

/// Has the library serve a connection that brings these reads, and then ends.
fn served(pieces: &[Vec<u8>]) -> Vec<Seen> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let service = service_fn(|request: Request<Incoming>| {
        let seen = Arc::clone(&seen);
        async move {
            let request = read(request).await;
            seen.lock().expect("a list").push(request);
            Ok::<_, Infallible>(Response::new(String::new()))
        }
    });
    let reads = pieces.iter().filter(|piece| !piece.is_empty()).cloned().collect();
    let connection = http1::Builder::new()
        .half_close(true)
        .max_header_size(16 << 10)
        .serve_connection(Socket { reads }, service);
    let mut connection = pin!(connection);
    let mut context = Context::from_waker(Waker::noop());
    let ended = (0..POLLS_MAX).any(|_| connection.as_mut().poll(&mut context).is_ready());
    assert!(ended, "the connection has no end");
    let mut seen = seen.lock().expect("a list");
    std::mem::take(&mut *seen)
}

async fn read(request: Request<Incoming>) -> Seen {
    let (head, mut body) = request.into_parts();
    let field = |(name, value): (&hyper::header::HeaderName, &hyper::header::HeaderValue)| {
        (name.to_string(), value.as_bytes().to_vec())
    };
    let mut seen = Seen {
        method: head.method.to_string(),
        target: head.uri.to_string(),
        fields: head.headers.iter().map(field).collect(),
        ..Seen::default()
    };
    loop {
        match poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            Some(Ok(frame)) => seen.body.extend(frame.into_data().unwrap_or_default()),
            Some(Err(_)) => return seen,
            None => {
                seen.is_whole = true;
                return seen;
            }
        }
    }
}

/// A socket in memory: reads come as they were cut; what is written is thrown away.
struct Socket {
    reads: VecDeque<Vec<u8>>,
}

impl Read for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        mut into: ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        if let Some(read) = self.reads.front_mut() {
            let rest = read.split_off(read.len().min(into.remaining()));
            into.put_slice(read);
            *read = rest;
            if read.is_empty() {
                self.reads.pop_front();
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl Write for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
