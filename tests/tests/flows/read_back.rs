//! What a decode worker has generated is read by the next turn's prefill, exactly or not at all.
//! Simulated engines check the content of what is read.

mod conversation;
mod failures;
mod pins;
mod priced;
mod replies;
mod tokens;

use serde_json::{Value, json};
use splitrail_sim::SimConfig;
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, Trial};

/// Tokens per block.
const BLOCK: usize = 16;

fn bidirectional(_name: &str, config: &mut SimConfig) {
    config.bidirectional_ttl_ms = Some(480_000);
}

/// A model that reads back, with so many workers of each kind. Reading takes nearly no time.
fn reading(prefill: usize, decode: usize, model: &str) -> Spec {
    let costs = "costs: { hand_off_base_ms: 0, kv_bytes_per_token: 1 }";
    let model = format!("read_back: true\n{costs}\n{model}");
    let policy = "{ kind: round_robin }";
    Spec { prefill, decode, policy, model, engine: bidirectional, ..Spec::default() }
}

/// A completion of a prompt of token ids, which reports the ids of its reply.
fn of_ids(ids: &[u64], max_tokens: u32) -> Value {
    json!({
        "model": "sim", "max_tokens": max_tokens, "temperature": 0, "prompt": ids,
        "return_token_ids": true,
    })
}

/// The token ids of a completion's reply.
fn ids_of(reply: &Value) -> Vec<u64> {
    let ids = reply["choices"][0]["token_ids"].as_array();
    ids.unwrap_or_else(|| panic!("{reply}")).iter().map(|id| id.as_u64().unwrap()).collect()
}

/// Token ids that no other salt shares.
fn prompt_ids(count: usize, salt: u64) -> Vec<u64> {
    (0..count as u64).map(|i| 3 + (salt * 37 + i * 11 + i / 7) % 250).collect()
}

/// Sends a completion and returns its reply.
async fn complete(trial: &mut Trial, ids: &[u64], max_tokens: u32) -> Value {
    let reply = trial.post("ok", COMPLETIONS, &of_ids(ids, max_tokens)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

async fn reads(trial: &Trial, outcome: &str) -> f64 {
    trial.cluster.metric("splitrail_read_backs_total", &[("outcome", outcome)]).await
}

async fn ends(trial: &Trial, end: &str) -> f64 {
    trial.cluster.metric("splitrail_read_back_pins_total", &[("end", end)]).await
}

/// Waits until no engine keeps a block for another one.
async fn nothing_is_pinned(trial: &Trial) {
    eventually("no block stays held", async || {
        trial.cluster.engines.iter().all(|(_, engine)| {
            let state = engine.state();
            (state.read_back_pins, state.blocks_used) == (0, 0)
        })
    })
    .await;
}
