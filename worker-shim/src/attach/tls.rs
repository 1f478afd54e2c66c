//! TLS towards routers.

use std::io;
use std::path::{Path, PathBuf};

use splitrail_settings::process::open_regular;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

/// Maximum size of a PEM file in bytes.
const PEM_BYTES_MAX: u64 = 1 << 20;

/// TLS towards routers. The files are read again for each connection, so they can be replaced
/// at any time.
#[derive(Clone, Debug)]
pub struct RouterTls {
    /// Certificates of the authorities that may sign a router's certificate, as PEM.
    pub ca: PathBuf,
    /// The shim's certificate and key, as PEM, for routers that require them.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name in the routers' certificates, if it differs from the host of their address.
    pub server_name: Option<String>,
}

impl RouterTls {
    /// Creates the TLS configuration of a connection to `host`.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(super) async fn client(&self, host: &str) -> io::Result<ClientTlsConfig> {
        let tls = self.clone();
        let read = tokio::task::spawn_blocking(move || tls.read());
        let config = read.await.map_err(io::Error::other)??;
        Ok(config.domain_name(self.server_name.as_deref().unwrap_or(host)))
    }

    /// Reads the files. Their content is checked only when a connection uses them.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn read(&self) -> io::Result<ClientTlsConfig> {
        let config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(&self.ca)?));
        Ok(match &self.identity {
            Some((cert, key)) => config.identity(Identity::from_pem(read(cert)?, read(key)?)),
            None => config,
        })
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let named =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let mut bytes = Vec::new();
    let file = open_regular(path).map_err(named)?;
    io::Read::read_to_end(&mut io::Read::take(file, PEM_BYTES_MAX + 1), &mut bytes)
        .map_err(named)?;
    match bytes.len() as u64 > PEM_BYTES_MAX {
        true => Err(named(io::Error::new(io::ErrorKind::InvalidData, "it is too large"))),
        false => Ok(bytes),
    }
}
