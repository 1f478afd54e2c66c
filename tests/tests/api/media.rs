//! Prompts with images: the text before the first image is found where it is cached, and no more
//! is ever said to be cached than the engine found.

use serde_json::{Value, json};
use splitrail_sim::{SimConfig, UsageReport};
use splitrail_tests::cluster::eventually;
use splitrail_tests::{Cluster, Reply, Spec};

const CHAT: &str = "/v1/chat/completions";
const BLOCK: u64 = 16;

/// What every prompt begins with: some twenty blocks.
fn preamble() -> String {
    (0..40).map(|i| format!("rule{i:03} ")).collect()
}

fn chat(user: Value) -> Value {
    let messages =
        json!([{"role": "system", "content": preamble()}, {"role": "user", "content": user}]);
    json!({"model": "sim", "max_tokens": 4, "temperature": 0, "messages": messages})
}

fn picture(question: &str, url: &str) -> Value {
    chat(json!([
        {"type": "text", "text": question},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Say it in one word."},
    ]))
}

/// The tokens before the image, by the simulated model's rules: each byte is one, and so is each
/// special token.
fn tokens_before(question: &str) -> u64 {
    let text = format!("system\n{}\nuser\n{question}\n", preamble());
    text.len() as u64 + 3
}

async fn ask(cluster: &Cluster, body: &Value) -> Reply {
    let reply = cluster.http.post(CHAT, body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

fn cached(reply: &Reply) -> u64 {
    let usage = &reply.json()["usage"];
    usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

async fn decision(cluster: &Cluster, reply: &Reply) -> Value {
    cluster.decisions(reply.header("x-request-id")).await.swap_remove(0)
}

/// Waits until the router sees so many blocks of a prompt on its best worker.
async fn seen(cluster: &Cluster, body: &Value, blocks: u64) {
    let headers = [("content-type", "application/json")];
    eventually("the router sees the blocks", async || {
        let told = cluster.admin.post_with("/admin/explain", &headers, body.to_string()).await;
        let told = told.json()["explanation"].clone();
        let steps = told["prompts"][0]["steps"].as_array().unwrap();
        let candidates = steps.iter().flat_map(|step| step["candidates"].as_array().unwrap());
        let best = candidates.filter_map(|seen| seen["overlap_blocks"].as_u64()).max();
        best == Some(blocks)
    })
    .await;
}

async fn check(spec: Spec) {
    let cluster = Cluster::start(spec).await;
    let question = "What is in the picture?";
    let (first, second) =
        (picture(question, "http://a/1.png"), picture(question, "http://a/2.png"));
    let blocks = tokens_before(question) / BLOCK;
    ask(&cluster, &chat("No picture, but the same rules.".into())).await;
    // The rules are cached, and nothing behind them.
    let shared = tokens_before("") / BLOCK;
    seen(&cluster, &first, shared).await;
    let mut engines = Vec::new();
    for (body, known) in [(&first, shared), (&second, blocks), (&first, blocks)] {
        seen(&cluster, body, known).await;
        let reply = ask(&cluster, body).await;
        let decision = decision(&cluster, &reply).await;
        assert_eq!(decision["prompt_unknown"], "media after the known blocks");
        assert_eq!(
            (&decision["prompt_tokens"], &decision["prompt_blocks"]),
            (&Value::Null, &blocks.into())
        );
        assert_eq!(decision["overlap_blocks"], known);
        assert_eq!(decision["estimated_cached_tokens"], known * BLOCK);
        engines.push((cached(&reply), decision["cached_source"].clone()));
    }
    let truth = [shared * BLOCK, blocks * BLOCK];
    let told: Vec<u64> = engines.iter().map(|(tokens, _)| *tokens).collect();
    assert_eq!(told[..2], truth, "{engines:?}");
    match engines[2].1.as_str() {
        // The image is cached as well, which the engine only knows.
        Some("engine") => assert!(told[2] > truth[1], "{engines:?}"),
        _ => assert_eq!(told[2], truth[1], "{engines:?}"),
    }
    let counted = cluster.metric(
        "splitrail_untokenized_prompts_total",
        &[("reason", "media_after_the_known_blocks")],
    );
    assert_eq!(counted.await, 3.0);
}

#[tokio::test]
async fn the_text_before_an_image_is_found_on_its_worker() {
    check(Spec::aggregated(2)).await;
}

#[tokio::test]
async fn the_text_before_an_image_is_found_by_the_prefill_leg() {
    check(Spec::default()).await;
}

#[tokio::test]
async fn a_gate_does_not_open_for_a_prompt_of_unknown_length() {
    check(Spec { flow: "decode_first", ..Spec::default() }).await;
}

#[tokio::test]
async fn silent_engines_are_estimated_by_the_blocks_before_the_image() {
    let engine: fn(&str, &mut SimConfig) = |_, config| config.usage_report = UsageReport::Absent;
    check(Spec { engine, ..Spec::aggregated(2) }).await;
}
