//! Encrypted, and each side sure of the other.

use tonic::transport::{Certificate, Identity, ServerTlsConfig};

use super::super::Tls;
use super::*;

macro_rules! pem {
    ($name:literal) => {
        include_bytes!(concat!("../../../tests/fixtures/tls/", $name)).as_slice()
    };
}

fn server() -> ServerTlsConfig {
    ServerTlsConfig::new()
        .identity(Identity::from_pem(pem!("router.pem"), pem!("router.key")))
        .client_ca_root(Certificate::from_pem(pem!("ca.pem")))
}

fn client(server_name: Option<&str>, with_identity: bool) -> Tls {
    let identity = || (pem!("shim.pem").to_vec(), pem!("shim.key").to_vec());
    Tls {
        ca_pem: pem!("ca.pem").to_vec(),
        identity_pem: with_identity.then(identity),
        server_name: server_name.map(str::to_owned),
    }
}

async fn attach(tls: Option<Tls>) -> (FakeRouter, SideCar) {
    let router = FakeRouter::start_with(welcome(2), Some(server())).await;
    let config = Config { tls, ..config(&[&router]) };
    let side_car = SideCar::start(small_mirror(), config);
    (router, side_car)
}

#[tokio::test]
async fn both_sides_show_a_certificate() {
    let (router, _side_car) = attach(Some(client(Some("router.test"), true))).await;
    router.wait_for("a copy", |known| known.snapshots == 1).await;
}

#[tokio::test]
async fn whoever_cannot_be_verified_is_told_nothing() {
    let wrong_name = client(Some("other.test"), true);
    for tls in
        [Some(wrong_name), Some(client(None, true)), Some(client(Some("router.test"), false)), None]
    {
        let (router, side_car) = attach(tls).await;
        side_car.wait_for("a failure", |status| status.last_error.is_some()).await;
        assert_eq!(router.known().attached, 0);
    }
}

#[test]
fn keys_are_shown_to_nobody() {
    let shown = format!("{:?}", client(None, true));
    assert!(shown.contains("has_identity: true") && !shown.contains("80, 82, 73"), "{shown}");
}
