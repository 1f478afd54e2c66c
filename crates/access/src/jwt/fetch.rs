//! Fetches a key set from a URL: one request on a connection of its own, with hyper, rustls and the
//! authorities of the system, all of which the workspace has already.

use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, HOST, USER_AGENT};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use splitrail_config::jwks::{JWKS_MAX_BYTES, JwksUrl};
use splitrail_config::tls::authorities;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// Maximum size of the head of the reply in bytes.
const HEAD_MAX_BYTES: usize = 64 << 10;

/// Why a key set could not be fetched. The messages contain nothing of the reply's body.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    #[error("the server did not reply in time")]
    Timeout,
    #[error("no connection to the server: {0}")]
    Connect(io::Error),
    #[error("an http URL must lead to this machine; use https")]
    NotThisMachine,
    #[error("`jwks_ca` {0}")]
    Authority(String),
    #[error("the system has no certificates of authorities; set `jwks_ca`")]
    NoAuthorities,
    #[error("no TLS connection to the server: {0}")]
    Tls(String),
    #[error("the reply is not valid HTTP: {0}")]
    Http(hyper::Error),
    #[error("the server replied with a redirect, which is not followed: status {0}")]
    Redirect(u16),
    #[error("the server replied with status {0}")]
    Status(u16),
    #[error("the reply broke off or is larger than 1 MiB")]
    Body,
}

/// Where a key set is fetched from.
#[derive(Clone, Debug)]
pub(super) struct Fetcher {
    pub(super) url: JwksUrl,
    /// The file with the authorities to trust instead of those of the system.
    pub(super) ca: Option<PathBuf>,
}

impl Fetcher {
    /// Fetches the key set.
    pub(super) async fn fetch(&self, time_max: Duration) -> Result<Vec<u8>, FetchError> {
        timeout(time_max, self.connect()).await.unwrap_or(Err(FetchError::Timeout))
    }

    async fn connect(&self) -> Result<Vec<u8>, FetchError> {
        let address = (self.url.host.as_str(), self.url.port);
        let stream = TcpStream::connect(address).await.map_err(FetchError::Connect)?;
        if self.url.is_tls {
            let connector = TlsConnector::from(self.tls_config().await?);
            let name = ServerName::try_from(self.url.host.clone()).map_err(tls_error)?;
            self.exchange(connector.connect(name, stream).await.map_err(tls_error)?).await
        } else {
            let peer = stream.peer_addr().map_err(FetchError::Connect)?;
            if !peer.ip().is_loopback() {
                return Err(FetchError::NotThisMachine);
            }
            self.exchange(stream).await
        }
    }

    /// Reads the authorities each time, so that changed files count without a restart.
    async fn tls_config(&self) -> Result<Arc<ClientConfig>, FetchError> {
        let ca = self.ca.clone();
        let read = spawn_blocking(move || match ca {
            Some(path) => {
                authorities("jwks_ca", &path).map_err(|error| FetchError::Authority(error.why))
            }
            None => system_authorities(),
        });
        let roots = read.await.map_err(tls_error)??;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(tls_error)?;
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    async fn exchange<S>(&self, stream: S) -> Result<Vec<u8>, FetchError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut builder = http1::Builder::new();
        builder.max_buf_size(HEAD_MAX_BYTES);
        let handshake = builder.handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(FetchError::Http)?;
        let request = Request::get(&self.url.target)
            .header(HOST, &self.url.authority)
            .header(ACCEPT, "application/jwk-set+json, application/json")
            .header(USER_AGENT, concat!("splitrail/", env!("CARGO_PKG_VERSION")))
            .body(Empty::<Bytes>::new())
            .map_err(|_| FetchError::Body)?;
        let mut reply = pin!(async {
            read(sender.send_request(request).await.map_err(FetchError::Http)?).await
        });
        let mut connection = pin!(connection);
        let mut is_open = true;
        loop {
            tokio::select! {
                result = &mut reply => return result,
                // The reply may be complete in memory when the connection ends.
                _ = &mut connection, if is_open => is_open = false,
            }
        }
    }
}

async fn read(reply: Response<Incoming>) -> Result<Vec<u8>, FetchError> {
    let status = reply.status();
    if status.is_redirection() {
        return Err(FetchError::Redirect(status.as_u16()));
    }
    if status != StatusCode::OK {
        return Err(FetchError::Status(status.as_u16()));
    }
    let body = Limited::new(reply.into_body(), JWKS_MAX_BYTES).collect();
    Ok(body.await.map_err(|_| FetchError::Body)?.to_bytes().into())
}

fn system_authorities() -> Result<RootCertStore, FetchError> {
    let mut roots = RootCertStore::empty();
    let (added, _) =
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if added == 0 { Err(FetchError::NoAuthorities) } else { Ok(roots) }
}

fn tls_error(error: impl std::fmt::Display) -> FetchError {
    FetchError::Tls(error.to_string())
}
