//! Engines whose replies have endless heads.

use std::time::Duration;

use serde_json::{Value, json};
use splitrail_tests::client::streamed_text;
use splitrail_tests::front::Front;
use splitrail_tests::raw_engine::{RawEngine, Then, Turn};
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::solo::Solo;

use super::{COMPLETIONS, generated};

/// Far more than the buffers of all sockets on the way.
const FLOOD_BYTES: usize = 1 << 30;
const READ_MAX_BYTES: usize = 32 << 20;

const STREAM_HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";

async fn is_cut_short(stream: bool, head: &str, piece: &str, why: &str) {
    let (head, piece) = (head.as_bytes().to_vec(), piece.repeat(256).into_bytes());
    let solo = Solo::start("{}", move |_| ScriptedReply::Endless {
        head: head.clone(),
        piece: piece.clone(),
        max_bytes: FLOOD_BYTES,
    })
    .await;
    let body = json!({"model": "sim", "prompt": "x", "max_tokens": 1, "stream": stream});
    let reply = solo.http.post(COMPLETIONS, &body).await;
    assert_eq!(reply.status, 502, "{}", reply.text());
    assert!(reply.text().contains(why), "{}", reply.text());
    let written = ScriptedServer::written_bytes(&solo.post);
    assert!(written < READ_MAX_BYTES, "{written} bytes were taken");
}

#[tokio::test]
async fn interim_answers_without_end_are_an_engine_s_failure() {
    is_cut_short(false, "", "HTTP/1.1 100 Continue\r\n\r\n", "interim responses").await;
    is_cut_short(true, "", "HTTP/1.1 103 Early\r\nlink: x\r\n\r\n", "interim responses").await;
}

#[tokio::test]
async fn a_head_without_end_is_an_engine_s_failure() {
    is_cut_short(false, "HTTP/1.1 200 OK\r\n", "x: y\r\n", "a head of more than").await;
}

#[tokio::test]
async fn comments_and_blank_lines_without_end_are_an_engine_s_failure() {
    for piece in [": ping\n\n", "\n\n", "event: ping\n\n"] {
        is_cut_short(true, STREAM_HEAD, piece, "comments and no event").await;
    }
}

#[tokio::test]
async fn comments_keep_a_stream_open_but_not_for_ever() {
    const EVERY: Duration = Duration::from_millis(25);
    let data = |event: &str| format!("data: {event}\n\n");
    let first = generated("cmpl-1", "a").replace("\"stop\"", "null");
    let rest = data(&generated("cmpl-1", "b")) + "data: [DONE]\n\n";
    let engine = RawEngine::start(move |asked| {
        let bytes = format!("{STREAM_HEAD}{}", data(&first)).into_bytes();
        let count = if asked.heard.text().contains("short") { 120 } else { 100_000 };
        let comment = b": still there\n\n".to_vec();
        let then = Then::Paced(comment, count, EVERY, rest.clone().into_bytes());
        Turn { bytes, then }
    })
    .await;
    // Many times the distance of two comments.
    let front = Front::start("{}", "timeouts: { stream_idle: 1s }", &[engine.url()]).await;
    let http = &front.http;
    let events = async |prompt: &str| {
        let body = json!({"model": "sim", "prompt": prompt, "max_tokens": 1, "stream": true});
        http.stream(COMPLETIONS, &body).await.rest().await
    };
    let (short, events) = tokio::join!(events("short"), events("long"));
    let (done, chunks) = short.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    let chunks: Vec<Value> = chunks.iter().map(|one| serde_json::from_str(one).unwrap()).collect();
    assert_eq!(streamed_text(&chunks, 0), "ab", "comments are passed over");
    let last = events.last().map(String::as_str).unwrap_or_default();
    assert!(last.contains("decode_lost") && last.contains("comments"), "{events:?}");
}
