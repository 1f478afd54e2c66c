//! Hybrid models: what the router promises of a worker, and tells the client, is what its engine uses.

use serde_json::{Value, json};
use splitrail_sim::cache::GroupKind;
use splitrail_sim::{SimConfig, UsageReport};
use splitrail_tests::client::Reply;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::COMPLETIONS;
use splitrail_tests::{Cluster, Spec};

const BLOCK: u64 = 16;

fn ask_for(prompt: &[u64]) -> Value {
    json!({"model": "sim", "max_tokens": 2, "temperature": 0, "prompt": prompt})
}

/// Prompts that share prefixes, follow each other as turns of a chat, or come again.
fn prompts(count: usize) -> Vec<Vec<u64>> {
    let mut state = 11_u64;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % below
    };
    let tokens = |from: usize, count: usize| {
        (0..count).map(move |i| 3 + ((from * 31 + i * 11 + i / 7) % 250) as u64).collect::<Vec<_>>()
    };
    let trunks: Vec<_> = (1..4).map(|trunk| tokens(trunk * 1000, 96 + trunk * 16)).collect();
    let mut all: Vec<Vec<u64>> = Vec::new();
    for salt in 0..count {
        let mut prompt = match draw(4) {
            0 if !all.is_empty() => all[draw(all.len())].clone(),
            1 if !all.is_empty() => {
                let mut turns = all[all.len() - 1].clone();
                turns.extend(tokens(salt + 50, 24));
                turns
            }
            _ => trunks[draw(trunks.len())].clone(),
        };
        if draw(3) > 0 {
            prompt.extend(tokens(salt + 90, 1 + draw(40)));
        }
        prompt.truncate(320);
        all.push(prompt);
    }
    all
}

/// Tokens that the engines have taken from their caches so far.
fn cached_by_engines(cluster: &Cluster) -> u64 {
    let engines = cluster.engines.iter();
    engines.map(|(_, engine)| engine.state().totals.local_cache_hit_tokens).sum()
}

fn told(reply: &Reply) -> u64 {
    let usage = &reply.json()["usage"];
    usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

/// Waits until the router has applied all events of all cache groups.
async fn in_step(cluster: &Cluster) {
    cluster.quiet().await;
    for (name, engine) in &cluster.engines {
        eventually("all events have come", async || {
            let labels = [("worker", name.as_str())];
            let applied = cluster.metric("splitrail_index_events_total", &labels).await;
            applied == engine.state().totals.kv_events as f64
        })
        .await;
    }
    cluster.settle().await;
}

/// Sends prompts one after the other to workers with the layout; returns how often full attention held
/// more of a prompt than its engine used.
async fn compare(engine: fn(&str, &mut SimConfig)) -> u32 {
    let cluster = Cluster::start(Spec { engine, ..Spec::aggregated(2) }).await;
    let (mut partly_usable, mut tokens_cached) = (0, 0);
    for prompt in prompts(48) {
        in_step(&cluster).await;
        let before = cached_by_engines(&cluster);
        let reply = cluster.http.post(COMPLETIONS, &ask_for(&prompt)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let cached = cached_by_engines(&cluster) - before;
        let decision = &cluster.decisions(reply.header("x-request-id")).await[0];
        let last = (prompt.len() as u64 - 1) / BLOCK;
        let promised = decision["overlap_blocks"].as_u64().unwrap().min(last) * BLOCK;
        assert_eq!((promised, told(&reply)), (cached, cached), "of {} tokens", prompt.len());
        let candidates = decision["candidates"].as_array().unwrap();
        let chosen = candidates.iter().find(|seen| seen["chosen"] == true).unwrap();
        let spine = chosen["spine_blocks"].as_u64().unwrap_or(0);
        partly_usable += u32::from(spine.min(last) * BLOCK > cached);
        tokens_cached += cached;
    }
    assert!(tokens_cached > 0);
    let workers = cluster.admin.get("/admin/workers").await.json();
    let workers = workers["workers"].as_array().unwrap();
    assert!(workers.iter().all(|worker| worker["unfollowed_cache_groups"] == json!([])));
    assert!(workers.iter().any(|worker| worker["cache_groups"] != json!([])));
    partly_usable
}

/// The engines report no cached tokens, so the client is told the router's estimate.
fn silent(config: &mut SimConfig, groups: &[GroupKind]) {
    config.usage_report = UsageReport::Null;
    config.cache_groups = groups.to_vec();
    config.kv_blocks = 110;
}

#[tokio::test]
async fn a_model_with_sliding_windows_uses_what_is_promised_and_told() {
    let engine = |_: &str, config: &mut SimConfig| {
        silent(config, &[GroupKind::SlidingWindow { tokens: 40 }]);
    };
    assert!(compare(engine).await > 1);
}

#[tokio::test]
async fn a_model_with_recurrent_layers_uses_what_is_promised_and_told() {
    let engine = |_: &str, config: &mut SimConfig| silent(config, &[GroupKind::Mamba; 3]);
    assert!(compare(engine).await > 1);
}

#[tokio::test]
async fn a_prefix_without_a_resume_point_is_shown_and_completed_where_it_is() {
    let engine = |_: &str, config: &mut SimConfig| silent(config, &[GroupKind::Mamba]);
    let cluster = Cluster::start(Spec { engine, ..Spec::aggregated(2) }).await;
    let prompt = |own: u64| -> Vec<u64> {
        (0..160).map(|i| 3 + (i * 11 + i / 7) % 250).chain((0..30).map(|i| 3 + own + i)).collect()
    };
    let mut placed = Vec::new();
    for own in [1, 40, 80, 120] {
        in_step(&cluster).await;
        let reply = cluster.http.post(COMPLETIONS, &ask_for(&prompt(own))).await;
        let decision = cluster.decisions(reply.header("x-request-id")).await[0].clone();
        let candidates = decision["candidates"].as_array().unwrap();
        let chosen = candidates.iter().find(|seen| seen["chosen"] == true).unwrap().clone();
        let figures = (chosen["overlap_blocks"].as_u64(), chosen["spine_blocks"].as_u64());
        placed.push((chosen["worker"].clone(), figures, told(&reply)));
    }
    let at = |number: usize| placed[number].0.clone();
    assert_eq!(placed[0].1, (Some(0), None));
    assert_eq!(placed[1], (at(0), (Some(0), Some(10)), 0), "the second prompt with the prefix");
    assert_eq!(placed[2], (at(0), (Some(10), None), 160));
    assert_eq!(placed[3], (at(0), (Some(10), None), 160));
}
