//! Every fault has the effect of its name, as often as configured.

use std::time::Duration;

use serde_json::json;
use splitrail_sim::{Fault, FaultKind, SimConfig};

use crate::support::*;

fn once(kind: FaultKind) -> Fault {
    Fault { kind, times: Some(1) }
}

#[tokio::test]
async fn a_status_fault_affects_the_given_number_of_requests() {
    let engine = start(SimConfig::default()).await;
    let fault = json!({"kind": "status", "status": 503, "times": 2});
    assert_eq!(post(&engine, "/sim/faults", fault).await.status, 200);
    let mut statuses = Vec::new();
    for _ in 0..3 {
        statuses.push(post(&engine, "/v1/completions", json!({"prompt": "x"})).await.status);
    }
    assert_eq!(statuses, [503, 503, 200]);
    assert_eq!(post(&engine, "/sim/faults", json!({"kind": "nonsense"})).await.status, 400);
}

#[tokio::test]
async fn lasting_faults_end_when_cleared() {
    let engine = start(SimConfig::default()).await;
    engine.set_fault(Fault { kind: FaultKind::Status { status: 429 }, times: None });
    for _ in 0..3 {
        assert_eq!(post(&engine, "/v1/completions", json!({"prompt": "x"})).await.status, 429);
    }
    let cleared = send(&engine, http::Method::DELETE, "/sim/faults", &[], String::new()).await;
    assert_eq!(cleared.unwrap().status, 200);
    assert_eq!(post(&engine, "/v1/completions", json!({"prompt": "x"})).await.status, 200);
}

#[tokio::test]
async fn a_reset_fault_gives_no_reply() {
    let engine = start(SimConfig::default()).await;
    engine.set_fault(once(FaultKind::Reset));
    let error = try_post(&engine, "/v1/completions", json!({"prompt": "x"})).await.err().unwrap();
    assert!(error.starts_with("no reply"), "{error}");
    assert_eq!(post(&engine, "/v1/completions", json!({"prompt": "x"})).await.status, 200);
}

#[tokio::test]
async fn a_cut_stream_has_the_given_number_of_chunks_and_no_end() {
    let engine = start(SimConfig::default()).await;
    for (stream, events) in [(true, 3), (false, 0)] {
        engine.set_fault(once(FaultKind::DieMidStream { after_chunks: 3 }));
        let body = json!({"prompt": "x", "max_tokens": 10, "stream": stream});
        let (text, orderly) = read_to_cut(&engine, "/v1/completions", body).await;
        assert!(!orderly && !text.is_empty());
        assert_eq!(text.matches("data: ").count(), events, "{text}");
    }
    until("nothing is held", || engine.state().blocks_used == 0).await;
}

#[tokio::test]
async fn a_truncated_body_is_not_json() {
    let engine = start(SimConfig::default()).await;
    engine.set_fault(once(FaultKind::TruncatedBody));
    let reply = post(&engine, "/v1/completions", json!({"prompt": "x"})).await;
    assert_eq!(reply.status, 200);
    assert!(serde_json::from_slice::<serde_json::Value>(&reply.bytes).is_err());
}

#[tokio::test]
async fn a_hanging_request_occupies_no_slot_of_the_engine() {
    let engine = start(SimConfig::default()).await;
    engine.set_fault(once(FaultKind::Hang));
    tokio::select! {
        _ = post(&engine, "/v1/completions", json!({"prompt": "x"})) => panic!("answered"),
        () = until("it arrived", || engine.requests().len() == 1) => {}
    }
    assert_eq!(engine.state().running + engine.state().waiting, 0);
    assert_eq!(post(&engine, "/v1/completions", json!({"prompt": "x"})).await.status, 200);
}

#[tokio::test]
async fn a_delayed_reply_is_complete() {
    let engine = start(SimConfig::default()).await;
    let quick = complete(&engine, &prompt(1, 10), 4).await;
    engine.set_fault(once(FaultKind::SlowFirstByte { delay_ms: 80 }));
    let began = std::time::Instant::now();
    let slow = complete(&engine, &prompt(1, 10), 4).await;
    assert!(began.elapsed() >= Duration::from_millis(80));
    assert_eq!(text_of(&slow), text_of(&quick));
}

#[tokio::test]
async fn shutdown_frees_the_ports_and_cuts_streams() {
    let engine = start(SimConfig { decode_us_per_step: 1_000, ..SimConfig::default() }).await;
    let addr = engine.http_addr();
    let port = |endpoint: Option<&str>| endpoint.unwrap().rsplit(':').next()?.parse::<u16>().ok();
    let (events, replay) = (port(engine.kv_events_endpoint()), port(engine.kv_replay_endpoint()));
    let body = json!({"prompt": "x", "max_tokens": 20_000, "stream": true}).to_string();
    let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    tokio::io::AsyncWriteExt::write_all(&mut stream, head.as_bytes()).await.unwrap();
    until("it runs", || engine.state().running == 1).await;
    engine.shutdown().await;
    let mut rest = Vec::new();
    let reading = tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut rest);
    // A reset or an end, but an end soon.
    let _ = tokio::time::timeout(PATIENCE, reading).await.unwrap();
    assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
    let again = SimConfig {
        http_port: addr.port(),
        kv_events_port: events,
        kv_replay_port: replay,
        ..SimConfig::default()
    };
    assert_eq!(start(again).await.http_addr(), addr);
}

#[tokio::test]
async fn uncached_tokens_and_decode_steps_take_the_configured_time() {
    let config = SimConfig {
        prefill_us_per_token: 1_000,
        decode_us_per_step: 5_000,
        ..SimConfig::default()
    };
    let engine = start(config).await;
    let took = async |max_tokens| {
        let began = std::time::Instant::now();
        complete(&engine, &prompt(1, 100), max_tokens).await;
        began.elapsed()
    };
    assert!(took(1).await >= Duration::from_millis(105), "100 tokens and a step");
    assert!(took(10).await >= Duration::from_millis(54), "4 tokens and ten steps");
    assert_eq!(engine.state().totals.steps, 11);
}
