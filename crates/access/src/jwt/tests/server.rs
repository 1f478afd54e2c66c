//! A server of key sets on loopback that does what a test tells it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

/// What the server does with a connection.
#[derive(Clone)]
pub(super) enum Reply {
    /// The server replies with these bytes and closes.
    Bytes(Vec<u8>),
    /// The server closes before it reads anything.
    Close,
    /// The server reads the request and never replies.
    Silence,
    /// The server replies with these bytes, and then with one byte from time to time, without end.
    Trickle(Vec<u8>),
    /// The server replies with these bytes, and then with zeros for as long as somebody reads.
    Endless(Vec<u8>),
}

/// A reply with status 200 and this body.
pub(super) fn found(body: &[u8]) -> Reply {
    status("200 OK", "content-type: application/json\r\n", body)
}

/// A reply with this status, these lines of the head, and this body.
pub(super) fn status(status: &str, head: &str, body: &[u8]) -> Reply {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\n{head}content-length: {length}\r\n\r\n");
    Reply::Bytes([head.as_bytes(), body].concat())
}

struct Script {
    reply: Reply,
    /// The time of each connection, and the head of its request.
    requests: Vec<(Instant, String)>,
}

/// The server. It ends when it is dropped.
pub(super) struct KeyServer {
    pub(super) address: SocketAddr,
    script: Arc<Mutex<Script>>,
    _tasks: JoinSet<()>,
}

impl KeyServer {
    pub(super) async fn start(reply: Reply) -> Self {
        Self::start_with(reply, None).await
    }

    /// A server with the certificate `router.pem` of this folder.
    pub(super) async fn start_tls(reply: Reply, folder: &str) -> Self {
        let fixture = |name: &str| std::fs::read(tls_fixture(folder, name)).unwrap();
        let chain =
            CertificateDer::pem_slice_iter(&fixture("router.pem")).collect::<Result<_, _>>();
        let key = PrivateKeyDer::from_pem_slice(&fixture("router.key")).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain.unwrap(), key)
            .unwrap();
        Self::start_with(reply, Some(TlsAcceptor::from(Arc::new(config)))).await
    }

    async fn start_with(reply: Reply, tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let script = Arc::new(Mutex::new(Script { reply, requests: Vec::new() }));
        let mut tasks = JoinSet::new();
        tasks.spawn(serve(listener, Arc::clone(&script), tls));
        Self { address, script, _tasks: tasks }
    }

    /// From the next connection on, the server does this.
    pub(super) fn reply_with(&self, reply: Reply) {
        self.script.lock().unwrap().reply = reply;
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}/keys?of=issuer", self.address)
    }

    /// The times of all connections.
    pub(super) fn times(&self) -> Vec<Instant> {
        self.script.lock().unwrap().requests.iter().map(|(time, _)| *time).collect()
    }

    /// The head of the last request.
    pub(super) fn last_request(&self) -> String {
        self.script.lock().unwrap().requests.last().unwrap().1.clone()
    }
}

/// A folder whose certificate is for `localhost` and `127.0.0.1`.
pub(super) const LOOPBACK_TLS: &str = "tests/fixtures/tls";

/// A folder whose certificate is for `router.test`.
pub(super) const NAMED_TLS: &str = "worker-shim/tests/fixtures/tls";

/// The path of a file in one of these folders.
pub(super) fn tls_fixture(folder: &str, name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../..", folder, name].iter().collect()
}

async fn serve(listener: TcpListener, script: Arc<Mutex<Script>>, tls: Option<TlsAcceptor>) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let script = Arc::clone(&script);
        match tls.clone() {
            None => connections.spawn(answer(stream, script)),
            Some(tls) => connections.spawn(answer_tls(tls, stream, script)),
        };
    }
}

async fn answer_tls(tls: TlsAcceptor, stream: TcpStream, script: Arc<Mutex<Script>>) {
    if let Ok(stream) = tls.accept(stream).await {
        answer(stream, script).await;
    }
}

async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin, script: Arc<Mutex<Script>>) {
    let reply = {
        let mut script = script.lock().unwrap();
        script.requests.push((Instant::now(), String::new()));
        script.reply.clone()
    };
    if matches!(reply, Reply::Close) {
        return;
    }
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let Ok(byte) = stream.read_u8().await else { return };
        head.push(byte);
    }
    script.lock().unwrap().requests.last_mut().unwrap().1 = String::from_utf8(head).unwrap();
    // Errors of writing mean that the client has had enough.
    match reply {
        Reply::Close => {}
        Reply::Silence => std::future::pending().await,
        Reply::Bytes(bytes) => {
            if stream.write_all(&bytes).await.is_ok() {
                let _ = stream.shutdown().await;
            }
        }
        Reply::Trickle(bytes) => {
            let _ = stream.write_all(&bytes).await;
            while stream.write_all(b" ").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        Reply::Endless(bytes) => {
            let _ = stream.write_all(&bytes).await;
            while stream.write_all(&[b'0'; 4096]).await.is_ok() {}
        }
    }
}
