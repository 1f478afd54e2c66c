//! Client certificates on a TLS listener: requests know the names in them.

use std::path::{Path, PathBuf};

use axum::Router;
use axum::extract::Request;
use axum::routing::get;
use prometheus::{IntCounterVec, Opts};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use splitrail_config::model::{ClientCertificates, Limits};
use splitrail_config::tls::TlsPaths;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

use super::super::connection::{self, Common, ConnectionBounds};
use super::super::connection_service::Routes;
use super::*;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tls").join(name)
}

/// Replies with the URIs of the client's certificate.
fn routes() -> Routes {
    let uris = |request: Request| {
        let certificate = request.extensions().get::<Arc<ClientCertificate>>();
        let uris = certificate.map(|certificate| certificate.uris.join(" "));
        std::future::ready(uris.unwrap_or_else(|| "none".to_owned()))
    };
    Router::new().route("/", get(uris)).into()
}

fn common() -> Common {
    let terms = ServerTerms {
        protocols: Protocols::Http,
        client_certificates: ClientCertificates::Optional,
    };
    let paths = TlsPaths {
        cert: fixture("router.pem"),
        key: fixture("router.key"),
        client_ca: Some(fixture("clients/ca.pem")),
    };
    let tls = TlsListener {
        name: "http",
        files: Arc::new(ReloadedTls::open(paths, terms, Instant::now()).unwrap()),
        accepts_plain_text: false,
        expires: IntGauge::new("expires", "x").unwrap(),
        throttle: LogThrottle::default(),
    };
    Common {
        routes: routes(),
        tls: Some(Arc::new(tls)),
        listener: "http",
        cut: IntCounterVec::new(Opts::new("cut", "x"), &["listener", "reason"]).unwrap(),
        stop: CancellationToken::new(),
    }
}

fn client(identity: Option<&str>) -> ClientConfig {
    let chain = |name: &str| vec![CertificateDer::from_pem_file(fixture(name)).unwrap()];
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(chain("ca.pem"));
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    match identity {
        None => config.with_no_client_auth(),
        Some(name) => {
            let key = PrivateKeyDer::from_pem_file(fixture(&format!("{name}.key"))).unwrap();
            config.with_client_auth_cert(chain(&format!("{name}.pem")), key).unwrap()
        }
    }
}

/// Also on a further connection of the same client.
#[tokio::test]
async fn requests_know_the_names_of_their_clients_certificate() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let common = common();
    let mut connections = JoinSet::new();
    let names = "spiffe://clusters.example/tenant/acme urn:acme:batch";
    for (identity, expected) in [(None, "none"), (Some("clients/acme"), names)] {
        let config = Arc::new(client(identity));
        for _ in 0..2 {
            let socket = TcpStream::connect(address).await.unwrap();
            let (accepted, peer) = listener.accept().await.unwrap();
            let bounds = ConnectionBounds::from(&Limits::default());
            connections.spawn(connection::serve(accepted, peer, bounds, common.clone()));
            let name = ServerName::try_from("localhost").unwrap();
            let connector = TlsConnector::from(Arc::clone(&config));
            let mut stream = connector.connect(name, socket).await.unwrap();
            let request = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
            stream.write_all(request).await.unwrap();
            let mut reply = String::new();
            stream.read_to_string(&mut reply).await.unwrap();
            assert!(reply.ends_with(&format!("\r\n\r\n{expected}")), "{reply}");
        }
    }
}
