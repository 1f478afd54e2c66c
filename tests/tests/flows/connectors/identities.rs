//! Who the engines of a push say that they are: in the reply to the router's question, and in replies to
//! legs.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use serde_json::{Value, json};
use splitrail_tests::Spec;
use splitrail_tests::raw_engine::{RawEngine, Turn, reply};
use splitrail_tests::trial::{COMPLETIONS, Trial, completion, prompt};

use super::push::push;

const HERE: &str = "127.0.0.1";
const ELSEWHERE: &str = "192.0.2.1";

/// The prompt of the question.
const QUESTION: &str = "splitrail";

/// An engine that pushes. It gives one id and host in the reply to the question who it is, and another
/// in replies to legs. It never answers a decode leg that names the engine `a`.
async fn says(asked: [&'static str; 2], replied: [&'static str; 2]) -> RawEngine {
    RawEngine::start(move |request| {
        let body: Value = serde_json::from_slice(&request.heard.body).unwrap();
        if body["kv_transfer_params"]["remote_engine_id"] == "a" {
            return Turn::answer(Vec::new());
        }
        identity(if body["prompt"] == QUESTION { asked } else { replied })
    })
    .await
}

/// A reply of an engine with this id, at this host.
fn identity([id, host]: [&str; 2]) -> Turn {
    let told = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
        "kv_transfer_params": {
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1]],
            "remote_engine_id": id, "remote_request_id": "r", "remote_host": host,
            "remote_port": 9, "tp_size": 1, "pp_size": 1, "remote_num_tokens": 9,
            "transfer_mode": "push", "remote_prefill_cached_tokens": 0,
        },
    });
    Turn::answer(reply(200, "application/json", &told.to_string()))
}

async fn scripted(p: &RawEngine, d: &RawEngine) -> Trial {
    let worker = |id, role, engine: &RawEngine| {
        format!("{{ id: {id}, role: {role}, url: \"{}\", kv_events: none }}", engine.url())
    };
    let extra_workers = vec![worker("p0", "prefill", p), worker("d0", "decode", d)];
    let model = "on_no_prefill: fail".into();
    Trial::start(Spec { extra_workers, model, ..push(0, 0) }).await
}

fn bodies(engine: &RawEngine) -> Vec<Value> {
    engine.heard().iter().map(|one| serde_json::from_slice(&one.body).unwrap()).collect()
}

/// The number of times that an engine was asked who it is.
fn questions(engine: &RawEngine) -> usize {
    bodies(engine).iter().filter(|body| body["prompt"] == QUESTION).count()
}

/// What the parameters of an engine's decode legs say under this name.
fn named(engine: &RawEngine, member: &str) -> Vec<Value> {
    let params = bodies(engine).into_iter().map(|body| body["kv_transfer_params"][member].clone());
    params.filter(|value| !value.is_null()).collect()
}

async fn is_refused(trial: &mut Trial) {
    let reply = trial.post("no_worker", COMPLETIONS, &completion(&prompt(30, "q"))).await;
    assert_eq!(reply.status, 503, "{}", reply.text());
    assert!(reply.text().contains("hand_off_networks"), "{}", reply.text());
}

#[tokio::test]
async fn an_engine_that_says_it_is_at_a_host_outside_the_fleet_gets_no_pair() {
    let p = says(["a", ELSEWHERE], ["a", ELSEWHERE]).await;
    let d = says(["d", HERE], ["d", HERE]).await;
    let mut trial = scripted(&p, &d).await;
    is_refused(&mut trial).await;
    assert_eq!(p.heard().len(), questions(&p), "questions and no leg");
    assert!(d.heard().is_empty());
    trial.finish().await;
}

#[tokio::test]
async fn a_host_outside_the_fleet_is_not_learned_from_the_reply_to_a_leg() {
    let p = says(["a", HERE], ["b", ELSEWHERE]).await;
    let d = says(["d", HERE], ["d", HERE]).await;
    let mut trial = scripted(&p, &d).await;
    is_refused(&mut trial).await;
    assert_eq!(named(&d, "remote_host"), [HERE], "one leg, with the host of the reply before");
    trial.finish().await;
}

#[tokio::test]
async fn who_an_engine_is_by_now_is_learned_from_the_reply_to_a_leg_without_a_question() {
    let p = says(["a", HERE], ["b", HERE]).await;
    let d = says(["d", HERE], ["d", HERE]).await;
    let mut trial = scripted(&p, &d).await;
    let reply = trial.post("ok", COMPLETIONS, &completion(&prompt(30, "q"))).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(named(&d, "remote_engine_id"), ["a", "b"]);
    assert_eq!(questions(&p), 1);
    trial.finish().await;
}

/// Decode fails, and by then the prefill engine is too busy to say again who it is.
#[tokio::test]
async fn a_prefill_engine_that_says_late_who_it_is_is_not_blamed_for_decode() {
    let told = AtomicUsize::new(0);
    let p = RawEngine::start(move |request| {
        let body: Value = serde_json::from_slice(&request.heard.body).unwrap();
        // The first question is answered, and after the pair has failed none in time.
        match body["prompt"] == QUESTION && told.fetch_add(1, Relaxed) == 0 {
            true => identity(["a", HERE]),
            false => Turn::answer(Vec::new()),
        }
    })
    .await;
    let d = RawEngine::start(|request| {
        let body: Value = serde_json::from_slice(&request.heard.body).unwrap();
        match body["prompt"] == QUESTION {
            true => identity(["d", HERE]),
            false => Turn::answer(reply(503, "application/json", "{}")),
        }
    })
    .await;
    let mut trial = scripted(&p, &d).await;
    let reply = trial.post("engine_failed", COMPLETIONS, &completion(&prompt(30, "q"))).await;
    assert!(reply.status.is_server_error(), "{}", reply.text());
    assert_eq!(questions(&p), 2);
    let failures = async |worker, leg| {
        let labels = [("worker", worker), ("leg", leg)];
        trial.cluster.metric("splitrail_worker_leg_failures_total", &labels).await
    };
    assert_eq!((failures("p0", "prefill").await, failures("d0", "decode").await), (0.0, 1.0));
}
