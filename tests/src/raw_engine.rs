//! An engine that keeps its connections, and whose every byte on them is the test's.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::scripted_server::{ReceivedRequest, read_request};

/// What the engine does with a request.
pub struct Turn {
    /// What it writes at once.
    pub bytes: Vec<u8>,
    /// What it does after that.
    pub then: Then,
}

/// What follows an answer.
pub enum Then {
    /// Nothing: the engine waits for the next request.
    Wait,
    /// These bytes, so much later; none if the next request has come by then.
    Late(Duration, Vec<u8>),
    /// The end of the connection, so much later, in the same way.
    LateEnd(Duration),
    /// These bytes, once as many connections wait here as the barrier is for.
    Together(Arc<Barrier>, Vec<u8>),
    /// A piece so many times, at this distance, and then these bytes.
    Paced(Vec<u8>, usize, Duration, Vec<u8>),
    /// The connection is closed in order.
    Close,
    /// The connection is reset.
    Reset,
}

impl Turn {
    /// Bytes, and nothing after them.
    pub fn answer(bytes: impl Into<Vec<u8>>) -> Self {
        Self { bytes: bytes.into(), then: Then::Wait }
    }

    /// Bytes, and the end of the connection.
    pub fn last(bytes: impl Into<Vec<u8>>) -> Self {
        Self { bytes: bytes.into(), then: Then::Close }
    }
}

/// A whole reply of this type, on a connection that is kept.
pub fn reply(status: u16, content_type: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// A request for inference, and how many came before it on its connection.
pub struct Asked {
    /// The request.
    pub heard: ReceivedRequest,
    /// Requests before it on the same connection.
    pub before: usize,
}

/// The list of its models.
const MODELS: &str = r#"{"object":"list","data":[{"id":"sim"},{"id":"other"}]}"#;

type Script = dyn Fn(&Asked) -> Turn + Send + Sync;

struct Shared {
    script: Box<Script>,
    heard: Mutex<Vec<ReceivedRequest>>,
    is_ill: AtomicBool,
}

/// The engine. Dropping it ends it.
pub struct RawEngine {
    address: SocketAddr,
    shared: Arc<Shared>,
    _accepting: JoinSet<()>,
}

impl RawEngine {
    /// Answers each POST as `script` says, and each GET with the list of its models, `sim` and
    /// `other`.
    pub async fn start(script: impl Fn(&Asked) -> Turn + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (script, heard) = (Box::new(script), Mutex::default());
        let shared = Arc::new(Shared { script, heard, is_ill: AtomicBool::new(false) });
        let at_work = Arc::clone(&shared);
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let shared = Arc::clone(&at_work);
                connections.spawn(async move {
                    // A connection that breaks needs nothing more.
                    let _broken = serve(socket, &shared).await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self { address, shared, _accepting: accepting }
    }

    /// `http://host:port`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Whether it answers each GET with a 503 from now on. Its connections stay.
    pub fn set_ill(&self, is_ill: bool) {
        self.shared.is_ill.store(is_ill, Relaxed);
    }

    /// Requests for inference so far.
    pub fn heard(&self) -> Vec<ReceivedRequest> {
        self.shared.heard.lock().expect("a lock").clone()
    }
}

async fn serve(mut socket: TcpStream, shared: &Shared) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    let mut before = 0;
    while let Some(heard) = read_request(&mut socket).await? {
        if !heard.is_inference() {
            let status = if shared.is_ill.load(Relaxed) { 503 } else { 200 };
            socket.write_all(reply(status, "application/json", MODELS).as_bytes()).await?;
            continue;
        }
        shared.heard.lock().expect("a lock").push(heard.clone());
        let Turn { bytes, then } = (shared.script)(&Asked { heard, before });
        before += 1;
        socket.write_all(&bytes).await?;
        match then {
            Then::Wait => {}
            Then::Late(after, bytes) => {
                if is_silent_for(&socket, after).await? {
                    socket.write_all(&bytes).await?;
                }
            }
            Then::LateEnd(after) => {
                if is_silent_for(&socket, after).await? {
                    return socket.shutdown().await;
                }
            }
            Then::Together(barrier, bytes) => {
                barrier.wait().await;
                socket.write_all(&bytes).await?;
            }
            Then::Paced(piece, count, every, last) => {
                for _ in 0..count {
                    tokio::time::sleep(every).await;
                    socket.write_all(&piece).await?;
                }
                socket.write_all(&last).await?;
            }
            Then::Close => return socket.shutdown().await,
            Then::Reset => return socket.set_zero_linger(),
        }
    }
    Ok(())
}

/// Whether nothing arrives for so long.
async fn is_silent_for(socket: &TcpStream, duration: Duration) -> std::io::Result<bool> {
    let mut first = [0];
    tokio::select! {
        biased;
        read = socket.peek(&mut first) => read.map(|_| false),
        () = tokio::time::sleep(duration) => Ok(true),
    }
}
