//! Binds sockets, and serves them until the router stops.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prometheus::IntGauge;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::connection::{self, Common, ConnectionBounds};
use super::connection_service::Routes;
use super::tls_listener::TlsListener;
use crate::core::Core;
use splitrail_config::model::Limits;
use splitrail_settings::address_shares::AddressShares;
use splitrail_settings::log_throttle::LogThrottle;
use splitrail_settings::process::descriptor_limit;
use splitrail_telemetry::metrics::Scope;

/// Pause of accepting when the system has no resources for another socket.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Maximum number of connections that wait to be accepted: thousands arrive together when a router
/// restarts.
const BACKLOG: u32 = 4096;

/// Size in bytes of the kernel's send buffer for a client; the kernel uses twice as much memory.
const SEND_BUFFER_BYTES: u32 = 128 << 10;

/// The reply for a connection beyond the maximum. For an HTTP/2 client it has no meaning, but the
/// connection's end is sufficient.
const OVER_LIMIT_REPLY: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/// Binds an address.
///
/// # Errors
/// The address cannot be bound; the message contains it.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| not_bound(address, &error))
}

/// Binds an address for a [`ClientListener`].
///
/// Bounds the kernel's buffer for a client that does not read, which would otherwise grow to
/// megabytes for each connection. With a round trip of 100 ms, this size allows 2.5 MB/s for one
/// connection.
///
/// # Errors
/// The address cannot be bound; the message contains it.
pub async fn bind_clients(address: SocketAddr) -> io::Result<TcpListener> {
    let bind = || {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        socket.set_reuseaddr(true)?;
        // Accepted connections inherit the size.
        socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    bind().map_err(|error| not_bound(address, &error))
}

fn not_bound(address: SocketAddr, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot listen on {address}: {error}"))
}

/// A listener for clients. Its bounds are the `limits` at the time of each connection.
pub struct ClientListener {
    /// Its name in metrics.
    pub name: &'static str,
    /// The routes of the listener.
    pub routes: Routes,
    /// The TLS of the listener. Without it, connections are not encrypted.
    pub tls: Option<Arc<TlsListener>>,
    /// Bounds and counters.
    pub core: Arc<Core>,
    /// Ends the listener.
    pub stop: CancellationToken,
}

/// Serves until `stop`, then waits for requests in flight. Dropping the future ends all connections
/// immediately.
///
/// # Errors
/// Never: accepting continues after the failure of a connection.
pub async fn serve(listener: TcpListener, client_listener: ClientListener) -> io::Result<()> {
    let name = client_listener.name;
    let mut open = Open::new(client_listener);
    let stop = open.common.stop.clone();
    let throttle = LogThrottle::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = open.wait_for_end() => continue,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((socket, peer)) => open.take(socket, peer),
            Err(error) => not_accepted(&error, name, &throttle).await,
        }
    }
    open.take_queued(listener);
    while !open.connections.is_empty() {
        open.wait_for_end().await;
    }
    Ok(())
}

/// The open connections of a listener.
struct Open {
    core: Arc<Core>,
    common: Common,
    connections: JoinSet<()>,
    addresses: Arc<AddressShares>,
    /// The places of the connections of all clients, as far as the process may open files; `None` for
    /// a listener of operators.
    of_files: Option<FilePlaces>,
    /// The gauge of open connections.
    count: IntGauge,
}

/// Places of connections, of which each may need a second file for its engine.
struct FilePlaces {
    places: usize,
    taken: Arc<AddressShares>,
}

impl FilePlaces {
    fn new(core: &Core) -> Self {
        let places = usize::try_from(descriptor_limit() / 2).unwrap_or(usize::MAX);
        Self { places, taken: Arc::clone(&core.connections) }
    }
}

impl Open {
    fn new(client_listener: ClientListener) -> Self {
        let ClientListener { name, routes, tls, core, stop } = client_listener;
        let of_files = routes.are_of_clients().then(|| FilePlaces::new(&core));
        core.metrics.declare(&Scope::Listener(name));
        let cut = core.metrics.connections_cut.clone();
        let count = core.metrics.connections.with_label_values(&[name]);
        let common = Common { routes, tls, listener: name, cut, stop };
        let (connections, addresses) = (JoinSet::new(), Arc::default());
        Self { core, common, connections, addresses, of_files, count }
    }

    /// Serves a connection if the bounds allow it.
    fn take(&mut self, socket: TcpStream, peer: SocketAddr) {
        let (bounds, max, of_one_max) = {
            let limits = &self.core.serving().limits;
            let Limits { connections_max, connections_per_address_max, .. } = *limits;
            (ConnectionBounds::from(limits), connections_max, connections_per_address_max)
        };
        let of_one_max = if of_one_max == 0 { usize::MAX } else { of_one_max };
        let is_full = self.connections.len() >= max;
        let place = self.addresses.take(peer.ip(), max, of_one_max).filter(|_| !is_full);
        let of_files = self.of_files.as_ref();
        let of_files = of_files.map(|all| all.taken.take(peer.ip(), all.places, usize::MAX));
        let (Some(place), None | Some(Some(_))) = (place, &of_files) else {
            self.common.count(if is_full { "connections_max" } else { "connections_per_address" });
            if self.common.tls.is_none() {
                // Whether the client reads it does not matter.
                let _unheard = socket.try_write(OVER_LIMIT_REPLY);
            }
            return;
        };
        prompt_socket(&socket);
        let serving = connection::serve(socket, peer, bounds, self.common.clone());
        self.connections.spawn(async move {
            let _places = (place, of_files);
            serving.await;
        });
        self.count.set(self.connections.len() as i64);
    }

    /// Takes the connections that the kernel has already accepted, because it would reset them when
    /// the listener is closed. Asks the listener itself: the runtime's readiness state may be
    /// outdated.
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
    async fn wait_for_end(&mut self) {
        if self.connections.join_next().await.is_none() {
            // There are no connections.
            std::future::pending().await
        }
        self.count.set(self.connections.len() as i64);
    }
}

/// A client that left before it was accepted is ignored. Otherwise the system has no resources for
/// sockets, until some are closed.
async fn not_accepted(error: &io::Error, name: &str, throttle: &LogThrottle) {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
        return;
    }
    if throttle.may_log() {
        tracing::error!(%error, listener = name, "no connection can be accepted");
    }
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

/// Disables Nagle's algorithm, which would delay the small chunks of a stream until the client's
/// delayed acknowledgement.
fn prompt_socket(socket: &TcpStream) {
    // If the socket is already closed, the next read reports it.
    let _gone = socket.set_nodelay(true);
}
