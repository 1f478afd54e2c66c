//! One client connection, from the accepted socket to its end.

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use hyper::server::conn::{http1, http2};
use hyper_util::rt::TokioIo;
use prometheus::IntCounterVec;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::connection_service::{ConnectionService, Routes};
use super::streams::Streams;
use super::tls_listener::{AcceptedConnection, CLIENT_CERTIFICATE, TlsListener};
use splitrail_api::unread::{RoomBounds, UnreadRoom};
use splitrail_client_connection::checked_socket::{CheckedSocket, RefusalReason};
use splitrail_client_connection::connection_activity::{
    CloseReason, ConnectionActivity, ConnectionTimeouts, IdleMonitor,
};
use splitrail_client_connection::recorded_socket::RecordedSocket;
use splitrail_client_connection::wire::Protocol;
use splitrail_config::model::Limits;

/// The HTTP library's default maximum of header fields, for which it needs no allocation per
/// request.
const HTTP1_HEADERS: usize = 100;

/// Minimum size in bytes of the buffers of an HTTP/1 connection, in each direction.
const HTTP1_BUFFER_BYTES: usize = 128 << 10;

/// Maximum size in bytes of a reply's data that waits for an HTTP/2 stream's window.
const HTTP2_SEND_BYTES: usize = 64 << 10;

/// Number of streams that may end because of the client's errors, before the connection is closed
/// with ENHANCE_YOUR_CALM.
const HTTP2_FAULTS_MAX: usize = 64;

/// How long a client that has connected and sent nothing is waited for when the router stops: its
/// request may be on its way.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum time to send the end of a connection to the client.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The name in metrics of a handshake that was not complete in time.
const TLS_TIMEOUT: &str = "tls_timeout";

/// How long before the end of its client's certificate a connection is asked to end: clients that
/// renew their certificates have then no request refused.
const CERTIFICATE_RESERVE: Duration = Duration::from_secs(1);

/// Completes when the client's certificate is about to expire; `None` if the client has none. Boxed
/// so that the future of a connection without a certificate does not grow.
type CertificateEnd = Option<Pin<Box<Sleep>>>;

/// What the connections of a listener have in common.
#[derive(Clone)]
pub(super) struct Common {
    pub(super) routes: Routes,
    /// The TLS of the listener, if it has any.
    pub(super) tls: Option<Arc<TlsListener>>,
    /// The listener's name in metrics.
    pub(super) listener: &'static str,
    pub(super) cut: IntCounterVec,
    pub(super) stop: CancellationToken,
}

impl Common {
    pub(super) fn count(&self, reason: &str) {
        self.cut.with_label_values(&[self.listener, reason]).inc();
    }

    /// Whether the client's certificate is about to expire, which is counted.
    fn certificate_ends(&self, end: &mut CertificateEnd, context: &mut Context<'_>) -> bool {
        let ends = end.as_mut().is_some_and(|end| end.as_mut().poll(context).is_ready());
        if ends {
            *end = None;
            self.count(CLIENT_CERTIFICATE);
        }
        ends
    }
}

/// By how much the head of a call of gRPC may exceed `limits.header_size_max` so that its refusal has
/// a status of gRPC: to a larger one, the library replies with a bare 431.
const GRPC_HEADS: usize = 4;

/// The bounds of one connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionBounds {
    timeouts: ConnectionTimeouts,
    header_max_bytes: usize,
    headers_max: usize,
    http2_streams_max: u32,
    unread: RoomBounds,
}

impl From<&Limits> for ConnectionBounds {
    fn from(limits: &Limits) -> Self {
        let &Limits { header_max_bytes, headers_max, http2_streams_max, .. } = limits;
        let (timeouts, unread) = (limits.into(), limits.into());
        Self { timeouts, header_max_bytes, headers_max, http2_streams_max, unread }
    }
}

