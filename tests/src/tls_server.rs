//! A TLS server in front of an engine that speaks plain HTTP.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

/// The certificate that a server presents, and whether it demands one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerCertificate {
    /// The files `NAME.pem` and `NAME.key` in `fixtures/tls`.
    pub name: &'static str,
    /// Whether clients need a certificate of the authority `engines/ca`.
    pub demands_certificate: bool,
}

impl ServerCertificate {
    /// A valid certificate of `localhost` and `127.0.0.1`.
    pub const VALID: Self = Self::named("engines/engine");

    /// A certificate by name; clients need none.
    pub const fn named(name: &'static str) -> Self {
        Self { name, demands_certificate: false }
    }

    fn config(self) -> ServerConfig {
        let provider = Arc::new(default_provider());
        let config = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let config = config.with_safe_default_protocol_versions().expect("protocol versions");
        let config = if self.demands_certificate {
            let mut roots = RootCertStore::empty();
            certificates("engines/ca").into_iter().for_each(|ca| roots.add(ca).expect("a root"));
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
            config.with_client_cert_verifier(verifier.build().expect("a verifier"))
        } else {
            config.with_no_client_auth()
        };
        let key = PrivateKeyDer::from_pem_file(fixture(&format!("{}.key", self.name)));
        let config = config.with_single_cert(certificates(self.name), key.expect("a key"));
        let mut config = config.expect("a certificate with its key");
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        config
    }
}

/// A file in `fixtures/tls`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tls").join(name)
}

fn certificates(name: &str) -> Vec<CertificateDer<'static>> {
    let read = CertificateDer::pem_file_iter(fixture(&format!("{name}.pem"))).expect("a file");
    read.map(|certificate| certificate.expect("a certificate")).collect()
}

/// The server. Dropping it ends its connections.
pub struct TlsServer {
    address: SocketAddr,
    secured: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl TlsServer {
    /// Passes everything on to `to`. The end of either side is passed on as well: to clients by
    /// `close_notify`.
    pub async fn start(to: SocketAddr, certificate: ServerCertificate) -> Self {
        Self::of_protocol(to, certificate, "http/1.1").await
    }

    /// The same for clients that offer this application protocol alone.
    pub async fn of_protocol(
        to: SocketAddr,
        certificate: ServerCertificate,
        protocol: &'static str,
    ) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let acceptor = TlsAcceptor::from(Arc::new(certificate.config()));
        let secured = Arc::<AtomicUsize>::default();
        let counter = Arc::clone(&secured);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                let (acceptor, counter) = (acceptor.clone(), Arc::clone(&counter));
                connections.spawn(async move {
                    // A connection that one of the ends breaks is over.
                    let _broken = carry(near, (to, protocol), &acceptor, &counter).await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self { address, secured, _tasks: tasks }
    }

    /// `https://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Number of successful handshakes.
    pub fn secured(&self) -> usize {
        self.secured.load(Relaxed)
    }
}

async fn carry(
    near: TcpStream,
    (to, expected): (SocketAddr, &str),
    acceptor: &TlsAcceptor,
    secured: &AtomicUsize,
) -> std::io::Result<()> {
    near.set_nodelay(true)?;
    let mut near = acceptor.accept(near).await?;
    let protocol = near.get_ref().1.alpn_protocol();
    assert_eq!(protocol, Some(expected.as_bytes()), "the only protocol that the router offers");
    secured.fetch_add(1, Relaxed);
    let mut far = TcpStream::connect(to).await?;
    far.set_nodelay(true)?;
    tokio::io::copy_bidirectional(&mut near, &mut far).await.map(drop)
}
