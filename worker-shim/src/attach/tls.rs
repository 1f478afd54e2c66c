//! TLS towards routers. The files are read again for each connection, so they can be replaced at any
//! time.

use std::io;
use std::path::Path;

use splitrail_settings::process::read_bounded;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::config::Tls;

/// Maximum size of a PEM file in bytes.
const PEM_BYTES_MAX: u64 = 1 << 20;

/// Creates the TLS configuration of a connection to `host`.
///
/// # Errors
/// If a file cannot be read.
pub(super) async fn client_config(tls: &Tls, host: &str) -> io::Result<ClientTlsConfig> {
    let files = tls.clone();
    let read = tokio::task::spawn_blocking(move || read_tls(&files));
    let config = read.await.map_err(io::Error::other)??;
    Ok(config.domain_name(tls.server_name.as_deref().unwrap_or(host)))
}

/// Reads the files. Their content is checked only when a connection uses them.
///
/// # Errors
/// If a file cannot be read.
pub(crate) fn read_tls(tls: &Tls) -> io::Result<ClientTlsConfig> {
    let config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(&tls.ca)?));
    Ok(match (&tls.cert, &tls.key) {
        (Some(cert), Some(key)) => config.identity(Identity::from_pem(read(cert)?, read(key)?)),
        _ => config,
    })
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_bounded(path, PEM_BYTES_MAX)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}
