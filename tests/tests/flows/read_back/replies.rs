//! What clients see of it: nothing, except for the cached tokens.

use serde_json::Value;
use splitrail_tests::Spec;
use splitrail_tests::trial::{CHAT, COMPLETIONS, Trial, either, prompt, streamed};

use super::{bidirectional, complete, ids_of, prompt_ids, reading};

/// A reply without what belongs to one request of one engine.
fn comparable(text: &str) -> String {
    let mut reply: Value = serde_json::from_str(text).unwrap();
    for key in ["id", "created", "system_fingerprint"] {
        let own = reply[key].to_string();
        reply[key] = Value::Null;
        assert!(text.contains(&own), "{key}");
    }
    reply.to_string()
}

#[tokio::test]
async fn a_client_that_asks_for_no_token_ids_gets_the_reply_of_an_engine_that_was_not_asked() {
    let mut trial = Trial::start(reading(1, 1, "")).await;
    let mut plain = Trial::start(Spec { model: String::new(), ..reading(1, 1, "") }).await;
    for turn in 0..4 {
        let (path, mut body) = either(turn, &prompt(20, &format!("hidden{turn}-")));
        if turn > 1 {
            body["return_token_ids"] = (turn == 3).into();
        }
        let reply = trial.post("ok", path, &body).await.text();
        let expected = plain.post("ok", path, &body).await.text();
        assert_eq!(comparable(&reply), comparable(&expected), "turn {turn}");
        assert_eq!(reply.contains("\"token_ids\":null"), turn != 3, "{reply}");
        assert_eq!(reply.len(), expected.len(), "byte for byte");
        assert!(reply.contains("\"kv_transfer_params\":null"));
        assert_eq!(trial.asked("d0").last().unwrap().body["return_token_ids"], true);
    }
    trial.finish().await;
    plain.finish().await;
}

#[tokio::test]
async fn streams_are_not_asked_for_ids_since_their_engines_do_not_say_what_they_keep() {
    let mut trial = Trial::start(reading(1, 1, "")).await;
    for path in [CHAT, COMPLETIONS] {
        let (_, body) = either(usize::from(path == COMPLETIONS), &prompt(20, path));
        trial.stream("ok", path, &streamed(&body)).await.chunks().await;
        assert!(trial.asked("d0").last().unwrap().body["return_token_ids"].is_null());
    }
    trial.finish().await;
}

/// A worker that is known to keep nothing is asked for no ids.
#[tokio::test]
async fn engines_without_the_flag_are_recognised_by_their_first_reply_and_left_alone() {
    let spec = Spec { engine: |_, _| {}, ..reading(1, 1, "") };
    let mut trial = Trial::start(spec).await;
    assert_eq!(keeps(&trial).await, Value::Null);
    for asked in [true, false] {
        let (path, body) = either(1, &prompt(20, &format!("plain{asked}-")));
        let reply = trial.post("ok", path, &body).await;
        assert!(reply.text().contains("\"token_ids\":null"), "{}", reply.text());
        let ids = trial.asked("d0").last().unwrap().body["return_token_ids"].clone();
        assert_eq!(ids.as_bool().unwrap_or(false), asked);
        assert_eq!(keeps(&trial).await, false);
    }
    trial.finish().await;
}

async fn keeps(trial: &Trial) -> Value {
    let workers = trial.cluster.admin.get("/admin/workers").await.json();
    let workers = workers["workers"].as_array().unwrap().clone();
    workers.iter().find(|worker| worker["id"] == "d0").unwrap()["keeps_for_read_back"].clone()
}

/// vLLM aborts such a request in its engine, which then keeps nothing of it.
#[tokio::test]
async fn a_reply_that_a_stop_string_ends_does_not_show_that_the_engine_keeps_nothing() {
    let mut trial = Trial::start(reading(1, 1, "")).await;
    let mut body = super::of_ids(&prompt_ids(100, 3), 40);
    let reply = trial.post("ok", COMPLETIONS, &body).await.json();
    assert_eq!(keeps(&trial).await, true);
    let text = reply["choices"][0]["text"].as_str().unwrap();
    body["stop"] = text[10..13].into();
    let ended = trial.post("ok", COMPLETIONS, &body).await.json();
    assert_eq!(ended["choices"][0]["finish_reason"], "stop");
    assert_eq!(keeps(&trial).await, true);
    trial.finish().await;
    // Of an engine that has shown nothing yet.
    let mut trial = Trial::start(reading(1, 1, "")).await;
    trial.post("ok", COMPLETIONS, &body).await;
    assert_eq!(keeps(&trial).await, Value::Null);
    complete(&mut trial, &prompt_ids(100, 4), 40).await;
    assert_eq!(keeps(&trial).await, true);
    trial.finish().await;
}

#[tokio::test]
async fn an_explanation_and_the_decision_record_name_what_is_read() {
    let spec = Spec { engine: bidirectional, ..reading(1, 1, "") };
    let mut trial = Trial::start(spec).await;
    let first = prompt_ids(100, 3);
    let reply = complete(&mut trial, &first, 90).await;
    let next = [first, ids_of(&reply), prompt_ids(20, 4)].concat();
    trial.cluster.settle().await;
    let body = super::of_ids(&next, 5);
    let headers = [("content-type", "application/json")];
    let told = trial.cluster.admin.post_with("/admin/explain", &headers, body.to_string()).await;
    let told = told.json();
    let read = &told["explanation"]["prompts"][0]["read_back"];
    assert_eq!((&read["worker"], read["tokens"].as_u64()), (&"d0".into(), Some(176)), "{told}");
    assert_eq!(trial.cluster.engine("d0").state().read_back_pins, 1, "nothing was read");
    let reply = trial.post("ok", COMPLETIONS, &body).await;
    let decisions = trial.cluster.decisions(reply.header("x-request-id")).await;
    let leg = &decisions[0]["ledger"]["legs"][0];
    assert_eq!(
        (&leg["read_back_offer"]["worker"], leg["read_back"].as_u64()),
        (&"d0".into(), Some(80))
    );
    trial.finish().await;
}
