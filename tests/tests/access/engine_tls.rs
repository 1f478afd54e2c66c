//! TLS towards engines: the same replies as without it, and none from an engine whose certificate
//! is not valid.

mod certificates;
mod kept;
mod legs;
mod reload;

use splitrail_tests::tls_server::{ServerCertificate, fixture};
use splitrail_tests::{Cluster, Spec};

/// The model's section with these members; the authority is that of the engines.
fn section(more: &str) -> String {
    format!("engine_tls: {{ ca: {:?}{more} }}", fixture("engines/ca.pem"))
}

/// The members for the certificate with this name.
fn identity(name: &str) -> String {
    let file = |end: &str| fixture(&format!("{name}.{end}"));
    format!(", cert: {:?}, key: {:?}", file("pem"), file("key"))
}

/// Engines behind TLS servers with this certificate.
fn behind(certificate: ServerCertificate, model: String, spec: Spec) -> Spec {
    Spec { tls: Some(certificate), model, ..spec }
}

/// A cluster whose engines are reached over TLS.
fn secured(spec: Spec) -> Spec {
    behind(ServerCertificate::VALID, section(""), spec)
}

/// Number of handshakes of an engine's TLS server.
fn handshakes(cluster: &Cluster, name: &str) -> usize {
    let at = cluster.engines.iter().position(|(other, _)| other == name).unwrap();
    cluster.tls[at].secured()
}
