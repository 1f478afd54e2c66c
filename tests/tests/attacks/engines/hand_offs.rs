//! A hand-off is used once, whatever becomes of the connection that it was sent on.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use serde_json::{Value, json};
use splitrail_tests::front::Front;
use splitrail_tests::raw_engine::{RawEngine, Turn, reply};

use super::{generated, is_answered, no_breaker_is_open, no_echo, prompt_of};

/// A prefill engine whose hand-offs all differ.
async fn prefill() -> RawEngine {
    let count = AtomicUsize::new(0);
    RawEngine::start(move |asked| {
        let mut answer: Value =
            serde_json::from_str(&generated("cmpl-1", &prompt_of(&asked.heard))).unwrap();
        answer["choices"][0]["finish_reason"] = "length".into();
        answer["kv_transfer_params"] = json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2]],
            "remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 1,
            "remote_request_id": count.fetch_add(1, Relaxed).to_string(),
            "remote_num_tokens": 32, "tp_size": 1,
        });
        Turn::answer(reply(200, "application/json", &answer.to_string()))
    })
    .await
}

#[tokio::test]
async fn a_hand_off_that_may_have_been_received_is_never_sent_again() {
    let prefill = prefill().await;
    let decode = RawEngine::start(|asked| match asked.before {
        0 => Turn::answer(no_echo(&asked.heard)),
        _ => Turn::last(""),
    })
    .await;
    let workers = [("prefill", prefill.url()), ("decode", decode.url())];
    let front = Front::with_flow("{}", "flow: prefill_first", "connector: nixl", &workers).await;
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
