//! TLS towards engines: the handshake of a new connection, and why it failed.
//!
//! Certificates are checked in each handshake: no session is resumed.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{AlertDescription, CertificateError, ClientConfig};
use splitrail_config::engine_tls::{EngineTlsFiles, SystemAuthorities};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio_rustls::TlsConnector;

use crate::records::Records;
use crate::stream::Stream;

/// TLS towards the engines of one model.
#[derive(Debug)]
pub struct TlsSettings {
    files: EngineTlsFiles,
    ready: OnceCell<HandshakeParts>,
}

/// What the first handshake needs.
struct HandshakeParts {
    config: Arc<ClientConfig>,
    /// The system's authorities, if the settings name none.
    system: Option<SystemAuthorities>,
}

impl std::fmt::Debug for HandshakeParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HandshakeParts")
            .field("uses_system", &self.system.is_some())
            .finish_non_exhaustive()
    }
}

impl TlsSettings {
    /// Settings from an `engine_tls` section that was read successfully. If it names no authorities,
    /// those of the system are read before the first handshake: models without `https` engines do
    /// not need them.
    pub fn new(files: EngineTlsFiles) -> Arc<Self> {
        Arc::new(Self { files, ready: OnceCell::new() })
    }

    /// Whether these settings were made from the same files, and from the same authorities of the
    /// system if they were read. Reads the latter again, which may take some milliseconds.
    pub fn are_current(&self, files: &EngineTlsFiles) -> bool {
        let system = self.ready.get().and_then(|ready| ready.system.as_ref());
        self.files == *files && system.is_none_or(|system| *system == SystemAuthorities::read())
    }

    /// Whether both were made from the same files.
    pub fn has_same_files(&self, other: &Self) -> bool {
        self.files == other.files
    }

    async fn config(&self) -> io::Result<&Arc<ClientConfig>> {
        let prepare = async || {
            let system = match self.files.has_own_authorities() {
                true => None,
                // Reading hundreds of files would stop the other tasks of this thread.
                false => Some(tokio::task::spawn_blocking(SystemAuthorities::read).await?),
            };
            if system.as_ref().is_some_and(SystemAuthorities::is_empty) {
                tracing::warn!(
                    "the system trusts no certificate authority: name one in engine_tls.ca"
                );
            }
            let config = self.files.client_config(system.as_ref()).map_err(io::Error::other)?;
            Ok(HandshakeParts { config, system })
        };
        self.ready.get_or_try_init(prepare).await.map(|ready| &ready.config)
    }

    /// Makes the handshake with the engine at `host`, which may be an IPv6 address in brackets.
    ///
    /// # Errors
    /// The engine does not speak TLS, its certificate is not valid, it refuses the connection, or
    /// the handshake takes longer than `limit`. The message follows "the engine cannot be reached:".
    pub(super) async fn connect(
        &self,
        host: &str,
        socket: TcpStream,
        limit: Duration,
    ) -> io::Result<Stream> {
        let name = match self.files.server_name() {
            Some(name) => name.clone(),
            None => server_name(host)?,
        };
        let connector = TlsConnector::from(Arc::clone(self.config().await?));
        let shake = connector.connect(name.clone(), Records::new(socket));
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, "no TLS handshake in time");
        match tokio::time::timeout(limit, shake).await.map_err(late)? {
            Ok(stream) => Ok(Stream::secured(stream)),
            Err(error) => Err(self.explained(&error, &name)),
        }
    }

    fn explained(&self, error: &io::Error, name: &ServerName<'_>) -> io::Error {
        let why = match tls_cause(error) {
            Some(rustls::Error::InvalidCertificate(why)) => {
                format!("its certificate {}", self.objection(why, name))
            }
            Some(rustls::Error::AlertReceived(alert)) => refused(*alert),
            Some(rustls::Error::InvalidMessage(_)) => "it does not speak TLS".to_owned(),
            Some(other) => format!("TLS: {other}"),
            None => format!("it ended the connection during the TLS handshake: {error}"),
        };
        io::Error::new(error.kind(), why)
    }

    /// What is wrong with a certificate, worded to follow "its certificate".
    fn objection(&self, why: &CertificateError, name: &ServerName<'_>) -> String {
        use CertificateError as Why;
        let name = name.to_str();
        match why {
            Why::UnknownIssuer if self.files.has_own_authorities() => {
                "is not from an authority in engine_tls.ca".to_owned()
            }
            Why::UnknownIssuer => "is not from an authority that the system trusts".to_owned(),
            Why::Expired | Why::ExpiredContext { .. } => "has expired".to_owned(),
            Why::NotValidYet | Why::NotValidYetContext { .. } => "is not valid yet".to_owned(),
            Why::NotValidForName | Why::NotValidForNameContext { .. } => {
                format!("is not for the name {name}")
            }
            Why::InvalidPurpose | Why::InvalidPurposeContext { .. } => {
                "is not for a TLS server".to_owned()
            }
            Why::BadSignature => "has a wrong signature".to_owned(),
            other => format!("is not valid: {other}"),
        }
    }
}

/// The name that a certificate must be for if only the URL gives one.
fn server_name(host: &str) -> io::Result<ServerName<'static>> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    // A trailing dot is not part of the names in certificates (RFC 6066, section 3).
    let bare = bare.strip_suffix('.').unwrap_or(bare).to_owned();
    ServerName::try_from(bare).map_err(|_| {
        let why = "its host is not a name that a certificate can have: set engine_tls.server_name";
        io::Error::new(io::ErrorKind::InvalidInput, why)
    })
}

/// The error of TLS behind an error of input or output, if it is one.
pub(super) fn tls_cause(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Why an engine refused a connection by an alert (RFC 8446, section 6).
pub(super) fn refused(alert: AlertDescription) -> String {
    use AlertDescription as Alert;
    match alert {
        Alert::CertificateRequired => {
            "it demands a certificate of the router: set engine_tls.cert and key".to_owned()
        }
        Alert::BadCertificate
        | Alert::UnsupportedCertificate
        | Alert::CertificateRevoked
        | Alert::CertificateExpired
        | Alert::CertificateUnknown
        | Alert::UnknownCA
        | Alert::AccessDenied => format!("it refuses the router's certificate ({alert:?})"),
        Alert::NoApplicationProtocol => "it does not speak HTTP/1.1 over TLS".to_owned(),
        other => format!("it refused the TLS connection ({other:?})"),
    }
}
