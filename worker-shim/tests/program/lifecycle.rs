//! What a router learns of an engine, from the engine's start to its restart.

use std::ops::Range;

use splitrail_kv::{HashSeed, Namespace, chain_hashes};
use splitrail_sim::{Fault, FaultKind, OddEvent, SimConfig, SimEngine};

use crate::fake_router::{FakeRouter, content};
use crate::ports::HeldPort;
use crate::support::{BLOCK_SIZE, Shim, ask, completion, engine, router, until};

/// Waits until the router's index equals the engine's cache.
pub(crate) async fn agree(router: &FakeRouter, engine: &SimEngine) {
    router
        .wait_for("the engine's blocks", |known| {
            let held = content(&known.index, 0);
            let copies = |copies: &[u32]| copies.iter().sum::<u32>() as usize;
            let named = held.iter().map(|(name, (.., per_tier))| (*name, copies(per_tier)));
            named.eq(engine.resident())
        })
        .await;
}

/// Two gate headers for a prompt of these tokens: a miss, whose last block is held by no engine,
/// and a hit.
pub(crate) fn gate(tokens: Range<u32>) -> (String, String) {
    let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: BLOCK_SIZE };
    let root = namespace.root(HashSeed(7));
    let mut hashes = Vec::new();
    chain_hashes(&namespace, HashSeed(7), &tokens.collect::<Vec<_>>(), &mut hashes);
    let (blocks, last) = (hashes.len(), hashes[hashes.len() - 1].0);
    let header = |hash: u64| format!("{:016x}:0:{blocks}:{hash:016x}", root.0);
    (header(last ^ 1), header(last))
}

#[tokio::test]
async fn a_router_learns_the_engines_identity_capabilities_and_blocks() {
    let engine = engine(SimConfig { honour_threshold: false, ..SimConfig::default() }).await;
    let router = router().await;
    let shim = Shim::start(&engine.url(), &router, &["--role", "decode"]).await;
    router
        .wait_for("all capabilities", |known| {
            known.capabilities.as_ref().is_some_and(|known| known.takes_rank_header.is_some())
        })
        .await;
    {
        let known = router.known();
        let hello = known.hello.as_ref().unwrap();
        assert_eq!(hello.worker_id, "w0");
        assert_eq!(hello.url, format!("http://{}", shim.address));
        assert_eq!((hello.model.as_str(), hello.role), ("sim", 2));
        let known = known.capabilities.as_ref().unwrap();
        assert_eq!((known.engine.as_str(), known.engine_version.as_str()), ("vllm", "0.32.0"));
        assert_eq!(
            (known.block_size, known.kv_blocks, known.ranks),
            (Some(16), Some(4096), Some(1))
        );
        assert_eq!(
            (known.supports_cache_hit_threshold, known.reports_cached_tokens),
            (Some(false), Some(true))
        );
        assert_eq!((known.publishes_kv_events, known.replays_kv_events), (Some(true), Some(true)));
        assert_eq!((known.gates, known.connector.as_str()), (Some(true), "nixl"));
        assert_eq!(known.lease_ms, None, "no lease is configured");
    }
    shim.complete(&[], &completion(100, 100, 4)).await;
    agree(&router, &engine).await;
    assert!(engine.resident().len() >= 6);
    assert_eq!(router.known().faults, Vec::<String>::new());
    let load = |known: &crate::fake_router::RouterState| known.loads.last().copied();
    router
        .wait_for("a load of an idle engine", |known| {
            load(known).is_some_and(|load| load.up && load.requests == Some(0))
        })
        .await;
    let load = load(&router.known()).unwrap();
    assert_eq!((load.running, load.waiting, load.kv_blocks), (Some(0), Some(0), Some(4096)));
    assert!(load.age_ms < 60_000);
}

#[tokio::test]
async fn a_shim_that_all_routers_refuse_is_not_ready() {
    let engine = engine(SimConfig::default()).await;
    let router = router().await;
    router.known().bearer = Some("Bearer another".to_owned());
    let shim = Shim::start(&engine.url(), &router, &["--role", "decode"]).await;
    let ready = async || ask(shim.address, "/splitrail/ready", &[], None).await.0;
    until("its only router refuses it", async || {
        shim.status().await["routers"][0]["stage"] == "refused" && ready().await == 503
    })
    .await;
    until("the engine is known", async || {
        shim.status().await["unready"] == "all routers refuse the shim"
    })
    .await;
}

