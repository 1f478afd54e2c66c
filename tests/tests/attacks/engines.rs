//! Engines that misbehave on the wire: late bytes, unsolicited answers, endless heads, oversized
//! replies, redirects and hand-offs to foreign hosts.

use serde_json::{Value, json};
use splitrail_tests::client::Reply;
use splitrail_tests::front::Front;
use splitrail_tests::raw_engine::reply;
use splitrail_tests::scripted_server::ReceivedRequest;

mod endless;
mod framing;
mod hand_offs;
mod kept;
mod large;
mod late;
mod redirects;
mod shapes;

const COMPLETIONS: &str = "/v1/completions";

fn completion(text: &str) -> Value {
    json!({"model": "sim", "prompt": text, "max_tokens": 2})
}

/// The prompt of a request that [`completion`] made.
fn prompt_of(heard: &ReceivedRequest) -> String {
    let body: Value = serde_json::from_slice(&heard.body).unwrap();
    body["prompt"].as_str().unwrap_or_default().to_owned()
}

/// What an engine answers, which names its answers like this and generates this text.
fn generated(id: &str, text: &str) -> String {
    let answer = json!({
        "id": id, "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": text, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    });
    answer.to_string()
}

/// The answer of an engine that repeats the id of the request, and its prompt.
fn echo(heard: &ReceivedRequest) -> String {
    let id = format!("cmpl-{}", heard.header("x-request-id"));
    reply(200, "application/json", &generated(&id, &prompt_of(heard)))
}

/// The same of an engine whose ids say nothing of the request.
fn no_echo(heard: &ReceivedRequest) -> String {
    reply(200, "application/json", &generated("cmpl-1", &prompt_of(heard)))
}

async fn ask(front: &Front, text: &str) -> Reply {
    front.http.post(COMPLETIONS, &completion(text)).await
}

/// Asks, and gets the answer to this and nothing else.
async fn is_answered(front: &Front, text: &str) {
    let reply = ask(front, text).await;
    assert_eq!(reply.status, 200, "{text}: {}", reply.text());
    assert_eq!(reply.json()["choices"][0]["text"], text);
}

async fn no_breaker_is_open(front: &Front) {
    assert_eq!(front.metric("splitrail_worker_breaker_open", &[]).await, 0.0);
}
