//! Attached workers as a part of the fleet: they serve, and their load counts.

use std::time::{Duration, Instant};

use serde_json::json;
use splitrail_fleet::parity::Parity;
use splitrail_fleet::{CandidateQuery, WorkerSource};
use splitrail_kv::BlockHash;
use splitrail_policy::{Candidate, Leg};
use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use splitrail_sim::{Role, SimConfig, SimEngine};
use splitrail_tests::Spec;
use splitrail_tests::cluster::{Cluster, eventually};
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::shim::{hello, run};

use super::support::{attach, held, is_believed, router, router_with, served, worker};

const URL: &str = "http://127.0.0.1:9";

/// What placing a prompt sees of a worker.
fn candidate(cluster: &Cluster, id: &str, hashes: &[u64]) -> Candidate {
    let number = worker(cluster, id).expect("it is there").index;
    let pool = &served(cluster).pool;
    let hashes: Vec<BlockHash> = hashes.iter().copied().map(BlockHash).collect();
    let (leg, now) = (Leg::Aggregated, Instant::now());
    let query = CandidateQuery {
        leg,
        hashes: &hashes,
        prompt_tokens: 1 << 20,
        exclusions: &[],
        readable_blocks: 0,
        takes_prefix: false,
        from: None,
        now,
    };
    let seen = pool.candidates(&pool.roster(), query);
    *seen.iter().find(|candidate| candidate.worker == number).expect("it is a candidate")
}

fn completion() -> serde_json::Value {
    json!({"model": "sim", "prompt": "once upon a time", "max_tokens": 2})
}

#[tokio::test]
async fn an_attached_worker_serves_and_what_it_can_do_is_shown() {
    let router = router("").await;
    let engine = SimConfig { role: Role::Both, ..SimConfig::default() };
    let engine = SimEngine::start(engine).await.expect("an engine");
    let capabilities = v1::Capabilities {
        engine: "vllm".into(),
        context_tokens: Some(4096),
        supports_cache_hit_threshold: Some(true),
        kv_blocks: Some(77),
        unfollowed_cache_groups: vec!["mamba".into(), "of tomorrow".into()],
        ..v1::Capabilities::default()
    };
    let hello = v1::Hello { capabilities: Some(capabilities), ..hello("s0", &engine.url()) };
    let shim = attach(&router, hello).await;
    shim.load(0, 0).await;
    let own = worker(&router, "w0").expect("it is there");
    own.set_draining(true, "only the attached one is to serve");
    let reply = router.http.post("/v1/completions", &completion()).await;
    assert_eq!((reply.status.as_u16(), reply.route("decode")), (200, Some("s0")));
    let shown = router.admin.get("/admin/workers").await.json();
    let shown = shown["workers"].as_array().expect("a list").iter().find(|w| w["id"] == "s0");
    let shown = shown.expect("it is shown");
    assert_eq!(shown["capabilities"]["kv_blocks"], 77);
    assert_eq!(shown["capabilities"]["engine"], "vllm");
    assert_eq!(shown["context_tokens"], 4096);
    assert_eq!(shown["events_origin"], "shim");
    assert_eq!(shown["supports_cache_hit_threshold"], true);
    assert_eq!(shown["unfollowed_cache_groups"], json!(["mamba", "other"]));
    assert!(worker(&router, "s0").expect("it is there").overlap_is_upper_bound());
}

#[tokio::test]
async fn an_attached_worker_without_kv_events_is_tested_by_its_tokens() {
    let spec = Spec {
        fleet: true,
        model: "discovery: [{ kind: shim }]\ncanary: { timeout: 5s, interval: 10m }".into(),
        ..Spec::aggregated(1)
    };
    let router = Cluster::start(spec).await;
    let engine = SimConfig { role: Role::Both, ..SimConfig::default() };
    let engine = SimEngine::start(engine).await.expect("an engine");
    let capabilities =
        v1::Capabilities { publishes_kv_events: Some(false), ..v1::Capabilities::default() };
    let hello = v1::Hello { capabilities: Some(capabilities), ..hello("s0", &engine.url()) };
    let shim = attach(&router, hello).await;
    shim.load(0, 0).await;
    eventually("it has been tested", async || {
        worker(&router, "s0").is_some_and(|worker| worker.kv.parity.parity() == Parity::Ok)
    })
    .await;
    let unclear = [("result", "unknown")];
    assert_eq!(router.metric("splitrail_canaries_total", &unclear).await, 0.0);
}

