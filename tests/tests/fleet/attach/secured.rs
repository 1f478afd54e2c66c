//! TLS between shim and router.

use std::path::Path;
use std::time::Duration;

use splitrail_tests::Cluster;
use splitrail_tests::cluster::eventually;
use splitrail_tests::shim::{Shim, hello};
use splitrail_tests::tls::expiring::ExpiringIdentity;
use tonic::Code;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::support::{fleet_address, router};

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
    secured_by(&fixture("router.pem"), &fixture("router.key"), &ca).await
}

async fn secured_by(cert: &str, key: &str, ca: &str) -> Cluster {
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
    let endpoint =
        Endpoint::from_shared(format!("https://{}", fleet_address(router))).expect("an address");
    endpoint.tls_config(tls).expect("a configuration").connect_lazy()
}

#[tokio::test]
async fn shims_see_the_routers_certificate() {
    let router = secured(false).await;
    let hello = hello("s0", "http://127.0.0.1:9");
    let shim = Shim::attach_over(channel(&router, None), None, hello.clone()).await;
    assert_eq!(shim.expect("it may attach").welcome.model, "sim");
    assert!(Shim::attach(fleet_address(&router), hello).await.is_err(), "plain text is not spoken");
}

#[tokio::test]
async fn only_certificates_of_the_authority_are_let_in() {
    let router = secured(true).await;
    let hello = hello("s0", "http://127.0.0.1:9");
    for stranger in [None, Some("stranger")] {
        let shim = Shim::attach_over(channel(&router, stranger), None, hello.clone()).await;
        assert!(shim.is_err(), "{stranger:?}");
    }
    let shim = Shim::attach_over(channel(&router, Some("shim")), None, hello).await;
    assert_eq!(shim.expect("it may attach").welcome.model, "sim");
}

#[tokio::test]
async fn a_certificate_speaks_for_the_workers_that_it_names() {
    let more = format!(", client_ca: {:?}, client_workers: dns_names", fixture("ca.pem"));
    let router = secured_by(&fixture("router.pem"), &fixture("router.key"), &more).await;
    let attach = async |id: &str| {
        let hello = hello(id, "http://127.0.0.1:9");
        let shim = Shim::attach_over(channel(&router, Some("shim")), None, hello).await;
        shim.map(|shim| shim.welcome.model).map_err(|status| status.code())
    };
    for id in ["s0", "shim-2", "w0", "s:0", "127.0.0.1"] {
        assert_eq!(attach(id).await, Err(Code::PermissionDenied), "{id}");
    }
    assert_eq!(attach("shim").await.as_deref(), Ok("sim"));
}

#[tokio::test]
async fn an_expired_certificate_attaches_nothing_over_an_open_connection() {
    let ca = format!(", client_ca: {:?}", fixture("clients/issuing.pem"));
    let router = secured_by(&fixture("router.pem"), &fixture("router.key"), &ca).await;
    let brief = ExpiringIdentity::new(Duration::from_secs(20));
    let channel = channel(&router, Some(&brief.name()));
    let attach = |hello| Shim::attach_over(channel.clone(), None, hello);
    let mut attached = attach(hello("s0", "http://127.0.0.1:9")).await.expect("it may attach");
    brief.expired().await;
    let refused = attach(hello("s1", "http://127.0.0.1:10")).await;
    assert_eq!(refused.map(|_| ()).map_err(|status| status.code()), Err(Code::Unauthenticated));
    // An open stream stays open, as with a token.
    attached.snapshot("m", 1, vec![]).await;
    attached.acked(1).await;
}

#[tokio::test]
async fn a_certificate_is_exchanged_while_the_router_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let put = |name: &str| {
        std::fs::copy(fixture(&format!("{name}.key")), path("tls.key")).expect("copied");
        std::fs::copy(fixture(&format!("{name}.pem")), path("tls.pem")).expect("copied");
    };
    put("stranger");
    let router = secured_by(&path("tls.pem"), &path("tls.key"), "").await;
    let attach = async || {
        Shim::attach_over(channel(&router, None), None, hello("s0", "http://127.0.0.1:9")).await
    };
    assert!(attach().await.is_err(), "nobody vouches for it");

    put("router");
    // The files are looked at once a second.
    eventually("the new certificate is shown", async || attach().await.is_ok()).await;

    std::fs::write(path("tls.key"), "half of a k").expect("written");
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert!(attach().await.is_ok(), "the earlier one holds until there is a whole one");
}
