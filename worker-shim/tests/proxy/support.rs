//! A proxy in this process, and sockets on both sides of it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prometheus::Registry;
use serde_json::Value;
use splitrail_proto::v1::Capabilities;
use splitrail_shim::proxy::{GateRequirement, Proxy, ProxyConfig, Residency, Traffic, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// A generous timeout that only a hang exceeds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Waits for a future. Panics if it does not complete in time.
pub(crate) async fn within_timeout<T>(what: &str, coming: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, coming).await.unwrap_or_else(|_| panic!("never: {what}"))
}

/// Claims that the first `blocks` blocks of any prompt are held on every rank, and records the
/// questions.
#[derive(Default)]
pub(crate) struct Holding {
    pub(crate) blocks: AtomicU32,
    pub(crate) asked: Mutex<Vec<GateRequirement>>,
}

impl Residency for Holding {
    fn holds<'a>(&'a self, ask: &'a GateRequirement) -> BoxFuture<'a, bool> {
        self.asked.lock().unwrap().push(*ask);
        Box::pin(std::future::ready(ask.blocks <= self.blocks.load(Ordering::Relaxed)))
    }
}

/// A running proxy with access to its counts.
pub(crate) struct ProxyUnderTest {
    pub(crate) address: SocketAddr,
    pub(crate) traffic: Arc<Traffic>,
    pub(crate) holding: Arc<Holding>,
    pub(crate) capabilities: watch::Sender<Capabilities>,
    pub(crate) registry: Registry,
    pub(crate) stop: CancellationToken,
    pub(crate) serving: JoinSet<()>,
}

impl ProxyUnderTest {
    /// Starts a proxy in front of an engine with the default settings.
    pub(crate) async fn in_front_of(engine: SocketAddr) -> Self {
        Self::with(engine, |_| {}).await
    }

    /// Starts a proxy with other settings.
    pub(crate) async fn with(engine: SocketAddr, configure: impl FnOnce(&mut ProxyConfig)) -> Self {
        let mut config = ProxyConfig::new(engine.to_string().parse().unwrap());
        configure(&mut config);
        let holding = Arc::new(Holding::default());
        let (capabilities, known) = watch::channel(Capabilities::default());
        let registry = Registry::new();
        let local = Arc::new(|_: &Method, path: &str| {
            let there = path == "/splitrail/status";
            there.then(|| Response::new(Bytes::from_static(b"here")))
        });
        let proxy = Proxy::new(config, holding.clone(), known, local, &registry).unwrap();
        let traffic = proxy.traffic();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let mut serving = JoinSet::new();
        serving.spawn(serve(listener, proxy, stop.clone()));
        Self { address, traffic, holding, capabilities, registry, stop, serving }
    }

    pub(crate) async fn connect(&self) -> Raw {
        Raw::new(TcpStream::connect(self.address).await.unwrap())
    }

    /// Connects from another address of loopback.
    pub(crate) async fn connect_from(&self, address: [u8; 4]) -> Raw {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((address, 0).into()).unwrap();
        Raw::new(socket.connect(self.address).await.unwrap())
    }

    /// Requests in flight and tokens queued.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.traffic.requests(), self.traffic.prefill_tokens_queued())
    }

    /// Waits until the counts are `expected`. Relies only on the signalled changes.
    pub(crate) async fn until_counts(&self, expected: (u64, u64)) {
        let mut changed = self.traffic.changed();
        let reached = async {
            while self.counts() != expected {
                changed.changed().await.unwrap();
            }
        };
        let reached = tokio::time::timeout(PATIENCE, reached).await;
        assert!(reached.is_ok(), "{:?}, never {expected:?}", self.counts());
    }

    /// Opens an HTTP/2 connection whose streams have a small receive window. The second value drives
    /// the connection until its end.
    pub(crate) async fn connect_http_2(&self) -> (SendRequest<Full<Bytes>>, JoinSet<()>) {
        let socket = TokioIo::new(self.connect().await.socket);
        let mut builder = http2::Builder::new(TokioExecutor::new());
        let shaken = builder.initial_stream_window_size(1024).handshake(socket).await;
        let (sender, connection) = shaken.unwrap();
        let mut driving = JoinSet::new();
        driving.spawn(async move {
            let _ended = connection.await;
        });
        (sender, driving)
    }

    /// The number of requests with this outcome.
    pub(crate) fn outcomes(&self, outcome: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|f| f.name() == "splitrail_shim_requests_total").unwrap();
        let metric = family.get_metric().iter().find(|m| m.get_label()[0].value() == outcome);
        metric.unwrap().get_counter().get_value() as u64
    }
}

