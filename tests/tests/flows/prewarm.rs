//! A prefill worker that restarts or joins takes over the prefixes that recent prompts use most. If
//! this fails, requests are served as without prewarming.

mod bounds;
mod joins;
mod privacy;

use serde_json::{Value, json};
use splitrail_tests::client::Reply;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Spec, Trial};

/// Tokens per block.
const BLOCK: u64 = 16;

/// The lease of hand-offs, in milliseconds.
const LEASE_MS: u64 = 3000;

/// Keys of a model whose workers fetch whatever they can.
const KEYS: &str = "peer_fetch: two_step\npeer_fetch_min_tokens: 16\n\
                    costs: { fetch_base_ms: 0, prefill_us_per_token: 1000000 }";

/// A cluster with these keys of `prewarm`.
fn spec(prewarm: &str) -> Spec {
    Spec {
        decode: 1,
        policy: "{ kind: predicted_ttft }",
        model: format!("{KEYS}\nprewarm: {prewarm}"),
        engine: |_, config| config.lease_ms = LEASE_MS,
        ..Spec::default()
    }
}

/// A cluster whose workers are prewarmed as fast as possible.
fn eager() -> Spec {
    spec("{ enabled: true, link_share: 1 }")
}

/// A prompt of `p1` alone.
const GREETING: &str = "a prompt that is sent once";

/// The text that prompts have in common.
fn common(name: &str) -> String {
    prompt(40, name)
}

/// The whole blocks of a common text. The simulated tokenizer has a token for each byte.
fn blocks(name: &str) -> u64 {
    common(name).len() as u64 / BLOCK
}

/// A prompt with a common beginning and an end of its own.
fn turn(name: &str, end: &str) -> Value {
    completion(&format!("{}{}", common(name), prompt(3, end)))
}

/// Has the prefill worker `p0` compute prompts with a common beginning, until it is hot: its token
/// ids are remembered.
async fn heat(trial: &mut Trial, names: &[&str]) {
    greet(trial).await;
    drain(trial, "p1").await;
    for name in names {
        let before = remembered(trial).await;
        serve(trial, &turn(name, "first")).await;
        serve(trial, &turn(name, "second")).await;
        eventually("the ids of the common beginning are known", async || {
            // Three runs of blocks, and four bytes for each token.
            remembered(trial).await >= before + 4.0 * (blocks(name) * BLOCK) as f64 + 500.0
        })
        .await;
    }
    trial.cluster.settle().await;
    undrain(trial, "p1").await;
}

/// Has `p1` serve a request, so that its next process is known to be another one.
async fn greet(trial: &mut Trial) {
    drain(trial, "p0").await;
    let reply = serve(trial, &completion(GREETING)).await;
    assert_eq!(reply.route("prefill"), Some("p1"));
    trial.cluster.settle().await;
    undrain(trial, "p0").await;
}

/// Workers that do both legs, and are prewarmed as fast as possible.
fn both(count: usize, keys: &str) -> Spec {
    let eager = eager();
    let model = format!("{}\n{keys}", eager.model);
    Spec { prefill: 0, decode: 0, both: count, flow: "aggregated", model, ..eager }
}

/// Has `w0` of workers that do both compute prompts with a common beginning, until it is hot, after `w1`
/// has served a request. All but `w0` stay drained.
async fn heat_both(trial: &mut Trial, others: &[&str], name: &str) {
    for other in others.iter().filter(|other| **other != "w1") {
        drain(trial, other).await;
    }
    drain(trial, "w0").await;
    serve(trial, &completion(GREETING)).await;
    undrain(trial, "w0").await;
    drain(trial, "w1").await;
    for end in ["first", "second"] {
        serve(trial, &turn(name, end)).await;
    }
    eventually("the ids of the common beginning are known", async || {
        remembered(trial).await >= (4 * blocks(name) * BLOCK) as f64 + 500.0
    })
    .await;
    trial.cluster.settle().await;
}

/// Bytes of memory for hot prefixes.
async fn remembered(trial: &Trial) -> f64 {
    trial.cluster.metric("splitrail_hot_prefix_memory_bytes", &[]).await
}

/// Sends a request that is served.
async fn serve(trial: &mut Trial, body: &Value) -> Reply {
    let reply = trial.post("ok", COMPLETIONS, body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

/// Takes a worker out of service.
async fn drain(trial: &Trial, worker: &str) {
    let path = format!("/admin/workers/{worker}/drain");
    assert_eq!(trial.cluster.admin.post(&path, &json!({})).await.status, 200);
}

/// Takes a worker into service again.
async fn undrain(trial: &Trial, worker: &str) {
    let path = format!("/admin/workers/{worker}/drain");
    assert_eq!(trial.cluster.admin.delete(&path).await.status, 200);
}

/// How far a worker is prewarmed, as operators see it.
async fn prewarmed(trial: &Trial, worker: &str) -> Value {
    let workers = trial.cluster.admin.get("/admin/workers").await.json()["workers"].clone();
    let workers = workers.as_array().unwrap();
    workers.iter().find(|one| one["id"] == worker).unwrap()["prewarm"].clone()
}

/// How often fetches of prewarming ended like this.
async fn fetched(trial: &Trial, outcome: &str) -> f64 {
    trial.cluster.metric("splitrail_prewarm_fetches_total", &[("outcome", outcome)]).await
}

/// Waits until prewarming of a worker has ended like this.
async fn until_ended(trial: &Trial, end: &str) {
    let metric = "splitrail_prewarms_total";
    eventually(&format!("prewarming ends: {end}"), async || {
        trial.cluster.metric(metric, &[]).await > 0.0
    })
    .await;
    let text = trial.cluster.admin.get("/metrics").await.text();
    let told =
        text.lines().filter(|line| line.starts_with("splitrail_prewarm") && !line.ends_with(" 0"));
    let told: Vec<&str> = told.collect();
    assert_eq!(trial.cluster.metric(metric, &[("end", end)]).await, 1.0, "{told:#?}");
}

/// The requests that an engine got besides those of clients: prompts of token ids.
fn steps(trial: &Trial, engine: &str) -> Vec<Value> {
    let asked = trial.asked(engine).into_iter();
    asked.filter(|request| request.body["prompt"].is_array()).map(|request| request.body).collect()
}

fn cached(reply: &Reply) -> u64 {
    reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}
