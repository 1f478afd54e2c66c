//! Measures whole replies over kept TLS connections, through the router and through nginx with the
//! same certificate.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{CipherSuite, ClientConfig, RootCertStore};

use super::client::Load;
use super::engines::Engines;
use super::report::{Cell, Row};
use super::targets::{Kind, Settings, Target};
use super::text::{SIZES, Text};
use super::{Bench, Failure, cell};
use crate::fleet::report::print_line;

/// Number of clients, each with one connection.
const CLIENTS: usize = 16;

/// The only cipher suite that clients offer, so that all servers use the same one. It is the first
/// choice of OpenSSL, and therefore of most clients in Python.
const CIPHER_SUITE: CipherSuite = CipherSuite::TLS13_AES_256_GCM_SHA384;

/// The name in the certificate.
const SERVER_NAME: &str = "localhost";

/// The files of a server's certificate.
pub(super) struct Certificate {
    /// The file with the certificate.
    pub(super) chain: PathBuf,
    /// The file with the private key (ECDSA, P-256).
    pub(super) key: PathBuf,
    /// The file with the certificate of the authority.
    authority: PathBuf,
}

impl Certificate {
    /// The certificate of the workspace's tests.
    fn of_tests() -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tls");
        let [chain, key, authority] =
            ["router.pem", "router.key", "ca.pem"].map(|name| folder.join(name));
        Self { chain, key, authority }
    }

    /// A connector for clients that trust this certificate's authority.
    ///
    /// # Errors
    /// A file is missing or contains no certificate.
    pub(super) fn connector(&self) -> Result<TlsConnector, Failure> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&self.authority)?)?;
        let all = ring::default_provider();
        let suites = all.cipher_suites.iter().filter(|suite| suite.suite() == CIPHER_SUITE);
        let provider = CryptoProvider { cipher_suites: suites.copied().collect(), ..all };
        let config = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[&TLS13])?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Arc::new(config).into())
    }
}

/// The name by which clients know a server with a [`Certificate`].
///
/// # Errors
/// None in practice: the name is valid.
pub(super) fn server_name() -> Result<ServerName<'static>, Failure> {
    Ok(ServerName::try_from(SERVER_NAME)?)
}

/// Measures whole replies to 1 KB prompts over TLS, and an engine without TLS.
///
/// # Errors
/// The router does not become ready, or a request gets no good reply.
pub(super) fn tls(
    bench: &Bench<'_>,
    engines: &Engines,
    text: &Text,
    folder: &Path,
) -> Result<Vec<Row>, Failure> {
    if !bench.options.wants("tls") {
        return Ok(Vec::new());
    }
    let certificate = Certificate::of_tests();
    let mut targets = vec![Target::direct(engines)];
    match bench.engine_runtime.block_on(Target::nginx(engines, Some(&certificate), folder)) {
        Ok(nginx) => targets.push(nginx),
        Err(error) => print_line(&format!("nginx is left out: {error}"))?,
    }
    let beside = bench.options.beside.as_ref().map(|other| (Target::beside_name("tls"), other));
    for (name, program) in [("tls", &bench.options.splitrail)].into_iter().chain(beside) {
        let settings =
            Settings { certificate: Some(&certificate), ..Kind::Aggregated(engines).into() };
        let variables = [("RUST_LOG", bench.options.program().1)];
        let starting = Target::ours_in(name, settings, program, folder, &variables);
        targets.push(bench.engine_runtime.block_on(starting)?);
    }
    let load = Arc::new(Load::new(&text.prompts(SIZES[0]), false));
    let how = (CLIENTS, false);
    let cell = cell(bench.client_runtime, bench.effort, &targets, (SIZES[0].name, &load), how)?;
    Ok(Cell::rows(&cell))
}
