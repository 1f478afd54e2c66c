//! Bound sockets, and serving on them until told to stop.

use std::net::SocketAddr;

use axum::Router;
use axum::serve::ListenerExt;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// Binds an address.
///
/// # Errors
/// With the address in the message.
pub async fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        std::io::Error::new(error.kind(), format!("cannot listen on {address}: {error}"))
    })
}

/// Serves until `stop`, then waits for what is in flight.
///
/// Nagle's algorithm is off: it would hold the small chunks of a stream back until
/// the client's delayed acknowledgement.
///
/// # Errors
/// Accepting never ends with an error; the type is the library's.
pub async fn serve(
    listener: TcpListener,
    routes: Router,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let listener = listener.tap_io(prompt_socket);
    axum::serve(listener, routes).with_graceful_shutdown(stop.cancelled_owned()).await
}

/// The same until it is dropped, for routes that want to know who calls
/// ([`ConnectInfo`](axum::extract::ConnectInfo) of the peer's address).
///
/// # Errors
/// As [`serve`].
pub async fn serve_known_peers(listener: TcpListener, routes: Router) -> std::io::Result<()> {
    let routes = routes.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener.tap_io(prompt_socket), routes).await
}

fn prompt_socket(socket: &mut TcpStream) {
    // A socket that is already gone is found out by the next read.
    let _gone = socket.set_nodelay(true);
}
