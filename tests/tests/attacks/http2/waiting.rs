//! Replies that wait for their client to read others, and engines that hang afterwards.

use std::time::Duration;

use serde_json::json;
use splitrail_tests::cluster::eventually;
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::scripted_server::ScriptedReply;
use splitrail_tests::solo::{Solo, answer_of};

const COMPLETIONS: &str = "/v1/completions";

fn completion(prompt: &str) -> Vec<u8> {
    json!({"model": "sim", "max_tokens": 4, "prompt": prompt}).to_string().into_bytes()
}

#[tokio::test]
async fn an_engine_that_hangs_after_its_reply_has_waited_for_room_is_at_fault() {
    let long = |held| match answer_of(&"y".repeat(1 << 20)) {
        ScriptedReply::Bytes(mut bytes) if held => {
            bytes.truncate(bytes.len() - 1);
            ScriptedReply::Held { first: bytes, last: Vec::new() }
        }
        reply => reply,
    };
    let limits = "{ unread_replies_size_max: 1MiB, write_stall: 600s, reply_rate_min: 0B/s }";
    let model = "    timeouts: { reply: 2s }\n";
    let solo =
        Solo::start_with(limits, model, move |heard| long(heard.text().contains("hang"))).await;
    let mut client = Raw2::connect(solo.router.http, &frames::initial_window(16 << 10)).await;
    client.write(&frames::window(0, 1 << 30)).await;
    client.write(&frames::request(1, COMPLETIONS, &completion("long"))).await;
    let head = client.next_of(1).await.expect("a reply");
    assert_eq!(head.kind, kind::HEADERS);
    client.write(&frames::request(3, COMPLETIONS, &completion("hang"))).await;
    let asked = || solo.post.heard().iter().filter(|heard| heard.is_inference()).count();
    eventually("the engine is asked again", async || asked() == 2).await;
    // Its reply waits for room.
    tokio::time::sleep(Duration::from_millis(500)).await;
    client.write(&frames::window(1, 1 << 24)).await;
    while client.next_of(1).await.expect("the first reply").flags & kind::END_STREAM == 0 {}
    let failures = async || solo.metric("splitrail_worker_leg_failures_total", &[]).await;
    eventually("the engine is at fault", async || failures().await >= 1.0).await;
    assert_eq!(solo.metric("splitrail_shed_total", &[("reason", "unread_replies")]).await, 0.0);
}
