//! Clients that speak TLS, with the certificates of `fixtures/tls`.

pub mod expiring;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Nothing takes longer, unless something hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// The path of a certificate or key.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tls").join(name)
}

/// Each version of TLS alone, for [`TlsClient::versions`].
pub const EACH_VERSION: [&[&SupportedProtocolVersion]; 2] = [&[&TLS12], &[&TLS13]];

/// What a client accepts and presents.
#[derive(Clone, Copy, Debug)]
pub struct TlsClient<'c> {
    /// The authority that must have signed the router's certificate.
    pub authority: &'c str,
    /// The name of the client's own certificate, if it has one.
    pub identity: Option<&'c str>,
    /// The application protocols that it offers.
    pub protocols: &'c [&'c str],
    /// The versions that it offers.
    pub versions: &'static [&'static SupportedProtocolVersion],
}

impl Default for TlsClient<'_> {
    fn default() -> Self {
        let versions = rustls::ALL_VERSIONS;
        Self { authority: "ca", identity: None, protocols: &[], versions }
    }
}

impl TlsClient<'_> {
    /// The configuration of the TLS library.
    pub fn config(&self) -> ClientConfig {
        let pem = |name: &str, kind: &str| fixture(&format!("{name}.{kind}"));
        let chain =
            |name| vec![CertificateDer::from_pem_file(pem(name, "pem")).expect("a fixture")];
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(chain(self.authority));
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(self.versions)
            .expect("versions")
            .with_root_certificates(roots);
        let mut config = match self.identity {
            None => config.with_no_client_auth(),
            Some(name) => {
                let key = PrivateKeyDer::from_pem_file(pem(name, "key")).expect("a fixture");
                config.with_client_auth_cert(chain(name), key).expect("a certificate")
            }
        };
        let protocols = self.protocols.iter().map(|protocol| protocol.as_bytes().to_vec());
        config.alpn_protocols = protocols.collect();
        config
    }

    /// Connects and completes the handshake. In TLS 1.3, a router that refuses the client's
    /// certificate says so afterwards.
    ///
    /// # Errors
    /// There is no connection, or the handshake failed.
    pub async fn connect(&self, address: SocketAddr) -> io::Result<TlsStream<TcpStream>> {
        over(TcpStream::connect(address).await?, self.config().into()).await
    }

    /// Connects, sends bytes, and reads until the end.
    pub async fn exchange(&self, address: SocketAddr, bytes: &[u8]) -> Exchanged {
        match self.connect(address).await {
            Ok(stream) => exchange(stream, bytes).await,
            Err(error) => Exchanged { bytes: Vec::new(), error: Some(error) },
        }
    }
}

/// The name in the routers' certificates.
pub fn server_name() -> ServerName<'static> {
    ServerName::try_from("localhost").expect("a name")
}

/// Completes a handshake on a connection.
///
/// # Errors
/// The handshake failed.
pub async fn over(
    socket: TcpStream,
    config: Arc<ClientConfig>,
) -> io::Result<TlsStream<TcpStream>> {
    let connecting = TlsConnector::from(config).connect(server_name(), socket);
    tokio::time::timeout(PATIENCE, connecting).await.expect("an end of the handshake in time")
}

/// What a client got until its connection ended.
#[derive(Debug)]
pub struct Exchanged {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// How the connection ended; none if with `close_notify`.
    pub error: Option<io::Error>,
}

impl Exchanged {
    /// The bytes as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// The alert with which the router ended the connection.
    pub fn alert(&self) -> Option<rustls::AlertDescription> {
        let cause = self.error.as_ref()?.get_ref()?.downcast_ref::<rustls::Error>()?;
        match cause {
            rustls::Error::AlertReceived(alert) => Some(*alert),
            _ => None,
        }
    }
}

/// Sends bytes on a connection, and reads until its end.
pub async fn exchange(mut stream: TlsStream<TcpStream>, bytes: &[u8]) -> Exchanged {
    let mut read = Vec::new();
    let ended = async {
        stream.write_all(bytes).await?;
        stream.flush().await?;
        stream.read_to_end(&mut read).await
    };
    let ended = tokio::time::timeout(PATIENCE, ended).await.expect("an end in time");
    Exchanged { bytes: read, error: ended.err() }
}

/// Sends a request without a body on a connection that stays open; the status of the reply, of
/// which the client must be able to read the whole at once.
pub async fn ask(stream: &mut TlsStream<TcpStream>, path: &str) -> u16 {
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let asked = async {
        stream.write_all(head.as_bytes()).await.expect("a request");
        stream.flush().await.expect("a request");
        let mut reply = vec![0; 16 << 10];
        let bytes = stream.read(&mut reply).await.expect("a reply");
        String::from_utf8_lossy(&reply[..bytes]).into_owned()
    };
    let reply = tokio::time::timeout(PATIENCE, asked).await.expect("a reply in time");
    let status = reply.split(' ').nth(1).and_then(|status| status.parse().ok());
    status.unwrap_or_else(|| panic!("no status in {reply:?}"))
}
