//! `migrate: true`: an answer whose decode worker is lost goes on upon another one, where
//! that is exact.
#![allow(missing_docs, clippy::unwrap_used)]

use serde_json::{Value, json};
use splitrail_sim::FaultKind;
use splitrail_tests::Spec;
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, Reference, Trial, broken_off, chat, completion, prompt,
};

/// Workers take turns, so that the first decode leg is `d0`'s.
fn in_turn(decode: usize, model: &str) -> Spec {
    let policy = "{ kind: round_robin }";
    let model = format!("breaker: {{ failures: 0 }}\n{model}");
    Spec { prefill: 1, decode, policy, model, ..Spec::default() }
}

fn dies_after(after_chunks: usize) -> FaultKind {
    FaultKind::DieMidStream { after_chunks }
}

fn with_usage(mut body: Value) -> Value {
    body["stream_options"] = json!({"include_usage": true});
    body
}

async fn migrations(trial: &Trial, outcome: &str) -> f64 {
    trial.cluster.metric("splitrail_migrations_total", &[("outcome", outcome)]).await
}

#[tokio::test]
async fn wherever_it_breaks_off_the_client_gets_the_whole_answer() {
    let reference = Reference::start().await;
    for flow in ["prefill_first", "aggregated"] {
        let (prefill, decode, both) = if flow == "aggregated" { (0, 0, 2) } else { (1, 2, 0) };
        let spec = Spec { flow, prefill, both, ..in_turn(decode, "migrate: true") };
        let mut trial = Trial::start(spec).await;
        let sick = if both > 0 { "w0" } else { "d0" };
        for after in 1..12 {
            let text = prompt(20, &format!("{flow}{after}-"));
            let body = completion(&text);
            let expected = reference.text(COMPLETIONS, &body).await;
            trial.fault(sick, dies_after(after), Some(1));
            let chunks = trial.stream("ok", COMPLETIONS, &with_usage(body)).await.chunks().await;
            assert_eq!(streamed_text(&chunks, 0), expected);
            let last = chunks.last().unwrap();
            let tokens = |key: &str| last["usage"][key].as_u64().unwrap() as usize;
            assert_eq!(tokens("prompt_tokens"), text.len());
            assert_eq!(
                (tokens("completion_tokens"), tokens("total_tokens")),
                (12, text.len() + 12)
            );
            let cached = last["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            assert!(cached <= last["usage"]["prompt_tokens"].as_u64().unwrap());
            for chunk in &chunks {
                assert_eq!(
                    (&chunk["id"], &chunk["created"]),
                    (&chunks[0]["id"], &chunks[0]["created"])
                );
                assert!(chunk["choices"][0]["token_ids"].is_null(), "not asked for: {chunk}");
                assert!(chunk["choices"][0]["prompt_token_ids"].is_null(), "{chunk}");
            }
        }
        // Without a prefill leg, every second request begins on the other worker.
        let broken = if flow == "aggregated" { 6.0 } else { 11.0 };
        assert_eq!(migrations(&trial, "resumed").await, broken);
        assert_eq!(migrations(&trial, "lost").await, 0.0);
        trial.finish().await;
    }
}

#[tokio::test]
async fn token_ids_that_the_client_asked_for_are_whole_too() {
    let mut trial = Trial::start(in_turn(2, "migrate: true")).await;
    let mut body = completion(&prompt(20, "ids"));
    body["return_token_ids"] = true.into();
    trial.fault("d0", dies_after(4), Some(1));
    let chunks = trial.stream("ok", COMPLETIONS, &body).await.chunks().await;
    assert_eq!(migrations(&trial, "resumed").await, 1.0);
    let ids: Vec<u64> = chunks
        .iter()
        .flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default())
        .map(|id| id.as_u64().unwrap())
        .collect();
    let whole = trial.post("ok", COMPLETIONS, &body).await.json();
    assert_eq!(json!(ids), whole["choices"][0]["token_ids"]);
    let prompts = chunks.iter().filter(|chunk| chunk["choices"][0]["prompt_token_ids"].is_array());
    assert_eq!(prompts.count(), 1, "the second worker's prompt is the router's affair");
    trial.finish().await;
}

#[tokio::test]
async fn it_goes_on_as_often_as_decode_may_be_retried() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(in_turn(3, "migrate: true\nretries: { decode: 2 }")).await;
    trial.fault("d0", dies_after(3), Some(1));
    // The second turn of those that are left.
    trial.fault("d2", dies_after(3), Some(1));
    let body = completion(&prompt(20, "often"));
    let chunks = trial.stream("ok", COMPLETIONS, &body).await.chunks().await;
    assert_eq!(streamed_text(&chunks, 0), reference.text(COMPLETIONS, &body).await);
    assert_eq!(migrations(&trial, "resumed").await, 2.0);
    trial.finish().await;

    let mut trial = Trial::start(in_turn(3, "migrate: true\nretries: { decode: 1 }")).await;
    trial.fault("d0", dies_after(3), Some(1));
    // The second turn of those that are left.
    trial.fault("d2", dies_after(3), Some(1));
    let mut events = trial.stream("decode_lost", COMPLETIONS, &body).await;
    let (chunks, error) = broken_off(&events.rest().await);
    assert_eq!(error["code"], "decode_lost");
    let expected = reference.text(COMPLETIONS, &body).await;
    assert_eq!(streamed_text(&chunks, 0), expected[..6], "what came is right as far as it goes");
    trial.finish().await;
}

#[tokio::test]
async fn what_would_not_be_exact_ends_with_an_error() {
    // Without hand-offs: what breaks here are streams, not what fetches for several samples.
    let model = "migrate: true\nlocal_prefill_max_tokens: 10000";
    let mut trial = Trial::start(in_turn(2, model)).await;
    let with = |key: &str, value: Value| {
        let mut body = completion(&prompt(20, key));
        body[key] = value;
        body
    };
    let bodies = [
        with("n", json!(2)),
        with("stop", json!(["never there"])),
        with("presence_penalty", json!(0.5)),
        with("logprobs", json!(1)),
        with("some_new_field", json!(1)),
        with("stream_options", json!({"include_usage": true, "continuous_usage_stats": true})),
    ];
    for body in bodies {
        for sick in ["d0", "d1"] {
            trial.fault(sick, dies_after(3), None);
        }
        let mut events = trial.stream("decode_lost", COMPLETIONS, &body).await;
        broken_off(&events.rest().await);
        let ids = trial.asked("d0").into_iter().chain(trial.asked("d1"));
        assert!(ids.filter(|seen| seen.body.get("return_token_ids").is_some()).count() == 0);
    }
    let mut events = trial.stream("decode_lost", CHAT, &chat(&prompt(20, "chat"))).await;
    broken_off(&events.rest().await);
    let total = migrations(&trial, "resumed").await + migrations(&trial, "lost").await;
    assert_eq!(total, 0.0);
    trial.finish().await;
}

#[tokio::test]
async fn without_leave_nothing_is_migrated() {
    let mut trial = Trial::start(in_turn(2, "")).await;
    trial.fault("d0", dies_after(3), Some(1));
    let body = completion(&prompt(20, "not"));
    let mut events = trial.stream("decode_lost", COMPLETIONS, &body).await;
    broken_off(&events.rest().await);
    let whole = trial.post("ok", COMPLETIONS, &body).await;
    assert!(!whole_text(&whole.json(), 0).is_empty());
    trial.finish().await;
}
