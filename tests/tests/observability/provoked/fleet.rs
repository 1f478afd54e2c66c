//! Alerts about the fleet: which workers there are, and what is heard of them.

use splitrail_proto::v1;
use splitrail_sim::{Fault, FaultKind};
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::shim::{Shim, hello};
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use tonic::Code;

use super::Watched;

#[tokio::test]
async fn a_worker_that_is_ejected_again_and_again_fires_worker_ejected() {
    // As by default, each ejection is longer than the one before, and ends.
    let ejection = "{ interval: 1s, requests_min: 3, base_time: 100ms, ejected_percent_max: 50 }";
    let watched = Watched::start(Spec {
        policy: "{ kind: round_robin }",
        model: format!("breaker: {{ failures: 0 }}\nhealth: {{ ejection: {ejection} }}"),
        ..Spec::aggregated(3)
    })
    .await;
    watched.is_healthy().await;
    let kind = FaultKind::Status { status: 500 };
    watched.cluster.engine("w1").set_fault(Fault { kind, times: None });
    let again = [("worker", "w1"), ("to", "ejected")];
    let mut turn = 0;
    eventually("the worker is ejected four times", async || {
        turn += 1;
        let body = completion(&prompt(20, &format!("eject{turn}-")));
        assert_eq!(watched.cluster.http.post(COMPLETIONS, &body).await.status, 200);
        watched.cluster.metric("splitrail_worker_transitions_total", &again).await >= 4.0
    })
    .await;
    watched.fires(&["SplitrailWorkerEjected"]).await;
}

#[tokio::test]
async fn prompts_whose_prefill_legs_fail_fire_prefill_fallbacks() {
    let model = "breaker: { failures: 0 }".into();
    let watched = Watched::start(Spec { model, ..Spec::default() }).await;
    watched.is_healthy().await;
    for engine in ["p0", "p1"] {
        let kind = FaultKind::Status { status: 500 };
        watched.cluster.engine(engine).set_fault(Fault { kind, times: None });
    }
    for turn in 0..3 {
        let body = completion(&prompt(40, &format!("falls{turn}-back")));
        assert_eq!(watched.cluster.http.post(COMPLETIONS, &body).await.status, 200);
    }
    watched.fires(&["SplitrailPrefillFallbacks"]).await;
}

#[tokio::test]
async fn a_name_that_cannot_be_resolved_fires_discovery_fails() {
    // RFC 6761: a name that nobody has.
    let source =
        "{ kind: dns, name: engines.invalid, port: 8000, role: both, refresh_interval: 1s }";
    let model = format!("discovery: [ {source} ]");
    let watched = Watched::start(Spec { model, ..Spec::aggregated(1) }).await;
    watched.fires(&["SplitrailDiscoveryFails"]).await;
}

#[tokio::test]
async fn a_shim_that_is_refused_again_and_again_fires_shims_refused() {
    let watched = Watched::start(Spec { fleet: true, ..Spec::aggregated(1) }).await;
    watched.is_healthy().await;
    let listener = watched.cluster.running.addresses.fleet.unwrap();
    let hello = v1::Hello { model: "unknown".into(), ..hello("stranger", "http://127.0.0.1:1") };
    let refused = Shim::attach(listener, hello).await.err().unwrap();
    assert_eq!(refused.code(), Code::NotFound);
    watched.fires(&["SplitrailShimsRefused"]).await;
}
