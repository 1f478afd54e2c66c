//! What metrics count of requests: calls that are refused early, waits in the queue, the parts of
//! streams, and models that are removed.

use serde_json::json;
use splitrail_proto::v1;
use splitrail_sim::{Fault, FaultKind};
use splitrail_tests::cluster::eventually;
use splitrail_tests::grpc::{grpc_client, text_request};
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::tenants::{Keys, bearer};
use splitrail_tests::trial::{COMPLETIONS, completion, prompt, streamed};
use splitrail_tests::{Cluster, Spec};
use tokio::task::JoinSet;
use tonic::{Code, Request};

#[tokio::test]
async fn calls_over_grpc_that_end_without_a_request_are_counted_once() {
    let mut keys = Keys::empty();
    let acme = keys.tenant("acme");
    let top = format!("{}\ntenants:\n  - {{ name: acme }}\n", keys.auth());
    let cluster = Cluster::start(Spec { top, ..Spec::aggregated(1) }).await;
    let address = cluster.running.addresses.grpc.unwrap();
    let good = || text_request(&prompt(4, "counted"), "");
    let of = |endpoint, outcome| [("model", "none"), ("endpoint", endpoint), ("outcome", outcome)];
    let requests = "splitrail_requests_total";

    let refused = grpc_client(address).generate(Request::new(good())).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    assert_eq!(cluster.metric(requests, &of("none", "invalid_api_key")).await, 1.0);

    // A compressed message is refused before it is read.
    let mut compressed = with_key(&acme, good());
    compressed.metadata_mut().insert("grpc-encoding", "gzip".parse().unwrap());
    let refused = grpc_client(address).generate(compressed).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    assert_eq!(cluster.metric(requests, &of("none", "refused")).await, 1.0);

    grpc_client(address)
        .list_models(with_key(&acme, v1::ListModelsRequest::default()))
        .await
        .unwrap();
    assert_eq!(cluster.metric(requests, &of("models", "ok")).await, 1.0);
    let denied = grpc_client(address)
        .explain(with_key(&acme, v1::ExplainRequest::default()))
        .await
        .unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied);
    assert_eq!(cluster.metric(requests, &of("explain", "permission_denied")).await, 1.0);

    let results = "splitrail_request_results_total";
    let none = |result| [("model", "none"), ("result", result)];
    assert_eq!(cluster.metric(results, &none("invalid")).await, 3.0);
    assert_eq!(cluster.metric(results, &none("ok")).await, 1.0);
    assert_eq!(cluster.metric("splitrail_request_seconds_count", &[("model", "none")]).await, 4.0);
    // Explain is off, so that its sender was not identified.
    let tenant = "splitrail_tenant_requests_total";
    let of_tenant = |outcome| [("tenant", "acme"), ("outcome", outcome)];
    assert_eq!(cluster.metric(tenant, &of_tenant("refused")).await, 1.0);
    assert_eq!(cluster.metric(tenant, &of_tenant("ok")).await, 1.0);
}

fn with_key<T>(key: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", bearer(key).parse().unwrap());
    request
}

#[tokio::test]
async fn waits_in_the_queue_are_those_of_requests_that_entered_it() {
    let cluster = Cluster::start(Spec::queued("max_waiting: 1")).await;
    let mut sent = JoinSet::new();
    // One is at work, and one waits.
    for (name, depth) in [("first", 0.0), ("second", 1.0)] {
        let (http, body) = (cluster.http.clone(), completion(&prompt(2000, name)));
        sent.spawn(async move { http.post(COMPLETIONS, &body).await });
        eventually(&format!("{depth} wait"), async || {
            cluster.metric("splitrail_queue_depth", &[]).await == depth
                && cluster.metric("splitrail_requests_in_flight", &[]).await == depth + 1.0
        })
        .await;
    }
    let waits = async || cluster.metric("splitrail_queue_wait_seconds_count", &[]).await;
    let before = waits().await;
    for turn in 0..3 {
        let body = completion(&prompt(2000, &format!("full{turn}-")));
        assert_eq!(cluster.http.post(COMPLETIONS, &body).await.status, 429);
    }
    assert_eq!(waits().await, before, "who may not wait has not waited");
    // The client of the one that waits leaves.
    sent.shutdown().await;
    eventually("the wait of who gave up is counted", async || waits().await == before + 1.0).await;
    assert!(cluster.metric("splitrail_queue_wait_seconds_sum", &[]).await > 0.0);
}

