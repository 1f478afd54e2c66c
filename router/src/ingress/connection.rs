//! One client's connection, from the socket to its end.

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hyper::server::conn::{http1, http2};
use hyper_util::rt::TokioIo;
use prometheus::IntCounterVec;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::door::{Door, Routes};
use super::guarded::{Guarded, RefusedFor};
use super::pulse::{Cut, Patience, Pulse, Watch};
use super::streams::Streams;
use super::wire::Protocol;
use splitrail_api::unread::{RoomBounds, UnreadRoom};
use splitrail_config::model::Limits;

/// What the HTTP library counts by itself, without a loss.
const HTTP1_HEADERS: usize = 100;

/// Bytes that are buffered each way on an HTTP/1 connection, at least.
const HTTP1_BUFFER_BYTES: usize = 128 << 10;

/// Bytes of an answer that wait for an HTTP/2 stream's window.
const HTTP2_SEND_BYTES: usize = 64 << 10;

/// Streams that may end because of what the client does wrong on them, before it is told to
/// calm down.
const HTTP2_FAULTS_MAX: usize = 64;

/// How long a client that has connected and said nothing is waited for when the router stops:
/// its request may be on its way.
const FIRST_WORDS: Duration = Duration::from_secs(1);

/// How long a connection that has to end may take to say so.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What the connections of a listener have in common.
#[derive(Clone)]
pub(super) struct Common {
    pub(super) routes: Routes,
    /// The listener's name in metrics.
    pub(super) listener: &'static str,
    pub(super) cut: IntCounterVec,
    pub(super) stop: CancellationToken,
}

impl Common {
    pub(super) fn count(&self, reason: &str) {
        self.cut.with_label_values(&[self.listener, reason]).inc();
    }
}

/// What one connection may do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    patience: Patience,
    header_max_bytes: usize,
    headers_max: usize,
    http2_streams_max: u32,
    unread: RoomBounds,
}

impl From<&Limits> for Bounds {
    fn from(limits: &Limits) -> Self {
        let &Limits { header_max_bytes, headers_max, http2_streams_max, .. } = limits;
        let (patience, unread) = (limits.into(), limits.into());
        Self { patience, header_max_bytes, headers_max, http2_streams_max, unread }
    }
}

/// Serves a connection to its end: the client's, or the router's when it stops or has to cut
/// it. Dropped, it ends with all its requests.
pub(super) async fn serve(socket: TcpStream, peer: SocketAddr, bounds: Bounds, common: Common) {
    let began = Instant::now();
    // Whoever asks a token takes its lock: each connection has one of its own.
    let common = Common { stop: common.stop.child_token(), ..common };
    let pulse = Arc::new(Pulse::default());
    let refused = Arc::new(RefusedFor::default());
    let mut socket = Guarded::new(socket, Arc::clone(&pulse), Arc::clone(&refused));
    let protocol = tokio::select! {
        biased;
        known = tokio::time::timeout_at(began + bounds.patience.head, socket.protocol()) => known,
        () = silent_at_stop(&common.stop, &pulse) => return,
    };
    let Ok(known) = protocol else { return common.count(Cut::HeaderTimeout.name()) };
    // An error is the client's end as well.
    let Some(protocol) = known.ok().flatten() else { return };
    // An HTTP/1 connection has one answer at a time.
    let room = || Arc::new(UnreadRoom::new(bounds.unread, pulse.written_bytes()));
    let room = (protocol == Protocol::Http2).then(room);
    let door = Door {
        routes: common.routes.clone(),
        pulse: Arc::clone(&pulse),
        peer,
        headers_max: bounds.headers_max,
        room,
    };
    let watch = Watch::new(bounds.patience, began);
    let driven = Driven { pulse, refused, watch, common };
    let socket = TokioIo::new(socket);
    match protocol {
        Protocol::Http1 => {
            let connection = pin!(http1(bounds).serve_connection(socket, door));
            driven.drive(connection).await;
        }
        // Boxed, since each connection of HTTP/1 would be as large else.
        Protocol::Http2 => Box::pin(serve_http2(socket, door, bounds, driven)).await,
    }
}