/// Serves a connection until the client ends it, or the router stops or closes it. Dropping the
/// future ends the connection with all its requests.
pub(super) async fn serve(
    socket: TcpStream,
    peer: SocketAddr,
    bounds: ConnectionBounds,
    common: Common,
) {
    let began = Instant::now();
    // Checking a token takes its lock, so each connection gets a child token.
    let common = Common { stop: common.stop.child_token(), ..common };
    let activity = Arc::new(ConnectionActivity::default());
    let refused = Arc::new(RefusalReason::default());
    let deadline = began + bounds.timeouts.head;
    let socket = RecordedSocket::new(socket, Arc::clone(&activity));
    let accepted = match common.tls.clone() {
        None => Some(AcceptedConnection::plain(socket)),
        // Boxed so that the future of a connection without TLS does not grow.
        Some(tls) => Box::pin(accept(&tls, socket, deadline, &common, &activity)).await,
    };
    let Some(AcceptedConnection { stream, certificate }) = accepted else { return };
    let mut socket = CheckedSocket::new(stream, Arc::clone(&activity), Arc::clone(&refused));
    let protocol = tokio::select! {
        biased;
        known = tokio::time::timeout_at(deadline, socket.protocol()) => known,
        () = silent_at_stop(&common.stop, &activity) => {
            let _silent = tokio::time::timeout(CLOSE_TIMEOUT, socket.shutdown()).await;
            return;
        }
    };
    let Ok(known) = protocol else { return common.count(CloseReason::HeaderTimeout.name()) };
    // After an error, too, the connection has ended.
    let Some(protocol) = known.ok().flatten() else { return };
    // An HTTP/1 connection has one reply at a time.
    let room = || Arc::new(UnreadRoom::new(bounds.unread, activity.written_bytes()));
    let room = (protocol == Protocol::Http2).then(room);
    let certificate_end: CertificateEnd = certificate.as_ref().map(|certificate| {
        let left = certificate.remaining(SystemTime::now()).unwrap_or_default();
        Box::pin(sleep(left.saturating_sub(CERTIFICATE_RESERVE)))
    });
    let service = ConnectionService {
        routes: common.routes.clone(),
        activity: Arc::clone(&activity),
        peer,
        certificate,
        headers_max: bounds.headers_max,
        header_max_bytes: bounds.header_max_bytes,
        room,
    };
    let watch = IdleMonitor::new(bounds.timeouts, protocol, began);
    let driven = ConnectionState { activity, refused, watch, common, certificate_end };
    let socket = TokioIo::new(socket);
    match protocol {
        Protocol::Http1 => {
            let connection = pin!(http1(bounds).serve_connection(socket, service));
            driven.drive(connection).await;
        }
        // Boxed so that the future of an HTTP/1 connection does not grow to HTTP/2's size.
        Protocol::Http2 => Box::pin(serve_http2(socket, service, bounds, driven)).await,
    }
}

/// Completes the handshake of a connection; `None` if the connection has ended instead.
async fn accept(
    tls: &TlsListener,
    socket: RecordedSocket,
    deadline: Instant,
    common: &Common,
    activity: &ConnectionActivity,
) -> Option<AcceptedConnection> {
    let accepted = tokio::select! {
        biased;
        accepted = tokio::time::timeout_at(deadline, tls.accept(socket)) => accepted,
        () = silent_at_stop(&common.stop, activity) => return None,
    };
    match accepted {
        Ok(Ok(accepted)) => Some(accepted),
        Ok(Err(refused)) => {
            refused.reason.iter().for_each(|reason| common.count(reason));
            refused.end().await;
            None
        }
        Err(_) => {
            common.count(TLS_TIMEOUT);
            None
        }
    }
}

/// Completes when the router stops and the client had time to begin a request. A client that has
/// sent a byte by then is waited for like any other.
async fn silent_at_stop(stop: &CancellationToken, activity: &ConnectionActivity) {
    stop.cancelled().await;
    sleep(FIRST_REQUEST_TIMEOUT).await;
    if activity.is_in_head() {
        std::future::pending().await
    }
}

async fn serve_http2(
    socket: Socket,
    service: ConnectionService,
    bounds: ConnectionBounds,
    driven: ConnectionState,
) {
    let activity = Arc::clone(&driven.activity);
    let streams = Streams::new(bounds.timeouts.required_pace, activity, &driven.common);
    let head_max_bytes = match service.routes.are_of_grpc() {
        true => bounds.header_max_bytes.saturating_mul(GRPC_HEADS),
        false => bounds.header_max_bytes,
    };
    let library = http2(bounds, head_max_bytes, streams.clone());
    let connection = pin!(library.serve_connection(socket, service));
    driven.drive(connection).await;
    streams.end();
}

