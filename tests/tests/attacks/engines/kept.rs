//! Kept connections that end, or say what was not asked for, when the next request is written.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use futures_util::future::join;
use serde_json::json;
use splitrail_tests::client::streamed_text;
use splitrail_tests::cluster::eventually;
use splitrail_tests::front::Front;
use splitrail_tests::raw_engine::{RawEngine, Then, Turn, reply};
use tokio::sync::Barrier;

use super::{COMPLETIONS, ask, echo, generated, is_answered, no_breaker_is_open, no_echo};

/// An engine that answers the first request of each connection, and says this to the second.
async fn after_one_answer(second: impl Fn() -> Turn + Send + Sync + 'static) -> RawEngine {
    RawEngine::start(move |asked| match asked.before {
        0 => Turn::answer(no_echo(&asked.heard)),
        _ => second(),
    })
    .await
}

async fn is_made_up_for(second: impl Fn() -> Turn + Send + Sync + 'static) {
    let engine = after_one_answer(second).await;
    let front = Front::start("{}", "", &[engine.url()]).await;
    for text in ["one", "two", "three"] {
        is_answered(&front, text).await;
    }
    let heard = engine.heard();
    let ids: BTreeSet<_> = heard.iter().map(|heard| heard.header("x-request-id")).collect();
    assert_eq!((heard.len(), ids.len()), (5, 5), "two were sent again, with ids of their own");
    assert_eq!(front.metric("splitrail_resent_requests_total", &[]).await, 2.0);
    no_breaker_is_open(&front).await;
}

#[tokio::test]
async fn a_request_on_a_connection_that_is_closed_under_it_is_sent_again() {
    is_made_up_for(|| Turn::last("")).await;
}

#[tokio::test]
async fn a_request_on_a_connection_that_is_reset_under_it_is_sent_again() {
    is_made_up_for(|| Turn { bytes: Vec::new(), then: Then::Reset }).await;
}

#[tokio::test]
async fn a_request_that_meets_a_server_which_gave_up_waiting_is_sent_again() {
    is_made_up_for(|| Turn::last(reply(408, "text/plain", ""))).await;
    is_made_up_for(|| Turn::answer(reply(408, "text/plain", ""))).await;
}

#[tokio::test]
async fn after_bytes_that_answer_no_request_connections_serve_one_request_each() {
    let again = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&again);
    let engine = RawEngine::start(move |asked| {
        counter.fetch_add(asked.before.min(1), Relaxed);
        let answer = no_echo(&asked.heard);
        let is_doubled = answer.contains("\"one\"");
        Turn::answer(if is_doubled { answer.repeat(2) } else { answer })
    })
    .await;
    let front = Front::start("{}", "", &[engine.url()]).await;
    for text in ["one", "two", "three", "four"] {
        is_answered(&front, text).await;
    }
    assert_eq!(again.load(Relaxed), 0, "no connection serves a second request");
    assert_eq!(front.metric("splitrail_unsolicited_data_connections_total", &[]).await, 1.0);
    assert_eq!(front.metric("splitrail_resent_requests_total", &[]).await, 0.0);
    no_breaker_is_open(&front).await;
}

#[tokio::test]
async fn a_request_is_not_sent_again_without_end() {
    let engine = RawEngine::start(|_| Turn::last("")).await;
    let front = Front::start("{}", "breaker: { failures: 0 }", &[engine.url()]).await;
    for asked in 1..=3 {
        assert_eq!(ask(&front, "x").await.status, 502);
        assert_eq!(
            engine.heard().len(),
            asked,
            "a new connection that ends is an engine's failure"
        );
    }
}

#[tokio::test]
async fn requests_are_not_sent_again_once_the_budget_for_retries_is_spent() {
    let engine = after_one_answer(|| Turn::last("")).await;
    let front = Front::start("{}", "retries: { budget_percent: 0 }", &[engine.url()]).await;
    is_answered(&front, "first").await;
    // A hundred are in reserve.
    for _ in 0..100 {
        is_answered(&front, "x").await;
    }
    let reply = ask(&front, "x").await;
    assert_eq!(reply.status, 502);
    assert_eq!(reply.json()["error"]["code"], "stale_connection");
    no_breaker_is_open(&front).await;
}

#[tokio::test]
async fn an_engine_that_closes_after_each_answer_without_saying_so_costs_no_client_an_error() {
    let engine = RawEngine::start(|asked| Turn::last(no_echo(&asked.heard))).await;
    let front = Front::start("{}", "", &[engine.url()]).await;
    let clients = (0..8).map(|client| {
        let front = &front;
        async move {
            for number in 0..40 {
                is_answered(front, &format!("{client}-{number}")).await;
            }
        }
    });
    futures_util::future::join_all(clients).await;
    no_breaker_is_open(&front).await;
}

