//! How a side-car ends beside an engine that publishes so often that it is read at beats.
//!
//! The router finds a fault in each change that is missing, comes twice or not in its turn.

use std::net::SocketAddr;

use http_body_util::BodyExt;
use rustix::process::Signal;
use serde_json::json;
use splitrail_sim::{SimConfig, SimEngine};
use tokio::task::JoinSet;

use crate::fake_router::{FakeRouter, Known};
use crate::life::{agree, gate};
use crate::support::{SideCar, ask, begin, completion, engine, router, until};

/// Streams at once, each in another place of a block: nearly every step fills some block.
const STREAMS: u32 = 16;
/// Tokens of each: more than any test waits for.
const ENDLESS: u32 = 16_000;
/// Changes after which an engine is surely read at beats.
const MANY: u64 = 50;

/// An engine whose steps are far shorter than a beat, and that has room for all streams.
async fn busy_engine() -> SimEngine {
    let config = SimConfig {
        decode_us_per_step: 2000,
        kv_blocks: 1 << 16,
        honour_threshold: false,
        ..SimConfig::default()
    };
    engine(config).await
}

/// Streams that only end when this is dropped.
async fn streams(at: SocketAddr) -> JoinSet<()> {
    let mut reading = JoinSet::new();
    for place in 0..STREAMS {
        let mut body = completion(1000 * (place + 1), 32 + place, ENDLESS);
        body["stream"] = true.into();
        body["ignore_eos"] = true.into();
        let stream = begin(at, "/v1/completions", &[], Some(&body)).await;
        assert_eq!(stream.status(), 200);
        reading.spawn(async move {
            let mut body = stream.into_body();
            while let Some(Ok(_)) = body.frame().await {}
        });
    }
    reading
}

/// Waits for so many changes more.
async fn tells_more(router: &FakeRouter, changes: u64) {
    let from = router.known().sequence;
    router.wait_for("more changes", |known| known.sequence >= from + changes).await;
}

fn has_byes(count: usize) -> impl FnMut(&Known) -> bool {
    move |known| known.byes.len() == count
}

fn assert_no_fault(router: &FakeRouter) {
    assert_eq!(router.known().faults, Vec::<String>::new());
}

/// Waits until the engine has nothing to do, so that it publishes no more.
async fn is_idle(engine: &SimEngine) {
    until("an idle engine", async || engine.state().running == 0).await;
}

#[tokio::test]
async fn p29_what_a_busy_engine_publishes_while_its_side_car_drains_is_told_to_the_end() {
    let engine = busy_engine().await;
    let router = router().await;
    let mut side_car = SideCar::start(&engine.url(), &router, &["--role", "decode"]).await;
    router.wait_for("a copy", |known| known.snapshots == 1).await;
    let streams = streams(side_car.address).await;
    tells_more(&router, MANY).await;

    side_car.signal(Signal::TERM);
    router.wait_for("a bye", has_byes(1)).await;
    // What waited when the signal came, and what came after it.
    tells_more(&router, MANY).await;
    assert_no_fault(&router);

    // What was on its way still finds the gate as it should be.
    let body = completion(100, 100, 1);
    side_car.complete(&[], &body).await;
    let (miss, hit) = gate(100..200);
    let finish = async |header: &str| {
        let reply = side_car.complete(&[("x-splitrail-gate", header)], &body).await;
        reply["choices"][0]["finish_reason"].clone()
    };
    until("a gate that opens", async || finish(&hit).await == "length").await;
    assert_eq!(finish(&miss).await, "cache_threshold");

    // A router that starts again meanwhile is told all of it.
    router.restart();
    router
        .wait_for("another bye and copy", |known| known.byes.len() == 2 && known.snapshots == 2)
        .await;
    tells_more(&router, MANY).await;
    assert_eq!(side_car.exit_code(), None, "there are requests under way");

    drop(streams);
    is_idle(&engine).await;
    assert_eq!(side_car.exited().await, 0);
    agree(&router, &engine).await;
    assert_no_fault(&router);
    let known = router.known();
    assert_eq!((known.byes.len(), known.attached), (2, 2));
}

#[tokio::test]
async fn what_is_published_while_hand_offs_wait_is_told_though_no_request_is_under_way() {
    let (prefill_engine, decode_engine) = (busy_engine().await, busy_engine().await);
    let router = router().await;
    let url = prefill_engine.url();
    let mut side_car = SideCar::start(&url, &router, &["--role", "prefill"]).await;
    router.wait_for("a copy", |known| known.snapshots == 1).await;
    let mut body = completion(100, 100, 1);
    body["kv_transfer_params"] = json!({ "do_remote_decode": true, "do_remote_prefill": false });
    let reply = side_car.complete(&[("x-request-id", "r1")], &body).await;
    assert_eq!(prefill_engine.state().staged_handoffs, 1);
    // None of these pass the side-car: it waits for none of them.
    let streams = streams(prefill_engine.http_addr()).await;
    tells_more(&router, MANY).await;

    side_car.signal(Signal::TERM);
    router.wait_for("a bye", has_byes(1)).await;
    tells_more(&router, MANY).await;
    drop(streams);
    is_idle(&prefill_engine).await;
    agree(&router, &prefill_engine).await;
    assert_eq!(side_car.exit_code(), None, "the hand-off waits to be fetched");

    let mut body = completion(100, 100, 4);
    body["kv_transfer_params"] = reply["kv_transfer_params"].clone();
    let headers = [("x-request-id", "r1")];
    let address = decode_engine.http_addr();
    let (status, reply) = ask(address, "/v1/completions", &headers, Some(&body)).await;
    assert_eq!(status, 200, "{reply}");
    assert_eq!(side_car.exited().await, 0);
    assert_eq!(prefill_engine.state().staged_handoffs, 0);
    agree(&router, &prefill_engine).await;
    assert_no_fault(&router);
    assert_eq!(router.known().byes.len(), 1);
}

#[tokio::test]
async fn a_drain_ends_with_its_grace_however_busy_the_engine_and_routers_are_told_first() {
    for grace in ["300ms", "1ms", "0s"] {
        let engine = busy_engine().await;
        let router = router().await;
        let drain = format!("drain: {{ grace: {grace} }}\nrole: prefill\n");
        let mut side_car = SideCar::start_by_file(&engine.url(), &router, &drain).await;
        router.wait_for("a copy", |known| known.snapshots == 1).await;
        let streams = streams(side_car.address).await;
        tells_more(&router, MANY).await;
        side_car.signal(Signal::TERM);
        assert_eq!(side_car.exited().await, 0, "{grace}");
        // None of them had ended by itself.
        drop(streams);
        router.wait_for(&format!("a bye within {grace}"), has_byes(1)).await;
        assert_no_fault(&router);
    }
}
