//! An address at which connections are neither accepted nor refused.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};

/// A listener whose queue of connections is full: further ones wait until their client
/// gives up.
pub struct Unanswering {
    listener: TcpListener,
    _queued: Vec<TcpStream>,
}

impl Unanswering {
    /// Takes a port and fills its queue.
    pub async fn start() -> Self {
        const ENOUGH: Duration = Duration::from_millis(300);
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
        let listener = socket.listen(1).expect("a listener");
        let address = listener.local_addr().expect("an address");
        let mut queued = Vec::new();
        while let Ok(connected) = tokio::time::timeout(ENOUGH, TcpStream::connect(address)).await {
            queued.push(connected.expect("a place in the queue"));
            assert!(queued.len() < 64, "the queue never fills up");
        }
        Self { listener, _queued: queued }
    }

    /// The address.
    pub fn address(&self) -> SocketAddr {
        self.listener.local_addr().expect("an address")
    }

    /// A worker at this address, as a YAML item.
    pub fn worker(&self, id: &str, role: &str) -> String {
        let address = self.address();
        format!("{{ id: {id}, role: {role}, url: \"http://{address}\" }}")
    }
}
