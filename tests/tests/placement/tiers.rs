//! Blocks in host memory: a prompt goes to the worker that loads them where that pays, and to the one
//! that has less to compute where it does not.

use serde_json::{Value, json};
use splitrail_sim::SimConfig;
use splitrail_tests::client::Reply;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::COMPLETIONS;
use splitrail_tests::{Cluster, Spec};

const BLOCK: u64 = 16;
/// Blocks of the prompt that one worker holds in host memory.
const HOST: u64 = 20;
/// Blocks of the same prompt that the other one holds in accelerator memory.
const DEVICE: u64 = 16;

/// A prompt of so many blocks and some tokens. Those with equal salts begin alike.
fn body(blocks: u64, salt: u64) -> Value {
    let id = |i: u64| 3 + (salt * 41 + i * 11 + i / 7) % 250;
    let ids: Vec<u64> = (0..blocks * BLOCK + 5).map(id).collect();
    json!({"model": "sim", "max_tokens": 2, "temperature": 0, "prompt": ids})
}

async fn send(cluster: &Cluster, body: &Value) -> Reply {
    let reply = cluster.http.post(COMPLETIONS, body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    cluster.quiet().await;
    cluster.settle().await;
    reply
}

async fn drain(cluster: &Cluster, worker: &str) {
    let path = format!("/admin/workers/{worker}/drain");
    assert_eq!(cluster.admin.post(&path, &json!({})).await.status, 200);
}

async fn undrain(cluster: &Cluster, worker: &str) {
    let path = format!("/admin/workers/{worker}/drain");
    assert_eq!(cluster.admin.delete(&path).await.status, 200);
}

fn engine(name: &str, config: &mut SimConfig) {
    config.prefill_us_per_token = 200;
    if name == "p0" {
        (config.kv_blocks, config.host_blocks) = (48, 128);
        config.host_load_us_per_block = 100;
    }
}

/// Where a prompt goes that `p0` holds in host memory, and `p1` for the most part in accelerator
/// memory, and the cached tokens that the client is told.
async fn placed(policy: &'static str, host_gb_per_second: &str) -> (String, u64) {
    let costs = "kv_bytes_per_token: 327680, prefill_us_per_token: 200";
    let model = format!("costs: {{ {costs}, host_gb_per_second: {host_gb_per_second} }}");
    let spec = Spec { prefill: 2, decode: 1, policy, model, engine, ..Spec::default() };
    let cluster = Cluster::start(spec).await;
    drain(&cluster, "p1").await;
    for salt in [1, 2, 3, 4] {
        send(&cluster, &body(HOST, salt)).await;
    }
    drain(&cluster, "p0").await;
    undrain(&cluster, "p1").await;
    send(&cluster, &body(DEVICE, 1)).await;
    undrain(&cluster, "p0").await;
    eventually("the index has what was moved to host memory", async || {
        let labels = [("worker", "p0"), ("tier", "host")];
        let held = cluster.engine("p0").state().host_blocks as f64;
        held >= HOST as f64 && cluster.metric("splitrail_index_blocks", &labels).await == held
    })
    .await;
    let reply = send(&cluster, &body(HOST + 1, 1)).await;
    let usage = reply.json()["usage"].clone();
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (reply.route("prefill").unwrap().to_owned(), cached)
}

#[tokio::test]
async fn blocks_in_host_memory_are_loaded_where_that_takes_less_time_than_computing() {
    for policy in ["{ kind: predicted_ttft }", "{ kind: kv_overlap }"] {
        assert_eq!(placed(policy, "50").await, ("p0".into(), HOST * BLOCK), "{policy}");
        assert_eq!(placed(policy, "0.001").await, ("p1".into(), DEVICE * BLOCK), "{policy}");
    }
}
