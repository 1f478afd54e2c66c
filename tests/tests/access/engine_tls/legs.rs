//! Requests, hand-offs and streams over TLS.

use serde_json::json;
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::cluster::eventually;
use splitrail_tests::shim::{Shim, hello};
use splitrail_tests::tls_server::{ServerCertificate, TlsServer};
use splitrail_tests::trial::{Reference, Trial, either, prompt, streamed};
use splitrail_tests::{Cluster, Spec};

use super::{behind, handshakes, identity, section, secured};

/// Asks on both endpoints, streamed and not, and compares with an engine without TLS.
async fn answers_are_the_same(trial: &mut Trial, flow: &str) {
    let reference = Reference::start().await;
    for turn in 0..4 {
        let (path, body) = either(turn, &prompt(40, &format!("t{turn}-")));
        let expected = reference.text(path, &body).await;
        let reply = trial.post("ok", path, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.route("flow"), Some(flow));
        assert_eq!(whole_text(&reply.json(), 0), expected);
        let mut events = trial.stream("ok", path, &streamed(&body)).await;
        assert_eq!(streamed_text(&events.chunks().await, 0), expected);
    }
}

#[tokio::test]
async fn aggregated_requests_and_streams_are_served_over_tls() {
    let mut trial = Trial::start(secured(Spec::aggregated(1))).await;
    answers_are_the_same(&mut trial, "aggregated").await;
    // Eight requests, of four kinds, and the router's own questions.
    let handshakes = handshakes(&trial.cluster, "w0");
    assert!((1..8).contains(&handshakes), "connections are kept: {handshakes}");
    trial.finish().await;
}

#[tokio::test]
async fn hand_offs_are_made_and_used_over_tls() {
    let mut trial = Trial::start(secured(Spec { decode: 1, ..Spec::default() })).await;
    answers_are_the_same(&mut trial, "prefill_first").await;
    let told = [("leg", "decode"), ("source", "external_kv_transfer")];
    let transferred = trial.cluster.metric("splitrail_prompt_tokens_total", &told).await;
    assert!(transferred > 0.0);
    assert_eq!(trial.local_prefills().await, 0.0);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn large_requests_are_sent_whole() {
    let cluster = Cluster::start(secured(Spec::aggregated(1))).await;
    // More than TLS buffers and more than a socket takes at once.
    let tokens: Vec<u32> = (0..400_000).map(|token| 5 + token % 90).collect();
    let body = json!({"model": "sim", "prompt": tokens, "max_tokens": 1});
    let reply = cluster.http.post("/v1/completions", &body).await;
    // A prompt of this length is refused by the engine, which has read the whole of it.
    let text = reply.text();
    assert!(reply.status == 200 || reply.status == 400, "{} {text}", reply.status);
    let asked = cluster.engine("w0").requests();
    let last = asked.iter().rfind(|request| request.path == "/v1/completions").unwrap();
    assert_eq!(last.body["prompt"].as_array().map(Vec::len), Some(tokens.len()));
}

#[tokio::test]
async fn an_engine_that_demands_a_certificate_serves_a_router_that_has_one() {
    let certificate = ServerCertificate { demands_certificate: true, ..ServerCertificate::VALID };
    let spec = behind(certificate, section(&identity("engines/router")), Spec::aggregated(1));
    let mut trial = Trial::start(spec).await;
    answers_are_the_same(&mut trial, "aggregated").await;
    trial.finish().await;
}

#[tokio::test]
async fn an_engine_is_asked_to_stop_when_the_client_of_a_stream_leaves() {
    let spec =
        Spec { engine: |_, config| config.decode_us_per_step = 20_000, ..Spec::aggregated(1) };
    let cluster = Cluster::start(secured(spec)).await;
    let body = json!({"model": "sim", "prompt": "x", "max_tokens": 2000, "stream": true});
    let mut events = cluster.http.stream("/v1/completions", &body).await;
    assert!(events.next().await.is_some());
    drop(events);
    eventually("the engine has nothing to do", async || cluster.engine("w0").state().running == 0)
        .await;
}

#[tokio::test]
async fn a_worker_with_an_https_url_joins_over_the_admin_listener() {
    let cluster = Cluster::start(secured(Spec::aggregated(2))).await;
    let extra = TlsServer::start(cluster.engine("w0").http_addr(), ServerCertificate::VALID).await;
    let worker = json!({"id": "x", "role": "both", "url": extra.url()});
    let reply = cluster.admin.post("/admin/workers", &json!({ "worker": worker })).await;
    assert!(reply.status.is_success(), "{}", reply.text());
    eventually("the worker has answered over TLS", async || extra.secured() > 0).await;
    let up = || cluster.metric("splitrail_worker_up", &[("worker", "x")]);
    eventually("the worker is up", async || up().await == 1.0).await;
}

#[tokio::test]
async fn a_worker_that_a_shim_announces_with_an_https_url_is_reached_over_tls() {
    let model = format!("{}\ndiscovery: [{{ kind: shim }}]", section(""));
    let spec = Spec { fleet: true, policy: "{ kind: round_robin }", ..Spec::aggregated(1) };
    let cluster = Cluster::start(behind(ServerCertificate::VALID, model, spec)).await;
    let server = TlsServer::start(cluster.engine("w0").http_addr(), ServerCertificate::VALID).await;
    let fleet = cluster.running.addresses.fleet.unwrap();
    let _shim = Shim::attach(fleet, hello("s0", &server.url())).await.unwrap();
    cluster.admin.post_with("/admin/workers/w0/drain", &[], "").await;
    let (path, body) = either(0, &prompt(8, "s"));
    let reply = cluster.http.post(path, &body).await;
    assert_eq!((reply.status.as_u16(), reply.route("decode")), (200, Some("s0")));
    assert!(server.secured() > 0);
}
