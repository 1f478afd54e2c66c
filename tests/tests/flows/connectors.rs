//! Every connector carries a prompt from prefill to decode, in its own way, to the same
//! answer.

mod failures;
mod identities;
mod legs;
mod push;
mod repairs;
mod replies;

use serde_json::{Value, json};
use splitrail_sim::{KvConnector, SimConfig, SimEngine};
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, GENERATE, chat, completion, generate, generated_ids, prompt, token_ids,
};
use splitrail_tests::{Cluster, Spec};

const CONNECTORS: [KvConnector; 5] = [
    KvConnector::Nixl,
    KvConnector::NixlPush,
    KvConnector::SharedStorage,
    KvConnector::Mooncake,
    KvConnector::Sglang,
];

/// A model with so many workers of each kind.
fn pd(connector: KvConnector, prefill: usize, decode: usize) -> Spec {
    Spec { connector, prefill, decode, ..Spec::default() }
}

/// Shuts an engine down. Returns its name, and the settings of a process that takes its ports.
async fn stop(cluster: &mut Cluster, engine: &str) -> (String, SimConfig) {
    let place = cluster.engines.iter().position(|(name, _)| name == engine).unwrap();
    let (name, old) = cluster.engines.remove(place);
    let config = old.config().clone();
    old.shutdown().await;
    (name, config)
}

/// Replaces an engine by another process, so fast that the router need not notice.
async fn replace(cluster: &mut Cluster, engine: &str) {
    let (name, config) = stop(cluster, engine).await;
    cluster.engines.push((name, SimEngine::start(config).await.unwrap()));
}

/// Waits until the router knows whether an engine is up.
async fn known(cluster: &Cluster, engine: &str, up: f64) {
    eventually("the router knows whether it is up", async || {
        cluster.metric("splitrail_worker_up", &[("worker", engine)]).await == up
    })
    .await;
}

/// Replaces an engine by another process after the router has seen that it is down.
async fn restart(cluster: &mut Cluster, engine: &str) {
    let (name, config) = stop(cluster, engine).await;
    known(cluster, engine, 0.0).await;
    cluster.engines.push((name, SimEngine::start(config).await.unwrap()));
    known(cluster, engine, 1.0).await;
}

/// A request of each endpoint that engines with this connector offer, with prompts of their own per
/// `salt`.
fn requests(connector: KvConnector, salt: u32) -> Vec<(&'static str, Value)> {
    let mut requests = vec![
        (CHAT, chat(&prompt(30, &format!("c{salt}x")))),
        (COMPLETIONS, completion(&prompt(40, &format!("d{salt}x")))),
        (GENERATE, generate(&token_ids(130, salt))),
    ];
    requests.retain(|(path, _)| *path != GENERATE || connector != KvConnector::Sglang);
    requests
}

/// What a choice says, in a whole reply or in a stream's chunks: text, or token ids.
fn said(path: &str, replies: &[Value], streamed: bool, index: usize) -> String {
    match (path, streamed) {
        (GENERATE, _) => json!(generated_ids(replies, index as u64)).to_string(),
        (_, true) => streamed_text(replies, index as u64),
        (_, false) => whole_text(&replies[0], index),
    }
}

/// Sets a member of the sampling parameters, wherever the endpoint keeps them.
fn sample(path: &str, body: &mut Value, key: &str, value: Value) {
    match path {
        GENERATE => body["sampling_params"][key] = value,
        _ => body[key] = value,
    }
}
