//! Engines whose replies have endless heads, or endless tokens.

use std::time::Duration;

use serde_json::{Value, json};
use splitrail_tests::client::streamed_text;
use splitrail_tests::front::Front;
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::raw;
use splitrail_tests::raw_engine::{RawEngine, Then, Turn};
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::solo::Solo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{COMPLETIONS, generated};

/// Far more than the buffers of all sockets on the way.
const FLOOD_BYTES: usize = 1 << 30;
const READ_MAX_BYTES: usize = 32 << 20;

const STREAM_HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";

async fn is_cut_short(stream: bool, head: &str, piece: &str, why: &str) {
    let (head, piece) = (head.as_bytes().to_vec(), piece.repeat(256).into_bytes());
    // A heartbeat would send the client a head before the failure.
    let quiet = "{}\nstreams: { keep_alive: none }";
    let solo = Solo::start(quiet, move |_| ScriptedReply::Endless {
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

/// Tokens without text, which a router that could resume the reply keeps and does not pass on.
#[tokio::test]
async fn tokens_without_end_of_a_reply_that_may_migrate_take_bounded_memory() {
    const REPLY_BYTES: usize = 96 << 20;
    let event = |ids: &[u32]| {
        let choice = json!({"index": 0, "text": "", "finish_reason": null, "token_ids": ids,
            "prompt_token_ids": [1]});
        let event = json!({"id": "cmpl-1", "object": "text_completion", "created": 1,
            "model": "sim", "choices": [choice]});
        format!("data: {event}\n\n")
    };
    let (head, piece) = (format!("{STREAM_HEAD}{}", event(&[1])), event(&[1; 16 << 10]));
    let post = ScriptedServer::start(move |heard| match heard.is_inference() {
        false => ScriptedReply::json(200, "{}"),
        true => ScriptedReply::Endless {
            head: head.clone().into(),
            piece: piece.clone().into(),
            max_bytes: REPLY_BYTES,
        },
    })
    .await;
    // The second request asks for as many tokens as `limits.output_tokens_max` allows.
    for max_tokens in [16, 1 << 20] {
        let limits = "{ request_memory_max: 32MiB }";
        let front = Front::measured(limits, "migrate: true", &[post.url()]).await;
        let before = memory(front.router.pid());
        reset_peak(front.router.pid());
        let body = json!({"model": "sim", "prompt": "x", "max_tokens": max_tokens, "stream": true});
        let request = raw::request("POST", COMPLETIONS, &[], body.to_string().as_bytes());
        let mut client = TcpStream::connect(front.router.http).await.unwrap();
        client.write_all(&request).await.unwrap();
        let mut buffer = vec![0; 64 << 10];
        let mut first = Vec::new();
        while let Ok(bytes @ 1..) = client.read(&mut buffer).await {
            if first.len() < 1 << 10 {
                first.extend_from_slice(&buffer[..bytes]);
            }
        }
        let first = String::from_utf8_lossy(&first);
        assert!(first.starts_with("HTTP/1.1 200"), "{max_tokens}: {first}");
        let grown_kib = memory(front.router.pid()).peak_kib.saturating_sub(before.now_kib);
        assert!(grown_kib < 64 << 10, "{max_tokens}: {grown_kib} KiB");
    }
    assert_eq!(post.heard().iter().filter(|heard| heard.is_inference()).count(), 2);
}
