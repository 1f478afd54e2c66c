//! TLS towards routers.

use std::io;
use std::path::{Path, PathBuf};

use tonic::transport::{Certificate, ClientTlsConfig, Identity};

/// A PEM file is no longer than this.
const PEM_BYTES_MAX: u64 = 1 << 20;

/// TLS towards routers. Its files are read again for each connection: they may be replaced at any time.
#[derive(Clone, Debug)]
pub struct Tls {
    /// Certificates of those who may vouch for a router, as PEM.
    pub ca: PathBuf,
    /// The shim's own certificate and key, as PEM, where routers ask for them.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name in a router's certificate, where it is not that of its address.
    pub server_name: Option<String>,
}

impl Tls {
    /// What a connection to this host is secured with.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(super) async fn client(&self, host: &str) -> io::Result<ClientTlsConfig> {
        let tls = self.clone();
        let read = tokio::task::spawn_blocking(move || tls.read());
        let config = read.await.map_err(io::Error::other)??;
        Ok(config.domain_name(self.server_name.as_deref().unwrap_or(host)))
    }

    /// Reads the files; what they hold shows when it is used.
    ///
    /// # Errors
    /// A file that cannot be read.
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
    let file = std::fs::File::open(path).map_err(named)?;
    io::Read::read_to_end(&mut io::Read::take(file, PEM_BYTES_MAX + 1), &mut bytes)
        .map_err(named)?;
    match bytes.len() as u64 > PEM_BYTES_MAX {
        true => Err(named(io::Error::new(io::ErrorKind::InvalidData, "it is too large"))),
        false => Ok(bytes),
    }
}
