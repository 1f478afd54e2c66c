//! The fleet listener's certificate, and the certificate authority of the shims' certificates.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::ServerConfig;

use splitrail_config::model::FleetTls;
use splitrail_config::tls::{TlsFileError, TlsFiles};

/// The files are read no more often than this, however many connect.
const FRESH: Duration = Duration::from_secs(1);

/// What connections are secured with: what is in the configured files now.
///
/// Certificates are issued for weeks and exchanged while programs run: whoever connects is shown the one that
/// is there, not the one that was there when the router started.
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
    /// Reads them for the first time.
    ///
    /// # Errors
    /// A file cannot be read or used: with its key in the configuration.
    pub(super) fn open(files: FleetTls, now: Instant) -> io::Result<Self> {
        let opened = TlsFiles::read(&files).and_then(|read| Ok((read.server_config()?, read)));
        let (config, read) =
            opened.map_err(|error| io::Error::other(format!("fleet.tls.{error}")))?;
        Ok(Self { files, known: Mutex::new(Known { read_at: now, files: read, config }) })
    }

    /// What a connection that begins now is secured with.
    pub(super) fn current(&self, now: Instant) -> Arc<ServerConfig> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(known.read_at) >= FRESH {
            known.read_at = now;
            if let Err(error) = known.look_again(&self.files) {
                // One file may be there before the other.
                tracing::error!("fleet.tls.{error}: the earlier ones still hold");
            }
        }
        Arc::clone(&known.config)
    }
}

impl Known {
    fn look_again(&mut self, files: &FleetTls) -> Result<(), TlsFileError> {
        let files = TlsFiles::read(files)?;
        if files != self.files {
            (self.config, self.files) = (files.server_config()?, files);
            tracing::info!("fleet.tls: the files have changed, and are used from now on");
        }
        Ok(())
    }
}
