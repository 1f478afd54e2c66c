//! TLS of a listener: its certificate, and the handshakes of its connections.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus::IntGauge;
use rustls::ServerConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::core::Core;
use splitrail_client_connection::certificate::ClientCertificate;
use splitrail_client_connection::client_stream::ClientStream;
use splitrail_client_connection::recorded_socket::RecordedSocket;
use splitrail_config::model::Listener;
use splitrail_config::tls::{Protocols, ReloadedTls, ServerTerms};
use splitrail_settings::log_throttle::LogThrottle;

/// The first byte of a TLS connection: the record type of a handshake message (RFC 8446, section
/// 5.1).
const HANDSHAKE_RECORD: u8 = 22;

/// The reply to a plain HTTP request.
const PLAIN_TEXT_REPLY: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 36\r\nconnection: close\r\n\r\n\
      This port speaks TLS: use https://.\n";

/// Maximum time for which the rest of a refused client's bytes is read.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of bytes that are read of a refused client.
const LINGER_MAX_BYTES: usize = 64 << 10;

/// The certificate files of a listener, and what it does with connections without TLS.
pub struct TlsListener {
    /// The listener's name in the configuration and in metrics.
    name: &'static str,
    files: Arc<ReloadedTls>,
    /// Whether connections without TLS are served as well.
    accepts_plain_text: bool,
    /// The time at which the certificate expires.
    expires: IntGauge,
    throttle: LogThrottle,
}

impl TlsListener {
    /// Reads the files of a listener; `None` if the listener has no TLS.
    ///
    /// # Errors
    /// A file cannot be read or used. The message names its key in the configuration.
    pub fn open(
        name: &'static str,
        listener: &Listener,
        protocols: Protocols,
        core: &Core,
    ) -> io::Result<Option<Arc<Self>>> {
        let Some(tls) = &listener.tls else { return Ok(None) };
        let client_certificates = tls.client_certificates(&core.serving().config.auth);
        let terms = ServerTerms { protocols, client_certificates };
        let files = ReloadedTls::open(tls.into(), terms, Instant::now())
            .map_err(|error| io::Error::other(format!("listen.{name}.tls.{error}")))?;
        let expires = core.metrics.certificate_expires.with_label_values(&[name]);
        expires.set(files.expires_unix_s().unwrap_or_default());
        Ok(Some(Arc::new(Self {
            name,
            files: Arc::new(files),
            accepts_plain_text: tls.plain_text,
            expires,
            throttle: LogThrottle::default(),
        })))
    }

    /// The TLS configuration for a connection that begins now. If the files are to be read again,
    /// waits for that; other connections do not.
    async fn config(&self) -> Arc<ServerConfig> {
        if let Some(due) = self.files.due(Instant::now()) {
            let read = tokio::task::spawn_blocking(move || due.read()).await;
            let name = self.name;
            match read {
                Ok(Ok(true)) => {
                    self.expires.set(self.files.expires_unix_s().unwrap_or_default());
                    tracing::info!("listen.{name}.tls: the files have changed and are in use now");
                }
                Ok(Err(error)) if self.throttle.may_log() => {
                    tracing::error!(
                        "listen.{name}.tls.{error}: the previous certificate stays in use"
                    );
                }
                // The reader has ended with the runtime, or panicked, which is logged.
                Ok(Ok(false) | Err(_)) | Err(_) => {}
            }
        }
        self.files.config()
    }

    /// Recognises TLS, and completes the handshake. A client that is refused is told why, as far as
    /// its protocol allows.
    pub(super) async fn accept(
        &self,
        socket: RecordedSocket,
    ) -> Result<AcceptedConnection, RefusedConnection> {
        match socket.peek().await {
            Ok(Some(HANDSHAKE_RECORD)) => {}
            Ok(Some(_)) if self.accepts_plain_text => return Ok(AcceptedConnection::plain(socket)),
            // The first letter of a method.
            Ok(Some(b'A'..=b'Z')) => {
                return Err(RefusedConnection::with_reason(PLAIN_TEXT, socket));
            }
            // The TLS library answers with an alert.
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return Err(RefusedConnection::left()),
        }
        let acceptor = TlsAcceptor::from(self.config().await);
        match acceptor.accept(socket).into_fallible().await {
            Ok(session) => Ok(session.into()),
            Err((error, socket)) => {
                tracing::debug!(%error, listener = self.name, "a TLS handshake failed");
                Err(reason(&error).map_or_else(RefusedConnection::left, |why| {
                    RefusedConnection::with_reason(why, socket)
                }))
            }
        }
    }
}

/// A connection whose requests can be read.
pub(super) struct AcceptedConnection {
    pub(super) stream: ClientStream,
    /// The names in the client's certificate, if the client has presented one.
    pub(super) certificate: Option<Arc<ClientCertificate>>,
}

impl AcceptedConnection {
    /// A connection without TLS.
    pub(super) fn plain(socket: RecordedSocket) -> Self {
        Self { stream: ClientStream::Plain(socket), certificate: None }
    }
}

impl From<TlsStream<RecordedSocket>> for AcceptedConnection {
    fn from(session: TlsStream<RecordedSocket>) -> Self {
        let chain = session.get_ref().1.peer_certificates();
        let certificate = chain.and_then(<[_]>::first).map(ClientCertificate::read).map(Arc::new);
        Self { stream: ClientStream::Tls(Box::new(session)), certificate }
    }
}

/// The name in metrics of a refusal because of a request without TLS.
const PLAIN_TEXT: &str = "plain_text";

/// The name in metrics of connections whose client has no valid certificate, or none any more.
pub(super) const CLIENT_CERTIFICATE: &str = "tls_client_certificate";

/// The name in metrics of a failed handshake; `None` if the client has left, as clients do that only
/// test whether the port is open.
fn reason(error: &io::Error) -> Option<&'static str> {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
    Some(match cause? {
        rustls::Error::NoCertificatesPresented | rustls::Error::InvalidCertificate(_) => {
            CLIENT_CERTIFICATE
        }
        _ => "tls_handshake",
    })
}

/// A connection that is not served.
pub(super) struct RefusedConnection {
    /// Why, as metrics name the reason; `None` if the client has left by itself.
    pub(super) reason: Option<&'static str>,
    /// The socket, if the client is still there.
    socket: Option<RecordedSocket>,
}

impl RefusedConnection {
    fn left() -> Self {
        Self { reason: None, socket: None }
    }

    fn with_reason(reason: &'static str, socket: RecordedSocket) -> Self {
        Self { reason: Some(reason), socket: Some(socket) }
    }

    /// Ends the connection in such a way that the client receives the reason: a socket that is
    /// closed before its bytes have been read is reset, and the client may lose what was sent to it.
    pub(super) async fn end(self) {
        let Some(mut socket) = self.socket else { return };
        let ended = async {
            if self.reason == Some(PLAIN_TEXT) {
                socket.write_all(PLAIN_TEXT_REPLY).await?;
            }
            socket.shutdown().await?;
            let mut bytes = 0;
            let mut buffer = [0; 1024];
            while bytes < LINGER_MAX_BYTES {
                match socket.read(&mut buffer).await? {
                    0 => break,
                    more => bytes += more,
                }
            }
            io::Result::Ok(())
        };
        // Whether the client reads the reason does not matter.
        let _unheard = tokio::time::timeout(LINGER_TIMEOUT, ended).await;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
