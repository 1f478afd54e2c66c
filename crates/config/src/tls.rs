//! Reads the PEM files of a `tls` section, and builds the TLS configuration of a listener.

use std::fmt::{self, Display};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};

use super::model::FleetTls;

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
    pub fn read(files: &FleetTls) -> Result<Self, TlsFileError> {
        let client_ca = files.client_ca.as_deref().map(|path| read("client_ca", path));
        Ok(Self {
            cert: read("cert", &files.cert)?,
            key: read("key", &files.key)?,
            client_ca: client_ca.transpose()?,
        })
    }

    /// The TLS configuration of an HTTP/2 listener with these files. With `client_ca`, clients must
    /// present a certificate.
    ///
    /// # Errors
    /// If a file does not contain what its key names, or certificate and key do not match.
    pub fn server_config(&self) -> Result<Arc<ServerConfig>, TlsFileError> {
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
                let mut roots = RootCertStore::empty();
                for certificate in certificates("client_ca", pem)? {
                    roots.add(certificate).map_err(|error| wrong(&error))?;
                }
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let verifier =
                    verifier.build().map_err(|error: VerifierBuilderError| wrong(&error))?;
                config.with_client_cert_verifier(verifier)
            }
        };
        let mut config =
            config.with_single_cert(chain, key).map_err(|error| unusable("cert", &error))?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }
}

pub(crate) fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, TlsFileError> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(PEM_MAX_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|error| TlsFileError { key, why: format!("cannot be read: {error}") })?;
    if bytes.len() as u64 > PEM_MAX_BYTES {
        return Err(TlsFileError { key, why: "is too large".to_owned() });
    }
    Ok(bytes)
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
