//! Connections of routers and other clients: HTTP/1.1 and HTTP/2 without TLS.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::Proxy;
use super::forward::answer;
use super::wakes::Wakes;
use crate::tasks::{ConnectionExecutor, ConnectionTasks};

/// How long a connection may take to send its first or its next request's head. Longer than
/// clients keep idle connections.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Headers of one message at most.
const HEADERS_MAX: usize = 128;

/// Requests of one HTTP/2 connection at once.
const STREAMS_MAX: u32 = 256;

/// What is buffered of one HTTP/2 stream, either way.
const STREAM_BUFFER_BYTES: u32 = 64 << 10;

/// Pings find out that an HTTP/2 peer is gone.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// A peer that vanished without a word is given up after so long a silence, and one that takes
/// nothing of what it was sent, after `STUCK_TIMEOUT`: the engine works for neither.
const SILENCE: Duration = Duration::from_secs(10);
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
const PROBES: u32 = 3;
#[cfg(target_os = "linux")]
const STUCK_TIMEOUT: Duration = Duration::from_secs(120);

/// A listener that fails, for want of open files say, is tried again after this time.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `stop`, then waits for requests in flight; new ones on open connections are
/// refused by then. Dropping the future cuts all connections.
pub async fn serve(listener: TcpListener, proxy: Proxy, stop: CancellationToken) {
    let limits = proxy.0.config.limits;
    let streams = ConnectionTasks::default();
    let builder = Arc::new(builder(&streams, limits.head_max_bytes));
    let room = Arc::new(Semaphore::new(limits.connections_max));
    let upstream = proxy.clone();
    let mut connections = JoinSet::new();
    let accepting = async {
        loop {
            let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
            let socket = accept(&listener).await;
            while connections.try_join_next().is_some() {}
            let (builder, proxy) = (Arc::clone(&builder), proxy.clone());
            connections.spawn(connection(builder, socket, proxy, stop.clone(), place));
        }
    };
    let serving = async { tokio::join!(accepting, upstream.0.engine.close_idle()) };
    stop.run_until_cancelled(serving).await;
    drop(listener);
    while connections.join_next().await.is_some() {}
}

fn builder(streams: &ConnectionTasks, head_max_bytes: usize) -> Builder<ConnectionExecutor> {
    let mut builder = Builder::new(streams.executor());
    // Most of what is written is some hundred bytes: to copy them costs less than to pass on
    // three pieces, and what came from the engine is free for what comes next.
    builder
        .http1()
        .writev(false)
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .header_read_timeout(HEAD_TIMEOUT)
        .max_headers(HEADERS_MAX)
        .max_buf_size(head_max_bytes.max(8192));
    builder
        .http2()
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(u32::try_from(head_max_bytes).unwrap_or(u32::MAX))
        .initial_stream_window_size(STREAM_BUFFER_BYTES)
        .initial_connection_window_size(STREAM_BUFFER_BYTES * 16)
        .max_send_buf_size(STREAM_BUFFER_BYTES as usize)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    builder
}

/// The next connection that is there to be accepted.
async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((socket, _)) => return socket,
            Err(error) if concerns_one_connection(&error) => {}
            Err(error) => {
                tracing::error!(%error, "cannot accept connections");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn concerns_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

fn set_up(socket: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    // Small chunks of a stream must not wait for acknowledgements.
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, SILENCE)?;
    sockopt::set_tcp_keepintvl(socket, PROBE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, PROBES)?;
    #[cfg(target_os = "linux")]
    sockopt::set_tcp_user_timeout(socket, STUCK_TIMEOUT.as_millis() as u32)?;
    Ok(())
}

/// Why a connection ends.
enum End {
    /// Either side is done with it, or it broke.
    Over,
    /// Nothing was ever asked for.
    Silent,
    /// All are to end.
    Asked,
}

/// Serves one connection. `place` is its own among all of them.
async fn connection(
    builder: Arc<Builder<ConnectionExecutor>>,
    socket: TcpStream,
    proxy: Proxy,
    stop: CancellationToken,
    place: OwnedSemaphorePermit,
) {
    if let Err(error) = set_up(&socket) {
        tracing::debug!(%error, "a socket's options");
    }
    let asked = AtomicBool::new(false);
    let service = service_fn(|request| {
        asked.store(true, Ordering::Relaxed);
        answer(Arc::clone(&proxy.0), request)
    });
    let mut connection = pin!(builder.serve_connection(TokioIo::new(socket), service));
    // Until the protocol is known, no time-out of the library's applies.
    let silent = async {
        tokio::time::sleep(HEAD_TIMEOUT).await;
        if asked.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    let mut end = pin!(async {
        tokio::select! {
            () = silent => End::Silent,
            () = stop.cancelled() => End::Asked,
        }
    });
    // Each piece of a stream wakes the connection, and hardly anything the others.
    let wakes = Arc::new(Wakes::new());
    let waker = Waker::from(Arc::clone(&wakes));
    let end = poll_fn(|context| match connection.as_mut().poll(context) {
        Poll::Ready(_ended) => Poll::Ready(End::Over),
        Poll::Pending => {
            let mut own = Context::from_waker(&waker);
            wakes.drive(context, || end.as_mut().poll(&mut own))
        }
    });
    match end.await {
        End::Over | End::Silent => return,
        End::Asked => connection.as_mut().graceful_shutdown(),
    }
    // What a peer that went away has broken off concerns nobody.
    let _ended = connection.await;
    drop(place);
}
