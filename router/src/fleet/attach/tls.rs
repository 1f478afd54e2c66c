//! The fleet listener's certificate, and the authority of the shims'.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};

use crate::config::model::FleetTls;

/// A PEM file is no longer than this.
const PEM_MAX_BYTES: u64 = 1 << 20;
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
    pems: Pems,
    config: Arc<ServerConfig>,
}

impl Certificates {
    /// Reads them for the first time.
    ///
    /// # Errors
    /// As `read_tls`, in words.
    pub(super) fn open(files: FleetTls, now: Instant) -> io::Result<Self> {
        let opened = Pems::read(&files).and_then(|pems| Ok((usable(&pems)?, pems)));
        let failed = |(key, why)| io::Error::other(format!("fleet.tls.{key} {why}"));
        let (config, pems) = opened.map_err(failed)?;
        Ok(Self { files, known: Mutex::new(Known { read_at: now, pems, config }) })
    }

    /// What a connection that begins now is secured with.
    pub(super) fn current(&self, now: Instant) -> Arc<ServerConfig> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(known.read_at) >= FRESH {
            known.read_at = now;
            if let Err((key, why)) = known.look_again(&self.files) {
                // One file may be there before the other.
                tracing::error!("fleet.tls.{key} {why}: the earlier ones still hold");
            }
        }
        Arc::clone(&known.config)
    }
}

impl Known {
    fn look_again(&mut self, files: &FleetTls) -> Result<(), Wrong> {
        let pems = Pems::read(files)?;
        if pems != self.pems {
            (self.config, self.pems) = (usable(&pems)?, pems);
            tracing::info!("fleet.tls: the files have changed, and are used from now on");
        }
        Ok(())
    }
}

/// The key of the configuration that is wrong, and why.
type Wrong = (&'static str, String);

/// Finds out whether the files can be read and used.
///
/// # Errors
/// The key of the configuration that is wrong, and why.
pub fn read_tls(files: &FleetTls) -> Result<(), Wrong> {
    usable(&Pems::read(files)?).map(|_| ())
}

/// What the files hold.
#[derive(PartialEq, Eq)]
struct Pems {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl Pems {
    fn read(files: &FleetTls) -> Result<Self, Wrong> {
        let client_ca = files.client_ca.as_deref().map(|path| read("client_ca", path));
        Ok(Self {
            cert: read("cert", &files.cert)?,
            key: read("key", &files.key)?,
            client_ca: client_ca.transpose()?,
        })
    }
}

fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, Wrong> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(PEM_MAX_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|error| (key, format!("cannot be read: {error}")))?;
    if bytes.len() as u64 > PEM_MAX_BYTES {
        return Err((key, "is too large".to_owned()));
    }
    Ok(bytes)
}

fn usable(pems: &Pems) -> Result<Arc<ServerConfig>, Wrong> {
    let chain = certificates("cert", &pems.cert)?;
    let key = PrivateKeyDer::from_pem_slice(&pems.key).map_err(|error| unusable("key", &error))?;
    let provider = Arc::new(default_provider());
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable("cert", &error))?;
    let config = match &pems.client_ca {
        None => config.with_no_client_auth(),
        Some(pem) => {
            let wrong = |error: &dyn Display| unusable("client_ca", error);
            let mut roots = RootCertStore::empty();
            for certificate in certificates("client_ca", pem)? {
                roots.add(certificate).map_err(|error| wrong(&error))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            let verifier = verifier.build().map_err(|error: VerifierBuilderError| wrong(&error))?;
            config.with_client_cert_verifier(verifier)
        }
    };
    let mut config =
        config.with_single_cert(chain, key).map_err(|error| unusable("cert", &error))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

fn certificates(key: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Wrong> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let all = read.map_err(|error| unusable(key, &error))?;
    match all.is_empty() {
        true => Err(unusable(key, &"it holds no certificate")),
        false => Ok(all),
    }
}

fn unusable(key: &'static str, why: &dyn Display) -> Wrong {
    (key, format!("cannot be used: {why}"))
}
