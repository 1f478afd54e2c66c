//! One connection, and the answer that comes over it.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::Response;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::rt::Executor as _;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::super::bodies::Upload;
use super::super::wakes::Wakes;
use super::Idle;
use crate::tasks::ConnectionTasks;

type Wire = http1::Connection<TokioIo<TcpStream>, Upload>;
type Sent = Result<Response<Incoming>, TrySendError<http::Request<Upload>>>;

/// A connection that goes on only while it is polled.
pub(super) struct Connection {
    pub(super) sender: SendRequest<Upload>,
    /// `None` once it has ended: only then is whoever waits told so.
    wire: Option<Wire>,
    wakes: Arc<Wakes>,
    /// Of `wakes`.
    waker: Waker,
}

impl Connection {
    pub(super) fn new(sender: SendRequest<Upload>, wire: Wire) -> Self {
        let wakes = Arc::new(Wakes::new());
        let waker = Waker::from(Arc::clone(&wakes));
        Self { sender, wire: Some(wire), wakes, waker }
    }

    /// Goes on with the connection, then with what waits for something to come over it.
    fn poll_with<T>(
        &mut self,
        context: &mut Context<'_>,
        mut next: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let Self { wire, wakes, waker, .. } = self;
        let mut own = Context::from_waker(waker);
        wakes.drive(context, || {
            if wire.as_mut().is_some_and(|wire| Pin::new(wire).poll(&mut own).is_ready()) {
                // How it has ended is said to whoever waits.
                *wire = None;
            }
            next(&mut own)
        })
    }

    /// Waits for the head of an answer.
    pub(super) async fn answered(
        &mut self,
        mut sending: Pin<&mut impl Future<Output = Sent>>,
    ) -> Sent {
        std::future::poll_fn(|context| self.poll_with(context, |own| sending.as_mut().poll(own)))
            .await
    }

    /// Goes on in a task of its own until the request and its answer are through, and ends.
    pub(super) fn run_alone(self: Box<Self>, tasks: &ConnectionTasks) {
        if let Some(wire) = self.wire {
            tasks.executor().execute(async move {
                let _ended = wire.await;
            });
        }
    }

    /// Whether the next request can be sent, once an answer has been read.
    fn is_free(&mut self) -> bool {
        // Nobody is to be woken when it is closed: that is seen when it is used.
        self.wakes.forget();
        let mut context = Context::from_waker(Waker::noop());
        let wire = self.wire.as_mut();
        wire.is_some_and(|wire| Pin::new(wire).poll(&mut context).is_pending())
            && self.sender.is_ready()
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Connection")
            .field("ended", &self.wire.is_none())
            .finish_non_exhaustive()
    }
}

/// An answer's body. Its end gives the connection back; dropped before, it closes it.
#[derive(Debug)]
pub(in super::super) struct Line {
    body: Incoming,
    connection: Option<(Box<Connection>, Arc<Idle>)>,
}

impl Line {
    pub(super) fn new(body: Incoming, connection: Box<Connection>, idle: Arc<Idle>) -> Self {
        let mut line = Self { body, connection: Some((connection, idle)) };
        if line.body.is_end_stream() {
            line.give_back();
        }
        line
    }

    /// Of a connection that has a task of its own, since the request is not through yet: an
    /// answer that nobody reads must not hold it up.
    pub(super) fn alone(body: Incoming) -> Self {
        Self { body, connection: None }
    }

    fn give_back(&mut self) {
        if let Some((mut connection, idle)) = self.connection.take()
            && connection.is_free()
        {
            idle.put(connection);
        }
    }
}

impl Body for Line {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let line = self.get_mut();
        let Line { body, connection } = line;
        let Some((driven, _)) = connection else { return Pin::new(body).poll_frame(context) };
        let frame = ready!(driven.poll_with(context, |own| Pin::new(&mut *body).poll_frame(own)));
        let is_last = match &frame {
            Some(Ok(frame)) => frame.is_trailers() || body.is_end_stream(),
            Some(Err(_)) | None => true,
        };
        if is_last {
            line.give_back();
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
