//! The fleet listener's certificate, and the authority of the side-cars'.

use std::path::Path;

use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

use crate::config::model::FleetTls;

/// A PEM file is no longer than this.
const PEM_MAX_BYTES: u64 = 1 << 20;

/// Reads the files, and finds out whether they can be used.
///
/// # Errors
/// The key of the configuration that is wrong, and why.
pub fn read_tls(tls: &FleetTls) -> Result<ServerTlsConfig, (&'static str, String)> {
    let cert = read("cert", &tls.cert)?;
    let key = read("key", &tls.key)?;
    let plain = ServerTlsConfig::new().identity(Identity::from_pem(cert, key));
    usable("cert", &plain)?;
    let Some(path) = &tls.client_ca else { return Ok(plain) };
    let config = plain.client_ca_root(Certificate::from_pem(read("client_ca", path)?));
    usable("client_ca", &config)?;
    Ok(config)
}

fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, (&'static str, String)> {
    let failed = |error: std::io::Error| (key, format!("cannot be read: {error}"));
    if std::fs::metadata(path).map_err(failed)?.len() > PEM_MAX_BYTES {
        return Err((key, "is too large".to_owned()));
    }
    std::fs::read(path).map_err(failed)
}

fn usable(key: &'static str, config: &ServerTlsConfig) -> Result<(), (&'static str, String)> {
    let built = Server::builder().tls_config(config.clone());
    built.map(|_| ()).map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        let why = cause.unwrap_or_else(|| error.to_string());
        (key, format!("cannot be used: {}", why.trim_end_matches('.')))
    })
}
