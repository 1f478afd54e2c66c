//! The index agrees with the caches of engines after any disturbance of KV events; where it cannot
//! know, it counts no blocks.

use futures_util::future::join_all;
use serde_json::{Value, json};
use splitrail_sim::{EventForm, Fault, FaultKind, HashForm, OddEvent, SimConfig, UsageReport};
use splitrail_tests::cluster::{eventually, restarted};
use splitrail_tests::{Client, Cluster, Reply, Spec};

const COMPLETIONS: &str = "/v1/completions";
const BLOCK: u64 = 16;

fn completion(prompt: &str) -> Value {
    json!({"model": "sim", "max_tokens": 4, "temperature": 0, "prompt": prompt})
}

async fn ask(client: &Client, prompt: &str) -> Reply {
    let reply = client.post(COMPLETIONS, &completion(prompt)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

fn text(words: usize, name: &str) -> String {
    (0..words).map(|i| format!("{name}{i} ")).collect()
}

/// Prompts that branch from each other: a few roots, extended and cut at random.
fn prompts(seed: u64, count: usize) -> Vec<String> {
    let mut state = seed;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % below
    };
    let mut all: Vec<String> = (0..3).map(|i| text(12, &format!("root{i}-"))).collect();
    while all.len() < count {
        let mut prompt = all[draw(all.len())].clone();
        if draw(3) == 0 {
            prompt.truncate(prompt.len() / 2);
        }
        prompt += &text(1 + draw(12), &format!("s{}-", draw(1000)));
        prompt.truncate(400);
        all.push(prompt);
    }
    all
}

fn cached(reply: &Reply) -> u64 {
    let usage = &reply.json()["usage"];
    usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

async fn overlap(cluster: &Cluster, reply: &Reply) -> u64 {
    let decision = &cluster.decisions(reply.header("x-request-id")).await[0];
    decision["overlap_blocks"].as_u64().unwrap()
}

/// A prompt is found with exactly the overlap that the engine then reports.
async fn check_overlap(cluster: &Cluster, prompt: &str) -> u64 {
    cluster.settle().await;
    let reply = ask(&cluster.http, prompt).await;
    let prompt_tokens = reply.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    let usable = overlap(cluster, &reply).await.min((prompt_tokens - 1) / BLOCK);
    assert_eq!(usable * BLOCK, cached(&reply), "{prompt:?}");
    usable
}

async fn check_random_workload(spec: Spec, seed: u64) {
    let cluster = Cluster::start(spec).await;
    let prompts = prompts(seed, 72);
    for some in prompts.chunks(6) {
        join_all(some.iter().map(|prompt| ask(&cluster.http, prompt))).await;
    }
    let mut found = 0;
    for prompt in prompts.iter().rev().take(24) {
        found += check_overlap(&cluster, prompt).await;
    }
    assert!(found > 0, "nothing was ever found");
    let evictions = cluster.engines.iter().any(|(_, engine)| {
        let totals = engine.state().totals;
        let computed = totals.local_compute_tokens + totals.external_kv_transfer_tokens;
        computed / BLOCK > 2 * engine.state().blocks_total as u64
    });
    assert!(evictions, "the caches were too large to evict anything");
    cluster.settle().await;
    for (name, engine) in &cluster.engines {
        assert!(!engine.resident().is_empty(), "{name} did nothing");
        let worker = [("worker", name.as_str())];
        let rejected = cluster.metric("splitrail_index_rejected_total", &worker);
        assert_eq!(rejected.await, 0.0, "{name}");
        let gaps = cluster.metric("splitrail_index_gaps_total", &worker);
        assert_eq!(gaps.await, 0.0, "{name}");
    }
    cluster.quiet().await;
}

macro_rules! workloads {
    ($($name:ident: $form:ident $hash:ident, $policy:literal, $spec:expr;)+) => {
        $(#[tokio::test]
        async fn $name() {
            let spec = Spec {
                policy: $policy,
                engine: |_, config| {
                    config.kv_blocks = 72;
                    config.event_form = EventForm::$form;
                    config.hash_form = HashForm::$hash;
                },
                ..$spec
            };
            check_random_workload(spec, 11).await;
        })+
    };
}

workloads! {
    the_index_is_what_engines_hold_told_in_maps_of_integers:
        Map U64, "{ kind: round_robin }", Spec::aggregated(2);
    the_index_is_what_engines_hold_told_in_maps_of_bytes:
        Map Bytes32, "{ kind: kv_overlap, load_weight: 3.0 }", Spec::default();
    the_index_is_what_engines_hold_told_in_arrays_of_integers:
        Array U64, "{ kind: kv_overlap, load_weight: 3.0 }", Spec::default();
    the_index_is_what_engines_hold_told_in_arrays_of_bytes:
        Array Bytes32, "{ kind: round_robin }", Spec::aggregated(2);
}

#[tokio::test]
async fn batches_that_were_lost_are_replayed() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    ask(&cluster.http, &text(20, "before")).await;
    cluster.settle().await;
    let worker = cluster.engine("w0");
    let kind = FaultKind::DropEventBatches;
    worker.set_fault(Fault { kind, times: None });
    for i in 0..4 {
        ask(&cluster.http, &text(20, &format!("lost{i}-"))).await;
    }
    worker.clear_faults();
    // The next batch shows that some are missing.
    ask(&cluster.http, &text(20, "after")).await;
    for prompt in ["before", "lost0-", "lost3-", "after"] {
        assert!(check_overlap(&cluster, &text(20, prompt)).await > 0, "{prompt}");
    }
}

/// Waits until the index has what the engine has of a prompt.
async fn is_known_again(cluster: &Cluster, prompt: &str) {
    eventually("the prompt is known", async || {
        let again = ask(&cluster.http, prompt).await;
        cached(&again) > 0 && overlap(cluster, &again).await * BLOCK >= cached(&again)
    })
    .await;
}

/// Why the index of the only worker is rebuilt often, as the admin listener says.
async fn rebuilt_often(cluster: &Cluster) -> Value {
    cluster.admin.get("/admin/workers").await.json()["workers"][0]["index_rebuilt_often"].clone()
}

fn rejected_for<'a>(worker: &'a str, reason: &'a str) -> [(&'a str, &'a str); 2] {
    [("worker", worker), ("reason", reason)]
}