/// The part of a connection that does not depend on its protocol.
struct ConnectionState {
    activity: Arc<ConnectionActivity>,
    refused: Arc<RefusalReason>,
    watch: IdleMonitor,
    common: Common,
    certificate_end: CertificateEnd,
}

impl ConnectionState {
    async fn drive(mut self, mut connection: Pin<&mut impl Graceful>) {
        let mut stop = pin!(self.common.stop.cancelled());
        let mut certificate_end = self.certificate_end.take();
        let mut is_informed = false;
        let mut is_stopping = false;
        let mut timer = pin!(sleep_until(Instant::now()));
        let reason = poll_fn(|context| {
            is_stopping = is_stopping
                || stop.as_mut().poll(context).is_ready()
                || self.common.certificate_ends(&mut certificate_end, context);
            loop {
                if connection.as_mut().poll(context).is_ready() {
                    // The HTTP library has already reported its result to the client.
                    return Poll::Ready(self.refused.get());
                }
                // A request that has begun is served, so its head is either complete or not begun
                // here.
                if !is_stopping || is_informed || self.activity.is_in_head() {
                    break;
                }
                is_informed = true;
                connection.as_mut().end_soon();
            }
            loop {
                let due = self.watch.look(&self.activity, Instant::now);
                let check = self.watch.next_check(Instant::now);
                // A timer that fires too early costs less than resetting it at each request.
                let next = due.map(|(at, _)| at).into_iter().chain(check).min();
                if let Some(at) = next.filter(|at| *at < timer.deadline()) {
                    timer.as_mut().reset(at);
                }
                if timer.as_mut().poll(context).is_pending() {
                    return Poll::Pending;
                }
                let now = Instant::now();
                match due {
                    Some((at, reason)) if at <= now => return Poll::Ready(Some(reason)),
                    Some((at, _)) => timer.as_mut().reset(at),
                    None => timer.as_mut().reset(now + self.watch.poll_interval()),
                }
            }
        })
        .await;
        let Some(reason) = reason else { return };
        self.common.count(reason.name());
        match reason {
            // An idle client is informed, if its protocol allows it.
            CloseReason::Idle => {
                connection.as_mut().end_soon();
                let _silent = tokio::time::timeout(CLOSE_TIMEOUT, connection).await;
            }
            CloseReason::WriteStall | CloseReason::WritePace => self.activity.discard(),
            CloseReason::HeaderTimeout | CloseReason::Framing | CloseReason::Flood => {}
        }
    }
}

/// A connection that can be asked to end after its current requests.
trait Graceful: Future<Output = hyper::Result<()>> {
    fn end_soon(self: Pin<&mut Self>);
}

type Socket = TokioIo<CheckedSocket>;

impl Graceful for http1::Connection<Socket, ConnectionService> {
    fn end_soon(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

impl Graceful for http2::Connection<Socket, ConnectionService, Streams> {
    fn end_soon(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

fn http1(bounds: ConnectionBounds) -> http1::Builder {
    let mut library = http1::Builder::new();
    library
        .max_header_size(bounds.header_max_bytes)
        .max_buf_size(HTTP1_BUFFER_BYTES.max(bounds.header_max_bytes));
    if bounds.headers_max != HTTP1_HEADERS {
        library.max_headers(bounds.headers_max);
    }
    library
}

fn http2(
    bounds: ConnectionBounds,
    head_max_bytes: usize,
    streams: Streams,
) -> http2::Builder<Streams> {
    let mut library = http2::Builder::new(streams);
    library
        .max_header_list_size(u32::try_from(head_max_bytes).unwrap_or(u32::MAX))
        .max_concurrent_streams(bounds.http2_streams_max)
        .max_local_error_reset_streams(HTTP2_FAULTS_MAX)
        .max_send_buf_size(HTTP2_SEND_BYTES);
    library
}