#[tokio::test]
async fn the_parts_of_streams_are_not_mixed_with_whole_replies() {
    let cluster = Cluster::start(Spec::default()).await;
    let count = async |stage: &str, stream: &str| {
        let labels = [("stage", stage), ("stream", stream)];
        cluster.metric("splitrail_engine_stage_seconds_count", &labels).await
    };
    let whole = completion(&prompt(40, "whole"));
    assert_eq!(cluster.http.post(COMPLETIONS, &whole).await.status, 200);
    for stage in ["prefill", "first_token"] {
        assert_eq!(
            (count(stage, "true").await, count(stage, "false").await),
            (0.0, 1.0),
            "{stage}"
        );
    }
    let stream = streamed(&completion(&prompt(40, "stream")));
    cluster.http.stream(COMPLETIONS, &stream).await.rest().await;
    for stage in ["prefill", "first_token"] {
        assert_eq!(
            (count(stage, "true").await, count(stage, "false").await),
            (1.0, 1.0),
            "{stage}"
        );
    }
    // What generates nothing has no first token.
    let text = json!({"model": "sim", "prompt": "some words"});
    let reply = cluster.http.post("/tokenize", &text).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(cluster.metric("splitrail_engine_stage_seconds_count", &[]).await, 4.0);
}

#[tokio::test]
async fn the_series_of_a_model_that_is_removed_leave_with_it() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    cluster.engine("w0").set_fault(Fault { kind: FaultKind::Hang, times: None });
    let mut hanging = JoinSet::new();
    let (http, body) = (cluster.http.clone(), completion(&prompt(4, "hangs")));
    hanging.spawn(async move { http.post(COMPLETIONS, &body).await });
    eventually("a request is in flight", async || {
        cluster.metric("splitrail_requests_in_flight", &[("model", "sim")]).await == 1.0
    })
    .await;
    let other = cluster.yaml.replace("name: sim", "name: other");
    assert_eq!(cluster.reload(&other).await.status, 200);
    let shown = async || {
        let text = cluster.admin.get("/metrics").await.text();
        let left: Vec<_> = text.lines().filter(|line| line.contains("model=\"sim\"")).collect();
        assert_eq!(left, [] as [&str; 0]);
        assert!(text.contains("model=\"other\"") && text.contains("model=\"none\""));
    };
    shown().await;
    // The last request of the model ends.
    hanging.shutdown().await;
    eventually("it has ended", async || cluster.running.core.live.is_empty()).await;
    shown().await;
    // A model of the same name begins anew.
    assert_eq!(cluster.reload(&cluster.yaml).await.status, 200);
    let sim = [("model", "sim")];
    assert_eq!(cluster.metric("splitrail_requests_in_flight", &sim).await, 0.0);
    assert_eq!(cluster.metric("splitrail_request_results_total", &sim).await, 0.0);
}

/// Limits with which one body fills the memory of all requests.
const LITTLE_MEMORY: &str =
    "{ body_size_max: 1MiB, request_memory_max: 1MiB, drain_delay: 10ms, drain_grace: 5s }";

async fn refused_for_memory(cluster: &Cluster) -> f64 {
    cluster.metric("splitrail_shed_total", &[("reason", "request_memory")]).await
}

#[tokio::test]
async fn reports_of_engines_that_find_no_memory_are_no_refused_requests() {
    let report = format!("# {}\n", "x".repeat(2 << 20));
    let engine = ScriptedServer::start(move |heard| match heard.target.as_str() {
        "/metrics" => ScriptedReply::json(200, &report),
        _ => ScriptedReply::json(200, "{}"),
    })
    .await;
    let worker = format!("{{ id: w0, role: both, url: \"{}\" }}", engine.url());
    let cluster = Cluster::start(Spec {
        policy: "{ kind: round_robin }",
        limits: LITTLE_MEMORY,
        extra_workers: vec![worker],
        ..Spec::aggregated(0)
    })
    .await;
    eventually("the report has been read three times", async || {
        engine.heard().iter().filter(|heard| heard.target == "/metrics").count() > 3
    })
    .await;
    assert_eq!(refused_for_memory(&cluster).await, 0.0);
}

#[tokio::test]
async fn bodies_of_operators_that_find_no_memory_are_no_refused_requests() {
    let cluster = Cluster::start(Spec { limits: LITTLE_MEMORY, ..Spec::aggregated(1) }).await;
    let long = completion(&"x ".repeat(520_000)).to_string();
    let headers = [("content-type", "application/json")];
    let refused = cluster.admin.post_with("/admin/explain", &headers, long.clone()).await;
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert_eq!(refused_for_memory(&cluster).await, 0.0);
    // The same body is refused at the front door, and counts there.
    let refused = cluster.http.post_with(COMPLETIONS, &headers, long).await;
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert_eq!(refused_for_memory(&cluster).await, 1.0);
}
