//! Reads the PEM files of a `tls` section, and builds the TLS configuration of a listener.

mod reloaded;
mod validity;

use std::fmt::{self, Display};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use splitrail_settings::process::read_bounded;

use super::model::{ClientCertificates, FleetTls, ListenerTls};

pub use reloaded::{DueRead, ReloadedTls};
pub use validity::not_after_unix_s;

/// Maximum size of a PEM file in bytes.
const PEM_MAX_BYTES: u64 = 1 << 20;

/// A file that cannot be read or used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFileError {
    /// The key in the `tls` or `engine_tls` section, such as `cert`, `key` or `client_ca`.
    pub key: &'static str,
    /// The cause, worded to follow the key in a sentence.
    pub why: String,
}

impl Display for TlsFileError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}", self.key, self.why)
    }
}

impl std::error::Error for TlsFileError {}

/// The paths of the files of a listener's `tls` section.
#[derive(Clone, Debug)]
pub struct TlsPaths {
    /// The certificate of the listener.
    pub cert: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
    /// The authority of the clients' certificates.
    pub client_ca: Option<PathBuf>,
}

impl From<&FleetTls> for TlsPaths {
    fn from(FleetTls { cert, key, client_ca, .. }: &FleetTls) -> Self {
        Self { cert: cert.clone(), key: key.clone(), client_ca: client_ca.clone() }
    }
}

impl From<&ListenerTls> for TlsPaths {
    fn from(ListenerTls { cert, key, client_ca, .. }: &ListenerTls) -> Self {
        Self { cert: cert.clone(), key: key.clone(), client_ca: client_ca.clone() }
    }
}

/// The application protocols of a listener, by preference, as ALPN names them (RFC 7301 and the
/// registry that it establishes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocols {
    /// HTTP/2 and HTTP/1.1.
    Http,
    /// HTTP/2 only, for gRPC.
    Http2,
}

impl Protocols {
    fn names(self) -> Vec<Vec<u8>> {
        match self {
            Self::Http => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
            Self::Http2 => vec![b"h2".to_vec()],
        }
    }
}

/// What a listener negotiates with its clients.
#[derive(Clone, Copy, Debug)]
pub struct ServerTerms {
    /// The application protocols.
    pub protocols: Protocols,
    /// Whether clients must present a certificate. Without a `client_ca`, they are not asked for
    /// one.
    pub client_certificates: ClientCertificates,
}

/// The content of the files of a `tls` section.
#[derive(PartialEq, Eq)]
pub struct TlsFiles {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl TlsFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// If a file cannot be read or is too large.
    pub fn read(paths: &TlsPaths) -> Result<Self, TlsFileError> {
        let client_ca = paths.client_ca.as_deref().map(|path| read("client_ca", path));
        Ok(Self {
            cert: read("cert", &paths.cert)?,
            key: read("key", &paths.key)?,
            client_ca: client_ca.transpose()?,
        })
    }

    /// The time from which on the certificate is not valid any more, in seconds since 1970; `None`
    /// if the certificate cannot be read.
    pub fn expires_unix_s(&self) -> Option<i64> {
        let chain = certificates("cert", &self.cert).ok()?;
        not_after_unix_s(chain.first()?)
    }

    /// The TLS configuration of a listener with these files: TLS 1.2 and 1.3, without early data.
    /// With a `client_ca`, no session is resumed.
    ///
    /// # Errors
    /// If a file does not contain what its key names, or certificate and key do not match.
    pub fn server_config(&self, terms: ServerTerms) -> Result<Arc<ServerConfig>, TlsFileError> {
        let chain = certificates("cert", &self.cert)?;
        let key =
            PrivateKeyDer::from_pem_slice(&self.key).map_err(|error| unusable("key", &error))?;
        let provider = Arc::new(default_provider());
        let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable("cert", &error))?;
        let config = match &self.client_ca {
            None => config.with_no_client_auth(),
            Some(pem) => {
                let wrong = |error: &dyn Display| unusable("client_ca", error);
                let roots = roots("client_ca", pem)?;
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let verifier = match terms.client_certificates {
                    ClientCertificates::Required => verifier,
                    ClientCertificates::Optional => verifier.allow_unauthenticated(),
                };
                let verifier =
                    verifier.build().map_err(|error: VerifierBuilderError| wrong(&error))?;
                config.with_client_cert_verifier(verifier)
            }
        };
        let mut config =
            config.with_single_cert(chain, key).map_err(|error| unusable("cert", &error))?;
        config.alpn_protocols = terms.protocols.names();
        if self.client_ca.is_some() {
            // A resumed session would skip the check of the client's certificate, which may have
            // expired since.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        Ok(Arc::new(config))
    }
}

/// The authorities whose certificates are in a PEM file. `key` is the key that names the file.
///
/// # Errors
/// If the file cannot be read, or does not contain certificates.
pub fn authorities(key: &'static str, path: &Path) -> Result<RootCertStore, TlsFileError> {
    roots(key, &read(key, path)?)
}

fn roots(key: &'static str, pem: &[u8]) -> Result<RootCertStore, TlsFileError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(key, pem)? {
        roots.add(certificate).map_err(|error| unusable(key, &error))?;
    }
    Ok(roots)
}

pub(crate) fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, TlsFileError> {
    read_bounded(path, PEM_MAX_BYTES).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => TlsFileError { key, why: "is too large".to_owned() },
        _ => TlsFileError { key, why: format!("cannot be read: {error}") },
    })
}

pub(crate) fn certificates(
    key: &'static str,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, TlsFileError> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let all = read.map_err(|error| unusable(key, &error))?;
    match all.is_empty() {
        true => Err(unusable(key, &"it holds no certificate")),
        false => Ok(all),
    }
}

pub(crate) fn unusable(key: &'static str, why: &dyn Display) -> TlsFileError {
    TlsFileError { key, why: format!("cannot be used: {why}") }
}
