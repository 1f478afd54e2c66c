//! The index is held against what engines report, worker by worker.

use serde_json::Value;
use splitrail_sim::{Fault, FaultKind};
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Cluster, Spec};

async fn audit_of(cluster: &Cluster, worker: &str) -> Value {
    let workers = cluster.admin.get("/admin/workers").await.json();
    let workers = workers["workers"].as_array().unwrap().clone();
    workers.iter().find(|one| one["id"] == worker).unwrap()["audit"].clone()
}

async fn drift(cluster: &Cluster, worker: &str, direction: &str) -> f64 {
    let labels = [("worker", worker), ("direction", direction)];
    cluster.metric("splitrail_worker_cached_tokens_drift_blocks", &labels).await
}

async fn ask(cluster: &Cluster, body: &Value) {
    let reply = cluster.http.post(COMPLETIONS, body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[tokio::test]
async fn an_index_in_step_has_no_drift() {
    let cluster = Cluster::start(Spec { prefill: 1, decode: 1, ..Spec::default() }).await;
    for _ in 0..4 {
        ask(&cluster, &completion(&prompt(40, "in step"))).await;
        cluster.settle().await;
    }
    let audit = audit_of(&cluster, "p0").await;
    assert_eq!(audit["comparisons"], 4, "{audit}");
    assert_eq!(
        (&audit["drift_over_blocks"], &audit["drift_under_blocks"]),
        (&0.0.into(), &0.0.into())
    );
    // The decode worker cannot be compared: it says nothing of its own cache.
    assert_eq!(audit_of(&cluster, "d0").await["comparisons"], 0);
}

#[tokio::test]
async fn an_index_that_holds_what_its_worker_has_lost_drifts_over() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let body = completion(&prompt(40, "lost"));
    ask(&cluster, &body).await;
    cluster.settle().await;
    // The engine tells of a cleared cache only with its next step.
    let engine = splitrail_tests::Client::new(cluster.engine("w0").http_addr());
    assert_eq!(engine.post_with("/reset_prefix_cache", &[], "").await.status, 200);
    ask(&cluster, &body).await;
    let blocks = (prompt(40, "lost").len() as u64 - 1) / 16;
    let audit = audit_of(&cluster, "w0").await;
    assert_eq!(audit["drift_over_blocks"], blocks as f64 / 16.0, "{audit}");
    assert_eq!(drift(&cluster, "w0", "over").await, blocks as f64 / 16.0);
    assert_eq!(drift(&cluster, "w0", "under").await, 0.0);
    let over = [("direction", "over")];
    let error = cluster.metric("splitrail_cached_tokens_error_blocks_sum", &over).await;
    assert_eq!(error, blocks as f64);
}

#[tokio::test]
async fn an_index_that_missed_events_drifts_under_and_samples_are_not_compared() {
    let spec = Spec { engine: |_, config| config.kv_replay_port = None, ..Spec::aggregated(1) };
    let cluster = Cluster::start(spec).await;
    let body = completion(&prompt(40, "missed"));
    let kind = FaultKind::DropEventBatches;
    cluster.engine("w0").set_fault(Fault { kind, times: None });
    ask(&cluster, &body).await;
    ask(&cluster, &body).await;
    assert!(drift(&cluster, "w0", "under").await > 0.0);
    assert_eq!(drift(&cluster, "w0", "over").await, 0.0);
    let before = audit_of(&cluster, "w0").await["comparisons"].clone();
    // The second sample finds what the first one computed: the index is not to blame.
    let mut several = completion(&prompt(40, "several"));
    several["n"] = 2.into();
    ask(&cluster, &several).await;
    assert_eq!(audit_of(&cluster, "w0").await["comparisons"], before);
}
