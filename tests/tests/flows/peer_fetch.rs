//! A prefill worker takes a prefix from a worker that holds it. If this fails, the request is
//! served as without the fetch.
//!
//! The simulated engines accept a hand-off once, for the very tokens, blocks and counts that were
//! staged. Every test ends with `Trial::finish`.

mod failures;
mod fetches;
mod flows;
mod guards;
mod no_transfer;
mod one_shot;
mod trial;

use serde_json::{Value, json};
use splitrail_tests::client::Reply;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Spec, Trial};
use tokio::task::JoinSet;

/// Tokens per block.
const BLOCK: u64 = 16;

/// Keys of a model whose workers fetch whatever they can.
const EAGER: &str = "peer_fetch: two_step\npeer_fetch_min_tokens: 16\n\
                     costs: { fetch_base_ms: 0, prefill_us_per_token: 1000000 }";

/// A cluster whose workers fetch whatever they can.
fn spec(prefill: usize, decode: usize) -> Spec {
    Spec {
        prefill,
        decode,
        policy: "{ kind: predicted_ttft }",
        model: EAGER.into(),
        ..Spec::default()
    }
}

/// A completion that is sent while the test goes on.
pub(super) struct Sent(JoinSet<Reply>);

impl Sent {
    pub(super) fn new(trial: &Trial, body: &Value) -> Self {
        let (http, body) = (trial.cluster.http.clone(), body.clone());
        let mut sent = JoinSet::new();
        sent.spawn(async move { http.post(COMPLETIONS, &body).await });
        Self(sent)
    }

    async fn reply(mut self) -> Reply {
        self.0.join_next().await.unwrap().unwrap()
    }
}

/// A worker that holds a prompt, and the prefill worker that is to take it from there.
struct Pair {
    holder: String,
    other: &'static str,
}

/// Has a prompt served by the prefill worker `p0` and a decode worker, which is its holder from now
/// on: the next prefill leg is served by `p1`.
async fn held(trial: &mut Trial, body: &Value) -> Pair {
    drain(trial, "p1").await;
    let reply = trial.post("ok", COMPLETIONS, body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    trial.cluster.settle().await;
    undrain(trial, "p1").await;
    drain(trial, "p0").await;
    Pair { holder: reply.route("decode").unwrap().to_owned(), other: "p1" }
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

/// Sends a request that is served.
async fn served(trial: &mut Trial, body: &Value) -> Reply {
    let reply = trial.post("ok", COMPLETIONS, body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

/// Two prompts of one prefix.
fn turns(salt: &str) -> [Value; 2] {
    let text = prompt(60, salt);
    [completion(&text), completion(&format!("{text} and then {}", prompt(5, "more")))]
}

/// How often fetches ended like this.
async fn ended(trial: &Trial, outcome: &str) -> f64 {
    trial.cluster.metric("splitrail_peer_fetches_total", &[("outcome", outcome)]).await
}

/// The fetch in the record of a reply's request.
async fn recorded(trial: &Trial, reply: &Reply) -> Value {
    let decisions = trial.cluster.decisions(reply.header("x-request-id")).await;
    decisions[0]["fetch"].clone()
}

/// The requests of an engine that are steps of a fetch: prompts of token ids.
fn steps(trial: &Trial, engine: &str) -> Vec<Value> {
    let asked = trial.asked(engine).into_iter();
    asked.filter(|request| request.body["prompt"].is_array()).map(|request| request.body).collect()
}

fn cached(reply: &Reply) -> u64 {
    reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

fn prompt_tokens(reply: &Reply) -> u64 {
    reply.json()["usage"]["prompt_tokens"].as_u64().unwrap()
}
