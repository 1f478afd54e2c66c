//! Kept connections over TLS: late bytes, late ends and truncated answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use splitrail_tests::front::Front;
use splitrail_tests::raw_engine::{Asked, RawEngine, Then, Turn, reply};
use splitrail_tests::scripted_server::ReceivedRequest;
use splitrail_tests::tls_server::{ServerCertificate, TlsServer};

use super::section;

const CLIENTS: usize = 8;
const REQUESTS_EACH: usize = 50;
const COMPLETIONS: &str = "/v1/completions";

/// The answer of an engine that repeats the prompt.
fn answer(heard: &ReceivedRequest) -> String {
    let body: Value = serde_json::from_slice(&heard.body).unwrap();
    let answer = json!({
        "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": body["prompt"], "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    });
    reply(200, "application/json", &answer.to_string())
}

/// A router before an engine that does what the script says, over TLS.
async fn front(
    script: impl Fn(&Asked) -> Turn + Send + Sync + 'static,
) -> (Front, TlsServer, RawEngine) {
    let engine = RawEngine::start(script).await;
    let address = engine.url()["http://".len()..].parse().unwrap();
    let server = TlsServer::start(address, ServerCertificate::VALID).await;
    let front = Front::start("{}", &section(""), &[server.url()]).await;
    (front, server, engine)
}

/// Whether a request got its own answer.
async fn is_answered(front: &Front, text: &str) -> bool {
    let body = json!({"model": "sim", "prompt": text, "max_tokens": 2});
    let reply = front.http.post(COMPLETIONS, &body).await;
    reply.status == 200 && reply.json()["choices"][0]["text"] == text
}

/// Number of requests that did not get their own answer.
async fn failures(front: &Front) -> usize {
    let failed = AtomicUsize::new(0);
    join_all((0..CLIENTS).map(|client| {
        let failed = &failed;
        async move {
            for number in 0..REQUESTS_EACH {
                if !is_answered(front, &format!("marker-{client}-{number}.")).await {
                    failed.fetch_add(1, Relaxed);
                }
                tokio::time::sleep(Duration::from_micros(rand::random_range(0..6000))).await;
            }
        }
    }))
    .await;
    failed.into_inner()
}

fn some_time() -> Duration {
    Duration::from_micros(rand::random_range(0..4000))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_408_and_a_late_end_cost_no_client_an_error() {
    for late in [
        |asked: &Asked| {
            let then = Then::Late(some_time(), reply(408, "text/plain", "").into_bytes());
            Turn { bytes: answer(&asked.heard).into_bytes(), then }
        },
        |asked: &Asked| {
            let then = Then::LateEnd(some_time());
            Turn { bytes: answer(&asked.heard).into_bytes(), then }
        },
    ] {
        let (front, _server, _engine) = front(late).await;
        assert_eq!(failures(&front).await, 0);
        assert_eq!(front.metric("splitrail_worker_breaker_open", &[]).await, 0.0);
    }
}

#[tokio::test]
async fn after_bytes_that_answer_no_request_connections_serve_one_request_each() {
    let again = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&again);
    let (front, _server, _engine) = front(move |asked| {
        counter.fetch_add(asked.before.min(1), Relaxed);
        let answer = answer(&asked.heard);
        let is_doubled = answer.contains("\"one\"");
        Turn::answer(if is_doubled { answer.repeat(2) } else { answer })
    })
    .await;
    for text in ["one", "two", "three", "four"] {
        assert!(is_answered(&front, text).await, "{text}");
    }
    assert_eq!(again.load(Relaxed), 0, "no connection serves a second request");
    assert_eq!(front.metric("splitrail_unsolicited_data_connections_total", &[]).await, 1.0);
}

#[tokio::test]
async fn a_request_on_a_connection_that_is_closed_under_it_is_sent_again() {
    let (front, _server, _engine) = front(|asked| match asked.before {
        0 => Turn::answer(answer(&asked.heard)),
        _ => Turn::last(""),
    })
    .await;
    for text in ["one", "two", "three"] {
        assert!(is_answered(&front, text).await, "{text}");
    }
    assert_eq!(front.metric("splitrail_resent_requests_total", &[]).await, 2.0);
    assert_eq!(front.metric("splitrail_worker_breaker_open", &[]).await, 0.0);
}

#[tokio::test]
async fn requests_with_pauses_share_one_connection() {
    let (front, server, _engine) = front(|asked| Turn::answer(answer(&asked.heard))).await;
    assert!(is_answered(&front, "first").await);
    let before = server.secured();
    for number in 0..10 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(is_answered(&front, &format!("then-{number}")).await);
    }
    // The router's own questions have a connection of their own.
    assert!(server.secured() <= before + 1, "{before} {}", server.secured());
    assert_eq!(front.metric("splitrail_unsolicited_data_connections_total", &[]).await, 0.0);
}
