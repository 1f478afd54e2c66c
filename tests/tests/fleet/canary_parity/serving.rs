//! When canaries are sent, and what they cost.

use splitrail_sim::{Fault, FaultKind, PromptDialect};
use splitrail_tests::cluster::{eventually, restarted};
use splitrail_tests::{Cluster, Spec};

use super::support::{COMPLETIONS, ask, completion, one, overlap, settled, text, worker};

/// The requests that an engine served, by their paths.
fn served(cluster: &Cluster, id: &str) -> Vec<String> {
    let requests = cluster.engine(id).requests().into_iter().map(|request| request.path);
    requests.filter(|path| path != "/tokenize").collect()
}

#[tokio::test]
async fn one_small_trial_request_is_sent_and_not_counted() {
    let cluster =
        Cluster::start(Spec { model: super::support::ASKED.into(), ..Spec::default() }).await;
    for id in ["p0", "p1", "d0", "d1"] {
        assert_eq!(settled(&cluster, id).await, "ok");
        assert_eq!(served(&cluster, id), ["/v1/chat/completions"]);
        let seen = cluster.engine(id).requests();
        let canary = seen.iter().find(|request| request.path != "/tokenize").unwrap();
        let body: serde_json::Value = canary.body.clone();
        assert_eq!((&body["max_tokens"], &body["stream"]), (&1.into(), &false.into()));
        let salt = body["cache_salt"].as_str().unwrap();
        assert!(salt.starts_with("splitrail-canary-"), "{salt}");
        assert!(body["kv_transfer_params"].is_null());
        assert_eq!(worker(&cluster, id).await["audit"]["usage"]["replies"], 0);
    }
    for name in [
        "splitrail_requests_total",
        "splitrail_usage_prompt_tokens_total",
        "splitrail_generation_tokens_total",
        "splitrail_cached_tokens_error_blocks_count",
        "splitrail_engine_reports_total",
    ] {
        assert_eq!(cluster.metric(name, &[]).await, 0.0, "{name}");
    }
    let decisions = cluster.admin.get("/admin/decisions").await.json();
    assert_eq!(decisions["decisions"].as_array().unwrap().len(), 0);
    cluster.quiet().await;
}

#[tokio::test]
async fn a_worker_without_canaries_is_trusted() {
    let spec = Spec { model: "canary: { enabled: false }".into(), ..Spec::aggregated(1) };
    let cluster = Cluster::start(spec).await;
    let seen = worker(&cluster, "w0").await;
    assert_eq!((&seen["parity"], &seen["kv_routing"]), (&"unknown".into(), &true.into()));
    assert!(cluster.engine("w0").requests().is_empty());
}

#[tokio::test]
async fn a_worker_that_disagrees_leaves_the_others_their_overlap() {
    let spec = Spec {
        model: super::support::ASKED.into(),
        engine: |id, config| {
            if id == "w0" {
                config.dialect = PromptDialect::OtherTemplate;
            }
        },
        ..Spec::aggregated(2)
    };
    let cluster = Cluster::start(spec).await;
    assert_eq!(settled(&cluster, "w0").await, "template");
    assert_eq!(settled(&cluster, "w1").await, "ok");
    let prompt = text(60, "shared");
    // Wherever it goes first, the worker that agrees is the one that is known to hold it.
    for _ in 0..4 {
        ask(&cluster, &prompt).await;
    }
    cluster.settle().await;
    let reply = cluster.http.post(COMPLETIONS, &completion(&prompt)).await;
    let decision = &cluster.decisions(reply.header("x-request-id")).await[0];
    for candidate in decision["candidates"].as_array().unwrap() {
        if candidate["worker"] == "w0" {
            assert_eq!(candidate["overlap_blocks"], 0, "{candidate}");
        }
    }
}

#[tokio::test]
async fn nothing_is_believed_before_a_worker_was_asked() {
    // It never answers its canary, so that it stays unasked.
    let mut spec = one(|_, config| {
        config.faults.push(Fault { kind: FaultKind::Hang, times: Some(1) });
    });
    spec.model = "canary: { timeout: 10m }".into();
    // With a worker that is nowhere the cluster is not waited for.
    spec.extra_workers = vec!["{ id: w9, role: both, url: \"http://127.0.0.1:9\" }".into()];
    let cluster = Cluster::start(spec).await;
    eventually("it is asked", async || served(&cluster, "w0").len() == 1).await;
    let ready = cluster.admin.get("/ready").await;
    assert_eq!(ready.status, 503);
    assert!(ready.text().contains("parity of worker w0 is being tested"), "{}", ready.text());
    // It serves all the same.
    let prompt = text(30, "early");
    ask(&cluster, &prompt).await;
    cluster.settle().await;
    let reply = ask(&cluster, &prompt).await;
    assert_eq!(overlap(&cluster, &reply).await, (0, 0.0));
    assert_eq!(worker(&cluster, "w0").await["parity"], "pending");
}

#[tokio::test]
async fn a_worker_that_comes_back_is_asked_again() {
    let mut cluster =
        Cluster::start(one(|_, config| config.dialect = PromptDialect::OtherTemplate)).await;
    assert_eq!(settled(&cluster, "w0").await, "template");
    let (name, engine) = cluster.engines.pop().unwrap();
    let engine = restarted(engine, |config| config.dialect = PromptDialect::Shipped).await;
    cluster.engines.push((name, engine));
    eventually("the new process agrees", async || worker(&cluster, "w0").await["parity"] == "ok")
        .await;
    let prompt = text(30, "again");
    ask(&cluster, &prompt).await;
    cluster.settle().await;
    let reply = ask(&cluster, &prompt).await;
    assert!(overlap(&cluster, &reply).await.0 > 0);
}

#[tokio::test]
async fn a_worker_that_disagrees_is_asked_again_after_a_while() {
    let mut spec = one(|_, config| {
        config.faults.push(Fault { kind: FaultKind::DropSalts, times: Some(1) });
    });
    spec.model = "canary: { interval: 200ms }".into();
    let cluster = Cluster::start(spec).await;
    eventually("it agrees in the end", async || worker(&cluster, "w0").await["parity"] == "ok")
        .await;
    let labels = [("result", "mismatch"), ("cause", "salt")];
    assert_eq!(cluster.metric("splitrail_canaries_total", &labels).await, 1.0);
}
