//! The listener: accepts connections of routers and other clients, HTTP/1.1 and HTTP/2 without
//! TLS.

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
use super::forward::handle;
use super::scoped_waker::ScopedWaker;
use crate::tasks::{ConnectionExecutor, ConnectionTasks};

/// Maximum time until a connection has sent the head of its first or next request. Longer than
/// clients keep idle connections.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum number of headers per message.
const HEADERS_MAX: usize = 128;

/// Maximum number of concurrent requests per HTTP/2 connection.
const STREAMS_MAX: u32 = 256;

/// Buffer size of an HTTP/2 stream in each direction, in bytes.
const STREAM_BUFFER_BYTES: u32 = 64 << 10;

/// Interval of HTTP/2 pings, which detect a peer that is gone, and timeout of their replies.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// TCP keep-alive settings, which detect a peer that has vanished. A peer that does not
/// acknowledge sent bytes is dropped after `STUCK_TIMEOUT`. In both cases the engine stops
/// working for the peer.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;
#[cfg(target_os = "linux")]
const STUCK_TIMEOUT: Duration = Duration::from_secs(120);

/// Delay after a failed accept, for example because too many files are open.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Serves until `stop` fires, then waits for requests in flight. New requests on open connections
/// are refused from then on. Dropping the future closes all connections.
pub async fn serve(listener: TcpListener, proxy: Proxy, stop: CancellationToken) {
    let limits = proxy.0.config.limits;
    let streams = ConnectionTasks::default();
    let builder = Arc::new(builder(&streams, limits.head_max_bytes));
    let permits = Arc::new(Semaphore::new(limits.connections_max));
    let upstream = proxy.clone();
    let mut connections = JoinSet::new();
    let accepting = async {
        loop {
            let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
            let socket = accept(&listener).await;
            while connections.try_join_next().is_some() {}
            let (builder, proxy) = (Arc::clone(&builder), proxy.clone());
            connections.spawn(connection(builder, socket, proxy, stop.clone(), permit));
        }
    };
    let serving = async { tokio::join!(accepting, upstream.0.engine.close_idle()) };
    stop.run_until_cancelled(serving).await;
    drop(listener);
    while connections.join_next().await.is_some() {}
}

fn builder(streams: &ConnectionTasks, head_max_bytes: usize) -> Builder<ConnectionExecutor> {
    let mut builder = Builder::new(streams.executor());
    // Most writes are a few hundred bytes. Copying them costs less than a write of three slices,
    // and frees the engine's buffer for the next chunk.
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

/// Accepts the next connection.
async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((socket, _)) => return socket,
            Err(error) if concerns_one_connection(&error) => {}
            Err(error) => {
                tracing::error!(%error, "cannot accept connections");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
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
    // The small chunks of a stream must not wait for acknowledgements.
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES)?;
    #[cfg(target_os = "linux")]
    sockopt::set_tcp_user_timeout(socket, STUCK_TIMEOUT.as_millis() as u32)?;
    Ok(())
}

/// Why serving a connection ends.
enum ConnectionEnd {
    /// Either side has closed the connection, or it has failed.
    Closed,
    /// The client has not sent a request in time.
    NoRequest,
    /// The proxy is stopping.
    Stopping,
}

/// Serves one connection. `permit` is its share of the connection limit.
async fn connection(
    builder: Arc<Builder<ConnectionExecutor>>,
    socket: TcpStream,
    proxy: Proxy,
    stop: CancellationToken,
    permit: OwnedSemaphorePermit,
) {
    if let Err(error) = set_up(&socket) {
        tracing::debug!(%error, "a socket's options");
    }
    let has_request = AtomicBool::new(false);
    let service = service_fn(|request| {
        has_request.store(true, Ordering::Relaxed);
        handle(Arc::clone(&proxy.0), request)
    });
    let mut connection = pin!(builder.serve_connection(TokioIo::new(socket), service));
    // The library's timeouts do not apply before the protocol is known.
    let no_request = async {
        tokio::time::sleep(HEAD_TIMEOUT).await;
        if has_request.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    let mut end = pin!(async {
        tokio::select! {
            () = no_request => ConnectionEnd::NoRequest,
            () = stop.cancelled() => ConnectionEnd::Stopping,
        }
    });
    // Each chunk of a stream wakes the connection. The other future is polled only when it is
    // woken itself, which is rare.
    let scoped_waker = Arc::new(ScopedWaker::new());
    let waker = Waker::from(Arc::clone(&scoped_waker));
    let end = poll_fn(|context| match connection.as_mut().poll(context) {
        Poll::Ready(_ended) => Poll::Ready(ConnectionEnd::Closed),
        Poll::Pending => {
            let mut own = Context::from_waker(&waker);
            scoped_waker.drive(context, || end.as_mut().poll(&mut own))
        }
    });
    match end.await {
        ConnectionEnd::Closed | ConnectionEnd::NoRequest => return,
        ConnectionEnd::Stopping => connection.as_mut().graceful_shutdown(),
    }
    // Errors of a connection whose peer has left are of no interest.
    let _ended = connection.await;
    drop(permit);
}