/// A whole reply.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Reply {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The chunks of a stream that ended with `[DONE]`.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let events = self.text().strip_suffix("data: [DONE]\n\n").expect("an end");
        let data = events.split_terminator("\n\n");
        data.map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
            .collect()
    }

    /// The status, code and parameter of an error in OpenAI's format.
    pub(crate) fn error(&self) -> (u16, String, Value) {
        let error = &self.json()["error"];
        assert!(error["message"].is_string() && error["type"].is_string(), "{error}");
        (self.status, error["code"].as_str().unwrap().to_owned(), error["param"].clone())
    }
}

/// Sends a request and reads the whole reply.
pub(crate) async fn ask(
    address: SocketAddr,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Reply {
    let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http();
    let mut request = Request::builder().method(method).uri(format!("http://{address}{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(body.into())).unwrap();
    let reply = within_timeout("a reply", client.request(request)).await.unwrap();
    let (head, body) = reply.into_parts();
    let body = within_timeout("a whole body", body.collect()).await.unwrap().to_bytes();
    Reply { status: head.status.as_u16(), headers: head.headers, body }
}

/// Sends a POST request with a JSON body.
pub(crate) async fn post(
    address: SocketAddr,
    path: &str,
    headers: &[(&str, &str)],
    body: &Value,
) -> Reply {
    ask(address, Method::POST, path, headers, body.to_string()).await
}

/// An engine for which the test writes every byte.
pub(crate) struct RawEngine {
    listener: TcpListener,
    pub(crate) address: SocketAddr,
}

impl RawEngine {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self { address: listener.local_addr().unwrap(), listener }
    }

    /// Accepts the next connection, without a timeout.
    pub(crate) async fn accept_any(&self) -> Raw {
        Raw::new(self.listener.accept().await.unwrap().0)
    }

    pub(crate) async fn accept(&self) -> Raw {
        Raw::new(within_timeout("a connection", self.listener.accept()).await.unwrap().0)
    }
}

/// One end of a connection, as raw bytes.
pub(crate) struct Raw {
    pub(crate) socket: TcpStream,
    buffer: Vec<u8>,
}

impl Raw {
    fn new(socket: TcpStream) -> Self {
        socket.set_nodelay(true).unwrap();
        Self { socket, buffer: Vec::new() }
    }

    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        within_timeout("bytes written", self.socket.write_all(bytes.as_ref())).await.unwrap();
    }

    /// Reads the head of the next message including its empty line.
    pub(crate) async fn head(&mut self) -> String {
        let end = loop {
            if let Some(at) = self.buffer.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            assert!(self.more().await, "ended in a head: {:?}", self.buffer);
        };
        self.buffer.drain(..end).map(char::from).collect()
    }

    /// Reads the head of the next message, or what arrives before the other side disconnects.
    pub(crate) async fn head_if_any(&mut self) -> String {
        while !self.buffer.windows(4).any(|four| four == b"\r\n\r\n") && self.more().await {}
        String::from_utf8_lossy(&std::mem::take(&mut self.buffer)).into_owned()
    }

    /// Writes to a peer that may have disconnected.
    pub(crate) async fn try_write(&mut self, bytes: &str) {
        let _gone = within_timeout("bytes written", self.socket.write_all(bytes.as_bytes())).await;
    }

    /// Reads and discards everything until the end.
    pub(crate) async fn drain(&mut self) {
        while self.more().await {
            self.buffer.clear();
        }
    }

    /// Reads exactly `count` bytes.
    pub(crate) async fn bytes(&mut self, count: usize) -> Vec<u8> {
        while self.buffer.len() < count {
            assert!(self.more().await, "ended after {:?}", String::from_utf8_lossy(&self.buffer));
        }
        self.buffer.drain(..count).collect()
    }

    /// Reads exactly this text.
    pub(crate) async fn expect(&mut self, text: &str) {
        let bytes = self.bytes(text.len()).await;
        assert_eq!(String::from_utf8_lossy(&bytes), text);
    }

    /// Reads a chunked body to its end.
    pub(crate) async fn chunked(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        loop {
            let mut line = String::new();
            while !line.ends_with("\r\n") {
                line.push(char::from(self.bytes(1).await[0]));
            }
            let size = usize::from_str_radix(line.trim_end(), 16).unwrap();
            body.extend(self.bytes(size).await);
            self.expect("\r\n").await;
            if size == 0 {
                return body;
            }
        }
    }

    /// Waits until the other side closes. No further byte may arrive.
    pub(crate) async fn closed(&mut self) {
        assert!(!self.more().await && self.buffer.is_empty(), "{:?}", self.buffer);
    }

    /// Reads everything until the other side closes.
    pub(crate) async fn rest(&mut self) -> String {
        while self.more().await {}
        String::from_utf8(std::mem::take(&mut self.buffer)).unwrap()
    }

    /// Reads more bytes. Returns whether there were any; a reset counts as the end.
    async fn more(&mut self) -> bool {
        let mut bytes = [0; 16 << 10];
        let read = within_timeout("bytes to read", self.socket.read(&mut bytes)).await.unwrap_or(0);
        self.buffer.extend_from_slice(&bytes[..read]);
        read > 0
    }
}
