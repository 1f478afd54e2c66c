//! A scripted server in the place of an engine: it records every request that arrives, on any path,
//! and replies as the test specifies.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    /// Its method.
    pub method: String,
    /// Its target, as written on the wire.
    pub target: String,
    /// Its headers, names in lower case.
    pub headers: Vec<(String, String)>,
    /// Its body.
    pub body: Vec<u8>,
}

impl ReceivedRequest {
    /// Whether it asks for inference.
    pub fn is_inference(&self) -> bool {
        self.method == "POST"
    }

    /// A header's value; empty if absent.
    pub fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(given, _)| given == name);
        found.map_or("", |(_, value)| value)
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// What to answer.
pub enum ScriptedReply {
    /// A whole reply, head included; then the connection is closed.
    Bytes(Vec<u8>),
    /// A head, then a piece again and again, up to so many bytes.
    Endless {
        /// Status line and headers, with the empty line.
        head: Vec<u8>,
        /// What is repeated.
        piece: Vec<u8>,
        /// When to end.
        max_bytes: usize,
    },
    /// Bytes at once, and the others when the test calls [`ScriptedServer::release`] or the client
    /// closes the connection.
    Held {
        /// Status line, headers and what comes at once.
        first: Vec<u8>,
        /// What comes at the end.
        last: Vec<u8>,
    },
}

/// What the system holds of an answer that nobody reads: thousands of them have room.
const SEND_BUFFER_BYTES: u32 = 64 << 10;

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 4096;

impl ScriptedReply {
    /// A JSON reply.
    pub fn json(status: u16, body: &str) -> Self {
        let length = body.len();
        let head = format!(
            "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
        );
        Self::Bytes((head + body).into_bytes())
    }

    /// Events, and then the end of the connection.
    pub fn events(body: &str) -> Self {
        Self::Bytes([STREAM_HEAD, body.as_bytes()].concat())
    }
}

/// The head of a stream that lasts until its connection ends.
pub const STREAM_HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";

type Script = dyn Fn(&ReceivedRequest) -> ScriptedReply + Send + Sync;

/// A server whose replies a test writes. Dropping it closes its listener and its connections.
pub struct ScriptedServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

struct Shared {
    heard: Mutex<Vec<ReceivedRequest>>,
    written_bytes: AtomicUsize,
    open: AtomicUsize,
    released: watch::Sender<bool>,
    script: Box<Script>,
}

impl ScriptedServer {
    /// Starts a server that answers as `script` says.
    pub async fn start(
        script: impl Fn(&ReceivedRequest) -> ScriptedReply + Send + Sync + 'static,
    ) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_send_buffer_size(SEND_BUFFER_BYTES).expect("a buffer");
        socket.bind(([127, 0, 0, 1], 0).into()).expect("a port");
        let listener = socket.listen(BACKLOG).expect("a listener");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            heard: Mutex::default(),
            written_bytes: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            released: watch::Sender::new(false),
            script: Box::new(script),
        });
        let mut tasks = JoinSet::new();
        let at_work = Arc::clone(&shared);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let shared = Arc::clone(&at_work);
                connections.spawn(async move {
                    // A connection that breaks is the other side's affair.
                    let _broken = attend(socket, &shared).await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self { address, shared, _tasks: tasks }
    }

    /// `http://host:port`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Everything that arrived so far.
    pub fn heard(&self) -> Vec<ReceivedRequest> {
        self.shared.heard.lock().expect("a lock").clone()
    }

    /// Bytes of endless answers that sockets have taken.
    pub fn written_bytes(&self) -> usize {
        self.shared.written_bytes.load(Relaxed)
    }

    /// Ends all answers that are held, and those that would be.
    pub fn release(&self) {
        self.shared.released.send_replace(true);
    }

    /// Endless and held answers that have not ended.
    pub fn open(&self) -> usize {
        self.shared.open.load(Relaxed)
    }
}

async fn attend(mut socket: TcpStream, shared: &Shared) -> std::io::Result<()> {
    let Some(heard) = read_request(&mut socket).await? else {
        return Ok(());
    };
    let answer = (shared.script)(&heard);
    shared.heard.lock().expect("a lock").push(heard);
    match answer {
        ScriptedReply::Bytes(bytes) => socket.write_all(&bytes).await?,
        ScriptedReply::Endless { head, piece, max_bytes } => {
            socket.write_all(&head).await?;
            shared.open.fetch_add(1, Relaxed);
            let mut written = 0;
            while written < max_bytes && socket.write_all(&piece).await.is_ok() {
                written += piece.len();
                shared.written_bytes.fetch_add(piece.len(), Relaxed);
            }
            shared.open.fetch_sub(1, Relaxed);
        }
        ScriptedReply::Held { first, last } => {
            socket.write_all(&first).await?;
            shared.open.fetch_add(1, Relaxed);
            let mut released = shared.released.subscribe();
            let mut buffer = [0];
            let lets_go = tokio::select! {
                _ = released.wait_for(|released| *released) => true,
                _ = socket.read(&mut buffer) => false,
            };
            shared.open.fetch_sub(1, Relaxed);
            if lets_go {
                socket.write_all(&last).await?;
            }
        }
    }
    socket.shutdown().await
}

/// Reads a request; `None` if the connection ends before it is whole.
pub(crate) async fn read_request(
    socket: &mut TcpStream,
) -> std::io::Result<Option<ReceivedRequest>> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; 16 << 10];
    let head_bytes = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at;
        }
        match socket.read(&mut buffer).await? {
            0 => return Ok(None),
            count => bytes.extend_from_slice(&buffer[..count]),
        }
    };
    let head = String::from_utf8_lossy(&bytes[..head_bytes]).into_owned();
    let mut lines = head.split("\r\n");
    let mut first = lines.next().unwrap_or_default().split(' ');
    let mut heard = ReceivedRequest {
        method: first.next().unwrap_or_default().to_owned(),
        target: first.next().unwrap_or_default().to_owned(),
        headers: lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect(),
        body: bytes.split_off(head_bytes + 4),
    };
    let length = heard.header("content-length").parse().unwrap_or(0);
    while heard.body.len() < length {
        match socket.read(&mut buffer).await? {
            0 => return Ok(None),
            count => heard.body.extend_from_slice(&buffer[..count]),
        }
    }
    Ok(Some(heard))
}
