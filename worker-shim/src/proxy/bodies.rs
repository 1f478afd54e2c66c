//! The bodies of requests and replies. Nothing that is forwarded is buffered, so that a slow reader
//! slows the other side down.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::sync::oneshot;

use super::body_pace::{BodyPace, RequestBodyError};
use super::client::RequestPlace;
use super::engine_connections::EngineBody;
use super::hand_off_scan::HandOffScanner;
use super::traffic::{PromptTokenMeter, RequestTicket, Traffic};

/// Estimated bytes of a request's body per prompt token, if the router sends no token count.
pub(super) const BYTES_PER_TOKEN: u64 = 4;

/// The body of a request to the engine. If it is dropped before its end, the unread rest is
/// sent to the receiver that [`RequestBody::new`] returns.
#[derive(Debug)]
pub(super) struct RequestBody {
    body: Option<Incoming>,
    pace: BodyPace,
    /// Present if the length of the body is not known in advance.
    meter: Option<PromptTokenMeter>,
    left: Option<oneshot::Sender<Incoming>>,
}

impl RequestBody {
    /// Creates a body, and the receiver of its rest if the engine does not read all of it.
    pub(super) fn new(
        body: Incoming,
        pace: BodyPace,
        meter: Option<PromptTokenMeter>,
    ) -> (Self, oneshot::Receiver<Incoming>) {
        let (left, unread) = oneshot::channel();
        (Self { body: Some(body), pace, meter, left: Some(left) }, unread)
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if let (Some(body), Some(left)) = (self.body.take(), self.left.take())
            && !body.is_end_stream()
        {
            // The receiver is gone if the engine has replied.
            let _unread = left.send(body);
        }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = RequestBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RequestBodyError>>> {
        let this = &mut *self;
        let Some(body) = &mut this.body else { return Poll::Ready(None) };
        let Poll::Ready(frame) = Pin::new(body).poll_frame(context) else {
            ready!(this.pace.poll_wait(context));
            return Poll::Ready(Some(Err(RequestBodyError::TooSlow)));
        };
        if let Some(Ok(frame)) = &frame {
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            this.pace.add(bytes);
            if let Some(meter) = &this.meter {
                meter.add((bytes as u64).div_ceil(BYTES_PER_TOKEN));
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(RequestBodyError::from)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

/// The engine's reply to a client. Dropping it early closes the connection to the engine, which
/// then aborts the request.
#[derive(Debug)]
pub(super) struct EngineReplyBody {
    pub(super) body: EngineBody,
    /// Counts a request that needs the accelerator, until the last byte of the reply.
    pub(super) ticket: Option<RequestTicket>,
    /// Present if the reply may contain a hand-off.
    pub(super) hand_off: Option<HandOffObserver>,
    /// Held until the last byte of the reply.
    pub(super) place: Option<RequestPlace>,
}

/// Records a hand-off in a reply.
#[derive(Debug)]
pub(super) struct HandOffObserver {
    pub(super) scanner: HandOffScanner,
    pub(super) traffic: Arc<Traffic>,
    /// How long the engine keeps the blocks.
    pub(super) lease: Duration,
}

impl EngineReplyBody {
    /// Observes a chunk that is forwarded.
    fn observe(&mut self, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        if let Some(ticket) = &self.ticket {
            ticket.begin_reply();
        }
        if let Some(observer) = &mut self.hand_off
            && observer.scanner.scan(data)
        {
            observer.traffic.stage(observer.lease);
        }
    }

    fn end(&mut self) {
        self.ticket = None;
        self.place = None;
    }
}

impl Body for EngineReplyBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if let Some(data) = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
            self.observe(data);
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

/// Maximum size in bytes of a piece of an [`OwnReplyBody`].
const PIECE_MAX_BYTES: usize = 16 << 10;

/// A reply of the shim itself. It is passed on in pieces, because the HTTP library copies a piece
/// before the client reads it.
#[derive(Debug)]
pub(super) struct OwnReplyBody {
    rest: Bytes,
}

impl From<Bytes> for OwnReplyBody {
    fn from(whole: Bytes) -> Self {
        Self { rest: whole }
    }
}

impl Body for OwnReplyBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let bytes = self.rest.len().min(PIECE_MAX_BYTES);
        let piece = (bytes > 0).then(|| self.rest.split_to(bytes));
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}

/// The body of a reply to a client.
#[derive(Debug)]
pub(super) enum ReplyBody {
    /// Made by the shim.
    Own(OwnReplyBody),
    /// From the engine.
    Engine(EngineReplyBody),
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Self::Own(body) => Pin::new(body).poll_frame(context),
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

/// Maximum time for reading the rest of a refused request's body.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(2);

/// Reads and discards the rest of a refused request's body. A connection that is closed with
/// unread bytes is reset, and the client may then lose the refusal.
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
    // After the timeout the rest stays unread.
    let _in_time = tokio::time::timeout(DISCARD_TIMEOUT, read).await;
}

/// Reads and discards what the engine has not read of a [`RequestBody`].
pub(super) async fn discard_unread(unread: oneshot::Receiver<Incoming>) {
    if let Ok(Ok(mut body)) = tokio::time::timeout(DISCARD_TIMEOUT, unread).await {
        discard(&mut body).await;
    }
}
