//! Bound sockets, and serving on them until told to stop.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::ListenerExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::connection::{self, Bounds, Common};
use super::door::Routes;
use crate::core::{Core, Seldom};

/// How long accepting pauses when the system has no room for another socket.
const NO_ROOM: Duration = Duration::from_millis(100);

/// Connections that may wait to be accepted: thousands come at once when a router comes back.
const BACKLOG: u32 = 4096;

/// Bytes that the system holds for a client; it takes twice as much memory for them.
const SEND_BUFFER_BYTES: u32 = 128 << 10;

/// What a client gets whose connection is one too many, if it listens. Over HTTP/2 it means
/// nothing, and the end of the connection says enough.
const ONE_TOO_MANY: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/// Binds an address.
///
/// # Errors
/// With the address in the message.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| not_bound(address, &error))
}

/// Binds an address for a [`Doorway`].
///
/// What the system buffers for a client that does not read is bounded here: it would become
/// megabytes each. In a round trip of 100 ms, that much is 2.5 MB/s for one connection.
///
/// # Errors
/// With the address in the message.
pub async fn bind_clients(address: SocketAddr) -> io::Result<TcpListener> {
    let bind = || {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        socket.set_reuseaddr(true)?;
        // Connections inherit it.
        socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    bind().map_err(|error| not_bound(address, &error))
}

fn not_bound(address: SocketAddr, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot listen on {address}: {error}"))
}

/// A door for clients: its bounds are `limits`, as they are when a connection comes.
pub struct Doorway {
    /// Its name in metrics.
    pub name: &'static str,
    /// What is behind it.
    pub routes: Routes,
    /// Bounds and counters.
    pub core: Arc<Core>,
    /// Ends the accepting.
    pub stop: CancellationToken,
}

/// Serves until told to stop, then waits for what is in flight. Dropped, all its connections
/// end at once.
///
/// # Errors
/// Never: accepting goes on whatever happens to one connection.
pub async fn serve(listener: TcpListener, doorway: Doorway) -> io::Result<()> {
    let Doorway { name, routes, core, stop } = doorway;
    let cut = core.metrics.connections_cut.clone();
    let open = core.metrics.connections.with_label_values(&[name]);
    let common = Common { routes, listener: name, cut, stop };
    let mut connections = JoinSet::new();
    let seldom = Seldom::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_ended) = connections.join_next() => {
                open.set(connections.len() as i64);
                continue;
            }
            () = common.stop.cancelled() => break,
        };
        let (socket, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                not_accepted(&error, name, &seldom).await;
                continue;
            }
        };
        let (bounds, max) = {
            let limits = &core.serving().limits;
            (Bounds::from(limits), limits.connections_max)
        };
        if connections.len() >= max {
            common.count("connections_max");
            // Whether it is heard is the client's affair.
            let _unheard = socket.try_write(ONE_TOO_MANY);
            continue;
        }
        prompt_socket(&socket);
        connections.spawn(connection::serve(socket, peer, bounds, common.clone()));
        open.set(connections.len() as i64);
    }
    drop(listener);
    while connections.join_next().await.is_some() {
        open.set(connections.len() as i64);
    }
    Ok(())
}

/// A client that left before it was accepted is nobody's concern; else there is no room for
/// more sockets, and some are closed soon.
async fn not_accepted(error: &io::Error, name: &str, seldom: &Seldom) {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
        return;
    }
    if seldom.may_say() {
        tracing::error!(%error, listener = name, "no connection can be accepted");
    }
    tokio::time::sleep(NO_ROOM).await;
}

/// Serves until it is dropped, for routes that want to know who calls
/// ([`ConnectInfo`](axum::extract::ConnectInfo) of the peer's address) and whom only operators
/// reach.
///
/// # Errors
/// Accepting never ends with an error; the type is the library's.
pub async fn serve_known_peers(listener: TcpListener, routes: Router) -> io::Result<()> {
    let routes = routes.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener.tap_io(|socket| prompt_socket(socket)), routes).await
}

/// Nagle's algorithm is off: it would hold the small chunks of a stream back until the
/// client's delayed acknowledgement.
fn prompt_socket(socket: &TcpStream) {
    // A socket that is already gone is found out by the next read.
    let _gone = socket.set_nodelay(true);
}