#[tokio::test]
async fn announcements_of_offloaded_blocks_cost_the_index_nothing() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let before = text(20, "before");
    ask(&cluster.http, &before).await;
    cluster.settle().await;
    let kind = FaultKind::OddEvents { event: OddEvent::Placeholder };
    cluster.engine("w0").set_fault(Fault { kind, times: None });
    for i in 0..4 {
        ask(&cluster.http, &text(20, &format!("between{i}-"))).await;
    }
    for prompt in [before, text(20, "between0-"), text(20, "between3-")] {
        assert!(check_overlap(&cluster, &prompt).await > 0, "{prompt}");
    }
    let rejected = rejected_for("w0", "unusable_event");
    assert!(cluster.metric("splitrail_index_rejected_total", &rejected).await >= 4.0);
    let resyncs = cluster.metric("splitrail_index_resyncs_total", &[("worker", "w0")]);
    assert_eq!(resyncs.await, 0.0);
    assert_eq!(rebuilt_often(&cluster).await, Value::Null);
}

#[tokio::test]
async fn an_event_of_an_unknown_kind_leaves_no_block_that_it_may_have_removed() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let kind = FaultKind::OddEvents { event: OddEvent::Unknown };
    let worker = cluster.engine("w0");
    for (round, often) in [(0, false), (1, false), (2, true)] {
        let [before, with] = ["before", "with"].map(|name| text(20, &format!("{name}{round}-")));
        ask(&cluster.http, &before).await;
        is_known_again(&cluster, &before).await;
        worker.set_fault(Fault { kind: kind.clone(), times: Some(1) });
        ask(&cluster.http, &with).await;
        // What the same batch stored behind the event is there.
        is_known_again(&cluster, &with).await;
        let reply = ask(&cluster.http, &before).await;
        assert_eq!(overlap(&cluster, &reply).await, 0);
        assert!(cached(&reply) > 0, "the engine's figure is told all the same");
        let reason = rebuilt_often(&cluster).await;
        assert_eq!(reason == "unclear_removal", often, "{reason}");
    }
    let unknown = rejected_for("w0", "unknown_event");
    assert_eq!(cluster.metric("splitrail_index_rejected_total", &unknown).await, 3.0);
}

