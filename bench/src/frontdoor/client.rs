//! Closed-loop clients: each sends its next request when it has received the previous reply.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::mock::{content_length, find};
use super::targets::Target;
use super::text::{GROUPS, Prompt};
use super::{Failure, http2, tls};

/// How long one answer may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
/// What ends a chunked answer.
const LAST_CHUNK: &[u8] = b"\r\n0\r\n\r\n";

/// How requests are framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// HTTP/1.1, a connection for each client.
    Http1,
    /// HTTP/2, a connection for each client.
    Http2,
    /// gRPC, a connection for each client.
    Grpc,
    /// gRPC, all clients' calls on one connection.
    GrpcShared,
}

/// What is sent, in turn, and how.
pub(super) struct Load {
    /// Whole requests, with the group of each; of HTTP/2, their bodies.
    pub(super) requests: Vec<(usize, Bytes)>,
    /// How they are framed.
    pub(super) framing: Framing,
    next: AtomicUsize,
}

impl Load {
    /// Chats of these prompts.
    pub(super) fn new(prompts: &[Prompt], streams: bool) -> Self {
        Self::framed(Framing::Http1, prompts, |prompt| prompt.chat(streams).into())
    }

    /// Chats of these prompts over HTTP/1.1, with an API key.
    pub(super) fn with_key(prompts: &[Prompt], key: &str) -> Self {
        let field = format!("authorization: Bearer {key}\r\n");
        let request =
            |prompt: &Prompt| (prompt.group, http1_request(&field, prompt.chat(false).as_ref()));
        Self::of(Framing::Http1, prompts.iter().map(request).collect())
    }

    /// Chats of these prompts, with bodies of one's own.
    pub(super) fn framed(
        framing: Framing,
        prompts: &[Prompt],
        body: impl Fn(&Prompt) -> Bytes,
    ) -> Self {
        let request = |prompt: &Prompt| {
            let body = body(prompt);
            let request = match framing {
                Framing::Http1 => http1_request("", &body),
                _ => body,
            };
            (prompt.group, request)
        };
        Self::of(framing, prompts.iter().map(request).collect())
    }

    fn of(framing: Framing, requests: Vec<(usize, Bytes)>) -> Self {
        Self { requests, framing, next: AtomicUsize::new(0) }
    }

    pub(super) fn next(&self) -> &(usize, Bytes) {
        &self.requests[self.next.fetch_add(1, Relaxed) % self.requests.len()]
    }
}

/// A request over HTTP/1.1. `fields` are further header fields, each with its end of line.
pub(super) fn http1_request(fields: &str, body: &[u8]) -> Bytes {
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\n\
         content-type: application/json\r\n{fields}content-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat().into()
}

/// What clients have seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// From a request's first byte to its answer's last, in nanoseconds, with when it ended.
    pub(super) latencies: Vec<(Instant, u64)>,
    /// Requests whose prefill was not where most of the prompt is; of targets that tell.
    pub(super) misplaced: usize,
}

/// Lets `clients` of them run until `ends`.
///
/// # Errors
/// Whatever is not answered with 200.
pub(super) async fn run(
    target: &Target,
    address: SocketAddr,
    load: &Arc<Load>,
    clients: usize,
    ends: Instant,
) -> Result<Seen, Failure> {
    let mut running = JoinSet::new();
    let connections = if load.framing == Framing::GrpcShared { 1 } else { clients };
    for _ in 0..connections {
        let load = Arc::clone(load);
        let (checks, connector) = (target.checks, target.tls.clone());
        running.spawn(async move {
            match (load.framing, connector) {
                (Framing::Http1, None) => one(connect(address).await?, &load, ends, checks).await,
                (Framing::Http1, Some(connector)) => {
                    let session = connector.connect(tls::server_name()?, connect(address).await?);
                    one(session.await?, &load, ends, checks).await
                }
                _ => http2::run(address, &load, clients / connections, ends).await,
            }
        });
    }
    let mut all = Seen::default();
    while let Some(seen) = running.join_next().await {
        let seen = seen??;
        all.latencies.extend(seen.latencies);
        all.misplaced += seen.misplaced;
    }
    Ok(all)
}

async fn connect(address: SocketAddr) -> Result<TcpStream, Failure> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn one<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    load: &Load,
    ends: Instant,
    checks: bool,
) -> Result<Seen, Failure> {
    let mut buffer = Vec::with_capacity(64 << 10);
    let mut seen = Seen::default();
    while Instant::now() < ends {
        let (group, request) = load.next();
        let began = Instant::now();
        let exchange = async {
            stream.write_all(request).await?;
            // A session of TLS may hold bytes back.
            stream.flush().await?;
            read_answer(&mut stream, &mut buffer).await
        };
        let head = timeout(PATIENCE, exchange).await.map_err(|_| "no reply in time")??;
        let now = Instant::now();
        seen.latencies.push((now, (now - began).as_nanos() as u64));
        if checks {
            let head = String::from_utf8_lossy(&buffer[..head]);
            let right = head.contains(&format!("prefill=p{};", group % GROUPS));
            seen.misplaced += usize::from(!right);
        }
    }
    Ok(seen)
}

/// Reads one answer; gives the length of its head.
async fn read_answer<S: AsyncRead + Unpin>(
    stream: &mut S,
    buffer: &mut Vec<u8>,
) -> Result<usize, Failure> {
    buffer.clear();
    let head = loop {
        if let Some(at) = find(buffer, b"\r\n\r\n") {
            break at + 4;
        }
        more(stream, buffer).await?;
    };
    if !buffer.starts_with(b"HTTP/1.1 200") {
        let text = String::from_utf8_lossy(buffer);
        return Err(format!("an answer that is no 200: {text}").into());
    }
    let text = String::from_utf8_lossy(&buffer[..head]).to_ascii_lowercase();
    if text.contains("transfer-encoding: chunked") {
        while !buffer.ends_with(LAST_CHUNK) {
            more(stream, buffer).await?;
        }
    } else {
        let end = head + content_length(&text);
        while buffer.len() < end {
            more(stream, buffer).await?;
        }
    }
    Ok(head)
}

/// Sends a request on a connection of its own, and reads its streamed answer. Returns the time from
/// its first byte to the first event.
///
/// # Errors
/// Whatever is not answered with a stream.
pub(super) async fn read_first_event(
    address: SocketAddr,
    request: &[u8],
) -> Result<Duration, Failure> {
    let mut stream = connect(address).await?;
    let mut buffer = Vec::with_capacity(4 << 10);
    let began = Instant::now();
    let exchange = async {
        stream.write_all(request).await?;
        while find(&buffer, b"\r\ndata: ").is_none() {
            more(&mut stream, &mut buffer).await?;
        }
        let took = began.elapsed();
        while !buffer.ends_with(LAST_CHUNK) {
            more(&mut stream, &mut buffer).await?;
        }
        Ok::<_, Failure>(took)
    };
    timeout(PATIENCE, exchange).await.map_err(|_| "no stream in time")?
}

async fn more<S: AsyncRead + Unpin>(stream: &mut S, buffer: &mut Vec<u8>) -> Result<(), Failure> {
    match stream.read_buf(buffer).await? {
        0 => Err("the connection was closed in mid-answer".into()),
        _ => Ok(()),
    }
}
