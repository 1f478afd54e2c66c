//! Ports that a test reserves while nothing listens on them.

use std::net::SocketAddr;
use std::ops::Range;

use tokio::net::TcpSocket;

/// Where ports are taken from: below those that the system gives to connections, and to listeners
/// that take any port.
const PORTS: Range<u16> = 12_000..32_000;

/// A port of loopback. Connections to it are refused unless a server listens on it, which it can
/// for as long as this lives; no other `HeldPort` of any process gets the port meanwhile.
pub struct HeldPort(TcpSocket);

impl HeldPort {
    /// Takes a free port.
    pub fn take() -> Self {
        Self::take_run(1).remove(0)
    }

    /// Takes so many ports in a row, lowest first.
    fn take_run(ports: u16) -> Vec<Self> {
        loop {
            let first = rand::random_range(PORTS.start..PORTS.end - ports);
            let held: Option<Vec<_>> = (first..first + ports).map(Self::at).collect();
            if let Some(held) = held {
                return held;
            }
        }
    }

    /// This port, if nobody has it.
    fn at(port: u16) -> Option<Self> {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(([127, 0, 0, 1], port).into()).ok()?;
        // Servers set this option as well, and can listen although the socket is bound. Set before
        // `bind`, it would let two processes hold one port.
        socket.set_reuseaddr(true).expect("an option");
        Some(Self(socket))
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.0.local_addr().expect("an address")
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.address().port()
    }

    /// A worker at this address, as a YAML item.
    pub fn worker(&self, id: &str, role: &str) -> String {
        format!("{{ id: {id}, role: {role}, url: \"http://{}\" }}", self.address())
    }
}

/// Ports that are held together.
#[derive(Default)]
pub struct HeldPorts(Vec<HeldPort>);

impl HeldPorts {
    /// Takes another port; its number.
    pub fn take(&mut self) -> u16 {
        self.take_run(1)
    }

    /// Takes so many ports in a row; the lowest number.
    pub fn take_run(&mut self, ports: u16) -> u16 {
        let held = HeldPort::take_run(ports);
        let first = held[0].number();
        self.0.extend(held);
        first
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test]
    async fn a_server_can_be_restarted_on_a_held_port() {
        let held = HeldPort::take();
        for _ in 0..2 {
            assert!(TcpStream::connect(held.address()).await.is_err(), "nobody listens");
            assert!(HeldPort::at(held.number()).is_none());
            let server = TcpListener::bind(held.address()).await.unwrap();
            assert!(TcpStream::connect(held.address()).await.is_ok());
            assert!(HeldPort::at(held.number()).is_none());
            drop(server);
        }
    }

    #[test]
    fn no_port_is_held_twice() {
        let mut held = HeldPorts::default();
        let taken = (0..500).flat_map(|_| {
            let first = held.take_run(4);
            first..first + 4
        });
        assert_eq!(taken.collect::<BTreeSet<u16>>().len(), 2000);
    }
}
