//! Between engines that store KV in different data types or block sizes none moves: no hand-off,
//! fetch or read-back. Simulated engines refuse it, or end, as real ones do.

use serde_json::{Value, json};
use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, Trial, completion, prompt};

fn body(salt: &str) -> Value {
    completion(&prompt(60, salt))
}

async fn drain(trial: &Trial, worker: &str) {
    let path = format!("/admin/workers/{worker}/drain");
    assert_eq!(trial.cluster.admin.post(&path, &json!({})).await.status, 200);
}

/// Engines with a 1 in their names store KV in 8 bits.
fn mixed(name: &str, config: &mut SimConfig) {
    config.kv_dtype = if name.ends_with('1') { "fp8" } else { "auto" }.to_owned();
}

/// The vetoes of a leg in a dry run.
async fn vetoed(trial: &Trial, step: &str) -> Value {
    let headers = [("content-type", "application/json")];
    let told = trial.cluster.admin.post_with("/admin/explain", &headers, body("x").to_string());
    let told = told.await.json();
    let steps = told["explanation"]["prompts"][0]["steps"].as_array().unwrap().clone();
    steps.iter().find(|told| told["step"] == step).unwrap()["vetoed"].clone()
}

#[tokio::test]
async fn a_hand_off_goes_only_to_an_engine_that_stores_kv_alike() {
    let policy = "{ kind: round_robin }";
    let spec = Spec { prefill: 1, decode: 2, engine: mixed, policy, ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    for salt in ["a", "b", "c", "d"] {
        let reply = trial.post("ok", COMPLETIONS, &body(salt)).await;
        assert_eq!((reply.route("prefill"), reply.route("decode")), (Some("p0"), Some("d0")));
    }
    let veto = json!({"worker": "d1", "reasons": ["other_kv_format"]});
    assert!(vetoed(&trial, "decode").await.as_array().unwrap().contains(&veto));
    let workers = trial.cluster.admin.get("/admin/workers").await.json()["workers"].clone();
    let dtype = |id: &str| {
        let mut all = workers.as_array().unwrap().iter();
        all.find(|worker| worker["id"] == id).unwrap()["kv_dtype"].clone()
    };
    assert_eq!((dtype("p0"), dtype("d1")), (json!("auto"), json!("fp8")));
    // Nobody can take what it would compute.
    drain(&trial, "d0").await;
    let reply = trial.post("ok", COMPLETIONS, &body("e")).await;
    assert_eq!((reply.route("prefill"), reply.route("decode")), (None, Some("d1")));
    trial.finish().await;
}

#[tokio::test]
async fn a_hand_off_goes_to_no_engine_with_another_block_size() {
    let engine = |name: &str, config: &mut SimConfig| {
        config.block_size = if name == "p0" { 32 } else { 16 };
    };
    let policy = "{ kind: round_robin }";
    let spec = Spec { prefill: 2, decode: 1, engine, policy, ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    for salt in ["a", "b", "c", "d"] {
        let reply = trial.post("ok", COMPLETIONS, &body(salt)).await;
        assert_eq!((reply.route("prefill"), reply.route("decode")), (Some("p1"), Some("d0")));
    }
    let veto = json!({"worker": "p0", "reasons": ["other_kv_format"]});
    assert!(vetoed(&trial, "prefill").await.as_array().unwrap().contains(&veto));
    // Nobody can take what the other one would compute.
    drain(&trial, "p1").await;
    let reply = trial.post("ok", COMPLETIONS, &body("e")).await;
    assert_eq!((reply.route("prefill"), reply.route("decode")), (None, Some("d0")));
    assert_eq!(trial.cluster.engine("d0").state().totals.hand_offs_misused, 0);
    trial.finish().await;
}

#[tokio::test]
async fn a_hand_off_that_nobody_used_is_released_by_no_engine_that_stores_kv_otherwise() {
    let spec = Spec { prefill: 1, decode: 2, engine: mixed, ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    trial.fault("p0", FaultKind::SlowFirstByte { delay_ms: 700 }, Some(1));
    let http = trial.cluster.http.clone();
    let mut sent = tokio::task::JoinSet::new();
    sent.spawn(async move { http.post(COMPLETIONS, &body("u")).await });
    eventually("the prefill leg is there", async || trial.asked("p0").len() == 1).await;
    // The only worker that could take it.
    let place = trial.cluster.engines.iter().position(|(name, _)| name == "d0").unwrap();
    trial.cluster.engines.remove(place).1.shutdown().await;
    sent.join_next().await.unwrap().unwrap();
    let unused = async |outcome| {
        let labels = [("outcome", outcome)];
        trial.cluster.metric("splitrail_unused_hand_offs_total", &labels).await
    };
    eventually("it is left to its lease", async || unused("left").await == 1.0).await;
    assert_eq!(trial.cluster.engine("d1").state().totals.hand_offs_misused, 0);
}

#[tokio::test]
async fn nothing_is_fetched_from_an_engine_that_stores_kv_otherwise() {
    let costs = "costs: { fetch_base_ms: 0, prefill_us_per_token: 1000000 }";
    let model = format!("peer_fetch: two_step\npeer_fetch_min_tokens: 16\n{costs}");
    let policy = "{ kind: predicted_ttft }";
    let spec = Spec { prefill: 2, decode: 2, engine: mixed, policy, model, ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    drain(&trial, "p1").await;
    let reply = trial.post("ok", COMPLETIONS, &body("f")).await;
    assert_eq!((reply.route("prefill"), reply.route("decode")), (Some("p0"), Some("d0")));
    trial.cluster.settle().await;
    let path = "/admin/workers/p1/drain";
    assert_eq!(trial.cluster.admin.delete(path).await.status, 200);
    drain(&trial, "p0").await;
    let reply = trial.post("ok", COMPLETIONS, &body("f")).await;
    assert_eq!((reply.route("prefill"), reply.route("decode")), (Some("p1"), Some("d1")));
    assert_eq!(trial.cluster.metric("splitrail_peer_fetches_total", &[]).await, 0.0);
    trial.finish().await;
}

#[tokio::test]
async fn nothing_is_read_back_from_an_engine_that_stores_kv_otherwise() {
    let engine = |name: &str, config: &mut SimConfig| {
        mixed(name, config);
        config.bidirectional_ttl_ms = Some(480_000);
    };
    let costs = "costs: { hand_off_base_ms: 0, kv_bytes_per_token: 1 }";
    let (policy, model) = ("{ kind: round_robin }", format!("read_back: true\n{costs}"));
    let spec = Spec { prefill: 2, decode: 2, engine, policy, model, ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    let of_ids = |ids: &[u64]| {
        json!({
            "model": "sim", "max_tokens": 90, "temperature": 0, "prompt": ids,
            "return_token_ids": true,
        })
    };
    let first: Vec<u64> = (0..100).map(|i| 3 + (i * 11 + i / 7) % 250).collect();
    drain(&trial, "p1").await;
    let reply = trial.post("ok", COMPLETIONS, &of_ids(&first)).await.json();
    let ids = reply["choices"][0]["token_ids"].as_array().unwrap().clone();
    let ids = ids.iter().map(|id| id.as_u64().unwrap());
    let next: Vec<u64> = first.into_iter().chain(ids).chain([7, 8, 9]).collect();
    let path = "/admin/workers/p1/drain";
    assert_eq!(trial.cluster.admin.delete(path).await.status, 200);
    drain(&trial, "p0").await;
    let reply = trial.post("ok", COMPLETIONS, &of_ids(&next)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.route("prefill"), Some("p1"));
    assert_eq!(trial.cluster.metric("splitrail_read_backs_total", &[]).await, 0.0);
    trial.finish().await;
}
