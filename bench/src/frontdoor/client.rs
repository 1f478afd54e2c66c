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

/// Maximum time for a reply.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(20);
/// The end of a chunked reply.
const LAST_CHUNK: &[u8] = b"\r\n0\r\n\r\n";

/// The protocol of requests, and how clients share connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// HTTP/1.1, with one connection per client.
    Http1,
    /// HTTP/2, with one connection per client.
    Http2,
    /// gRPC, with one connection per client.
    Grpc,
    /// gRPC, with one connection for all clients.
    GrpcShared,
}

/// The requests that clients send in turn.
pub(super) struct Load {
    /// Each request with the group of its prompt: head and body for HTTP/1.1, the body alone for
    /// HTTP/2 and gRPC.
    pub(super) requests: Vec<(usize, Bytes)>,
    /// The framing of the requests.
    pub(super) framing: Framing,
    /// Number of requests sent so far.
    sent: AtomicUsize,
}

impl Load {
    /// Chats with these prompts over HTTP/1.1.
    pub(super) fn new(prompts: &[Prompt], streams: bool) -> Self {
        Self::framed(Framing::Http1, prompts, |prompt| prompt.chat(streams).into())
    }

    /// Chats with these prompts over HTTP/1.1, with an API key.
    pub(super) fn with_key(prompts: &[Prompt], key: &str) -> Self {
        let field = format!("authorization: Bearer {key}\r\n");
        let request =
            |prompt: &Prompt| (prompt.group, http1_request(&field, prompt.chat(false).as_ref()));
        Self::of(Framing::Http1, prompts.iter().map(request).collect())
    }

    /// Requests with these prompts, whose bodies `body` makes.
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
        Self { requests, framing, sent: AtomicUsize::new(0) }
    }

    /// The next request with its group; after the last one, the first one again.
    pub(super) fn next(&self) -> &(usize, Bytes) {
        &self.requests[self.sent.fetch_add(1, Relaxed) % self.requests.len()]
    }
}

/// A chat request over HTTP/1.1. `fields` are further header fields, each with its end of line.
pub(super) fn http1_request(fields: &str, body: &[u8]) -> Bytes {
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\n\
         content-type: application/json\r\n{fields}content-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat().into()
}

/// The results of one or several clients.
#[derive(Clone, Debug, Default)]
pub(super) struct Results {
    /// For each request, the end of its reply, and the time from the request's first byte to the
    /// reply's last one, in nanoseconds.
    pub(super) latencies: Vec<(Instant, u64)>,
    /// Number of requests with another prefill worker than the one that holds most of the prompt.
    /// It is counted for targets with `checks_worker`.
    pub(super) misplaced: usize,
}

/// Runs `clients` clients; none sends a request after `deadline`.
///
/// # Errors
/// A request gets no reply in time, or another status than 200.
pub(super) async fn run(
    target: &Target,
    address: SocketAddr,
    load: &Arc<Load>,
    clients: usize,
    deadline: Instant,
) -> Result<Results, Failure> {
    let mut running = JoinSet::new();
    let connections = if load.framing == Framing::GrpcShared { 1 } else { clients };
    for _ in 0..connections {
        let load = Arc::clone(load);
        let (checks_worker, connector) = (target.checks_worker, target.tls.clone());
        running.spawn(async move {
            match (load.framing, connector) {
                (Framing::Http1, None) => {
                    run_one(connect(address).await?, &load, deadline, checks_worker).await
                }
                (Framing::Http1, Some(connector)) => {
                    let session = connector.connect(tls::server_name()?, connect(address).await?);
                    run_one(session.await?, &load, deadline, checks_worker).await
                }
                _ => http2::run(address, &load, clients / connections, deadline).await,
            }
        });
    }
    let mut all = Results::default();
    while let Some(results) = running.join_next().await {
        let results = results??;
        all.latencies.extend(results.latencies);
        all.misplaced += results.misplaced;
    }
    Ok(all)
}

async fn connect(address: SocketAddr) -> Result<TcpStream, Failure> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn run_one<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    load: &Load,
    deadline: Instant,
    checks_worker: bool,
) -> Result<Results, Failure> {
    let mut buffer = Vec::with_capacity(64 << 10);
    let mut results = Results::default();
    while Instant::now() < deadline {
        let (group, request) = load.next();
        let began = Instant::now();
        let exchange = async {
            stream.write_all(request).await?;
            // A TLS session may buffer bytes.
            stream.flush().await?;
            read_reply(&mut stream, &mut buffer).await
        };
        let head = timeout(REPLY_TIMEOUT, exchange).await.map_err(|_| "no reply in time")??;
        let now = Instant::now();
        results.latencies.push((now, (now - began).as_nanos() as u64));
        if checks_worker {
            let head = String::from_utf8_lossy(&buffer[..head]);
            let right = head.contains(&format!("prefill=p{};", group % GROUPS));
            results.misplaced += usize::from(!right);
        }
    }
    Ok(results)
}

/// Reads one reply. Returns the length of its head.
async fn read_reply<S: AsyncRead + Unpin>(
    stream: &mut S,
    buffer: &mut Vec<u8>,
) -> Result<usize, Failure> {
    buffer.clear();
    let head = loop {
        if let Some(at) = find(buffer, b"\r\n\r\n") {
            break at + 4;
        }
        read_more(stream, buffer).await?;
    };
    if !buffer.starts_with(b"HTTP/1.1 200") {
        let text = String::from_utf8_lossy(buffer);
        return Err(format!("a request is not answered with 200: {text}").into());
    }
    let text = String::from_utf8_lossy(&buffer[..head]).to_ascii_lowercase();
    if text.contains("transfer-encoding: chunked") {
        while !buffer.ends_with(LAST_CHUNK) {
            read_more(stream, buffer).await?;
        }
    } else {
        let end = head + content_length(&text);
        while buffer.len() < end {
            read_more(stream, buffer).await?;
        }
    }
    Ok(head)
}

/// Sends a request on a connection of its own, and reads its streamed reply. Returns the time from
/// the request's first byte to the reply's first event.
///
/// # Errors
/// The reply is no stream, or is not complete in time.
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
            read_more(&mut stream, &mut buffer).await?;
        }
        let took = began.elapsed();
        while !buffer.ends_with(LAST_CHUNK) {
            read_more(&mut stream, &mut buffer).await?;
        }
        Ok::<_, Failure>(took)
    };
    timeout(REPLY_TIMEOUT, exchange).await.map_err(|_| "no complete stream in time")?
}

async fn read_more<S: AsyncRead + Unpin>(
    stream: &mut S,
    buffer: &mut Vec<u8>,
) -> Result<(), Failure> {
    match stream.read_buf(buffer).await? {
        0 => Err("the connection was closed in the middle of a reply".into()),
        _ => Ok(()),
    }
}