#[tokio::test]
async fn the_gate_passes_only_requests_whose_blocks_the_engine_holds() {
    let engine = engine(SimConfig { honour_threshold: false, ..SimConfig::default() }).await;
    let router = router().await;
    let shim = Shim::start(&engine.url(), &router, &["--role", "decode"]).await;
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    let body = completion(100, 100, 1);
    shim.complete(&[], &body).await;
    agree(&router, &engine).await;

    let (miss, hit) = gate(100..200);
    let served = engine.state().totals.prompt_tokens;
    let reply = shim.complete(&[("x-splitrail-gate", &miss)], &body).await;
    assert_eq!(reply["choices"][0]["finish_reason"], "cache_threshold");
    assert_eq!(engine.state().totals.prompt_tokens, served, "a miss never gets to the engine");
    let reply = shim.complete(&[("x-splitrail-gate", &hit)], &body).await;
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], 96);

    // With a cache group that is not followed, the engine may be unable to use what it holds.
    let kind = FaultKind::OddEvents { event: OddEvent::SlidingWindow };
    engine.set_fault(Fault { kind, times: None });
    shim.complete(&[], &completion(300, 100, 1)).await;
    router
        .wait_for("the cache group", |known| {
            let known = known.capabilities.as_ref();
            known.is_some_and(|known| known.unfollowed_cache_groups == ["sliding_window"])
        })
        .await;
    agree(&router, &engine).await;
    let reply = shim.complete(&[("x-splitrail-gate", &hit)], &body).await;
    assert_eq!(reply["choices"][0]["finish_reason"], "cache_threshold");
}

#[tokio::test]
async fn a_restarted_engine_is_asked_and_followed_again() {
    let ports = [(); 3].map(|()| HeldPort::take());
    let config = SimConfig {
        http_port: ports[0].number(),
        kv_events_port: Some(ports[1].number()),
        kv_replay_port: Some(ports[2].number()),
        ..SimConfig::default()
    };
    let first = engine(SimConfig { honour_threshold: false, ..config.clone() }).await;
    let router = router().await;
    let shim = Shim::start(&first.url(), &router, &["--role", "decode"]).await;
    shim.complete(&[], &completion(100, 100, 1)).await;
    agree(&router, &first).await;
    router
        .wait_for("what it can do", |known| {
            known
                .capabilities
                .as_ref()
                .is_some_and(|known| known.supports_cache_hit_threshold == Some(false))
        })
        .await;
    let started = || router.known().loads.last().and_then(|load| load.started_at_s);
    until("the start of its process is known", async || started().is_some()).await;
    let first_started = started();
    drop(first);
    router.wait_for("word of its end", |known| known.loads.last().is_some_and(|l| !l.up)).await;
    until("it is not ready any more", async || {
        ask(shim.address, "/splitrail/ready", &[], None).await.0 == 503
    })
    .await;
    let second = engine(SimConfig { max_model_len: 1000, ..config }).await;
    router
        .wait_for("what the other one can do", |known| {
            let honours = |known: &splitrail_proto::v1::Capabilities| {
                known.supports_cache_hit_threshold == Some(true)
                    && known.context_tokens == Some(1000)
            };
            known.loads.last().is_some_and(|load| load.up)
                && known.capabilities.as_ref().is_some_and(honours)
        })
        .await;
    until("the start of another process is known", async || started() > first_started).await;
    shim.complete(&[], &completion(500, 64, 1)).await;
    agree(&router, &second).await;
    assert_eq!(router.known().faults, Vec::<String>::new());
    until("a status of two processes", async || shim.status().await["process"] == 2).await;
}

#[tokio::test]
async fn a_shim_waits_for_an_engine_that_starts_late() {
    let port = HeldPort::take();
    let config = SimConfig { http_port: port.number(), ..SimConfig::default() };
    let url = format!("http://{}", port.address());
    let router = router().await;
    let starting = Shim::start(&url, &router, &["--role", "both"]);
    let late = async {
        // Long enough for several failed polls, which must do no harm.
        tokio::time::sleep(std::time::Duration::from_millis(700)).await;
        assert_eq!(router.known().attached, 0, "the engine is still unknown");
        engine(config).await
    };
    let (shim, _engine) = tokio::join!(starting, late);
    let (status, _) = ask(shim.address, "/splitrail/ready", &[], None).await;
    assert_eq!(status, 200);
    router.wait_for("an attachment", |known| known.attached == 1).await;
}

#[tokio::test]
async fn every_metric_is_documented_and_every_documented_metric_exists() {
    let engine = engine(SimConfig::default()).await;
    let router = router().await;
    let shim = Shim::start(&engine.url(), &router, &["--role", "both"]).await;
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    let (_, text) = ask(shim.address, "/splitrail/metrics", &[], None).await;
    let text = text.as_str().unwrap();
    let shown = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let mut shown: Vec<&str> = shown.collect();
    shown.sort_unstable();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/shim.md");
    let page = std::fs::read_to_string(page).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `splitrail_shim_"));
    let mut documented: Vec<String> =
        rows.map(|row| format!("splitrail_shim_{}", row.split('`').next().unwrap())).collect();
    documented.sort_unstable();
    assert_eq!(shown, documented);
}
