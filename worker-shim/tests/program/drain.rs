//! Drains of a shim.

use http_body_util::BodyExt;
use rustix::process::Signal;
use splitrail_sim::{Role, SimConfig};

use crate::support::{Shim, begin, completion, engine, fetch, prefill, router, until};

async fn draining(shim: &Shim) {
    until("a drain", async || shim.status().await["unready"] == "draining").await;
}

#[tokio::test]
async fn a_stream_in_progress_completes_before_the_shim_ends() {
    let slow = SimConfig { decode_us_per_step: 10_000, ..SimConfig::default() };
    let engine = engine(slow).await;
    let router = router().await;
    let mut shim = Shim::start(&engine.url(), &router, &["--role", "decode"]).await;
    router.wait_for("an attachment", |known| known.attached == 1).await;
    let mut body = completion(100, 32, 300);
    body["stream"] = true.into();
    body["ignore_eos"] = true.into();
    let stream = begin(shim.address, "/v1/completions", &[], Some(&body)).await;
    shim.signal(Signal::TERM);
    router.wait_for("a bye", |known| !known.byes.is_empty()).await;
    assert!(router.known().byes[0].grace_ms > 0);
    draining(&shim).await;
    // Requests are still accepted: a router may have sent them before it learnt of the drain.
    shim.complete(&[], &completion(300, 32, 1)).await;
    let text = stream.into_body().collect().await.unwrap().to_bytes();
    let text = std::str::from_utf8(&text).unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(text.matches("\"index\":0").count(), 300);
    assert_eq!(shim.exited().await, 0);
    assert_eq!(router.known().byes.len(), 1);
}

#[tokio::test]
async fn a_prefill_shim_runs_until_its_hand_offs_are_fetched() {
    let prefill_engine = engine(SimConfig { role: Role::Prefill, ..SimConfig::default() }).await;
    let decode_engine = engine(SimConfig { role: Role::Decode, ..SimConfig::default() }).await;
    let router = router().await;
    let url = prefill_engine.url();
    let mut shim = Shim::start(&url, &router, &["--role", "prefill"]).await;
    let reply = shim.complete(&[("x-request-id", "r1")], &prefill()).await;
    assert_eq!(prefill_engine.state().staged_hand_offs, 1);
    shim.signal(Signal::TERM);
    draining(&shim).await;
    // After the straggler wait, only the hand-off can delay the end.
    tokio::time::sleep(2 * splitrail_shim::drain::STRAGGLER_WAIT).await;
    assert_eq!(shim.exit_code(), None, "the hand-off waits to be fetched");
    fetch(&decode_engine, &reply).await;
    assert_eq!(shim.exited().await, 0);
    assert_eq!(prefill_engine.state().staged_hand_offs, 0);
}

#[tokio::test]
async fn a_second_signal_ends_the_shim_at_once() {
    let engine = engine(SimConfig { role: Role::Prefill, ..SimConfig::default() }).await;
    let router = router().await;
    let mut shim = Shim::start(&engine.url(), &router, &["--role", "prefill"]).await;
    shim.complete(&[], &prefill()).await;
    shim.signal(Signal::TERM);
    draining(&shim).await;
    shim.signal(Signal::INT);
    assert_eq!(shim.exited().await, 0);
    assert_eq!(engine.state().staged_hand_offs, 1, "it had not been fetched");
}