/// Waits until the router has stopped and the client has had its time to begin a request. One
/// that has sent a byte by then is waited for, as any other is.
async fn silent_at_stop(stop: &CancellationToken, pulse: &Pulse) {
    stop.cancelled().await;
    tokio::time::sleep(FIRST_WORDS).await;
    if pulse.is_in_head() {
        std::future::pending().await
    }
}

async fn serve_http2(socket: Socket, door: Door, bounds: Bounds, driven: Driven) {
    let pulse = Arc::clone(&driven.pulse);
    let streams = Streams::new(bounds.patience.taking, pulse, &driven.common);
    let connection = pin!(http2(bounds, streams.clone()).serve_connection(socket, door));
    driven.drive(connection).await;
    streams.end();
}

/// What of a connection does not depend on its protocol.
struct Driven {
    pulse: Arc<Pulse>,
    refused: Arc<RefusedFor>,
    watch: Watch,
    common: Common,
}

impl Driven {
    async fn drive(mut self, mut connection: Pin<&mut impl Graceful>) {
        let mut stop = pin!(self.common.stop.cancelled());
        let mut is_told = false;
        let mut is_stopping = false;
        let mut timer = pin!(sleep_until(Instant::now()));
        let cut = poll_fn(|context| {
            is_stopping = is_stopping || stop.as_mut().poll(context).is_ready();
            loop {
                if connection.as_mut().poll(context).is_ready() {
                    // However it ended: what there was to say has been said to the client.
                    return Poll::Ready(self.refused.get());
                }
                // A request that has begun is served. So it is whole, or none is on its way.
                if !is_stopping || is_told || self.pulse.is_in_head() {
                    break;
                }
                is_told = true;
                connection.as_mut().end_soon();
            }
            loop {
                let due = self.watch.look(&self.pulse, Instant::now);
                // A timer that fires early costs less than one moved with each request.
                if let Some((at, _)) = due.filter(|(at, _)| *at < timer.deadline()) {
                    timer.as_mut().reset(at);
                }
                if timer.as_mut().poll(context).is_pending() {
                    return Poll::Pending;
                }
                let now = Instant::now();
                match due {
                    Some((at, cut)) if at <= now => return Poll::Ready(Some(cut)),
                    Some((at, _)) => timer.as_mut().reset(at),
                    None => timer.as_mut().reset(now + self.watch.again()),
                }
            }
        })
        .await;
        let Some(cut) = cut else { return };
        self.common.count(cut.name());
        match cut {
            // An idle client is told, as far as its protocol has words for it.
            Cut::Idle => {
                connection.as_mut().end_soon();
                let _silent = tokio::time::timeout(LAST_WORDS, connection).await;
            }
            Cut::WriteStall | Cut::WritePace => self.pulse.discard(),
            Cut::HeaderTimeout | Cut::Framing | Cut::Flood => {}
        }
    }
}

/// A connection that can be told to end once it has done what it is doing.
trait Graceful: Future<Output = hyper::Result<()>> {
    fn end_soon(self: Pin<&mut Self>);
}

type Socket = TokioIo<Guarded>;

impl Graceful for http1::Connection<Socket, Door> {
    fn end_soon(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

impl Graceful for http2::Connection<Socket, Door, Streams> {
    fn end_soon(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

fn http1(bounds: Bounds) -> http1::Builder {
    let mut library = http1::Builder::new();
    library
        .max_header_size(bounds.header_max_bytes)
        .max_buf_size(HTTP1_BUFFER_BYTES.max(bounds.header_max_bytes));
    if bounds.headers_max != HTTP1_HEADERS {
        library.max_headers(bounds.headers_max);
    }
    library
}

fn http2(bounds: Bounds, streams: Streams) -> http2::Builder<Streams> {
    let mut library = http2::Builder::new(streams);
    library
        .max_header_list_size(u32::try_from(bounds.header_max_bytes).unwrap_or(u32::MAX))
        .max_concurrent_streams(bounds.http2_streams_max)
        .max_local_error_reset_streams(HTTP2_FAULTS_MAX)
        .max_send_buf_size(HTTP2_SEND_BYTES);
    library
}
