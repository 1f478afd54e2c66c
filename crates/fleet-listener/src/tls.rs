//! The fleet listener's certificate, and the certificate authority of the shims' certificates.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use prometheus::IntGauge;
use rustls::ServerConfig;

use splitrail_config::model::{ClientCertificates, FleetTls};
use splitrail_config::tls::{Protocols, ReloadedTls, ServerTerms};

/// The TLS configuration of the fleet listener, kept up to date with the configured files.
#[derive(Clone)]
pub(super) struct Certificates {
    tls: Arc<ReloadedTls>,
    /// The time at which the certificate expires.
    expires: IntGauge,
}

impl Certificates {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// A file cannot be read or used. The message names its key in the configuration.
    pub(super) fn open(files: &FleetTls, expires: IntGauge, now: Instant) -> io::Result<Self> {
        let terms = ServerTerms {
            protocols: Protocols::Http2,
            client_certificates: ClientCertificates::Required,
        };
        let tls = ReloadedTls::open(files.into(), terms, now)
            .map_err(|error| io::Error::other(format!("fleet.tls.{error}")))?;
        expires.set(tls.expires_unix_s().unwrap_or_default());
        Ok(Self { tls: Arc::new(tls), expires })
    }

    /// The TLS configuration for a connection that begins now. If the files are to be read again,
    /// waits for that; other connections do not.
    pub(super) async fn current(&self, now: Instant) -> Arc<ServerConfig> {
        let Some(due) = self.tls.due(now) else { return self.tls.config() };
        match tokio::task::spawn_blocking(|| due.read()).await {
            Ok(Ok(true)) => {
                self.expires.set(self.tls.expires_unix_s().unwrap_or_default());
                tracing::info!("fleet.tls: the files have changed and are in use from now on");
            }
            Ok(Err(error)) => {
                tracing::error!("fleet.tls.{error}: the previous certificate stays in use");
            }
            // The reader has ended with the runtime, or panicked, which is logged.
            Ok(Ok(false)) | Err(_) => {}
        }
        self.tls.config()
    }
}
