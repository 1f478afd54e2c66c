//! A TLS configuration that is kept up to date with its files.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustls::ServerConfig;

use super::{ServerTerms, TlsFileError, TlsFiles, TlsPaths};

/// Minimum time between two reads of the files.
const READ_INTERVAL_MIN: Duration = Duration::from_secs(1);

/// The TLS configuration of a listener, kept up to date with the configured files.
///
/// Certificates are renewed while the router runs: a new connection gets the certificate that is in
/// the file now, not the one from when the router started.
pub struct ReloadedTls {
    paths: TlsPaths,
    terms: ServerTerms,
    known: Mutex<KnownFiles>,
}

struct KnownFiles {
    /// When the last read began.
    read_at: Instant,
    is_being_read: bool,
    files: TlsFiles,
    config: Arc<ServerConfig>,
}

impl ReloadedTls {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// A file cannot be read or used.
    pub fn open(paths: TlsPaths, terms: ServerTerms, now: Instant) -> Result<Self, TlsFileError> {
        let files = TlsFiles::read(&paths)?;
        let config = files.server_config(terms)?;
        let known = KnownFiles { read_at: now, is_being_read: false, files, config };
        Ok(Self { paths, terms, known: Mutex::new(known) })
    }

    /// The TLS configuration of the files that were read last and could be used.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.known().config)
    }

    /// The time from which on the certificate in use is not valid any more, in seconds since 1970.
    pub fn expires_unix_s(&self) -> Option<i64> {
        self.known().files.expires_unix_s()
    }

    /// The permission to read the files again, if a second has passed since the last read began
    /// and that read has ended.
    pub fn due(self: &Arc<Self>, now: Instant) -> Option<DueRead> {
        let mut known = self.known();
        let is_due = now.saturating_duration_since(known.read_at) >= READ_INTERVAL_MIN;
        if known.is_being_read || !is_due {
            return None;
        }
        (known.read_at, known.is_being_read) = (now, true);
        Some(DueRead(Arc::clone(self)))
    }

    /// A panic while the lock was held cannot leave the state half-changed.
    fn known(&self) -> MutexGuard<'_, KnownFiles> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The permission to read the files of a [`ReloadedTls`]; nobody else has one at the same time.
pub struct DueRead(Arc<ReloadedTls>);

impl DueRead {
    /// Reads the files, and uses them from now on if they have changed; returns whether they have.
    /// Blocks the thread for as long as the file system takes.
    ///
    /// # Errors
    /// A file cannot be read or used; the previous files stay in use. A certificate and its key may
    /// be replaced one after the other, so this can be temporary.
    pub fn read(self) -> Result<bool, TlsFileError> {
        let tls = &self.0;
        let files = TlsFiles::read(&tls.paths)?;
        if files == tls.known().files {
            return Ok(false);
        }
        let config = files.server_config(tls.terms)?;
        let mut known = tls.known();
        (known.files, known.config) = (files, config);
        Ok(true)
    }
}

impl Drop for DueRead {
    fn drop(&mut self) {
        self.0.known().is_being_read = false;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::super::Protocols;
    use super::*;
    use crate::model::ClientCertificates;

    fn fixture(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/config/tls").join(name)
    }

    #[test]
    fn files_are_read_once_a_second_by_one_reader_and_broken_ones_are_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::copy(fixture("router.pem"), path("cert")).unwrap();
        std::fs::copy(fixture("router.key"), path("key")).unwrap();
        let paths = TlsPaths { cert: path("cert"), key: path("key"), client_ca: None };
        let terms = ServerTerms {
            protocols: Protocols::Http,
            client_certificates: ClientCertificates::Optional,
        };
        let start = Instant::now();
        let tls = Arc::new(ReloadedTls::open(paths, terms, start).unwrap());
        let first = tls.config();
        assert!(tls.due(start).is_none(), "the files were just read");

        let later = start + READ_INTERVAL_MIN;
        let due = tls.due(later).unwrap();
        assert!(tls.due(later + READ_INTERVAL_MIN).is_none(), "the files are being read");
        assert!(!due.read().unwrap());
        assert!(tls.due(later).is_none(), "the files were just read");

        let later = later + READ_INTERVAL_MIN;
        std::fs::write(path("key"), "half of a k").unwrap();
        assert_eq!(tls.due(later).unwrap().read().unwrap_err().key, "key");
        assert!(Arc::ptr_eq(&first, &tls.config()), "the previous files stay in use");

        let later = later + READ_INTERVAL_MIN;
        std::fs::copy(fixture("router.key"), path("key")).unwrap();
        let cert = std::fs::read_to_string(fixture("router.pem")).unwrap();
        std::fs::write(path("cert"), format!("{cert}\n")).unwrap();
        assert!(tls.due(later).unwrap().read().unwrap());
        assert!(!Arc::ptr_eq(&first, &tls.config()), "the new files are in use");
    }
}
