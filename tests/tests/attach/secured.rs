//! TLS between side-car and router.

use std::path::Path;

use splitrail_tests::Cluster;
use splitrail_tests::side_car::{SideCar, hello};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::support::{door, router};

fn fixture(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tls");
    folder.join(name).display().to_string()
}

fn pem(name: &str) -> Vec<u8> {
    std::fs::read(fixture(name)).expect("a fixture")
}

async fn secured(client_ca: bool) -> Cluster {
    let ca =
        if client_ca { format!(", client_ca: {:?}", fixture("ca.pem")) } else { String::new() };
    let (cert, key) = (fixture("router.pem"), fixture("router.key"));
    router(&format!("fleet: {{ tls: {{ cert: {cert:?}, key: {key:?}{ca} }} }}")).await
}

fn channel(router: &Cluster, identity: Option<&str>) -> Channel {
    let mut tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(pem("ca.pem")))
        .domain_name("localhost");
    if let Some(name) = identity {
        let (cert, key) = (pem(&format!("{name}.pem")), pem(&format!("{name}.key")));
        tls = tls.identity(Identity::from_pem(cert, key));
    }
    let endpoint = Endpoint::from_shared(format!("https://{}", door(router))).expect("an address");
    endpoint.tls_config(tls).expect("a configuration").connect_lazy()
}

#[tokio::test]
async fn side_cars_see_the_routers_certificate() {
    let router = secured(false).await;
    let hello = hello("s0", "http://127.0.0.1:9");
    let car = SideCar::attach_over(channel(&router, None), None, hello.clone()).await;
    assert_eq!(car.expect("it may attach").welcome.model, "sim");
    assert!(SideCar::attach(door(&router), hello).await.is_err(), "plain text is not spoken");
}

#[tokio::test]
async fn only_certificates_of_the_authority_are_let_in() {
    let router = secured(true).await;
    let hello = hello("s0", "http://127.0.0.1:9");
    for stranger in [None, Some("stranger")] {
        let car = SideCar::attach_over(channel(&router, stranger), None, hello.clone()).await;
        assert!(car.is_err(), "{stranger:?}");
    }
    let car = SideCar::attach_over(channel(&router, Some("side-car")), None, hello).await;
    assert_eq!(car.expect("it may attach").welcome.model, "sim");
}
