//! Closed-loop clients: each sends its next request when it has the answer to the last.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::mock::{content_length, find};
use super::text::{GROUPS, Prompt};
use super::{Failure, http2};

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

    /// Chats of these prompts, with bodies of one's own.
    pub(super) fn framed(
        framing: Framing,
        prompts: &[Prompt],
        body: impl Fn(&Prompt) -> Bytes,
    ) -> Self {
        let request = |prompt: &Prompt| {
            let body = body(prompt);
            if framing != Framing::Http1 {
                return (prompt.group, body);
            }
            let head = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\n\
                 content-type: application/json\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            (prompt.group, [head.as_bytes(), &body].concat().into())
        };
        let requests = prompts.iter().map(request).collect();
        Self { requests, framing, next: AtomicUsize::new(0) }
    }

    pub(super) fn next(&self) -> &(usize, Bytes) {
        &self.requests[self.next.fetch_add(1, Relaxed) % self.requests.len()]
    }
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
    address: SocketAddr,
    load: &Arc<Load>,
    clients: usize,
    ends: Instant,
    checks: bool,
) -> Result<Seen, Failure> {
    let mut running = JoinSet::new();
    let connections = if load.framing == Framing::GrpcShared { 1 } else { clients };
    for _ in 0..connections {
        let load = Arc::clone(load);
        running.spawn(async move {
            match load.framing {
                Framing::Http1 => one(address, &load, ends, checks).await,
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

async fn one(
    address: SocketAddr,
    load: &Load,
    ends: Instant,
    checks: bool,
) -> Result<Seen, Failure> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(64 << 10);
    let mut seen = Seen::default();
    while Instant::now() < ends {
        let (group, request) = load.next();
        let began = Instant::now();
        let exchange = async {
            stream.write_all(request).await?;
            read_answer(&mut stream, &mut buffer).await
        };
        let head = timeout(PATIENCE, exchange).await.map_err(|_| "no answer in time")??;
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
async fn read_answer(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Result<usize, Failure> {
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

async fn more(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Result<(), Failure> {
    match stream.read_buf(buffer).await? {
        0 => Err("the connection was closed in mid-answer".into()),
        _ => Ok(()),
    }
}
