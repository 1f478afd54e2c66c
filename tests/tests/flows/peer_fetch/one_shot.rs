//! A prefill leg takes the prefix itself, from engines that can and only from them.

mod failures;
mod fetches;
mod guards;

use serde_json::{Value, json};
use splitrail_sim::SimConfig;
use splitrail_tests::client::Reply;
use splitrail_tests::trial::{SHORT_LEASE, prompt};
use splitrail_tests::{Spec, Trial};

use super::{BLOCK, held, recorded, served, spec, turns};

/// Keys of a model whose prefill legs take whatever they can.
const EAGER: &str = "peer_fetch: one_shot\nkv_load_failure_policy: fail\npeer_fetch_min_tokens: 16\n\
                     costs: { fetch_base_ms: 0, prefill_us_per_token: 20000 }";

/// Prefill engines have the flag; what engines keep for others is freed soon.
fn flagged(name: &str, config: &mut SimConfig) {
    config.lease_ms = 4 * SHORT_LEASE.as_millis() as u64;
    if name.starts_with('p') {
        config.bidirectional_ttl_ms = Some(SHORT_LEASE.as_millis() as u64);
    }
}

/// A cluster whose prefill legs take whatever they can.
fn one_shot(prefill: usize, decode: usize) -> Spec {
    Spec { model: EAGER.into(), engine: flagged, ..spec(prefill, decode) }
}

/// The prefill legs of an engine that take a prefix.
fn takes(trial: &Trial, engine: &str) -> Vec<Value> {
    let takes = |body: &Value| {
        let params = &body["kv_transfer_params"];
        params["do_remote_decode"] == true && params["remote_num_tokens"].as_u64() > Some(1)
    };
    trial.asked(engine).into_iter().map(|request| request.body).filter(takes).collect()
}

/// The number of tokens in the whole blocks of the common prefix of [`turns`].
fn prefix_tokens(salt: &str) -> u64 {
    prompt(60, salt).len() as u64 / BLOCK * BLOCK
}

/// The prefill leg in the ledger of a reply's request.
async fn prefill_leg(trial: &Trial, reply: &Reply) -> Value {
    let decisions = trial.cluster.decisions(reply.header("x-request-id")).await;
    decisions[0]["ledger"]["legs"][0].clone()
}

/// How often fetches went this way and ended like this.
async fn went(trial: &Trial, way: &str, outcome: &str) -> f64 {
    let labels = [("way", way), ("outcome", outcome)];
    trial.cluster.metric("splitrail_peer_fetches_total", &labels).await
}

/// Lets the router find out what the engine of `p1` can: by the first fetch to it.
async fn learned(trial: &mut Trial) {
    let [first, second] = turns("learn");
    held(trial, &first).await;
    let reply = served(trial, &second).await;
    let fetch = recorded(trial, &reply).await;
    assert_eq!((&fetch["way"], &fetch["outcome"]), (&json!("two_step"), &json!("fetched")));
    super::undrain(trial, "p0").await;
}

/// Checks the way and the outcome of the fetch in the record of a reply's request.
async fn fetched_by(trial: &Trial, reply: &Reply, way: &str, outcome: &str) {
    let fetch = recorded(trial, reply).await;
    assert_eq!((&fetch["way"], &fetch["outcome"]), (&json!(way), &json!(outcome)), "{fetch}");
}