#[tokio::test]
async fn two_routers_see_the_same_blocks_and_each_others_load() {
    let (one, two) = (router("").await, router("").await);
    let mut shims = [attach(&one, hello("s0", URL)).await, attach(&two, hello("s0", URL)).await];
    for shim in &mut shims {
        shim.snapshot("m", 1, vec![run(None, 1..=4)]).await;
        shim.stored(2, [1, 2, 7]).await;
        shim.load(9, 4000).await;
        shim.acked(2).await;
    }
    for router in [&one, &two] {
        eventually("its load is known", async || {
            worker(router, "s0").is_some_and(|worker| worker.is_probed())
        })
        .await;
        assert_eq!(held(router, "s0"), [1, 2, 3, 4, 7]);
        let seen = candidate(router, "s0", &[1, 2, 3, 5]);
        assert_eq!((seen.overlap_blocks, seen.requests, seen.prefill_tokens), (3, 9, 4000));
        assert!(seen.up);
    }
}

#[tokio::test]
async fn a_worker_of_old_reports_is_taken_to_be_as_busy_as_the_busiest() {
    let router = router("fleet: { load_interval: 50ms, load_stale_after: 100ms }").await;
    let idle = attach(&router, hello("s0", URL)).await;
    let busy = attach(&router, hello("s1", "http://127.0.0.1:8")).await;
    assert_eq!(idle.welcome.load_interval_ms, 50);
    idle.load(1, 10).await;
    eventually("it is seen as it was, and then as the busiest", async || {
        busy.load(8, 9000).await;
        let is_there = worker(&router, "s1").is_some_and(|worker| worker.is_probed());
        is_there && candidate(&router, "s0", &[]).requests == 8
    })
    .await;
    assert_eq!(candidate(&router, "s0", &[]).prefill_tokens, 9000);
    eventually("it is seen as it is", async || {
        idle.load(2, 20).await;
        candidate(&router, "s0", &[]).requests == 2
    })
    .await;
}

#[tokio::test]
async fn a_replaced_worker_gets_a_complete_snapshot_again() {
    let router = router("").await;
    let mut shim = attach(&router, hello("s0", URL)).await;
    shim.snapshot("m", 1, vec![run(None, 1..=3)]).await;
    shim.acked(1).await;
    let before = worker(&router, "s0").expect("it is there").index;
    // Another source fills a gap, which makes another worker of it.
    let config = serde_json::from_value(json!({
        "id": "s0", "role": "both", "url": URL, "kv_events": "tcp://127.0.0.1:7",
    }));
    let fleet = &router.running.fleet;
    fleet.claim("sim", WorkerSource::Admin, config.expect("a worker")).expect("it may join");
    assert_eq!(shim.resync().await, "worker_replaced");
    shim.snapshot("m", 5, vec![run(None, 1..=2)]).await;
    shim.acked(5).await;
    assert!(worker(&router, "s0").expect("it is there").index > before);
    assert!(is_believed(&router, "s0"));
    assert_eq!(held(&router, "s0"), [1, 2]);
    // Without its shim it is what the other source says it is, and drained until its engine is down,
    // which is so here.
    shim.say(Message::Bye(v1::Bye::default())).await;
    eventually("it drains", async || {
        worker(&router, "s0").is_some_and(|worker| worker.is_draining())
    })
    .await;
    drop(shim);
    eventually("it falls back", async || {
        worker(&router, "s0").is_some_and(|worker| !worker.config.shim)
    })
    .await;
    assert!(held(&router, "s0").is_empty());
    let is_draining = || worker(&router, "s0").is_some_and(|worker| worker.is_draining());
    eventually("its engine is found down", async || !is_draining()).await;
    let again = attach(&router, hello("s0", URL)).await;
    eventually("the shim leads again", async || {
        worker(&router, "s0").is_some_and(|worker| worker.config.shim)
    })
    .await;
    eventually("it is in service, because its shim is back", async || !is_draining()).await;
    // What an operator wants stays.
    worker(&router, "s0").expect("it is there").set_draining(true, "a test");
    again.say(Message::Bye(v1::Bye::default())).await;
    drop(again);
    eventually("it falls back", async || {
        worker(&router, "s0").is_some_and(|worker| !worker.config.shim)
    })
    .await;
    assert!(is_draining(), "an operator drained it");
}

