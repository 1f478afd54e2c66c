//! Drains beside an engine that publishes so often that its events are read at ticks.
//!
//! The router reports each change that is missing, duplicated or out of order.

use std::net::SocketAddr;

use rustix::process::Signal;
use splitrail_sim::{SimConfig, SimEngine};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::fake_router::{FakeRouter, RouterState};
use crate::lifecycle::{agree, gate};
use crate::support::{Shim, completion, engine, fetch, prefill, router, until};

/// Number of concurrent requests. Each is at another position of a block, so every step fills a
/// block.
const REQUESTS: u32 = 16;
/// Tokens of each request: more than any test waits for.
const ENDLESS: u32 = 16_000;
/// Number of changes after which the engine's events are certainly read at ticks.
const MANY: u64 = 50;

/// An engine whose steps are much shorter than a tick, with room for all requests.
async fn busy_engine() -> SimEngine {
    let config = SimConfig {
        decode_us_per_step: 2000,
        kv_blocks: 1 << 16,
        honour_threshold: false,
        ..SimConfig::default()
    };
    engine(config).await
}

/// Starts requests that end only when the returned set is dropped. They are not streamed,
/// because forwarding tokens would slow the engine down.
async fn requests(engine: &SimEngine, at: SocketAddr) -> JoinSet<()> {
    let mut asking = JoinSet::new();
    for place in 0..REQUESTS {
        let mut body = completion(1000 * (place + 1), 32 + place, ENDLESS);
        body["ignore_eos"] = true.into();
        let (body, head) = (body.to_string(), "POST /v1/completions HTTP/1.1\r\nhost: engine\r\n");
        let kind = "content-type: application/json\r\n";
        let request = format!("{head}{kind}content-length: {}\r\n\r\n{body}", body.len());
        let mut stream = TcpStream::connect(at).await.unwrap();
        asking.spawn(async move {
            stream.write_all(request.as_bytes()).await.unwrap();
            // No reply arrives, but the connection may end.
            let _broken = stream.read_to_end(&mut Vec::new()).await;
        });
    }
    let all = REQUESTS as usize;
    until("requests under way", async || engine.state().running == all).await;
    asking
}

/// Waits for this number of further changes.
async fn tells_more(router: &FakeRouter, changes: u64) {
    let from = router.known().sequence;
    router.wait_for("more changes", |known| known.sequence >= from + changes).await;
}

fn has_byes(count: usize) -> impl FnMut(&RouterState) -> bool {
    move |known| known.byes.len() == count
}

/// Waits for the end of all streams. A worker that has announced its end leaves with its stream,
/// so later changes do not matter.
async fn is_gone(router: &FakeRouter, streams: u64) {
    router.wait_for("the end of its streams", |known| known.ended == streams).await;
    assert_eq!(router.known().byes.len() as u64, streams);
    assert_no_fault(router);
}

fn assert_no_fault(router: &FakeRouter) {
    assert_eq!(router.known().faults, Vec::<String>::new());
}

/// Waits until the engine is idle and publishes nothing more.
async fn is_idle(engine: &SimEngine) {
    until("an idle engine", async || engine.state().running == 0).await;
}

#[tokio::test]
async fn a_draining_shim_reports_a_busy_engines_changes_to_the_end() {
    let engine = busy_engine().await;
    let router = router().await;
    let mut shim = Shim::start(&engine.url(), &router, &["--role", "decode"]).await;
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    let under_way = requests(&engine, shim.address).await;
    tells_more(&router, MANY).await;

    shim.signal(Signal::TERM);
    router.wait_for("a bye", has_byes(1)).await;
    // Changes that were pending at the signal, and later ones.
    tells_more(&router, MANY).await;
    assert_no_fault(&router);

    // The gate still works for requests that arrive during the drain.
    let body = completion(100, 100, 1);
    shim.complete(&[], &body).await;
    let (miss, hit) = gate(100..200);
    let finish = async |header: &str| {
        let reply = shim.complete(&[("x-splitrail-gate", header)], &body).await;
        reply["choices"][0]["finish_reason"].clone()
    };
    until("a gate that opens", async || finish(&hit).await == "length").await;
    assert_eq!(finish(&miss).await, "cache_threshold");

    // A router that restarts during the drain is informed as well.
    router.restart();
    router
        .wait_for("another bye and snapshot", |known| known.byes.len() == 2 && known.snapshots == 2)
        .await;
    tells_more(&router, MANY).await;
    assert_eq!(shim.exit_code(), None, "there are requests under way");

    drop(under_way);
    is_idle(&engine).await;
    assert_eq!(shim.exited().await, 0);
    agree(&router, &engine).await;
    is_gone(&router, 2).await;
}

#[tokio::test]
async fn changes_are_reported_while_a_drain_waits_only_for_hand_offs() {
    let (prefill_engine, decode_engine) = (busy_engine().await, busy_engine().await);
    let router = router().await;
    let url = prefill_engine.url();
    let mut shim = Shim::start(&url, &router, &["--role", "prefill"]).await;
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    let reply = shim.complete(&[("x-request-id", "r1")], &prefill()).await;
    assert_eq!(prefill_engine.state().staged_hand_offs, 1);
    // These requests do not pass through the shim, so it does not wait for them.
    let under_way = requests(&prefill_engine, prefill_engine.http_addr()).await;
    tells_more(&router, MANY).await;

    shim.signal(Signal::TERM);
    router.wait_for("a bye", has_byes(1)).await;
    tells_more(&router, MANY).await;
    drop(under_way);
    is_idle(&prefill_engine).await;
    agree(&router, &prefill_engine).await;
    assert_eq!(shim.exit_code(), None, "the hand-off waits to be fetched");

    fetch(&decode_engine, &reply).await;
    assert_eq!(shim.exited().await, 0);
    assert_eq!(prefill_engine.state().staged_hand_offs, 0);
    agree(&router, &prefill_engine).await;
    is_gone(&router, 1).await;
}

#[tokio::test]
async fn a_drain_ends_after_its_grace_and_informs_routers_first() {
    for grace in ["300ms", "1ms", "0s"] {
        let engine = busy_engine().await;
        let router = router().await;
        let drain = format!("drain: {{ grace: {grace} }}\nrole: prefill\n");
        let mut shim = Shim::start_by_file(&engine.url(), &router, &drain).await;
        router.wait_for("a snapshot", |known| known.snapshots == 1).await;
        let under_way = requests(&engine, shim.address).await;
        tells_more(&router, MANY).await;
        shim.signal(Signal::TERM);
        assert_eq!(shim.exited().await, 0, "{grace}");
        // None of these requests ends by itself.
        drop(under_way);
        is_gone(&router, 1).await;
    }
}

#[tokio::test]
async fn routers_are_informed_of_the_end_even_without_grace_or_requests() {
    let engine = busy_engine().await;
    let router = router().await;
    let drain = "drain: { grace: 0s }\nrole: prefill\n";
    let mut shim = Shim::start_by_file(&engine.url(), &router, drain).await;
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    // No request passes through the shim, so it has nothing to wait for.
    let _under_way = requests(&engine, engine.http_addr()).await;
    tells_more(&router, MANY).await;
    shim.signal(Signal::TERM);
    assert_eq!(shim.exited().await, 0);
    is_gone(&router, 1).await;
}
