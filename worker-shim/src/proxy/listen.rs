//! The listener: accepts connections of routers and other clients, HTTP/1.1 and HTTP/2 without
//! TLS.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use splitrail_settings::address_shares::{AddressPlace, AddressShares};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::client::ClientConnection;
use super::forward::handle;
use super::scoped_waker::ScopedWaker;
use super::{Proxy, ProxyLimits};
use crate::tasks::{ConnectionExecutor, ConnectionTasks};

/// Maximum number of headers per message.
const HEADERS_MAX: usize = 128;

/// Maximum number of concurrent requests per HTTP/2 connection.
const STREAMS_MAX: u32 = 256;

/// Buffer size of an HTTP/2 stream in each direction, in bytes.
const STREAM_BUFFER_BYTES: u32 = 64 << 10;

/// Interval of HTTP/2 pings, which detect a peer that is gone.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum time for the reply to a ping.
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

/// The reply for a connection of an address that holds its share. For an HTTP/2 client it has no
/// meaning, but the connection's end is sufficient.
const OVER_SHARE_REPLY: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/// Serves until `stop` fires, then waits for requests in flight. New requests on open connections
/// are refused from then on. Dropping the future closes all connections.
pub async fn serve(listener: TcpListener, proxy: Proxy, stop: CancellationToken) {
    let limits = proxy.0.config.limits;
    let streams = ConnectionTasks::default();
    let builder = Arc::new(builder(&streams, &limits));
    let permits = Arc::new(Semaphore::new(limits.connections_max));
    let shares = Arc::<AddressShares>::default();
    let upstream = proxy.clone();
    let mut connections = JoinSet::new();
    let accepting = async {
        loop {
            let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
            let (socket, peer) = accept(&listener).await;
            while connections.try_join_next().is_some() {}
            let Some(place) = shares.take(peer.ip(), limits.connections_max, usize::MAX) else {
                refuse(&socket, &proxy);
                continue;
            };
            let (builder, proxy) = (Arc::clone(&builder), proxy.clone());
            let client = ClientConnection::new(peer.ip());
            let places = Places { _place: place, _permit: permit };
            let serving = connection(builder, socket, proxy, client, stop.clone());
            connections.spawn(async move {
                let _places = places;
                serving.await;
            });
        }
    };
    let serving = async { tokio::join!(accepting, upstream.0.engine.close_idle()) };
    stop.run_until_cancelled(serving).await;
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// What a connection holds until its end.
struct Places {
    /// Its place, counted at the client's address. It is returned before the permit, whose receiver
    /// asks for a place.
    _place: AddressPlace,
    /// The same place among all connections.
    _permit: OwnedSemaphorePermit,
}

/// Refuses a connection of an address that holds its share.
fn refuse(socket: &TcpStream, proxy: &Proxy) {
    proxy.0.refused_connections.inc();
    // Whether the client reads it does not matter.
    let _unheard = socket.try_write(OVER_SHARE_REPLY);
}

fn builder(streams: &ConnectionTasks, limits: &ProxyLimits) -> Builder<ConnectionExecutor> {
    let head_max_bytes = limits.head_max_bytes;
    let mut builder = Builder::new(streams.executor());
    // Most writes are a few hundred bytes. Copying them costs less than a write of three slices,
    // and frees the engine's buffer for the next chunk.
    builder
        .http1()
        .writev(false)
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .header_read_timeout(limits.idle_timeout)
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
async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
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

/// Serves one connection.
async fn connection(
    builder: Arc<Builder<ConnectionExecutor>>,
    socket: TcpStream,
    proxy: Proxy,
    client: ClientConnection,
    stop: CancellationToken,
) {
    if let Err(error) = set_up(&socket) {
        tracing::debug!(%error, "a socket's options");
    }
    let idle_timeout = proxy.0.config.limits.idle_timeout;
    let client = Arc::new(client);
    let service = service_fn(|request| handle(Arc::clone(&proxy.0), Arc::clone(&client), request));
    let mut connection = pin!(builder.serve_connection(TokioIo::new(socket), service));
    // The library's timeouts do not apply before the protocol is known, nor to HTTP/2.
    let idle_or_stopping = pin!(async {
        tokio::select! {
            () = client.until_idle(idle_timeout) => {}
            () = stop.cancelled() => {}
        }
    });
    if drive(connection.as_mut(), idle_or_stopping).await.is_none() {
        return;
    }
    connection.as_mut().graceful_shutdown();
    // A client that does not read a reply would keep the connection.
    let idle = pin!(client.until_idle(idle_timeout));
    let _ended = drive(connection, idle).await;
}

/// Drives a connection until it ends, or until `reason` to end it occurs: `None` if the connection
/// has ended. Errors of a connection whose peer has left are of no interest.
async fn drive<T>(
    mut connection: Pin<&mut impl Future>,
    mut reason: Pin<&mut impl Future<Output = T>>,
) -> Option<T> {
    // Each chunk of a stream wakes the connection. The other future is polled only when it is
    // woken itself, which is rare.
    let scoped_waker = Arc::new(ScopedWaker::new());
    let waker = Waker::from(Arc::clone(&scoped_waker));
    poll_fn(|context| match connection.as_mut().poll(context) {
        Poll::Ready(_ended) => Poll::Ready(None),
        Poll::Pending => {
            let mut own = Context::from_waker(&waker);
            scoped_waker.drive(context, || reason.as_mut().poll(&mut own)).map(Some)
        }
    })
    .await
}