#[tokio::test]
async fn a_replaced_worker_has_what_its_shim_reported_last() {
    let router = router("").await;
    let mut shim = attach(&router, hello("s0", URL)).await;
    shim.snapshot("m", 1, vec![run(None, 1..=3)]).await;
    shim.acked(1).await;
    let capabilities = v1::Capabilities {
        ranks: Some(4),
        takes_rank_header: Some(true),
        ..v1::Capabilities::default()
    };
    shim.say(Message::Capabilities(capabilities)).await;
    let ranks = || worker(&router, "s0").map(|worker| worker.ranks.count());
    eventually("its ranks are known", async || ranks() == Some(4)).await;
    let config = serde_json::from_value(json!({
        "id": "s0", "role": "both", "url": URL, "kv_events": "tcp://127.0.0.1:7",
    }));
    let fleet = &router.running.fleet;
    fleet.claim("sim", WorkerSource::Admin, config.expect("a worker")).expect("it may join");
    assert_eq!(shim.resync().await, "worker_replaced");
    assert_eq!(ranks(), Some(4));
    let takes = worker(&router, "s0").expect("it is there").ranks.takes_rank_header();
    assert_eq!(takes, Some(true));
}

#[tokio::test]
async fn a_restart_of_an_engine_behind_a_shim_ends_what_its_process_kept() {
    let router = router("").await;
    let shim = attach(&router, hello("s0", URL)).await;
    let own = worker(&router, "s0").expect("it is there");
    let load = async |up: bool, started_at_s| {
        shim.say(Message::Load(v1::Load { up, started_at_s, ..v1::Load::default() })).await;
        eventually("the load is known", async || own.is_probed() && own.is_up() == up).await;
    };
    load(true, Some(1000.0)).await;
    own.quarantine("a test");
    let restarts = own.health.presence.restarts();
    load(false, Some(1000.0)).await;
    load(true, Some(1000.0)).await;
    assert_eq!(own.health.presence.restarts(), restarts, "the process was only out of reach");
    assert!(own.is_quarantined(), "its cache is the same");
    load(false, None).await;
    load(true, Some(2000.0)).await;
    eventually("the new process is noticed", async || {
        own.health.presence.restarts() == restarts + 1
    })
    .await;
    eventually("its cache is empty", async || !own.is_quarantined() && !own.is_draining()).await;
}

#[tokio::test]
async fn an_engine_behind_a_shim_that_sleeps_is_unready() {
    let router = router("").await;
    let shim = attach(&router, hello("s0", URL)).await;
    let own = worker(&router, "s0").expect("it is there");
    for (asleep, state) in [(false, "serving"), (true, "unready"), (false, "serving")] {
        let load = v1::Load { up: true, asleep: Some(asleep), ..v1::Load::default() };
        shim.say(Message::Load(load)).await;
        eventually("the state is known", async || own.state().name() == state).await;
    }
    let signs = own.health.progress.signs();
    for tokens_total in [5, 9] {
        let load = v1::Load { up: true, tokens_total: Some(tokens_total), ..v1::Load::default() };
        shim.say(Message::Load(load)).await;
    }
    eventually("its work is seen", async || own.health.progress.signs() > signs).await;
}

