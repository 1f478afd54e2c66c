//! Tests of the mirror with a simulated engine over sockets, and with a router.
#![allow(clippy::unwrap_used)]

#[path = "support/fake_router.rs"]
mod fake_router;

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use splitrail_engine::identity::EventSource;
use splitrail_kv::{BlockHash, HashSeed, Namespace, chain_hashes};
use splitrail_proto::v1::{Capabilities, Load, WorkerRole};
use splitrail_shim::attach;
use splitrail_shim::mirror::{self, Mirror};
use splitrail_sim::{Fault, FaultKind, SimConfig, SimEngine};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use fake_router::{FakeRouter, content, welcome};

/// A generous timeout that only a broken mirror exceeds.
const PATIENCE: Duration = Duration::from_secs(30);
const BLOCK_SIZE: u32 = 16;

async fn complete(engine: &SimEngine, prompt: &[u32]) {
    let body = serde_json::json!({"prompt": prompt, "max_tokens": 1}).to_string();
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let request = http::Request::post(format!("{}/v1/completions", engine.url()));
    let reply = client.request(request.body(Full::from(body)).unwrap()).await.unwrap();
    assert_eq!(reply.status(), 200);
    reply.into_body().collect().await.unwrap();
}

/// Lets the engine drop all blocks that no request uses.
async fn clear(engine: &SimEngine) {
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let request = http::Request::post(format!("{}/reset_prefix_cache", engine.url()));
    client.request(request.body(Full::default()).unwrap()).await.unwrap();
}

/// Prompts that share prefixes. Together they do not fit into the cache.
fn prompt(seed: u32) -> Vec<u32> {
    let (family, own) = (seed % 5, seed / 5);
    let token = |at: u32| 3 + (if at < 64 { family } else { own + 7 } * 31 + at * 7) % 200;
    (0..96 + seed * 13 % 160).map(token).collect()
}

fn source(engine: &SimEngine, rank: u16) -> EventSource {
    EventSource {
        rank,
        events: engine.kv_events_endpoint().unwrap().parse().unwrap(),
        replay: Some(engine.kv_replay_endpoint().unwrap().parse().unwrap()),
    }
}

struct Shim {
    mirror: Mirror,
    leaving: CancellationToken,
    _tasks: JoinSet<()>,
    _told: (watch::Sender<Capabilities>, watch::Sender<Load>),
}

impl Shim {
    /// Whether the mirror holds every block of a prompt.
    fn holds(&self, seed: u32) -> bool {
        let (blocks, last) = asked(&prompt(seed));
        self.mirror.holds(BlockHash(0), 0, blocks, last)
    }

    /// Refreshes the mirror repeatedly, as requests at the gate do, until a condition holds.
    async fn ask_until(&self, what: &str, enough: impl Fn() -> bool) {
        let asking = async {
            while !enough() {
                tokio::time::sleep(Duration::from_millis(1)).await;
                self.mirror.refresh(0).await;
            }
        };
        tokio::time::timeout(PATIENCE, asking).await.unwrap_or_else(|_| panic!("never: {what}"));
    }

    /// Like [`agree`], but refreshes the mirror until both agree, for tests in which events are
    /// read only on request.
    async fn agree_when_asked(&self, router: &FakeRouter, engine: &SimEngine) {
        tokio::select! {
            () = agree(router, 0, engine) => {}
            () = self.ask_until("both agree", || false) => unreachable!("it has no end"),
        }
    }
}

fn shim(sources: Vec<EventSource>, router: &FakeRouter) -> Shim {
    shim_with(mirror::MirrorConfig::default(), sources, router)
}

fn shim_with(config: mirror::MirrorConfig, sources: Vec<EventSource>, router: &FakeRouter) -> Shim {
    let mirror = Mirror::new(config);
    let (capabilities, told_capabilities) = watch::channel(Capabilities::default());
    let (load, told_load) = watch::channel(Load::default());
    let config = attach::AttachConfig {
        routers: vec![format!("localhost:{}", router.address.port()).parse().unwrap()],
        worker_id: "p0".to_owned(),
        role: WorkerRole::Both,
        url: "http://127.0.0.1:1".to_owned(),
        model: "sim".to_owned(),
        grace: Duration::ZERO,
        token: None,
        tls: None,
        timing: attach::Timing::default(),
        status: attach::RouterStatuses::default(),
    };
    let mut tasks = JoinSet::new();
    let followed = mirror.clone();
    tasks.spawn(async move { followed.follow(sources).await });
    let leaving = CancellationToken::new();
    let told = (mirror.clone(), told_capabilities, told_load, leaving.clone());
    tasks.spawn(attach::run(config, told.0, told.1, told.2, told.3));
    Shim { mirror, leaving, _tasks: tasks, _told: (capabilities, load) }
}