/// A cluster of one engine that knows a prompt named "before", and whose events
/// were garbage while it served "hidden".
async fn after_garbage() -> Cluster {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    ask(&cluster.http, &text(20, "before")).await;
    cluster.settle().await;
    let worker = cluster.engine("w0");
    let kind = FaultKind::GarbageEvents;
    worker.set_fault(Fault { kind, times: None });
    ask(&cluster.http, &text(20, "hidden")).await;
    eventually("garbage is counted", async || {
        let garbage = [("worker", "w0"), ("reason", "garbage")];
        let rejected = cluster.metric("splitrail_index_rejected_total", &garbage);
        let resyncs = cluster.metric("splitrail_index_resyncs_total", &garbage);
        rejected.await > 0.0 && resyncs.await > 0.0
    })
    .await;
    worker.clear_faults();
    cluster
}

#[tokio::test]
async fn garbage_is_counted_and_never_makes_the_router_claim_too_much() {
    let cluster = after_garbage().await;
    let new = text(20, "after");
    ask(&cluster.http, &new).await;
    is_known_again(&cluster, &new).await;
    for prompt in ["before", "hidden"] {
        let reply = ask(&cluster.http, &text(20, prompt)).await;
        let told = cached(&reply);
        assert!(told > 0, "the engine's figure is told all the same");
        assert!(overlap(&cluster, &reply).await * BLOCK <= told + BLOCK);
    }
}

#[tokio::test]
async fn events_hidden_by_garbage_are_replayed() {
    let cluster = after_garbage().await;
    ask(&cluster.http, &text(20, "after")).await;
    for prompt in ["before", "hidden", "after"] {
        assert!(check_overlap(&cluster, &text(20, prompt)).await > 0, "{prompt}");
    }
}

fn without_replay(_: &str, config: &mut SimConfig) {
    config.kv_replay_port = None;
}

#[tokio::test]
async fn without_a_replay_endpoint_nothing_from_before_a_gap_is_believed() {
    let cluster = Cluster::start(Spec { engine: without_replay, ..Spec::aggregated(1) }).await;
    let old = text(20, "old");
    ask(&cluster.http, &old).await;
    assert!(check_overlap(&cluster, &old).await > 0);
    let worker = cluster.engine("w0");
    let kind = FaultKind::DropEventBatches;
    worker.set_fault(Fault { kind, times: Some(1) });
    ask(&cluster.http, &text(20, "lost")).await;
    worker.clear_faults();
    let new = text(20, "new");
    ask(&cluster.http, &new).await;
    eventually("the gap is counted", async || {
        cluster.metric("splitrail_index_gaps_total", &[("worker", "w0")]).await > 0.0
    })
    .await;
    is_known_again(&cluster, &new).await;
    for prompt in [&old, &text(20, "lost")] {
        let reply = ask(&cluster.http, prompt).await;
        assert_eq!(overlap(&cluster, &reply).await, 0);
        assert!(cached(&reply) > 0, "the engine's figure is told all the same");
    }
}