#[tokio::test]
async fn a_shim_that_leaves_while_its_worker_is_replaced_drains_the_new_one() {
    let router = router("").await;
    let shim = attach(&router, hello("s0", URL)).await;
    shim.load(0, 0).await;
    let before = worker(&router, "s0").expect("it is there");
    let config = serde_json::from_value(json!({
        "id": "s0", "role": "both", "url": URL, "kv_events": "tcp://127.0.0.1:7",
    }));
    let fleet = &router.running.fleet;
    fleet.claim("sim", WorkerSource::Admin, config.expect("a worker")).expect("it may join");
    // The session has not noticed yet that another worker has taken the place of this one.
    before.drain_for_shim("a test");
    eventually("the new one drains", async || {
        worker(&router, "s0")
            .is_some_and(|worker| worker.index > before.index && worker.is_draining())
    })
    .await;
}

#[tokio::test]
async fn redirects_of_workers_are_not_followed() {
    let elsewhere = ScriptedServer::start(|_| ScriptedReply::json(200, "{}")).await;
    let target = elsewhere.url();
    let redirecting = ScriptedServer::start(move |_| {
        let head = format!("HTTP/1.1 302 X\r\nlocation: {target}/v1/completions\r\n");
        ScriptedReply::Bytes((head + "content-length: 0\r\nconnection: close\r\n\r\n").into_bytes())
    })
    .await;
    let router = router("").await;
    let shim = attach(&router, hello("s0", &redirecting.url())).await;
    shim.load(0, 0).await;
    worker(&router, "w0").expect("it is there").set_draining(true, "a test");
    let reply = router.http.post("/v1/completions", &completion()).await;
    assert_eq!(reply.status.as_u16(), 502, "{}", reply.text());
    assert!(!redirecting.heard().is_empty() && elsewhere.heard().is_empty());
}

#[tokio::test]
async fn ten_million_invented_blocks_stay_below_the_bound() {
    const LIMIT: usize = 1000;
    let limits = "{ drain_delay: 10ms, drain_grace: 5s, index_blocks_per_worker_max: 1000 }";
    let router = router_with("", limits).await;
    let mut shim = attach(&router, hello("s0", URL)).await;
    assert_eq!(shim.welcome.blocks_max, LIMIT as u64);
    shim.snapshot("m", 0, vec![]).await;
    let (per_message, messages) = (20_000_u64, 500_u64);
    for sequence in 1..=messages {
        let first = sequence * per_message;
        let stored = v1::Stored {
            parent: None,
            names: (first..first + per_message).collect(),
            hashes: (first..first + per_message).collect(),
            tier: 0,
        };
        let changes = vec![v1::Change { change: Some(v1::change::Change::Stored(stored)) }];
        // Further ranks are no further room.
        let rank = (sequence % 4) as u32;
        let events = v1::Events { sequence, rank, engine_time_s: 0.0, changes };
        shim.say(Message::Events(events)).await;
    }
    shim.acked(messages).await;
    let number = worker(&router, "s0").expect("it is there").index.0;
    {
        let served = served(&router);
        let index = served.pool.index();
        assert_eq!(index.held(number), LIMIT);
        index.check().expect("a sound index");
        // A good deal more than they need, and next to nothing beside what was sent.
        assert!(index.bytes() < LIMIT * 1024 + (4 << 20), "{}", index.bytes());
    }
    let labels = [("worker", "s0"), ("reason", "over_limit")];
    let beyond = router.metric("splitrail_index_rejected_total", &labels).await;
    assert_eq!(beyond, (messages * per_message) as f64 - LIMIT as f64);
    let truncated = router.metric("splitrail_index_truncated", &[("worker", "s0")]).await;
    assert_eq!(truncated, 1.0);
    eventually("the router is well", async || {
        tokio::time::timeout(Duration::from_secs(5), router.admin.get("/health")).await.is_ok()
    })
    .await;
}
