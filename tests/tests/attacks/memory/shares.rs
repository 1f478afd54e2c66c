//! The memory of requests is shared among clients.

use serde_json::json;
use splitrail_tests::cluster::eventually;
use splitrail_tests::raw::{connect_narrow, request};
use splitrail_tests::solo::{Solo, answer_of};
use splitrail_tests::tenants::{Keys, bearer, complete};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

const MIB: f64 = 1_048_576.0;

/// A router with 64 MiB of memory for requests, and further top-level keys. Its engine answers to a
/// prompt with as many mebibytes as the prompt says.
async fn router(top: &str) -> Solo {
    let limits = "{ request_memory_max: 64MiB, write_stall: 600s, reply_rate_min: 0B/s }";
    Solo::start(&format!("{limits}\n{top}"), |heard| {
        let heard: serde_json::Value = serde_json::from_str(&heard.text()).unwrap();
        let mib: usize = heard["prompt"].as_str().unwrap_or_default().parse().unwrap_or_default();
        answer_of(&"y".repeat(mib << 20))
    })
    .await
}

/// Requests long replies and reads none, until one is refused: first replies of 8 MiB, then replies
/// of 1 MiB.
async fn park(solo: &Solo, headers: &[(&str, &str)]) -> Vec<TcpStream> {
    let mut parked = Vec::new();
    for prompt in ["8", "1"] {
        let body = json!({"model": "sim", "max_tokens": 4, "prompt": prompt}).to_string();
        let bytes = request("POST", "/v1/completions", headers, body.as_bytes());
        loop {
            let mut socket = connect_narrow(solo.router.http).await;
            socket.write_all(&bytes).await.unwrap();
            // The status comes when the whole reply is held.
            let mut status = [0; 12];
            while socket.peek(&mut status).await.unwrap() < status.len() {}
            match &status {
                b"HTTP/1.1 200" => parked.push(socket),
                b"HTTP/1.1 503" => break,
                other => panic!("{}", String::from_utf8_lossy(other)),
            }
        }
    }
    parked
}

#[tokio::test]
async fn a_tenant_that_reads_no_replies_leaves_memory_to_others() {
    let mut keys = Keys::empty();
    let [greedy, other] = ["greedy", "other"].map(|tenant| keys.tenant(tenant));
    let top = format!("{}\ntenants: [ {{ name: greedy }}, {{ name: other }} ]", keys.auth());
    let solo = router(&top).await;
    let parked = park(&solo, &[("authorization", &bearer(&greedy))]).await;
    let body = json!({
        "model": "sim", "max_tokens": 4, "prompt": "0", "user": "u".repeat(3 << 20),
    });
    for _ in 0..3 {
        let reply = complete(&solo.http, &other, &body).await;
        assert_eq!(reply.status, 200, "there is memory for another client");
    }
    let long = json!({"model": "sim", "max_tokens": 4, "prompt": "8"});
    let refused = complete(&solo.http, &greedy, &long).await;
    assert_eq!(refused.status, 503);
    drop(parked);
    eventually("the memory comes back", async || {
        solo.metric("splitrail_request_memory_bytes", &[]).await == 0.0
    })
    .await;
    assert_eq!(complete(&solo.http, &greedy, &body).await.status, 200);
}

#[tokio::test]
async fn without_tenants_the_addresses_of_clients_share_the_memory() {
    let solo = router("").await;
    let parked = park(&solo, &[]).await;
    let held = solo.metric("splitrail_request_memory_bytes", &[]).await;
    assert!(held <= 64.0 * MIB * 8.0 / 9.0, "{} MiB", held / MIB);
    assert!(held > 40.0 * MIB, "{} MiB", held / MIB);
    drop(parked);
    eventually("the memory comes back", async || {
        solo.metric("splitrail_request_memory_bytes", &[]).await == 0.0
    })
    .await;
}

#[tokio::test]
async fn a_tenant_of_little_weight_has_its_long_bodies_served_while_nobody_else_has_any() {
    let mut keys = Keys::empty();
    let light = keys.tenant("light");
    let top = format!("{}\ntenants: [ {{ name: light, weight: 0.01 }} ]", keys.auth());
    let solo = router(&top).await;
    let body = json!({
        "model": "sim", "max_tokens": 4, "prompt": "0", "user": "u".repeat(8 << 20),
    });
    let reply = complete(&solo.http, &light, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}
