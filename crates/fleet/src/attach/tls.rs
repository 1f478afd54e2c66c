//! The fleet listener's certificate, and the certificate authority of the shims' certificates.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::ServerConfig;

use splitrail_config::model::FleetTls;
use splitrail_config::tls::{TlsFileError, TlsFiles};

/// Minimum time between two reads of the files.
const READ_INTERVAL_MIN: Duration = Duration::from_secs(1);

/// The TLS configuration of the fleet listener, kept up to date with the configured files.
///
/// Certificates are renewed while the router runs: a new connection gets the certificate that is in
/// the file now, not the one from when the router started.
pub(super) struct Certificates {
    files: FleetTls,
    known: Mutex<Known>,
}

struct Known {
    read_at: Instant,
    files: TlsFiles,
    config: Arc<ServerConfig>,
}

impl Certificates {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// A file cannot be read or used. The message names its key in the configuration.
    pub(super) fn open(files: FleetTls, now: Instant) -> io::Result<Self> {
        let opened = TlsFiles::read(&files).and_then(|read| Ok((read.server_config()?, read)));
        let (config, read) =
            opened.map_err(|error| io::Error::other(format!("fleet.tls.{error}")))?;
        Ok(Self { files, known: Mutex::new(Known { read_at: now, files: read, config }) })
    }

    /// The TLS configuration for a connection that begins now.
    pub(super) fn current(&self, now: Instant) -> Arc<ServerConfig> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(known.read_at) >= READ_INTERVAL_MIN {
            known.read_at = now;
            if let Err(error) = known.read_again(&self.files) {
                // A certificate and its key may be replaced one after the other.
                tracing::error!("fleet.tls.{error}: the previous certificate stays in use");
            }
        }
        Arc::clone(&known.config)
    }
}

impl Known {
    fn read_again(&mut self, files: &FleetTls) -> Result<(), TlsFileError> {
        let files = TlsFiles::read(files)?;
        if files != self.files {
            (self.config, self.files) = (files.server_config()?, files);
            tracing::info!("fleet.tls: the files have changed and are in use from now on");
        }
        Ok(())
    }
}
