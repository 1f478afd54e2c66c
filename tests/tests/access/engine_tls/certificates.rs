//! Engines that are not who they should be, or that refuse the router.

use serde_json::Value;
use splitrail_tests::cluster::eventually;
use splitrail_tests::front::Front;
use splitrail_tests::raw_engine::{RawEngine, Turn, reply};
use splitrail_tests::tls_server::{ServerCertificate, TlsServer, fixture};
use splitrail_tests::trial::{Trial, either, error_of, prompt};
use splitrail_tests::{Cluster, Spec};

use super::{behind, identity, section};

async fn reason(cluster: &Cluster) -> String {
    let workers: Value = cluster.admin.get("/admin/workers").await.json();
    workers["workers"][0]["state_why"].as_str().unwrap_or_default().to_owned()
}

/// Requests fail with the error of an unreachable engine, the reason is shown, and the engine behind
/// the TLS server gets nothing.
async fn is_unreachable(certificate: ServerCertificate, model: String, because: &str) {
    let spec = Spec { policy: "{ kind: least_loaded }", ..Spec::aggregated(0) };
    let engine = RawEngine::start(|_| Turn::answer(reply(200, "application/json", "{}"))).await;
    let server = TlsServer::start(engine.url()["http://".len()..].parse().unwrap(), certificate);
    let server = server.await;
    let worker = format!("{{ id: w0, role: both, url: \"{}\" }}", server.url());
    let spec = behind(certificate, model, Spec { extra_workers: vec![worker], ..spec });
    let mut trial = Trial::start(spec).await;
    eventually(because, async || reason(&trial.cluster).await.contains(because)).await;
    for turn in 0..3 {
        let (path, body) = either(turn, &prompt(30, "u"));
        let reply = trial.post("engine_unreachable", path, &body).await;
        assert_eq!(reply.status, 502, "{}", reply.text());
        error_of(&reply.json());
        assert!(!reply.text().contains("certificate"), "clients learn nothing of certificates");
    }
    assert_eq!(engine.heard().len(), 0, "no request is sent");
    trial.finish().await;
}

#[tokio::test]
async fn an_engine_with_a_certificate_of_another_authority_gets_no_request() {
    is_unreachable(
        ServerCertificate::named("router"),
        section(""),
        "its certificate is not from an authority in engine_tls.ca",
    )
    .await;
}

#[tokio::test]
async fn an_engine_with_a_certificate_that_the_system_does_not_trust_gets_no_request() {
    is_unreachable(
        ServerCertificate::VALID,
        String::new(),
        "its certificate is not from an authority that the system trusts",
    )
    .await;
}

#[tokio::test]
async fn an_engine_with_a_certificate_for_another_name_gets_no_request() {
    let why = "its certificate is not for the name 127.0.0.1";
    is_unreachable(ServerCertificate::named("engines/elsewhere"), section(""), why).await;
    let why = "its certificate is not for the name engines.example";
    let named = section(", server_name: engines.example");
    is_unreachable(ServerCertificate::VALID, named, why).await;
}

#[tokio::test]
async fn an_engine_whose_certificate_has_expired_gets_no_request() {
    let certificate = ServerCertificate::named("engines/expired");
    is_unreachable(certificate, section(""), "its certificate has expired").await;
}

#[tokio::test]
async fn an_engine_that_demands_a_certificate_is_unreachable_without_a_valid_one() {
    let certificate = ServerCertificate { demands_certificate: true, ..ServerCertificate::VALID };
    let why = "it demands a certificate of the router";
    is_unreachable(certificate, section(""), why).await;
    let strange = section(&identity("stranger"));
    is_unreachable(certificate, strange, "it refuses the router's certificate").await;
}

#[tokio::test]
async fn the_name_of_certificates_can_be_set_for_all_engines() {
    let certificate = ServerCertificate::named("engines/elsewhere");
    let named = section(", server_name: engines.example");
    let cluster = Cluster::start(behind(certificate, named, Spec::aggregated(1))).await;
    let (path, body) = either(0, &prompt(8, "n"));
    assert_eq!(cluster.http.post(path, &body).await.status, 200);
}

#[tokio::test]
async fn an_engine_without_tls_behind_an_https_url_gets_no_request() {
    let engine = RawEngine::start(|_| Turn::answer(reply(200, "application/json", "{}"))).await;
    let url = engine.url().replace("http://", "https://");
    let worker = format!("{{ id: w0, role: both, url: \"{url}\" }}");
    let spec = Spec { model: section(""), extra_workers: vec![worker], ..Spec::aggregated(0) };
    let mut trial = Trial::start(spec).await;
    let (path, body) = either(0, &prompt(30, "p"));
    assert_eq!(trial.post("engine_unreachable", path, &body).await.status, 502);
    assert_eq!(engine.heard().len(), 0);
    trial.finish().await;
}

#[tokio::test]
async fn requests_go_to_other_workers_and_the_log_says_why() {
    let engine =
        RawEngine::start(|_| Turn::answer(reply(200, "application/json", "{\"id\": \"x\"}"))).await;
    let address = engine.url()["http://".len()..].parse().unwrap();
    let expired = TlsServer::start(address, ServerCertificate::named("engines/expired")).await;
    let valid = TlsServer::start(address, ServerCertificate::VALID).await;
    let ca = format!("engine_tls: {{ ca: {:?} }}", fixture("engines/ca.pem"));
    let front = Front::start("{}", &ca, &[expired.url(), valid.url()]).await;
    for _ in 0..20 {
        let (path, body) = either(1, "x");
        assert_eq!(front.http.post(path, &body).await.status, 200);
    }
    let up = async |worker| front.metric("splitrail_worker_up", &[("worker", worker)]).await;
    eventually("the router knows", async || up("w0").await + up("w1").await == 1.0).await;
    assert_eq!((expired.secured(), engine.heard().len()), (0, 20));
    let log = front.log();
    let said = log.lines().filter(|line| line.contains("its certificate has expired")).count();
    assert_eq!(said, 1, "once, and not for each attempt:\n{log}");
}
