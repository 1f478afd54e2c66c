//! How a shim ends beside an engine that publishes so often that it is read at beats.
//!
//! The router finds a fault in each change that is missing, comes twice or not in its turn.

use std::net::SocketAddr;

use rustix::process::Signal;
use splitrail_sim::{SimConfig, SimEngine};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::fake_router::{FakeRouter, Known};
use crate::life::{agree, gate};
use crate::support::{Shim, completion, engine, fetch, prefill, router, until};

/// Requests at once, each in another place of a block: every step fills some block.
const REQUESTS: u32 = 16;
/// Tokens of each: more than any test waits for.
const ENDLESS: u32 = 16_000;
/// Changes after which an engine is surely read at beats.
const MANY: u64 = 50;

/// An engine whose steps are far shorter than a beat, and that has room for all requests.
async fn busy_engine() -> SimEngine {
    let config = SimConfig {
        decode_us_per_step: 2000,
        kv_blocks: 1 << 16,
        honour_threshold: false,
        ..SimConfig::default()
    };
    engine(config).await
}

/// Requests that only end when this is dropped. Not streamed: to pass tokens on would slow the
/// engine down.
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
            // No answer comes, but perhaps an end.
            let _broken = stream.read_to_end(&mut Vec::new()).await;
        });
    }
    let all = REQUESTS as usize;
    until("requests under way", async || engine.state().running == all).await;
    asking
}

/// Waits for so many changes more.
async fn tells_more(router: &FakeRouter, changes: u64) {
    let from = router.known().sequence;
    router.wait_for("more changes", |known| known.sequence >= from + changes).await;
}

fn has_byes(count: usize) -> impl FnMut(&Known) -> bool {
    move |known| known.byes.len() == count
}

/// Waits for the end of all streams. A worker that has said good-bye leaves with its stream:
/// what was not told any more is missed by nobody.
async fn is_gone(router: &FakeRouter, streams: u64) {
    router.wait_for("the end of its streams", |known| known.ended == streams).await;
    assert_eq!(router.known().byes.len() as u64, streams);
    assert_no_fault(router);
}

fn assert_no_fault(router: &FakeRouter) {
    assert_eq!(router.known().faults, Vec::<String>::new());
}

/// Waits until the engine has nothing to do, so that it publishes no more.
async fn is_idle(engine: &SimEngine) {
    until("an idle engine", async || engine.state().running == 0).await;
}

#[tokio::test]
async fn p29_what_a_busy_engine_publishes_while_its_shim_drains_is_told_to_the_end() {
    let engine = busy_engine().await;
    let router = router().await;
    let mut shim = Shim::start(&engine.url(), &router, &["--role", "decode"]).await;
    router.wait_for("a copy", |known| known.snapshots == 1).await;
    let under_way = requests(&engine, shim.address).await;
    tells_more(&router, MANY).await;

    shim.signal(Signal::TERM);
    router.wait_for("a bye", has_byes(1)).await;
    // What waited when the signal came, and what came after it.
    tells_more(&router, MANY).await;
    assert_no_fault(&router);

    // What was on its way still finds the gate as it should be.
    let body = completion(100, 100, 1);
    shim.complete(&[], &body).await;
    let (miss, hit) = gate(100..200);
    let finish = async |header: &str| {
        let reply = shim.complete(&[("x-splitrail-gate", header)], &body).await;
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
    assert_eq!(shim.exit_code(), None, "there are requests under way");

    drop(under_way);
    is_idle(&engine).await;
    assert_eq!(shim.exited().await, 0);
    agree(&router, &engine).await;
    is_gone(&router, 2).await;
}

#[tokio::test]
async fn what_is_published_while_hand_offs_wait_is_told_though_no_request_is_under_way() {
    let (prefill_engine, decode_engine) = (busy_engine().await, busy_engine().await);
    let router = router().await;
    let url = prefill_engine.url();
    let mut shim = Shim::start(&url, &router, &["--role", "prefill"]).await;
    router.wait_for("a copy", |known| known.snapshots == 1).await;
    let reply = shim.complete(&[("x-request-id", "r1")], &prefill()).await;
    assert_eq!(prefill_engine.state().staged_handoffs, 1);
    // None of these pass the shim: it waits for none of them.
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
    assert_eq!(prefill_engine.state().staged_handoffs, 0);
    agree(&router, &prefill_engine).await;
    is_gone(&router, 1).await;
}

#[tokio::test]
async fn a_drain_ends_with_its_grace_however_busy_the_engine_and_routers_are_told_first() {
    for grace in ["300ms", "1ms", "0s"] {
        let engine = busy_engine().await;
        let router = router().await;
        let drain = format!("drain: {{ grace: {grace} }}\nrole: prefill\n");
        let mut shim = Shim::start_by_file(&engine.url(), &router, &drain).await;
        router.wait_for("a copy", |known| known.snapshots == 1).await;
        let under_way = requests(&engine, shim.address).await;
        tells_more(&router, MANY).await;
        shim.signal(Signal::TERM);
        assert_eq!(shim.exited().await, 0, "{grace}");
        // None of them could end by itself.
        drop(under_way);
        is_gone(&router, 1).await;
    }
}

#[tokio::test]
async fn routers_are_told_of_an_end_without_any_grace_and_without_any_request() {
    let engine = busy_engine().await;
    let router = router().await;
    let drain = "drain: { grace: 0s }\nrole: prefill\n";
    let mut shim = Shim::start_by_file(&engine.url(), &router, drain).await;
    router.wait_for("a copy", |known| known.snapshots == 1).await;
    // Nothing passes the shim, so that nothing is there to wait for.
    let _under_way = requests(&engine, engine.http_addr()).await;
    tells_more(&router, MANY).await;
    shim.signal(Signal::TERM);
    assert_eq!(shim.exited().await, 0);
    is_gone(&router, 1).await;
}