#[tokio::test]
async fn events_that_stop_without_a_word_are_noticed_by_what_the_engine_computes() {
    let model = "canary: { enabled: true, timeout: 1s }".into();
    let cluster =
        Cluster::start(Spec { engine: without_replay, model, ..Spec::aggregated(1) }).await;
    let old = text(20, "old");
    ask(&cluster.http, &old).await;
    assert!(check_overlap(&cluster, &old).await > 0);
    let worker = cluster.engine("w0");
    worker.set_fault(Fault { kind: FaultKind::DropEventBatches, times: None });
    let silent = [("worker", "w0"), ("reason", "silent")];
    let mut asked = 0;
    eventually("the silence is noticed", async || {
        asked += 1;
        ask(&cluster.http, &text(20, &format!("new{asked}-"))).await;
        cluster.metric("splitrail_index_resyncs_total", &silent).await > 0.0
    })
    .await;
    let parity = async || {
        let workers = cluster.admin.get("/admin/workers").await.json();
        let worker = &workers["workers"][0];
        [worker["parity"].clone(), worker["parity_cause"].clone()]
    };
    eventually("the canary says why", async || parity().await[1] == "events_absent").await;
    let reply = ask(&cluster.http, &old).await;
    assert_eq!(overlap(&cluster, &reply).await, 0, "blocks may have been evicted meanwhile");
    assert_eq!(cluster.metric("splitrail_index_resyncs_total", &silent).await, 1.0);
    worker.clear_faults();
    is_known_again(&cluster, &text(20, "again")).await;
    eventually("the canary is asked again", async || parity().await[0] == "ok").await;
}

async fn check_restart(engine: fn(&str, &mut SimConfig), busy: bool) {
    let mut cluster = Cluster::start(Spec {
        engine,
        model: "retries: { decode: 5 }".into(),
        ..Spec::aggregated(1)
    })
    .await;
    let old = text(30, "old");
    for i in 0..3 {
        ask(&cluster.http, &text(30, &format!("other{i}-"))).await;
    }
    ask(&cluster.http, &old).await;
    cluster.settle().await;
    let (name, engine) = cluster.engines.pop().unwrap();
    let engine = restarted(engine, |_| {}).await;
    if busy {
        // Its batches' numbers are soon beyond those of the old process.
        let direct = Client::new(engine.http_addr());
        for i in 0..12 {
            ask(&direct, &text(30, &format!("direct{i}-"))).await;
        }
    }
    cluster.engines.push((name, engine));
    eventually("the restart is noticed", async || {
        cluster.metric("splitrail_index_resyncs_total", &[("worker", "w0")]).await > 0.0
            && cluster.metric("splitrail_worker_up", &[("worker", "w0")]).await == 1.0
    })
    .await;
    let reply = ask(&cluster.http, &old).await;
    assert_eq!(overlap(&cluster, &reply).await, 0, "nothing stale is believed");
    assert_eq!(cached(&reply), 0);
}

#[tokio::test]
async fn a_restarted_engine_has_nothing_and_is_believed_to_have_nothing() {
    check_restart(|_, _| {}, false).await;
}

#[tokio::test]
async fn a_restarted_engine_is_known_even_if_it_is_ahead_of_its_old_self() {
    check_restart(|_, _| {}, true).await;
}

#[tokio::test]
async fn a_restart_is_noticed_without_a_replay_endpoint() {
    check_restart(without_replay, false).await;
}

#[tokio::test]
async fn after_a_restart_the_index_is_in_step_again() {
    let mut cluster = Cluster::start(Spec::aggregated(1)).await;
    ask(&cluster.http, &text(30, "old")).await;
    cluster.settle().await;
    let (name, engine) = cluster.engines.pop().unwrap();
    let engine = restarted(engine, |_| {}).await;
    let direct = Client::new(engine.http_addr());
    for i in 0..5 {
        ask(&direct, &text(30, &format!("direct{i}-"))).await;
    }
    cluster.engines.push((name, engine));
    cluster.settle().await;
    // What it stored before the router was back was replayed.
    assert!(check_overlap(&cluster, &text(30, "direct0-")).await > 0);
    assert!(check_overlap(&cluster, &text(30, "direct4-")).await > 0);
    assert_eq!(check_overlap(&cluster, &text(30, "old")).await, 0);
}

