//! The memory of replies is charged, and a stream that finds none is no fault of an engine.

use serde_json::json;
use splitrail_tests::cluster::eventually;
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::scripted_server::{STREAM_HEAD, ScriptedReply};
use splitrail_tests::solo::Solo;

const MIB: usize = 1 << 20;
const MEMORY: &str = "splitrail_request_memory_bytes";

#[tokio::test]
async fn long_events_that_only_open_a_reply_are_charged_while_they_are_held_back() {
    let ping = json!({"type": "ping", "filler": "y".repeat(5 * MIB)});
    let events = format!("event: ping\ndata: {ping}\n\n").repeat(3);
    let solo = Solo::start("{}", move |_| {
        let first = [STREAM_HEAD, events.as_bytes(), b"event: ping\ndata: {"].concat();
        ScriptedReply::Held { first, last: Vec::new() }
    })
    .await;
    let body = json!({
        "model": "sim", "max_tokens": 4, "stream": true,
        "messages": [{"role": "user", "content": "a"}],
    });
    let client = async {
        solo.http.post("/v1/messages", &body).await;
    };
    let held = eventually("three events are charged", async || {
        solo.metric(MEMORY, &[]).await >= (15 * MIB) as f64
    });
    tokio::select! { () = client => panic!("the reply has not begun"), () = held => {} }
    eventually("nothing is held", async || solo.metric(MEMORY, &[]).await == 0.0).await;
}

#[tokio::test]
async fn an_embedding_of_some_kilobytes_is_charged_until_its_client_has_taken_it() {
    const REPLY_BYTES: usize = 6 << 10;
    const STREAMS: u32 = 20;
    let reply =
        json!({"object": "list", "data": [], "filler": "y".repeat(REPLY_BYTES)}).to_string();
    let limits = "{ write_stall: 600s, reply_rate_min: 0B/s }";
    let solo = Solo::start(limits, move |_| ScriptedReply::json(200, &reply)).await;
    let mut client = Raw2::connect(solo.router.http, &frames::initial_window(1000)).await;
    let body = json!({"model": "sim", "input": "a"}).to_string();
    for i in 0..STREAMS {
        client.write(&frames::request(2 * i + 1, "/v1/embeddings", body.as_bytes())).await;
    }
    let mut bytes = 0;
    while bytes < STREAMS as usize * 1000 {
        let frame = client.next().await.expect("the connection goes on");
        assert_ne!(frame.kind, kind::RST_STREAM);
        bytes += if frame.kind == kind::DATA { frame.payload.len() } else { 0 };
    }
    let held = solo.metric(MEMORY, &[]).await;
    assert!(held >= (STREAMS as usize * REPLY_BYTES) as f64, "{held}");
    drop(client);
    eventually("nothing is held", async || solo.metric(MEMORY, &[]).await == 0.0).await;
}

#[tokio::test]
async fn a_stream_that_finds_no_memory_in_mid_reply_is_shed_and_no_failure_of_an_engine() {
    let event = |text: &str| {
        let event = json!({
            "id": "x", "object": "text_completion", "created": 1, "model": "sim",
            "choices": [{"index": 0, "text": text, "finish_reason": null}],
        });
        format!("data: {event}\n\n")
    };
    for (limits, code, result) in [
        ("{ body_size_max: 1MiB, request_memory_max: 8MiB }", "overloaded", "shed"),
        ("{ engine_reply_size_max: 4MiB }", "reply_too_large", "invalid"),
    ] {
        let (first, last) = (event("short"), event(&"y".repeat(16 * MIB)));
        let solo = Solo::start(limits, move |_| {
            let first = [STREAM_HEAD, first.as_bytes()].concat();
            ScriptedReply::Held { first, last: last.clone().into_bytes() }
        })
        .await;
        let body = json!({"model": "sim", "max_tokens": 4, "prompt": "a", "stream": true});
        let mut stream = solo.http.stream("/v1/completions", &body).await;
        stream.next().await.expect("the first event");
        solo.post.release();
        let rest = stream.rest().await;
        let error: serde_json::Value = serde_json::from_str(rest.last().unwrap()).unwrap();
        assert_eq!(error["error"]["code"], code, "{error}");
        let ended = [("model", "sim"), ("result", result)];
        assert_eq!(solo.metric("splitrail_request_results_total", &ended).await, 1.0, "{code}");
        assert_eq!(solo.metric("splitrail_worker_leg_failures_total", &[]).await, 0.0, "{code}");
    }
}
