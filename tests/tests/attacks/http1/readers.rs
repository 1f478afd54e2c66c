//! Clients that read slowly, and what they are sent.

use std::time::Duration;

use serde_json::{Value, json};
use splitrail_tests::cluster::eventually;
use splitrail_tests::front::Front;
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::raw::{connect_narrow, exchange, read_slowly, request};
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::solo::{Solo, answer_of};
use tokio::io::AsyncWriteExt;
use tokio::task::JoinSet;

use crate::support::{REST_KIB, UNREAD_STREAM_KIB};

const COMPLETIONS: &str = "/v1/completions";
const ANSWER_BYTES: usize = 4 << 20;

fn completion(stream: bool) -> Vec<u8> {
    let body = json!({"model": "sim", "max_tokens": 4, "prompt": "a", "stream": stream});
    request("POST", COMPLETIONS, &[], body.to_string().as_bytes())
}

/// A router whose engine answers with so much that a client cannot be sent it at once.
async fn with_long_answers(limits: &str) -> Solo {
    let text = "y".repeat(ANSWER_BYTES);
    Solo::start(limits, move |_| answer_of(&text)).await
}

/// Some 2 MB/s: the transfer takes several times as long as an idle connection stays open.
#[tokio::test]
async fn a_steady_reader_gets_all_of_a_long_answer_however_short_the_idle_timeout() {
    let solo = with_long_answers("{ idle_timeout: 300ms }").await;
    let mut socket = connect_narrow(solo.router.http).await;
    socket.write_all(&completion(false)).await.unwrap();
    let bytes = read_slowly(&mut socket, 32 << 10, Duration::from_millis(16)).await;
    assert!(bytes > ANSWER_BYTES, "{bytes}");
}

#[tokio::test]
async fn a_reader_that_never_stops_and_is_never_quick_is_cut() {
    let limits = "{ write_stall: 600s, idle_timeout: 600s, reply_grace: 500ms, \
                  reply_rate_min: 1MiB/s }";
    let solo = with_long_answers(limits).await;
    let mut slow = JoinSet::new();
    for _ in 0..10 {
        let address = solo.router.http;
        slow.spawn(async move {
            let mut socket = connect_narrow(address).await;
            socket.write_all(&completion(false)).await.unwrap();
            read_slowly(&mut socket, 4 << 10, Duration::from_millis(40)).await
        });
    }
    for bytes in slow.join_all().await {
        assert!(bytes < ANSWER_BYTES, "{bytes}");
    }
    let slow = [("listener", "http"), ("reason", "write_pace")];
    assert_eq!(solo.metric("splitrail_connections_cut_total", &slow).await, 10.0);
    let quick = exchange(solo.router.http, &completion(false)).await.unwrap();
    assert!(quick.body.len() > ANSWER_BYTES, "a quick reader gets all of it");
}

/// Their replies together are several times what requests may hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_readers_of_long_replies_take_no_more_memory_than_requests_may() {
    const CLIENTS: usize = 60;
    const MEMORY_MIB: u64 = 64;
    let limits = format!(
        "{{ write_stall: 600s, idle_timeout: 600s, reply_grace: 2s, reply_rate_min: 1MiB/s, \
          request_memory_max: {MEMORY_MIB}MiB }}"
    );
    let text = "y".repeat(ANSWER_BYTES);
    let post = ScriptedServer::start(move |heard| match heard.is_inference() {
        true => answer_of(&text),
        false => ScriptedReply::json(200, "{}"),
    })
    .await;
    let front = Front::measured(&limits, "", &[post.url()]).await;
    let quick = exchange(front.router.http, &completion(false)).await.unwrap();
    assert!(quick.body.len() > ANSWER_BYTES);
    let before = memory(front.router.pid());
    reset_peak(front.router.pid());
    let mut slow = JoinSet::new();
    for _ in 0..CLIENTS {
        let address = front.router.http;
        slow.spawn(async move {
            let mut socket = connect_narrow(address).await;
            socket.write_all(&completion(false)).await.unwrap();
            read_slowly(&mut socket, 4 << 10, Duration::from_millis(40)).await
        });
    }
    for bytes in slow.join_all().await {
        assert!(bytes < ANSWER_BYTES, "{bytes}");
    }
    // Replies are charged to `request_memory_max` until they are read. Besides, each client has a
    // stream that is not read.
    let allowed_kib = (MEMORY_MIB << 10) + CLIENTS as u64 * UNREAD_STREAM_KIB + REST_KIB;
    let grown_kib = memory(front.router.pid()).peak_kib.saturating_sub(before.now_kib);
    assert!(grown_kib < allowed_kib, "{grown_kib} KiB, where {allowed_kib} are allowed");
    let slow = [("listener", "http"), ("reason", "write_pace")];
    let cut = front.metric("splitrail_connections_cut_total", &slow).await;
    let shed = front.metric("splitrail_shed_total", &[("reason", "request_memory")]).await;
    assert!(cut > 0.0 && shed > 0.0, "{cut} were cut, {shed} refused");
    assert_eq!(cut + shed, CLIENTS as f64);
    eventually("the memory is given back", async || {
        front.metric("splitrail_request_memory_bytes", &[]).await == 0.0
    })
    .await;
}

/// The time of an engine is not the client's.
#[tokio::test]
async fn a_slow_engine_is_not_held_against_its_reader() {
    let event = |text: &str| {
        let event = json!({
            "id": "x", "object": "text_completion", "created": 1, "model": "sim",
            "choices": [{"index": 0, "text": text, "finish_reason": null}],
        });
        format!("data: {event}\n\n")
    };
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
    let (first, last) = (format!("{head}{}", event("first")), event("last") + "data: [DONE]\n\n");
    let limits = "{ reply_grace: 50ms, reply_rate_min: 1048576, write_stall: 50ms }";
    let solo = Solo::start(limits, move |_| {
        let (first, last) = (first.clone().into_bytes(), last.clone().into_bytes());
        ScriptedReply::Held { first, last }
    })
    .await;
    let address = solo.router.http;
    let mut read = JoinSet::new();
    read.spawn(async move { exchange(address, &completion(true)).await.unwrap().text() });
    eventually("the engine has begun", async || solo.post.open() == 1).await;
    // Much longer than the client may be slow.
    tokio::time::sleep(Duration::from_millis(500)).await;
    solo.post.release();
    let text = read.join_next().await.unwrap().unwrap();
    assert!(text.contains("first") && text.contains("[DONE]"), "{text}");
}

/// RFC and engines allow an event's data to have several lines; each goes out behind its name.
#[tokio::test]
async fn an_event_of_several_lines_of_data_is_the_same_event_for_the_client() {
    let events = "data: {\"id\":\"x\",\"object\":\"text_completion\",\"created\":1,\"choices\":[\n\
                  data: {\"index\":0,\"text\":\"a\",\r\ndata: \"finish_reason\":\"stop\"}]}\n\n\
                  data: [DONE]\n\n";
    let solo = Solo::start("{}", move |_| ScriptedReply::events(events)).await;
    let mut client = solo
        .http
        .stream(
            COMPLETIONS,
            &json!({
                "model": "sim", "max_tokens": 4, "prompt": "a", "stream": true,
            }),
        )
        .await;
    let text = client.rest_text().await;
    let lines = || text.lines().filter(|line| !line.is_empty());
    assert!(lines().all(|line| line.starts_with("data: ")), "{text}");
    let first = text.split("\n\n").next().unwrap();
    let data: Vec<&str> = first.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let event: Value = serde_json::from_str(&data.join("\n")).unwrap();
    assert_eq!(event["choices"][0]["text"], "a");
}