#[tokio::test]
async fn a_cleared_cache_is_cleared_in_the_index() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let prompt = text(30, "a");
    ask(&cluster.http, &prompt).await;
    assert!(check_overlap(&cluster, &prompt).await > 0);
    cluster.quiet().await;
    let direct = Client::new(cluster.engine("w0").http_addr());
    let reset = direct.post_with("/reset_prefix_cache", &[], "").await;
    assert_eq!(reset.status, 200);
    // The engine announces it with its next step.
    ask(&cluster.http, &text(3, "b")).await;
    cluster.settle().await;
    assert_eq!(check_overlap(&cluster, &prompt).await, 0);
}

#[tokio::test]
async fn blocks_of_another_size_are_counted_and_never_matched() {
    let cluster =
        Cluster::start(Spec { engine: |_, config| config.block_size = 32, ..Spec::default() })
            .await;
    let prompt = text(30, "a");
    ask(&cluster.http, &prompt).await;
    eventually("the blocks are counted as rejected", async || {
        let reason = [("reason", "block_size")];
        cluster.metric("splitrail_index_rejected_total", &reason).await > 0.0
    })
    .await;
    assert_eq!(cluster.metric("splitrail_index_blocks", &[]).await, 0.0);
    let mut hits = 0;
    for _ in 0..4 {
        let again = ask(&cluster.http, &prompt).await;
        assert_eq!(overlap(&cluster, &again).await, 0);
        hits += cached(&again);
    }
    assert!(hits > 0, "engines' figures are told all the same");
    cluster.quiet().await;
}

#[tokio::test]
async fn engines_without_events_are_served_and_nothing_is_estimated() {
    fn silent(_: &str, config: &mut SimConfig) {
        config.kv_events_port = None;
        config.kv_replay_port = None;
    }
    let spec = || Spec { policy: "{ kind: least_loaded }", ..Spec::aggregated(1) };
    let cluster = Cluster::start(Spec { engine: silent, ..spec() }).await;
    let prompt = text(30, "a");
    assert_eq!(cached(&ask(&cluster.http, &prompt).await), 0);
    let warm = ask(&cluster.http, &prompt).await;
    assert_eq!(overlap(&cluster, &warm).await, 0);
    assert!(cached(&warm) > 0);

    let mute = Cluster::start(Spec {
        engine: |name, config| {
            silent(name, config);
            config.usage_report = UsageReport::Null;
        },
        ..spec()
    })
    .await;
    for _ in 0..2 {
        assert_eq!(cached(&ask(&mute.http, &prompt).await), 0);
    }
    let estimated = [("source", "estimate")];
    assert_eq!(mute.metric("splitrail_cached_tokens_total", &estimated).await, 0.0);
}

#[tokio::test]
async fn nothing_is_estimated_from_an_overlap_that_is_an_upper_bound() {
    let silent: fn(&str, &mut SimConfig) = |_, config| config.usage_report = UsageReport::Null;
    let cluster = Cluster::start(Spec { engine: silent, ..Spec::aggregated(1) }).await;
    let [prompt, other] = ["a", "b"].map(|name| text(30, name));
    ask(&cluster.http, &prompt).await;
    cluster.settle().await;
    let warm = ask(&cluster.http, &prompt).await;
    let promised = overlap(&cluster, &warm).await;
    assert!(promised > 0);
    assert_eq!(cached(&warm), promised * BLOCK, "all groups are followed");
    let estimated = async || {
        let source = [("source", "estimate")];
        cluster.metric("splitrail_cached_tokens_total", &source).await
    };
    let before = estimated().await;

    let kind = FaultKind::OddEvents { event: OddEvent::SlidingWindow };
    cluster.engine("w0").set_fault(Fault { kind, times: Some(1) });
    ask(&cluster.http, &other).await;
    cluster.settle().await;
    for prompt in [&prompt, &other] {
        let unsure = ask(&cluster.http, prompt).await;
        assert!(overlap(&cluster, &unsure).await > 0, "it influences placement");
        assert_eq!(cached(&unsure), 0);
    }
    assert_eq!(estimated().await, before, "nothing more is counted");
    let workers = cluster.admin.get("/admin/workers").await.json();
    assert_eq!(workers["workers"][0]["unfollowed_cache_groups"], json!(["sliding_window"]));
}
