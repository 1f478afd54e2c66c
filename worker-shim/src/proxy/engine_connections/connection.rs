//! One connection to the engine, and the body of the reply on it.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
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
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::super::bodies::RequestBody;
use super::super::scoped_waker::ScopedWaker;
use super::IdleConnections;
use crate::tasks::ConnectionTasks;

type HttpConnection = http1::Connection<TokioIo<TcpStream>, RequestBody>;
type SendResult = Result<Response<Incoming>, TrySendError<http::Request<RequestBody>>>;

/// What has arrived on a connection since its last reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArrivedData {
    Nothing,
    Bytes,
    /// The connection has ended or failed.
    End,
}

/// A second descriptor of a connection's socket, which the HTTP library owns. The socket itself is
/// asked, because the runtime's readiness state may be outdated.
pub(super) struct Probe(OwnedFd);

impl Probe {
    /// # Errors
    /// There are too many open files.
    pub(super) fn new(socket: &TcpStream) -> io::Result<Self> {
        Ok(Self(socket.as_fd().try_clone_to_owned()?))
    }

    fn arrived(&self) -> ArrivedData {
        match recv(&self.0, &mut [0; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 1..)) => ArrivedData::Bytes,
            Err(Errno::AGAIN | Errno::INTR) => ArrivedData::Nothing,
            Ok(_) | Err(_) => ArrivedData::End,
        }
    }
}

/// A connection that makes progress only while it is polled.
pub(super) struct Connection {
    pub(super) sender: SendRequest<RequestBody>,
    /// `None` once the connection has ended.
    driver: Option<HttpConnection>,
    probe: Probe,
    scoped_waker: Arc<ScopedWaker>,
    /// Made from `scoped_waker`.
    waker: Waker,
}

impl Connection {
    pub(super) fn new(
        sender: SendRequest<RequestBody>,
        driver: HttpConnection,
        probe: Probe,
    ) -> Self {
        let scoped_waker = Arc::new(ScopedWaker::new());
        let waker = Waker::from(Arc::clone(&scoped_waker));
        Self { sender, driver: Some(driver), probe, scoped_waker, waker }
    }

    /// What has arrived since the last reply.
    pub(super) fn arrived(&self) -> ArrivedData {
        self.probe.arrived()
    }

    /// Polls the connection, then the future that waits for data from it.
    fn poll_with<T>(
        &mut self,
        context: &mut Context<'_>,
        mut next: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let Self { driver, scoped_waker, waker, .. } = self;
        let mut own = Context::from_waker(waker);
        scoped_waker.drive(context, || {
            if driver.as_mut().is_some_and(|driver| Pin::new(driver).poll(&mut own).is_ready()) {
                // The waiting future learns how the connection has ended.
                *driver = None;
            }
            next(&mut own)
        })
    }

    /// Waits for the head of a reply.
    pub(super) async fn wait_for_reply(
        &mut self,
        mut sending: Pin<&mut impl Future<Output = SendResult>>,
    ) -> SendResult {
        std::future::poll_fn(|context| self.poll_with(context, |own| sending.as_mut().poll(own)))
            .await
    }

    /// Drives the connection in its own task until the request and its reply are complete.
    pub(super) fn run_detached(self: Box<Self>, tasks: &ConnectionTasks) {
        if let Some(driver) = self.driver {
            tasks.executor().execute(async move {
                let _ended = driver.await;
            });
        }
    }

    /// Whether another request can be sent after a reply has been read.
    fn is_free(&mut self) -> bool {
        // A close wakes no task. It is noticed when the connection is used again.
        self.scoped_waker.detach();
        let mut context = Context::from_waker(Waker::noop());
        let driver = self.driver.as_mut();
        driver.is_some_and(|driver| Pin::new(driver).poll(&mut context).is_pending())
            && self.sender.is_ready()
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Connection")
            .field("ended", &self.driver.is_none())
            .finish_non_exhaustive()
    }
}

/// The body of a reply. At its end the connection becomes idle. Dropping the body earlier closes
/// the connection.
#[derive(Debug)]
pub(in super::super) struct EngineBody {
    body: Incoming,
    connection: Option<(Box<Connection>, Arc<IdleConnections>)>,
}

impl EngineBody {
    pub(super) fn new(
        body: Incoming,
        connection: Box<Connection>,
        idle: Arc<IdleConnections>,
    ) -> Self {
        let mut this = Self { body, connection: Some((connection, idle)) };
        if this.body.is_end_stream() {
            this.return_connection();
        }
        this
    }

    /// The body of a reply whose connection has its own task because the request is still being
    /// sent. A reply that is not read must not delay the request.
    pub(super) fn detached(body: Incoming) -> Self {
        Self { body, connection: None }
    }

    fn return_connection(&mut self) {
        if let Some((mut connection, idle)) = self.connection.take()
            && connection.is_free()
        {
            idle.put(connection, Instant::now());
        }
    }
}

impl Body for EngineBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let EngineBody { body, connection } = this;
        let Some((driven, _)) = connection else { return Pin::new(body).poll_frame(context) };
        let frame = ready!(driven.poll_with(context, |own| Pin::new(&mut *body).poll_frame(own)));
        let is_last = match &frame {
            Some(Ok(frame)) => frame.is_trailers() || body.is_end_stream(),
            Some(Err(_)) | None => true,
        };
        if is_last {
            this.return_connection();
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
