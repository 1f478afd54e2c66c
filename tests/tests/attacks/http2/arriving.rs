//! Requests whose bodies do not come.

use serde_json::json;
use splitrail_tests::cluster::eventually;
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::solo::{Solo, whole_reply};

const COMPLETIONS: &str = "/v1/completions";

const CONNECTIONS: usize = 20;
const STREAMS: u32 = 100;

/// Requests that may wait for their bodies: eight ninths of the budget, by what each counts.
const WAITING: f64 = 512.0;

#[tokio::test]
async fn requests_that_wait_for_their_bodies_are_charged() {
    let limits =
        "{ request_memory_max: 9MiB, body_size_max: 1MiB, body_grace: 600s, body_timeout: 600s }";
    let solo = Solo::start(limits, |_| whole_reply()).await;
    let body = json!({"model": "sim", "prompt": "a"});
    assert_eq!(solo.http.post(COMPLETIONS, &body).await.status, 200);
    reset_peak(solo.router.pid());
    let before = memory(solo.router.pid());
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut client = Raw2::connect(solo.router.http, &[]).await;
        for stream in 0..STREAMS {
            let head = frames::post(COMPLETIONS);
            let head = frames::frame(kind::HEADERS, kind::END_HEADERS, 2 * stream + 1, &head);
            client.write(&head).await;
        }
        clients.push(client);
    }
    let all = CONNECTIONS as f64 * f64::from(STREAMS);
    let shed = [("reason", "request_memory")];
    eventually("those beyond the budget are refused", async || {
        solo.metric("splitrail_shed_total", &shed).await == all - WAITING
    })
    .await;
    let grown_kib = memory(solo.router.pid()).peak_kib - before.now_kib;
    assert!(grown_kib < 24 << 10, "{grown_kib} KiB more");
    drop(clients);
    eventually("the budget is free again", async || {
        solo.http.post(COMPLETIONS, &body).await.status == 200
    })
    .await;
}
