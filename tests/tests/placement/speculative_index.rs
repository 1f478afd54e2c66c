//! The speculative index: blocks that no KV event has confirmed keep prompts with a common prefix
//! together, open no gate and are never reported as cached.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use serde_json::{Value, json};
use splitrail_sim::{Fault, FaultKind, SimConfig, UsageReport};
use splitrail_tests::cluster::eventually;
use splitrail_tests::{Cluster, Reply, Spec};

const COMPLETIONS: &str = "/v1/completions";
const SPECULATIVE_BLOCKS: &str = "splitrail_speculative_index_blocks";
/// Long enough for a test; expiry is tested where time can be told.
const LONG: &str = "speculative_index: { speculative_ttl: 10m, approximate_ttl: 10m }";
const OFF: &str = "speculative_index: { speculative_ttl: 0s, approximate_ttl: 0s }";

fn text(words: usize, name: &str) -> String {
    (0..words).map(|i| format!("{name}{i} ")).collect()
}

fn completion(prompt: &str) -> Value {
    json!({"model": "sim", "max_tokens": 4, "temperature": 0, "prompt": prompt})
}

async fn ask(cluster: &Cluster, prompt: &str) -> Reply {
    let reply = cluster.http.post(COMPLETIONS, &completion(prompt)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

/// Prompts that share all but their last words, sent at once.
async fn siblings(cluster: &Cluster, count: usize, name: &str) -> Vec<Reply> {
    let shared = text(60, name);
    let prompts: Vec<_> = (0..count).map(|i| format!("{shared} and {i}")).collect();
    join_all(prompts.iter().map(|prompt| ask(cluster, prompt))).await
}

fn cached(reply: &Reply) -> u64 {
    let usage = &reply.json()["usage"];
    usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

/// The workers that did a part of these requests, by the route header.
fn workers<'a>(replies: &'a [Reply], part: &str) -> BTreeSet<&'a str> {
    replies.iter().map(|reply| reply.route(part).unwrap()).collect()
}

/// The chosen candidate of a leg, as the decision record has it.
async fn chosen(cluster: &Cluster, reply: &Reply, leg: &str) -> Value {
    let decision = &cluster.decisions(reply.header("x-request-id")).await[0];
    let candidates = decision["candidates"].as_array().unwrap().iter();
    let mut chosen = candidates.filter(|c| c["leg"] == leg && c["chosen"] == true);
    chosen.next().unwrap().clone()
}

/// Publishes no KV events.
fn silent(_: &str, config: &mut SimConfig) {
    config.kv_events_port = None;
    config.kv_replay_port = None;
}

/// Takes its time over prompts, so that all siblings are routed before the first is computed.
fn slow(_: &str, config: &mut SimConfig) {
    config.prefill_us_per_token = 5_000;
}

#[tokio::test]
async fn prompts_with_a_common_prefix_that_arrive_together_share_a_worker() {
    let spec = Spec { prefill: 4, engine: slow, model: LONG.into(), ..Spec::default() };
    let cluster = Cluster::start(spec).await;
    for name in ["a", "b"] {
        let replies = siblings(&cluster, 8, name).await;
        assert_eq!(workers(&replies, "prefill").len(), 1, "{name}");
        let computed: Vec<_> = replies.iter().filter(|reply| cached(reply) == 0).collect();
        assert_eq!(computed.len(), 1, "one computes the common part, for all");
        // None of it was known when they were placed, and none is told as known.
        let mut speculative = 0;
        for reply in &replies {
            assert_eq!(reply.route("overlap_blocks"), Some("0"));
            let seen = chosen(&cluster, reply, "prefill").await;
            assert_eq!(seen["overlap_blocks"], 0);
            speculative += u64::from(seen["speculative_blocks"].as_u64().unwrap() > 0);
            let decision = &cluster.decisions(reply.header("x-request-id")).await[0];
            assert_eq!(decision["estimated_cached_tokens"], 0);
        }
        assert_eq!(speculative, 7);
    }
    assert_eq!(cluster.metric("splitrail_overlap_blocks_sum", &[("role", "prefill")]).await, 0.0);
    cluster.quiet().await;
}

#[tokio::test]
async fn without_the_speculative_index_such_prompts_are_spread_over_all_workers() {
    let spec = Spec { prefill: 4, engine: slow, model: OFF.into(), ..Spec::default() };
    let cluster = Cluster::start(spec).await;
    let replies = siblings(&cluster, 8, "a").await;
    assert_eq!(workers(&replies, "prefill").len(), 4);
    assert_eq!(cluster.metric(SPECULATIVE_BLOCKS, &[]).await, 0.0);
    cluster.quiet().await;
}

#[tokio::test]
async fn many_prompts_with_a_common_prefix_do_not_overload_one_worker() {
    let engine = |_: &str, config: &mut SimConfig| config.prefill_us_per_token = 500;
    let spec = Spec { prefill: 2, engine, model: LONG.into(), ..Spec::default() };
    let cluster = Cluster::start(spec).await;
    let shared = text(12, "system");
    let prompts: Vec<_> =
        (0..12).map(|i| format!("{shared}{}", text(60, &format!("u{i}-")))).collect();
    let replies = join_all(prompts.iter().map(|prompt| ask(&cluster, prompt))).await;
    assert_eq!(workers(&replies, "prefill").len(), 2);
    cluster.quiet().await;
}

#[tokio::test]
async fn speculative_blocks_open_no_gate() {
    // Events are lost: the index knows of nothing, though it believes itself up to date.
    let gate = "gate: { kind: router }\ncache_hit_threshold: 0.5";
    let spec = Spec {
        prefill: 1,
        decode: 1,
        flow: "decode_first",
        model: format!("{LONG}\n{gate}"),
        engine: |_, config| config.honour_threshold = false,
        ..Spec::default()
    };
    let cluster = Cluster::start(spec).await;
    let kind = FaultKind::DropEventBatches;
    cluster.engine("d0").set_fault(Fault { kind, times: None });
    let prompt = text(60, "a");
    for turn in 0..3 {
        let reply = ask(&cluster, &prompt).await;
        assert_eq!((reply.route("gate"), reply.route("try")), (Some("router"), Some("skipped")));
        assert_eq!(reply.route("prefill"), Some("p0"), "turn {turn}");
        let seen = chosen(&cluster, &reply, "decode").await;
        assert_eq!(seen["overlap_blocks"], 0);
        let speculative = seen["speculative_blocks"].as_u64().unwrap();
        assert_eq!(speculative > 0, turn > 0, "from the second turn on");
    }
    cluster.quiet().await;
}

#[tokio::test]
async fn without_events_a_repeated_prompt_goes_to_the_worker_that_computed_it() {
    let spec = Spec { engine: silent, model: LONG.into(), ..Spec::aggregated(4) };
    let cluster = Cluster::start(spec).await;
    for name in ["a", "b", "c", "d"] {
        let first = ask(&cluster, &text(50, name)).await;
        assert_eq!(cached(&first), 0);
        for _ in 0..4 {
            let again = ask(&cluster, &text(50, name)).await;
            assert_eq!(again.route("decode"), first.route("decode"));
            assert_eq!(again.route("overlap_blocks"), Some("0"));
            assert!(cached(&again) > 0, "the engine found it");
            let seen = chosen(&cluster, &again, "aggregated").await;
            assert_eq!(seen["overlap_blocks"], 0);
            assert!(seen["speculative_blocks"].as_u64().unwrap() > 0);
        }
    }
    let approximate = [("kind", "approximate")];
    assert!(cluster.metric(SPECULATIVE_BLOCKS, &approximate).await > 0.0);
    assert_eq!(cluster.metric("splitrail_index_blocks", &[]).await, 0.0);
    cluster.quiet().await;
}

#[tokio::test]
async fn without_events_hand_offs_go_where_both_workers_hold_the_prompt() {
    let spec =
        Spec { engine: silent, prefill: 3, decode: 3, model: LONG.into(), ..Spec::default() };
    let cluster = Cluster::start(spec).await;
    let first = ask(&cluster, &text(50, "a")).await;
    for _ in 0..5 {
        let again = ask(&cluster, &text(50, "a")).await;
        assert_eq!(again.route("prefill"), first.route("prefill"));
        assert_eq!(again.route("decode"), first.route("decode"));
    }
    cluster.quiet().await;
}

#[tokio::test]
async fn speculative_blocks_never_become_cached_tokens() {
    let spec = Spec {
        engine: |name, config| {
            silent(name, config);
            config.usage_report = UsageReport::Null;
        },
        model: LONG.into(),
        ..Spec::aggregated(1)
    };
    let cluster = Cluster::start(spec).await;
    for _ in 0..3 {
        assert_eq!(cached(&ask(&cluster, &text(50, "a")).await), 0);
    }
    assert!(cluster.metric(SPECULATIVE_BLOCKS, &[]).await > 0.0);
    assert_eq!(cluster.metric("splitrail_cached_tokens_total", &[]).await, 0.0);
    cluster.quiet().await;
}

#[tokio::test]
async fn a_failed_request_leaves_no_speculative_blocks() {
    let approximate =
        "speculative_index: { speculative_ttl: 0s, approximate_ttl: 10m }\nretries: { decode: 0 }";
    let spec = Spec { engine: silent, model: approximate.into(), ..Spec::aggregated(1) };
    let cluster = Cluster::start(spec).await;
    let kind = FaultKind::Status { status: 500 };
    cluster.engine("w0").set_fault(Fault { kind, times: Some(1) });
    let failed = cluster.http.post(COMPLETIONS, &completion(&text(50, "a"))).await;
    assert_eq!(failed.status, 502);
    assert_eq!(cluster.metric(SPECULATIVE_BLOCKS, &[]).await, 0.0);
    ask(&cluster, &text(50, "a")).await;
    assert!(cluster.metric(SPECULATIVE_BLOCKS, &[]).await > 0.0);
    cluster.quiet().await;
}

#[tokio::test]
async fn a_worker_that_is_gone_has_no_speculative_blocks() {
    let spec = Spec { engine: silent, model: LONG.into(), ..Spec::aggregated(2) };
    let mut cluster = Cluster::start(spec).await;
    let prompt = text(50, "a");
    let holder = ask(&cluster, &prompt).await.route("decode").unwrap().to_owned();
    let worker = [("worker", holder.as_str())];
    assert!(cluster.metric(SPECULATIVE_BLOCKS, &worker).await > 0.0);
    let place = cluster.engines.iter().position(|(name, _)| *name == holder).unwrap();
    cluster.engines.remove(place).1.shutdown().await;
    eventually("its speculative blocks are forgotten", async || {
        cluster.metric(SPECULATIVE_BLOCKS, &worker).await == 0.0
    })
    .await;
    assert_ne!(ask(&cluster, &prompt).await.route("decode"), Some(holder.as_str()));
    cluster.quiet().await;
}

#[tokio::test]
async fn a_cleared_cache_has_no_speculative_blocks() {
    let spec = Spec { model: LONG.into(), ..Spec::aggregated(1) };
    let cluster = Cluster::start(spec).await;
    ask(&cluster, &text(50, "a")).await;
    cluster.settle().await;
    cluster.quiet().await;
    let before = cluster.metric(SPECULATIVE_BLOCKS, &[]).await;
    assert!(before > 1.0);
    let direct = splitrail_tests::Client::new(cluster.engine("w0").http_addr());
    assert_eq!(direct.post_with("/reset_prefix_cache", &[], "").await.status, 200);
    // The engine announces it with its next step.
    ask(&cluster, "b").await;
    eventually("the speculative blocks are forgotten", async || {
        cluster.metric(SPECULATIVE_BLOCKS, &[]).await < before
    })
    .await;
}
