//! TLS between shims and routers, with certificates on both sides.

use std::path::{Path, PathBuf};

use tonic::transport::{Certificate, Identity, ServerTlsConfig};

use super::*;
use crate::config::Tls;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls").join(name)
}

fn server() -> ServerTlsConfig {
    let pem = |name| std::fs::read(fixture(name)).unwrap();
    ServerTlsConfig::new()
        .identity(Identity::from_pem(pem("router.pem"), pem("router.key")))
        .client_ca_root(Certificate::from_pem(pem("ca.pem")))
}

fn client(server_name: Option<&str>, with_identity: bool) -> Tls {
    Tls {
        ca: fixture("ca.pem"),
        cert: with_identity.then(|| fixture("shim.pem")),
        key: with_identity.then(|| fixture("shim.key")),
        server_name: server_name.map(str::to_owned),
    }
}

async fn attach(tls: Option<Tls>) -> (FakeRouter, Shim) {
    let router = FakeRouter::start_with(welcome(2), Some(server())).await;
    let config = AttachConfig { tls, ..config(&[&router]) };
    let shim = Shim::start(small_mirror(), config);
    (router, shim)
}

#[tokio::test]
async fn a_shim_and_a_router_verify_each_others_certificates() {
    let (router, _shim) = attach(Some(client(Some("router.test"), true))).await;
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
}

#[tokio::test]
async fn no_stream_opens_if_either_side_cannot_be_verified() {
    let wrong_name = client(Some("other.test"), true);
    for tls in
        [Some(wrong_name), Some(client(None, true)), Some(client(Some("router.test"), false)), None]
    {
        let (router, shim) = attach(tls).await;
        shim.wait_for("a failure", |status| status.last_error.is_some()).await;
        assert_eq!(router.known().attached, 0);
    }
}

#[tokio::test]
async fn certificate_files_are_read_again_for_each_connection() {
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str| std::fs::copy(fixture(name), folder.path().join(name)).unwrap();
    put("shim.pem");
    put("shim.key");
    // A key that does not match, as in the middle of a rotation.
    std::fs::copy(fixture("router.key"), folder.path().join("shim.key")).unwrap();
    let (cert, key) = (folder.path().join("shim.pem"), folder.path().join("shim.key"));
    let tls = Tls { cert: Some(cert), key: Some(key), ..client(Some("router.test"), true) };
    let (router, shim) = attach(Some(tls)).await;
    shim.wait_for("a failure", |status| status.last_error.is_some()).await;
    put("shim.key");
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
}