/// Waits until the router's index of a rank equals the engine's cache.
async fn agree(router: &FakeRouter, rank: u16, engine: &SimEngine) {
    let what = format!("what rank {rank} holds");
    router
        .wait_for(&what, |known| {
            assert_eq!(known.faults, Vec::<String>::new());
            let told = content(&known.index, rank);
            let told: BTreeMap<_, _> =
                told.iter().map(|(name, (_, _, copies))| (*name, copies[0] as usize)).collect();
            told == engine.resident().into_iter().collect()
        })
        .await;
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
}

/// The number of full blocks of a prompt, and the chained hash of the last one.
fn asked(prompt: &[u32]) -> (u32, BlockHash) {
    let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: BLOCK_SIZE };
    let mut hashes = Vec::new();
    chain_hashes(&namespace, HashSeed(7), prompt, &mut hashes);
    (u32::try_from(hashes.len()).unwrap(), *hashes.last().unwrap())
}

fn small() -> SimConfig {
    SimConfig { kv_blocks: 80, ..SimConfig::default() }
}

#[tokio::test]
async fn a_router_learns_the_engines_blocks_whenever_it_attaches() {
    let engine = SimEngine::start(small()).await.unwrap();
    // Blocks from before the shim's start arrive by replay.
    for seed in 0..10 {
        complete(&engine, &prompt(seed)).await;
    }
    let router = FakeRouter::start(welcome(BLOCK_SIZE)).await;
    let shim = shim(vec![source(&engine, 0)], &router);
    agree(&router, 0, &engine).await;
    for seed in 10..60 {
        complete(&engine, &prompt(seed)).await;
        if seed % 20 == 0 {
            router.restart();
        }
    }
    agree(&router, 0, &engine).await;

    let (blocks, last) = asked(&prompt(59));
    let namespace = BlockHash(0);
    assert!(shim.mirror.holds(namespace, 0, blocks, last));
    assert!(!shim.mirror.holds(namespace, 1, blocks, last), "another rank does not");
    assert!(!shim.mirror.holds(namespace, 0, blocks + 1, last));
    for seed in 60..80 {
        complete(&engine, &prompt(seed)).await;
    }
    until("the prompt is evicted", || !shim.mirror.holds(namespace, 0, blocks, last)).await;
}

#[tokio::test]
async fn pending_events_are_read_on_request_and_reach_routers_completely() {
    let engine = SimEngine::start(small()).await.unwrap();
    let router = FakeRouter::start(welcome(BLOCK_SIZE)).await;
    // An interval beyond the end of the test: once the engine is busy, only requests read events.
    let read_every = Duration::from_secs(3600);
    let config = mirror::MirrorConfig { read_every, ..mirror::MirrorConfig::default() };
    let shim = shim_with(config, vec![source(&engine, 0)], &router);
    for seed in 0..60 {
        complete(&engine, &prompt(seed)).await;
        shim.ask_until("the blocks just computed", || shim.holds(seed)).await;
        if seed % 20 == 0 {
            router.restart();
        }
    }
    shim.agree_when_asked(&router, &engine).await;
    assert!(!shim.mirror.holds(BlockHash(0), 0, 1, BlockHash(1)));
}

#[tokio::test]
async fn a_bye_is_sent_at_once_and_pending_changes_follow_it() {
    let engine = SimEngine::start(small()).await.unwrap();
    let router = FakeRouter::start(welcome(BLOCK_SIZE)).await;
    // As above, events of a busy engine are read only on request.
    let read_every = Duration::from_secs(3600);
    let config = mirror::MirrorConfig { read_every, ..mirror::MirrorConfig::default() };
    let shim = shim_with(config, vec![source(&engine, 0)], &router);
    for seed in 0..10 {
        complete(&engine, &prompt(seed)).await;
        shim.ask_until("the blocks just computed", || shim.holds(seed)).await;
    }
    complete(&engine, &prompt(11)).await;
    shim.leaving.cancel();
    router.wait_for("a bye", |known| known.byes.len() == 1).await;
    assert!(!shim.holds(11), "its events are read at the next tick");
    shim.agree_when_asked(&router, &engine).await;
    assert!(shim.holds(11), "the gate opens for what it holds while it leaves as before");
    let known = router.known();
    assert_eq!((known.byes.len(), known.attached), (1, 1));
}

/// The next number of a deterministic random sequence.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

