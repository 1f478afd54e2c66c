//! Clusters whose workers are asked.

use serde_json::{Value, json};
use splitrail_sim::{Fault, FaultKind, SimConfig};
use splitrail_tests::cluster::eventually;
use splitrail_tests::{Cluster, Reply, Spec};

pub(crate) const COMPLETIONS: &str = "/v1/completions";

/// What is not there is waited for this long.
pub(crate) const ASKED: &str = "canary: { timeout: 5s, interval: 10m }";

/// One worker, with the engine as it is set.
pub(crate) fn one(engine: fn(&str, &mut SimConfig)) -> Spec {
    Spec { model: ASKED.into(), engine, ..Spec::aggregated(1) }
}

/// An engine with a fault from the start.
pub(crate) fn faulty(config: &mut SimConfig, kind: FaultKind) {
    config.faults.push(Fault { kind, times: None });
}

/// A worker, as the admin listener shows it.
pub(crate) async fn worker(cluster: &Cluster, id: &str) -> Value {
    let workers = cluster.admin.get("/admin/workers").await.json();
    let workers = workers["workers"].as_array().unwrap().clone();
    workers.into_iter().find(|one| one["id"] == id).unwrap()
}

/// Waits for what is found of a worker: `ok` or a mismatch's cause.
pub(crate) async fn settled(cluster: &Cluster, id: &str) -> String {
    let parity = async || worker(cluster, id).await["parity"].as_str().unwrap().to_owned();
    let told = |parity: String| ["ok", "mismatch"].contains(&&*parity);
    eventually("the worker is asked", async || told(parity().await)).await;
    let worker = worker(cluster, id).await;
    let cause = worker["parity_cause"].as_str();
    cause.or(worker["parity"].as_str()).unwrap().to_owned()
}

pub(crate) fn completion(prompt: &str) -> Value {
    json!({"model": "sim", "max_tokens": 4, "temperature": 0, "prompt": prompt})
}

pub(crate) async fn ask(cluster: &Cluster, prompt: &str) -> Reply {
    let reply = cluster.http.post(COMPLETIONS, &completion(prompt)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

pub(crate) fn text(words: usize, name: &str) -> String {
    (0..words).map(|i| format!("{name}{i} ")).collect()
}

/// Leading blocks that the chosen worker was believed to hold, and the share that did not count.
pub(crate) async fn overlap(cluster: &Cluster, reply: &Reply) -> (u64, f64) {
    let decision = &cluster.decisions(reply.header("x-request-id")).await[0];
    let candidates = decision["candidates"].as_array().unwrap();
    let chosen = candidates.iter().find(|candidate| candidate["chosen"] == true).unwrap();
    let blocks = chosen["overlap_blocks"].as_u64().unwrap();
    (blocks, chosen["overlap_discount"].as_f64().unwrap())
}
