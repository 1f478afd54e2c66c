//! Binds sockets, and serves them until the router stops.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prometheus::IntGauge;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::addresses::Addresses;
use super::connection::{self, Bounds, Common};
use super::door::Routes;
use crate::core::Core;
use splitrail_config::model::Limits;
use splitrail_telemetry::LogThrottle;

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
    let name = doorway.name;
    let mut open = Open::new(doorway);
    let stop = open.common.stop.clone();
    let throttle = LogThrottle::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = open.one_ends() => continue,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((socket, peer)) => open.take(socket, peer),
            Err(error) => not_accepted(&error, name, &throttle).await,
        }
    }
    open.take_queued(listener);
    while !open.connections.is_empty() {
        open.one_ends().await;
    }
    Ok(())
}

/// The open connections of a listener.
struct Open {
    core: Arc<Core>,
    common: Common,
    connections: JoinSet<()>,
    addresses: Addresses,
    /// How many there are, as a metric.
    count: IntGauge,
}

impl Open {
    fn new(doorway: Doorway) -> Self {
        let Doorway { name, routes, core, stop } = doorway;
        let cut = core.metrics.connections_cut.clone();
        let count = core.metrics.connections.with_label_values(&[name]);
        let common = Common { routes, listener: name, cut, stop };
        let (connections, addresses) = (JoinSet::new(), Addresses::default());
        Self { core, common, connections, addresses, count }
    }

    /// Serves a connection, if there is room for it.
    fn take(&mut self, socket: TcpStream, peer: SocketAddr) {
        let (bounds, max, of_one_max) = {
            let limits = &self.core.serving().limits;
            let Limits { connections_max, connections_per_address_max, .. } = *limits;
            (Bounds::from(limits), connections_max, connections_per_address_max)
        };
        let free = max.saturating_sub(self.connections.len());
        let has_share = self.addresses.has_room(peer.ip(), free, of_one_max);
        if free == 0 || !has_share {
            self.common.count(if free == 0 {
                "connections_max"
            } else {
                "connections_per_address"
            });
            // Whether it is heard is the client's affair.
            let _unheard = socket.try_write(ONE_TOO_MANY);
            return;
        }
        prompt_socket(&socket);
        let serving = connection::serve(socket, peer, bounds, self.common.clone());
        let task = self.connections.spawn(serving).id();
        self.addresses.begins(task, peer.ip());
        self.count.set(self.connections.len() as i64);
    }

    /// Takes the connections that the system has accepted: it would reset them when their
    /// listener is closed. The listener is asked itself; what the runtime knows of it may be old.
    fn take_queued(&mut self, listener: TcpListener) {
        let Ok(listener) = listener.into_std() else { return };
        while let Ok((socket, peer)) = listener.accept() {
            let socket = socket.set_nonblocking(true).and_then(|()| TcpStream::from_std(socket));
            if let Ok(socket) = socket {
                self.take(socket, peer);
            }
        }
    }

    /// Waits until a connection ends.
    async fn one_ends(&mut self) {
        let task = match self.connections.join_next_with_id().await {
            Some(Ok((task, ()))) => task,
            Some(Err(panicked)) => panicked.id(),
            // There is none.
            None => std::future::pending().await,
        };
        self.addresses.ends(task);
        self.count.set(self.connections.len() as i64);
    }
}

/// A client that left before it was accepted is nobody's concern; else there is no room for
/// more sockets, and some are closed soon.
async fn not_accepted(error: &io::Error, name: &str, throttle: &LogThrottle) {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
        return;
    }
    if throttle.may_log() {
        tracing::error!(%error, listener = name, "no connection can be accepted");
    }
    tokio::time::sleep(NO_ROOM).await;
}

/// Nagle's algorithm is off: it would hold the small chunks of a stream back until the
/// client's delayed acknowledgement.
fn prompt_socket(socket: &TcpStream) {
    // A socket that is already gone is found out by the next read.
    let _gone = socket.set_nodelay(true);
}
