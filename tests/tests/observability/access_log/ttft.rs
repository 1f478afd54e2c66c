//! The time to first token that the router tells, against what its clients see.

use std::time::Instant;

use splitrail_tests::Spec;
use splitrail_tests::cluster::metric_in;
use splitrail_tests::trial::{CHAT, chat, prompt, streamed};
use tokio::task::JoinSet;

use super::Logged;

const CLIENTS: usize = 4;
const EACH: usize = 15;

/// At any load, the router has an event before its client has it, and counts each stream once.
#[tokio::test]
async fn the_time_to_first_token_is_the_clients_and_of_streams_alone() {
    let spec = Spec {
        engine: |_, config| {
            (config.prefill_us_per_token, config.decode_us_per_step) = (20, 1_000);
        },
        ..Spec::default()
    };
    let logged = Logged::start(spec, "").await;
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let http = logged.http.clone();
        clients.spawn(async move {
            let mut seen = Vec::new();
            for turn in 0..EACH {
                let id = format!("stream-{client}-{turn}");
                let body = chat(&prompt(20, &id));
                let whole = [("x-request-id", "whole"), ("content-type", "application/json")];
                assert_eq!(http.post_with(CHAT, &whole, body.to_string()).await.status, 200);
                let begun = Instant::now();
                let headers = [("x-request-id", id.as_str())];
                let mut events = http.stream_with(CHAT, &headers, &streamed(&body)).await;
                events.next().await.unwrap();
                let seen_ms = begun.elapsed().as_secs_f64() * 1e3;
                events.rest().await;
                seen.push((id, seen_ms));
            }
            seen
        });
    }
    let mut sum_ms = 0.0;
    for (id, seen_ms) in clients.join_all().await.into_iter().flatten() {
        let line = logged.line(&id).await;
        let told_ms = line["ttft_ms"].as_f64().unwrap();
        assert!(0.0 < told_ms && told_ms <= seen_ms, "{seen_ms} ms at the client: {line}");
        sum_ms += told_ms;
    }
    let lines = logged.lines();
    let whole: Vec<_> = lines.iter().filter(|line| line["request_id"] == "whole").collect();
    assert_eq!((whole.len(), lines.len()), (CLIENTS * EACH, 2 * CLIENTS * EACH));
    assert!(whole.iter().all(|line| line["ttft_ms"].is_null()));
    let text = logged.admin.get("/metrics").await.text();
    let count = metric_in(&text, "splitrail_ttft_seconds_count", &[]);
    assert_eq!(count, (CLIENTS * EACH) as f64, "streams alone");
    let counted_ms = metric_in(&text, "splitrail_ttft_seconds_sum", &[]) * 1e3;
    assert!((counted_ms - sum_ms).abs() <= sum_ms / 100.0, "{counted_ms} and {sum_ms} ms");
}
