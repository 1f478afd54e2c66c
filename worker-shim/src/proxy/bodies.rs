//! Bodies on their way through: nothing is buffered, so that whoever reads slowly slows the
//! other side down.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::handoff::Scan;
use super::traffic::{Meter, Ticket, Traffic};
use super::upstream::Line;

/// Bytes of a request's body that stand for one token, about, where nobody says.
pub(super) const BYTES_PER_TOKEN: u64 = 4;

/// A request's body, towards the engine. What was not read of it when the engine is done
/// with it goes back to whoever holds the other end.
#[derive(Debug)]
pub(super) struct Upload {
    body: Option<Incoming>,
    /// Of a body whose length is not known before.
    meter: Option<Meter>,
    left: Option<oneshot::Sender<Incoming>>,
}

impl Upload {
    /// A body, and where it will be if the engine does not take it.
    pub(super) fn new(body: Incoming, meter: Option<Meter>) -> (Self, oneshot::Receiver<Incoming>) {
        let (left, unread) = oneshot::channel();
        (Self { body: Some(body), meter, left: Some(left) }, unread)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let (Some(body), Some(left)) = (self.body.take(), self.left.take())
            && !body.is_end_stream()
        {
            // Nobody waits for it where the engine answers.
            let _unread = left.send(body);
        }
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(body).poll_frame(context));
        if let (Some(meter), Some(Ok(frame))) = (&self.meter, &frame) {
            let bytes = frame.data_ref().map_or(0, Bytes::len) as u64;
            meter.add(bytes.div_ceil(BYTES_PER_TOKEN));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

/// An engine's answer, towards the client. Dropping it closes the connection to the engine,
/// which then drops the request.
#[derive(Debug)]
pub(super) struct Relay {
    pub(super) body: Line,
    /// Of a request that the engine computes for, until the last byte.
    pub(super) ticket: Option<Ticket>,
    /// Of a reply that may hand KV over.
    pub(super) watch: Option<HandOffWatch>,
    /// Its place among all requests under way.
    pub(super) place: Option<OwnedSemaphorePermit>,
}

/// Tells the traffic of a hand-off in a reply.
#[derive(Debug)]
pub(super) struct HandOffWatch {
    pub(super) scan: Scan,
    pub(super) traffic: Arc<Traffic>,
    /// How long the engine keeps the blocks.
    pub(super) lease: Duration,
}

impl Relay {
    fn passes(&mut self, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        if let Some(ticket) = &self.ticket {
            ticket.begun();
        }
        if let Some(watch) = &mut self.watch
            && watch.scan.finds(data)
        {
            watch.traffic.stage(watch.lease);
        }
    }

    fn end(&mut self) {
        self.ticket = None;
        self.place = None;
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if let Some(data) = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
            self.passes(data);
        }
        if !matches!(frame, Some(Ok(_))) || self.body.is_end_stream() {
            self.end();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What a client gets.
#[derive(Debug)]
pub(super) enum Answer {
    /// Made here.
    Own(Full<Bytes>),
    /// The engine's.
    Engine(Relay),
}

impl Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Self::Own(body) => Pin::new(body).poll_frame(context).map_err(|never| match never {}),
            Self::Engine(body) => Pin::new(body).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Own(body) => body.is_end_stream(),
            Self::Engine(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own(body) => body.size_hint(),
            Self::Engine(body) => body.size_hint(),
        }
    }
}

/// How long the rest of a refused request's body is waited for.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(2);

/// Reads the rest of a refused request's body: a connection that is closed upon unread bytes
/// is reset, and the refusal may be lost on its way.
pub(super) async fn discard(body: &mut Incoming) {
    const MAX_BYTES: usize = 64 << 20;
    let read = async {
        let mut read_bytes = 0;
        while let Some(Ok(frame)) = body.frame().await {
            read_bytes += frame.data_ref().map_or(0, Bytes::len);
            if read_bytes > MAX_BYTES {
                break;
            }
        }
    };
    // What is late is not waited for.
    let _in_time = tokio::time::timeout(DISCARD_TIMEOUT, read).await;
}

/// The same with what an engine has not taken of an [`Upload`].
pub(super) async fn discard_unread(unread: oneshot::Receiver<Incoming>) {
    if let Ok(Ok(mut body)) = tokio::time::timeout(DISCARD_TIMEOUT, unread).await {
        discard(&mut body).await;
    }
}
