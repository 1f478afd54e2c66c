//! An engine that gives the same bytes to every inference request, however wrong.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// What follows the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The connection is closed in order.
    Close,
    /// The connection stays open, and silent.
    Silence,
}

/// The engine. Dropping it ends it.
pub struct Canned {
    address: SocketAddr,
    asked: Arc<AtomicUsize>,
    _accepting: JoinSet<()>,
}

impl Canned {
    /// Answers each POST with `bytes`, and each GET with an empty 200.
    pub async fn start(bytes: impl Into<Vec<u8>>, then: Then) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let asked = Arc::new(AtomicUsize::new(0));
        let (count, bytes) = (Arc::clone(&asked), Arc::new(bytes.into()));
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let (count, bytes) = (Arc::clone(&count), Arc::clone(&bytes));
                connections.spawn(async move {
                    // A client that goes away early needs no answer.
                    let _gone = answer(socket, &count, &bytes, then).await;
                });
            }
        });
        Self { address, asked, _accepting: accepting }
    }

    /// A 200 of this type with this body.
    pub fn reply(content_type: &str, body: &str) -> String {
        let length = body.len();
        format!(
            "HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n{body}"
        )
    }

    /// A stream of events that ends in order, as HTTP sees it.
    pub fn events(events: &[&str]) -> String {
        let body: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
        Self::reply("text/event-stream", &body)
    }

    /// The engine as a worker, as a YAML item.
    pub fn worker(&self, id: &str, role: &str) -> String {
        format!("{{ id: {id}, role: {role}, url: \"http://{}\" }}", self.address)
    }

    /// Inference requests so far.
    pub fn asked(&self) -> usize {
        self.asked.load(Relaxed)
    }
}

async fn answer(
    mut socket: TcpStream,
    asked: &AtomicUsize,
    bytes: &[u8],
    then: Then,
) -> std::io::Result<()> {
    loop {
        let head = read_head(&mut socket).await?;
        if head.starts_with("GET") {
            let empty = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
            socket.write_all(empty).await?;
            continue;
        }
        let length = head
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            .and_then(|(_, value)| value.trim().parse().ok())
            .unwrap_or(0);
        let mut body = vec![0; length];
        socket.read_exact(&mut body).await?;
        asked.fetch_add(1, Relaxed);
        socket.write_all(bytes).await?;
        if then == Then::Close {
            return socket.shutdown().await;
        }
        // Until the other side gives up.
        while socket.read(&mut [0; 64]).await? > 0 {}
        return Ok(());
    }
}

async fn read_head(socket: &mut TcpStream) -> std::io::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await?);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}