/// The router reports each change that is duplicated or out of order.
#[tokio::test]
async fn every_change_is_reported_once_and_in_order_despite_failures() {
    for seed in 1..=3_u64 {
        let engine = SimEngine::start(small()).await.unwrap();
        let router = FakeRouter::start(welcome(BLOCK_SIZE)).await;
        let shim = shim(vec![source(&engine, 0)], &router);
        let mut chance = seed;
        for at in 0..80 {
            match next(&mut chance) % 16 {
                0 => router.disconnect(),
                1 => router.restart(),
                2 => router.ask_again(),
                3 => router.pause(true),
                4..=5 => router.pause(false),
                6 => clear(&engine).await,
                7 => {
                    let lost = FaultKind::DropEventBatches;
                    engine.set_fault(Fault { kind: lost, times: Some(1) });
                }
                8..=9 => shim.mirror.refresh(0).await,
                10 => tokio::time::sleep(Duration::from_millis(next(&mut chance) % 60)).await,
                _ => {}
            }
            complete(&engine, &prompt(at + next(&mut chance) as u32 % 3)).await;
        }
        router.pause(false);
        engine.clear_faults();
        // Only a later event reveals a gap.
        complete(&engine, &prompt(99)).await;
        println!("seed {seed}");
        agree(&router, 0, &engine).await;
    }
}

#[tokio::test]
async fn an_engine_restart_resets_the_mirror_and_no_block_counts_as_held_meanwhile() {
    let engine = SimEngine::start(small()).await.unwrap();
    let router = FakeRouter::start(welcome(BLOCK_SIZE)).await;
    let shim = shim(vec![source(&engine, 0)], &router);
    complete(&engine, &prompt(1)).await;
    complete(&engine, &prompt(2)).await;
    agree(&router, 0, &engine).await;
    let before = router.known().mirror_id.clone();
    let (blocks, last) = asked(&prompt(1));
    let holds = || shim.mirror.holds(BlockHash(0), 0, blocks, last);
    until("events come", holds).await;

    let port = |endpoint: Option<&str>| {
        let port = endpoint.unwrap().rsplit_once(':').unwrap().1;
        Some(port.parse::<u16>().unwrap())
    };
    let config = SimConfig {
        kv_events_port: port(engine.kv_events_endpoint()),
        kv_replay_port: port(engine.kv_replay_endpoint()),
        ..small()
    };
    engine.shutdown().await;
    until("the gate shuts", || !holds()).await;
    assert!(!shim.mirror.status().ranks[0].current);
    let engine = SimEngine::start(config).await.unwrap();
    complete(&engine, &prompt(3)).await;
    agree(&router, 0, &engine).await;
    assert_ne!(router.known().mirror_id, before);
    assert!(!holds(), "what it held before is gone");
    let status = shim.mirror.status();
    assert_eq!((status.ranks[0].resets, status.ranks[0].last_reset), (1, Some("engine_restarted")));
}

#[tokio::test]
async fn lost_events_are_replayed_and_ranks_stay_separate() {
    let engines =
        [SimEngine::start(small()).await.unwrap(), SimEngine::start(small()).await.unwrap()];
    let router = FakeRouter::start(welcome(BLOCK_SIZE)).await;
    let sources = vec![source(&engines[0], 0), source(&engines[1], 1)];
    let shim = shim(sources, &router);
    // Events that are lost before the subscription leave no gap: the first replay contains them.
    for (rank, engine) in engines.iter().enumerate() {
        complete(engine, &prompt(95)).await;
        agree(&router, rank as u16, engine).await;
    }
    for round in 0..6 {
        for (at, engine) in engines.iter().enumerate() {
            let lost = FaultKind::DropEventBatches;
            engine.set_fault(Fault { kind: lost, times: Some(round % 3) });
            for seed in 0..5 {
                complete(engine, &prompt(round * 7 + seed * 3 + at as u32)).await;
            }
        }
    }
    for (rank, engine) in engines.iter().enumerate() {
        engine.clear_faults();
        // Only a later event reveals a gap.
        complete(engine, &prompt(90)).await;
        agree(&router, rank as u16, engine).await;
    }
    assert!(shim.mirror.status().ranks.iter().all(|rank| rank.gaps > 0 && rank.resets == 0));
}

#[tokio::test]
async fn the_blocks_of_an_engine_that_stays_away_are_dropped() {
    let engine = SimEngine::start(small()).await.unwrap();
    let router = FakeRouter::start(welcome(BLOCK_SIZE)).await;
    let config = mirror::MirrorConfig {
        disconnect_max: Duration::from_millis(200),
        ..mirror::MirrorConfig::default()
    };
    let shim = shim_with(config, vec![source(&engine, 0)], &router);
    complete(&engine, &prompt(1)).await;
    agree(&router, 0, &engine).await;
    engine.shutdown().await;
    router.wait_for("nothing", |known| known.index.workers().next().is_none()).await;
    let status = shim.mirror.status();
    assert_eq!(status.ranks[0].last_reset, Some("cut_off"));
}
