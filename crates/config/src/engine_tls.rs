//! Reads the PEM files of an `engine_tls` section, and builds the TLS configuration of connections
//! to engines.

use std::fmt;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};

use crate::model::EngineTls;
use crate::tls::{TlsFileError, certificates, read, unusable};

/// The only protocol that is spoken with engines, as ALPN names it (RFC 7301, section 6).
const PROTOCOL: &[u8] = b"http/1.1";

/// The content of an `engine_tls` section and of its files.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct EngineTlsFiles {
    ca: Option<Vec<u8>>,
    /// The certificate chain and the private key.
    identity: Option<(Vec<u8>, Vec<u8>)>,
    server_name: Option<ServerName<'static>>,
}

/// Neither certificates nor keys are shown.
impl fmt::Debug for EngineTlsFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut files = f.debug_struct("EngineTlsFiles");
        files.field("has_ca", &self.ca.is_some()).field("has_identity", &self.identity.is_some());
        files.field("server_name", &self.server_name).finish_non_exhaustive()
    }
}

/// The authorities that the system trusts.
#[derive(Clone, PartialEq, Eq)]
pub struct SystemAuthorities(Vec<CertificateDer<'static>>);

impl SystemAuthorities {
    /// Reads the system's list: the places of OpenSSL, or `SSL_CERT_FILE` and `SSL_CERT_DIR`. Reading
    /// hundreds of certificates may take some milliseconds. Files that cannot be read are left out,
    /// so that the list may be empty.
    #[must_use]
    pub fn read() -> Self {
        Self(rustls_native_certs::load_native_certs().certs)
    }

    /// Whether the system trusts no authority.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl EngineTlsFiles {
    /// Reads the files of a section, and checks that they can be used.
    ///
    /// # Errors
    /// If a file cannot be read, is too large, or does not contain what its key names; if
    /// certificate and key do not match, or only one of them is given; or if `server_name` is
    /// neither a name nor an IP address.
    pub fn read(section: &EngineTls) -> Result<Self, TlsFileError> {
        let ca = section.ca.as_deref().map(|path| read("ca", path)).transpose()?;
        let identity = match (&section.cert, &section.key) {
            (Some(cert), Some(key)) => Some((read("cert", cert)?, read("key", key)?)),
            (None, None) => None,
            (Some(_), None) => return Err(alone("cert", "key")),
            (None, Some(_)) => return Err(alone("key", "cert")),
        };
        let server_name = section.server_name.clone().map(ServerName::try_from).transpose();
        let server_name = server_name.map_err(|_| TlsFileError {
            key: "server_name",
            why: "is neither a host name nor an IP address".to_owned(),
        })?;
        let files = Self { ca, identity, server_name };
        files.build(files.own_authorities()?.unwrap_or_else(RootCertStore::empty))?;
        Ok(files)
    }

    /// The name that the certificates of all engines must be for; `None` if it is the host of each
    /// engine's URL.
    #[must_use]
    pub fn server_name(&self) -> Option<&ServerName<'static>> {
        self.server_name.as_ref()
    }

    /// Whether the section names its own authorities instead of those of the system.
    #[must_use]
    pub fn has_own_authorities(&self) -> bool {
        self.ca.is_some()
    }

    /// The TLS configuration of connections to engines. `system` is used if the section names no
    /// authorities.
    ///
    /// # Errors
    /// None for files that were read successfully.
    pub fn client_config(
        &self,
        system: Option<&SystemAuthorities>,
    ) -> Result<Arc<ClientConfig>, TlsFileError> {
        let roots = match self.own_authorities()? {
            Some(own) => own,
            None => {
                let mut roots = RootCertStore::empty();
                let certificates = system.map(|system| system.0.clone()).unwrap_or_default();
                // A certificate that cannot be parsed makes the others no less trustworthy.
                let _counts = roots.add_parsable_certificates(certificates);
                roots
            }
        };
        self.build(roots).map(Arc::new)
    }

    fn own_authorities(&self) -> Result<Option<RootCertStore>, TlsFileError> {
        let Some(pem) = &self.ca else { return Ok(None) };
        let mut roots = RootCertStore::empty();
        for certificate in certificates("ca", pem)? {
            roots.add(certificate).map_err(|error| unusable("ca", &error))?;
        }
        Ok(Some(roots))
    }

    fn build(&self, roots: RootCertStore) -> Result<ClientConfig, TlsFileError> {
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable("ca", &error))?
            .with_root_certificates(roots);
        let mut config = match &self.identity {
            None => config.with_no_client_auth(),
            Some((cert, key)) => {
                let chain = certificates("cert", cert)?;
                let key =
                    PrivateKeyDer::from_pem_slice(key).map_err(|error| unusable("key", &error))?;
                config
                    .with_client_auth_cert(chain, key)
                    .map_err(|error| unusable("cert", &error))?
            }
        };
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        // A resumed session would skip the check of the certificate, which may have expired since.
        config.resumption = Resumption::disabled();
        Ok(config)
    }
}

fn alone(key: &'static str, other: &str) -> TlsFileError {
    TlsFileError { key, why: format!("is given without `{other}`") }
}