#[tokio::test]
async fn an_answer_with_the_id_of_another_request_reaches_no_client() {
    // Once it has answered, an engine answers the request before the last.
    let engine = RawEngine::start(|asked| match asked.before {
        0 => Turn::answer(echo(&asked.heard)),
        _ => Turn::answer(reply(200, "application/json", &generated("cmpl-0", "another's"))),
    })
    .await;
    let front = Front::start("{}", "", &[engine.url()]).await;
    for text in ["one", "two", "three"] {
        is_answered(&front, text).await;
    }
    assert_eq!(engine.heard().len(), 5, "the connection of a foreign answer is not used again");
    let worker = [("worker", "w0")];
    assert_eq!(front.metric("splitrail_foreign_replies_total", &worker).await, 2.0);
    no_breaker_is_open(&front).await;
}

#[tokio::test]
async fn a_stream_with_the_id_of_another_request_reaches_no_client() {
    let stream = |id: &str, text: &str| {
        let events = format!("data: {}\n\ndata: [DONE]\n\n", generated(id, text));
        reply(200, "text/event-stream", &events)
    };
    let engine = RawEngine::start(move |asked| {
        let id = format!("cmpl-{}", asked.heard.header("x-request-id"));
        Turn::answer(match asked.before {
            0 => stream(&id, "mine"),
            _ => stream("cmpl-0", "another's"),
        })
    })
    .await;
    let front = Front::start("{}", "", &[engine.url()]).await;
    let body = json!({"model": "sim", "prompt": "x", "max_tokens": 1, "stream": true});
    for _ in 0..3 {
        let chunks = front.http.stream(COMPLETIONS, &body).await.chunks().await;
        assert_eq!(streamed_text(&chunks, 0), "mine");
    }
    assert_eq!(front.metric("splitrail_foreign_replies_total", &[]).await, 2.0);
}

#[tokio::test]
async fn a_request_that_got_the_answer_of_another_is_sent_again_on_a_new_connection() {
    // The engine answers two requests at the same time, so that the router keeps two connections.
    // On both of them, the next answer is for another request.
    let both = Arc::new(Barrier::new(2));
    let engine = RawEngine::start(move |asked| {
        let mine = echo(&asked.heard).into_bytes();
        match asked.before {
            0 if asked.heard.text().contains("together") => {
                Turn { bytes: Vec::new(), then: Then::Together(Arc::clone(&both), mine) }
            }
            0 => Turn::answer(mine),
            _ => Turn::answer(reply(200, "application/json", &generated("cmpl-0", "another's"))),
        }
    })
    .await;
    let front = Front::start("{}", "", &[engine.url()]).await;
    join(is_answered(&front, "together 1"), is_answered(&front, "together 2")).await;
    is_answered(&front, "next").await;
    assert_eq!(engine.heard().len(), 4, "one answer was for another request");
    assert_eq!(front.metric("splitrail_foreign_replies_total", &[]).await, 1.0);
    no_breaker_is_open(&front).await;
}

#[tokio::test]
async fn a_connection_to_a_process_that_has_gone_serves_no_further_request() {
    // Before engines stand proxies, whose connections outlive a restart of the engine.
    let before = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&before);
    let engine = RawEngine::start(move |asked| {
        seen.lock().unwrap().push(asked.before);
        Turn::answer(echo(&asked.heard))
    })
    .await;
    let health = "health: { probe_interval: 20ms }";
    let front = Front::start("{}", health, &[engine.url()]).await;
    is_answered(&front, "one").await;
    is_answered(&front, "two").await;
    let is_up = async || front.metric("splitrail_worker_up", &[]).await == 1.0;
    engine.set_ill(true);
    eventually("the worker is down", async || !is_up().await).await;
    engine.set_ill(false);
    eventually("the worker is up again", is_up).await;
    is_answered(&front, "three").await;
    assert_eq!(*before.lock().unwrap(), [0, 1, 0]);
}

#[tokio::test]
async fn an_engine_that_stops_to_repeat_ids_is_served_by_again() {
    // A proxy has put another version in its place.
    let engine = RawEngine::start(|asked| {
        let old = asked.heard.text().contains("old");
        Turn::answer(if old { echo(&asked.heard) } else { no_echo(&asked.heard) })
    })
    .await;
    let front = Front::start("{}", "", &[engine.url()]).await;
    is_answered(&front, "old").await;
    let mut refused = 0;
    while ask(&front, "new").await.status != 200 {
        refused += 1;
        assert!(refused < 20, "it is believed in the end");
    }
    assert!(refused > 0);
    is_answered(&front, "new").await;
}

#[tokio::test]
async fn a_connection_serves_requests_of_one_kind_only() {
    let engine = RawEngine::start(|asked| {
        assert_eq!(asked.before, 0, "{}", asked.heard.target);
        match asked.heard.target.as_str() {
            "/tokenize" => Turn::answer(reply(200, "application/json", r#"{"tokens":[1]}"#)),
            _ => Turn::answer(no_echo(&asked.heard)),
        }
    })
    .await;
    let front = Front::start("{}", "", &[engine.url()]).await;
    // The worker is polled meanwhile.
    is_answered(&front, "x").await;
    let body = json!({"model": "sim", "prompt": "x"});
    assert_eq!(front.http.post("/tokenize", &body).await.status, 200);
    assert_eq!(engine.heard().len(), 2);
}
