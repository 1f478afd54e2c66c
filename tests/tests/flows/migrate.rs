//! `migrate: true`: a reply whose decode worker is lost continues on another one if the result is
//! exactly the same.

use serde_json::{Value, json};
use splitrail_sim::FaultKind;
use splitrail_tests::Spec;
use splitrail_tests::canned::{Canned, Then};
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, Reference, Trial, broken_off, chat, completion, generated_ids, prompt,
    streamed,
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

/// Chunks without what belongs to one engine: its name for the answer, the time, itself, its cache.
fn comparable(mut chunks: Vec<Value>) -> Vec<Value> {
    for chunk in &mut chunks {
        chunk["id"] = "id".into();
        chunk["created"] = 0.into();
        if chunk["usage"].is_object() {
            chunk["system_fingerprint"] = Value::Null;
            chunk["usage"]["prompt_tokens_details"] = Value::Null;
        }
    }
    chunks
}

#[tokio::test]
async fn wherever_a_chat_breaks_off_the_client_gets_the_chunks_of_an_unbroken_one() {
    let reference = Reference::start().await;
    for flow in ["prefill_first", "aggregated"] {
        let (prefill, decode, both) = if flow == "aggregated" { (0, 0, 2) } else { (1, 2, 0) };
        let spec = Spec { flow, prefill, both, ..in_turn(decode, "migrate: true") };
        let mut trial = Trial::start(spec).await;
        let engines = if both > 0 { ["w0", "w1"] } else { ["d0", "d1"] };
        for after in 1..13 {
            let body = with_usage(chat(&prompt(20, &format!("{flow}{after}-"))));
            let expected = reference.chunks(CHAT, &body).await;
            trial.fault(engines[0], dies_after(after), Some(1));
            let chunks = trial.stream("ok", CHAT, &body).await.chunks().await;
            for chunk in &chunks {
                let named = (&chunk["id"], &chunk["created"]);
                assert_eq!(named, (&chunks[0]["id"], &chunks[0]["created"]));
            }
            assert_eq!(comparable(chunks), comparable(expected), "{flow}, {after}");
        }
        let broken = if flow == "aggregated" { 6.0 } else { 12.0 };
        assert_eq!(migrations(&trial, "resumed").await, broken);
        let asked = engines.map(|engine| trial.asked(engine)).concat();
        let rest: Vec<_> = asked.iter().filter(|seen| seen.path == COMPLETIONS).collect();
        assert_eq!(rest.len(), broken as usize);
        for seen in rest {
            assert!(seen.body["prompt"].is_array(), "token ids, no text: {}", seen.body);
            assert!(seen.body.get("messages").is_none(), "{}", seen.body);
        }
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_chat_whose_answer_has_reasoning_does_not_go_on() {
    let chunk = |choice: Value| {
        let chunk = json!({
            "id": "c", "object": "chat.completion.chunk", "created": 1, "model": "sim",
            "choices": [choice], "prompt_token_ids": [5, 6],
        });
        format!("data: {chunk}\n\n")
    };
    let events = [
        json!({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}),
        json!({
            "index": 0, "delta": {"reasoning": "hm"}, "finish_reason": null, "token_ids": [7],
        }),
        json!({"index": 0, "delta": {"content": "so"}, "finish_reason": null, "token_ids": [8]}),
    ];
    let stream = Canned::reply("text/event-stream", &events.map(chunk).concat());
    let thinking = Canned::start(stream, Then::Close).await;
    let spec = Spec {
        extra_workers: vec![thinking.worker("x0", "both")],
        policy: "{ kind: round_robin }",
        model: "migrate: true".into(),
        ..Spec::aggregated(1)
    };
    let trial = Trial::start(spec).await;
    let body = streamed(&chat(&prompt(20, "think")));
    let mut broken = Vec::new();
    for _ in 0..2 {
        let events = trial.cluster.http.stream(CHAT, &body).await.rest().await;
        if events.last().is_none_or(|last| last != "[DONE]") {
            broken.push(events);
        }
    }
    let [events] = &broken[..] else { panic!("workers take turns: {broken:?}") };
    let (chunks, error) = broken_off(events);
    assert_eq!(error["code"], "decode_lost");
    assert_eq!(streamed_text(&chunks, 0), "so");
    for chunk in &chunks {
        assert!(chunk["prompt_token_ids"].is_null(), "not asked for: {chunk}");
        assert!(chunk["choices"][0]["token_ids"].is_null(), "not asked for: {chunk}");
    }
    assert_eq!(trial.asked("w0").iter().filter(|seen| seen.path == COMPLETIONS).count(), 0);
    assert_eq!(migrations(&trial, "resumed").await, 0.0);
}

#[tokio::test]
async fn token_ids_that_a_chat_s_client_asked_for_are_whole_too() {
    let mut trial = Trial::start(in_turn(2, "migrate: true")).await;
    let mut body = chat(&prompt(20, "ids"));
    body["return_token_ids"] = true.into();
    trial.fault("d0", dies_after(5), Some(1));
    let chunks = trial.stream("ok", CHAT, &body).await.chunks().await;
    assert_eq!(migrations(&trial, "resumed").await, 1.0);
    let whole = trial.post("ok", CHAT, &body).await.json();
    assert_eq!(generated_ids(&chunks, 0), generated_ids(std::slice::from_ref(&whole), 0));
    let prompts: Vec<_> = chunks
        .iter()
        .map(|chunk| &chunk["prompt_token_ids"])
        .filter(|ids| !ids.is_null())
        .collect();
    assert_eq!(prompts, [&whole["prompt_token_ids"]], "once, and the client's own");
    trial.finish().await;
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
async fn a_reply_migrates_as_often_as_decode_may_be_retried() {
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
async fn a_migration_that_would_not_be_exact_ends_with_an_error() {
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
        with("repetition_penalty", json!(1.5)),
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
    let chat_with = |key: &str, value: Value| {
        let mut body = chat(&prompt(20, key));
        body[key] = value;
        body
    };
    let chats = [
        // How long it may be is the engine's to say.
        chat_with("max_tokens", Value::Null),
        chat_with("n", json!(2)),
        chat_with("stop", json!(["never there"])),
        chat_with("frequency_penalty", json!(0.5)),
        chat_with("logprobs", json!(true)),
        chat_with("tools", json!([{"type": "function", "function": {"name": "f"}}])),
        chat_with("repetition_penalty", json!(1.5)),
    ];
    for body in chats {
        for sick in ["d0", "d1"] {
            trial.fault(sick, dies_after(3), None);
        }
        let mut events = trial.stream("decode_lost", CHAT, &body).await;
        broken_off(&events.rest().await);
    }
    let ids = trial.asked("d0").into_iter().chain(trial.asked("d1"));
    assert!(ids.filter(|seen| seen.body.get("return_token_ids").is_some()).count() == 0);
    let total = migrations(&trial, "resumed").await + migrations(&trial, "lost").await;
    assert_eq!(total, 0.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_reply_that_breaks_off_after_its_last_token_takes_no_retry() {
    let mut trial = Trial::start(in_turn(2, "migrate: true")).await;
    trial.fault("d0", dies_after(12), Some(1));
    let body = completion(&prompt(20, "finished"));
    let mut events = trial.stream("decode_lost", COMPLETIONS, &body).await;
    let (chunks, _) = broken_off(&events.rest().await);
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
    assert_eq!(trial.retries("migrate").await, 0.0);
    assert_eq!(migrations(&trial, "resumed").await + migrations(&trial, "lost").await, 0.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_lost_worker_s_failure_counts_while_the_reply_moves() {
    let mut trial = Trial::start(in_turn(2, "migrate: true")).await;
    trial.fault("d0", dies_after(3), Some(1));
    trial.fault("d1", FaultKind::Hang, None);
    let body = completion(&prompt(20, "moves"));
    let events = trial.stream("cancelled", COMPLETIONS, &body).await;
    // Reads while the second worker is asked.
    let mut reading = tokio::task::JoinSet::new();
    reading.spawn(async move { drop({ events }.rest().await) });
    eventually("the second worker is asked", async || !trial.asked("d1").is_empty()).await;
    let lost = [("worker", "d0")];
    eventually("the failure counts and nothing is booked", async || {
        let failures = [("worker", "d0"), ("leg", "decode")];
        let failed = trial.cluster.metric("splitrail_worker_leg_failures_total", &failures).await;
        let booked = trial.cluster.metric("splitrail_worker_requests", &lost).await;
        (failed, booked) == (1.0, 0.0)
    })
    .await;
    drop(reading);
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
