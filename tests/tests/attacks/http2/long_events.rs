//! Long events of streams that their clients do not read.

use serde_json::json;
use splitrail_tests::cluster::eventually;
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::scripted_server::ScriptedReply;
use splitrail_tests::solo::Solo;

const COMPLETIONS: &str = "/v1/completions";
const STREAMS: u32 = 50;
const EVENT_BYTES: usize = 4 << 20;
/// Ends in the beginning of the long event.
const WINDOW_BYTES: u32 = 4000;
/// The error code CANCEL.
const CANCEL: [u8; 4] = [0, 0, 0, 8];

fn event(text: &str) -> String {
    let event = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": text, "finish_reason": null}],
    });
    format!("data: {event}\n\n")
}

#[tokio::test]
async fn a_long_event_is_charged_until_its_client_has_taken_it() {
    let events = event("short") + &event(&"y".repeat(EVENT_BYTES)) + "data: [DONE]\n\n";
    let solo = Solo::start("{ write_stall: 600s, reply_rate_min: 0B/s }", move |_| {
        ScriptedReply::events(&events)
    })
    .await;
    let mut client = Raw2::connect(solo.router.http, &frames::initial_window(WINDOW_BYTES)).await;
    client.write(&frames::window(0, 1 << 30)).await;
    let body = json!({"model": "sim", "max_tokens": 4, "prompt": "a", "stream": true}).to_string();
    for i in 0..STREAMS {
        client.write(&frames::request(2 * i + 1, COMPLETIONS, body.as_bytes())).await;
    }
    // Its beginning is sent once the event is complete.
    let mut bytes = 0;
    while bytes < (STREAMS * WINDOW_BYTES) as usize {
        let frame = client.next().await.expect("the connection goes on");
        assert_ne!(frame.kind, kind::RST_STREAM);
        bytes += if frame.kind == kind::DATA { frame.payload.len() } else { 0 };
    }
    let held = async || solo.metric("splitrail_request_memory_bytes", &[]).await;
    let bytes = held().await;
    assert!(bytes >= (STREAMS as usize * EVENT_BYTES) as f64, "{bytes}");
    for i in 0..STREAMS {
        client.write(&frames::frame(kind::RST_STREAM, 0, 2 * i + 1, &CANCEL)).await;
    }
    eventually("nothing is held", async || held().await == 0.0).await;
}

#[tokio::test]
async fn a_long_event_reaches_its_client_whole() {
    for (text, streams) in [("y".repeat(EVENT_BYTES), "one line"), ("\n".repeat(9), "escapes")] {
        let events = event("short") + &event(&text) + "data: [DONE]\n\n";
        let solo = Solo::start("{}", move |_| ScriptedReply::events(&events)).await;
        let body = json!({"model": "sim", "max_tokens": 4, "prompt": "a", "stream": true});
        let events = solo.http.stream(COMPLETIONS, &body).await.rest().await;
        assert_eq!(events.len(), 3, "{streams}");
        let long: serde_json::Value = serde_json::from_str(&events[1]).unwrap();
        assert!(long["choices"][0]["text"] == text.as_str(), "{streams}");
        assert_eq!(events[2], "[DONE]");
    }
}
