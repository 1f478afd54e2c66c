//! A hand-off is used once, in whatever way the connection ends on which it was sent.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use futures_util::future::join;
use serde_json::{Value, json};
use splitrail_tests::cluster::eventually;
use splitrail_tests::front::Front;
use splitrail_tests::raw_engine::{RawEngine, Then, Turn, reply};
use tokio::sync::Barrier;

use super::{ask, generated, is_answered, no_breaker_is_open, no_echo, prompt_of};

/// A prefill engine whose hand-offs all differ. `then` says for a prompt, and how often it was asked
/// for, what the engine does with its answer.
async fn prefill(then: impl Fn(&str, usize, String) -> Turn + Send + Sync + 'static) -> RawEngine {
    let prompts: Mutex<Vec<String>> = Mutex::default();
    RawEngine::start(move |asked| {
        let prompt = prompt_of(&asked.heard);
        let mut prompts = prompts.lock().unwrap();
        prompts.push(prompt.clone());
        let mut answer: Value = serde_json::from_str(&generated("cmpl-1", &prompt)).unwrap();
        answer["choices"][0]["finish_reason"] = "length".into();
        answer["kv_transfer_params"] = json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2]],
            "remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 1,
            "remote_request_id": prompts.len().to_string(),
            "remote_num_tokens": 32, "tp_size": 1,
        });
        let times = prompts.iter().filter(|earlier| **earlier == prompt).count();
        then(&prompt, times, reply(200, "application/json", &answer.to_string()))
    })
    .await
}

/// A decode engine that closes each connection upon the second request.
async fn decode() -> RawEngine {
    RawEngine::start(|asked| match asked.before {
        0 => Turn::answer(no_echo(&asked.heard)),
        _ => Turn::last(""),
    })
    .await
}

async fn pair(prefill: &RawEngine, decode: &RawEngine) -> Front {
    let workers = [("prefill", prefill.url()), ("decode", decode.url())];
    Front::with_flow("{}", "flow: prefill_first", "connector: nixl", &workers).await
}

#[tokio::test]
async fn a_hand_off_that_may_have_been_received_is_never_sent_again() {
    let prefill = prefill(|_, _, answer| Turn::answer(answer)).await;
    let decode = decode().await;
    let front = pair(&prefill, &decode).await;
    for text in ["one", "two", "three"] {
        is_answered(&front, text).await;
    }
    let heard = decode.heard();
    let hand_offs: Vec<String> = heard
        .iter()
        .map(|heard| serde_json::from_slice::<Value>(&heard.body).unwrap())
        .map(|body| body["kv_transfer_params"]["remote_request_id"].to_string())
        .collect();
    let distinct: BTreeSet<&String> = hand_offs.iter().collect();
    assert_eq!((heard.len(), distinct.len()), (5, 5), "{hand_offs:?}");
    assert!(!hand_offs.contains(&"null".to_owned()), "{hand_offs:?}");
    assert_eq!(prefill.heard().len(), 5, "what replaces it is prefilled anew");
    no_breaker_is_open(&front).await;
}

#[tokio::test]
async fn a_replaced_hand_off_is_sent_on_a_new_connection() {
    // The second prefill of a request ends once another request has left a connection behind.
    let both = Arc::new(Barrier::new(2));
    let ends = Arc::clone(&both);
    let prefill = prefill(move |prompt, times, answer| match (prompt, times) {
        ("twice", 2) => {
            Turn { bytes: Vec::new(), then: Then::Together(Arc::clone(&ends), answer.into()) }
        }
        _ => Turn::answer(answer),
    })
    .await;
    let decode = decode().await;
    let front = pair(&prefill, &decode).await;
    is_answered(&front, "kept").await;
    let between = async {
        eventually("it is prefilled again", async || {
            let prompts = prefill.heard();
            prompts.iter().filter(|heard| prompt_of(heard) == "twice").count() == 2
        })
        .await;
        is_answered(&front, "between").await;
        both.wait().await;
    };
    let (reply, ()) = join(ask(&front, "twice"), between).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(decode.heard().len(), 4, "one request met the end of a connection");
    no_breaker_is_open(&front).await;
}
