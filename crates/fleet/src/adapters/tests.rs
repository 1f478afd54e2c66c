use splitrail_kv::{
    BlockAdapter, EngineHash, HashSeed, IndexConfig, KvEvent, Namespace, Overlaps, StoredBlock,
    Tier, chain_hashes,
};

use super::*;
use crate::ranks::rank_key;
use crate::state::Event;

const NAMES: [&str; 2] = ["a", "b"];

fn names() -> Vec<String> {
    NAMES.map(str::to_owned).to_vec()
}

/// A pool of workers with these roles.
fn pool(roles: &[&str]) -> (Pool, Vec<Arc<Worker>>) {
    let (model, seed) = ("m".into(), HashSeed(1));
    let index = IndexConfig { model, block_size: 1, seed, max_blocks_per_worker: 8 };
    let pool = Pool::new(index, None);
    let workers = roles.iter().enumerate().map(|(at, role)| {
        let config = format!(r#"{{"id": "w{at}", "role": "{role}", "url": "http://w{at}:1"}}"#);
        let config = serde_json::from_str(&config).unwrap();
        pool.enter(|number| Worker::new(number, config, format!("w{at}:1").parse().unwrap()))
    });
    let workers = workers.collect();
    (pool, workers)
}

/// What an engine lists: the model, and adapters with their paths.
fn listed(adapters: &[(&str, &str)]) -> Vec<EngineModel> {
    let model = |name: &str, root: &str, is_adapter| EngineModel {
        name: name.to_owned(),
        context_tokens: None,
        is_adapter,
        root: Some(root.to_owned()),
        owner: None,
    };
    let adapters = adapters.iter().map(|(name, root)| model(name, root, true));
    std::iter::once(model("m", "m", false)).chain(adapters).collect()
}

/// The engine is asked, and lists these adapters.
fn lists(pool: &Pool, worker: &Worker, adapters: &[(&str, &str)]) {
    let loads = pool.adapter_loads(worker, &names());
    pool.learn_adapters(worker, &names(), &loads, &listed(adapters));
}

/// The engine says that it has computed a block of one token with a load of an adapter.
fn computes(pool: &Pool, worker: &Worker, name: &str, load: u64, token: u32) {
    let hash = EngineHash(load << 32 | u64::from(token));
    let stored = KvEvent::Stored {
        parent: None,
        blocks: vec![StoredBlock { hash, tokens: vec![token], opaque: false }],
        adapter: Some(BlockAdapter { name: name.to_owned(), load }),
        salt: None,
        tier: Tier::Device,
    };
    pool.index().apply(rank_key(worker.index, 0), &stored);
}

/// Whether the index says that a worker holds the block of a token.
fn holds(pool: &Pool, worker: &Worker, name: &str, token: u32) -> bool {
    let namespace = Namespace { salt: None, model: "m", adapter: Some(name), block_size: 1 };
    let (mut hashes, mut overlaps) = (Vec::new(), Overlaps::new());
    chain_hashes(&namespace, HashSeed(1), &[token], &mut hashes);
    pool.index().find(&hashes, &mut overlaps);
    overlaps.get(rank_key(worker.index, 0)).blocks == 1
}

#[test]
fn a_worker_has_the_adapters_that_its_engine_listed_last_and_nothing_is_known_before() {
    let (pool, workers) = pool(&["both"]);
    let worker = &workers[0];
    assert_eq!(worker.has_adapter("a"), None);
    lists(&pool, worker, &[("b", "/b"), ("c", "/c")]);
    assert_eq!(
        ["a", "b", "c"].map(|name| worker.has_adapter(name)),
        [Some(false), Some(true), None],
        "the last one is not configured"
    );
    assert_eq!(worker.engine.facts.adapters().len(), 2, "only those that are configured");
    lists(&pool, worker, &[("a", "/a")]);
    assert_eq!(NAMES.map(|name| worker.has_adapter(name)), [true, false].map(Some));
    worker.becomes_another();
    assert_eq!(worker.has_adapter("a"), None, "it may be another process");
}

#[test]
fn another_path_is_noticed_although_the_engine_was_out_of_reach_meanwhile() {
    let (pool, workers) = pool(&["both"]);
    let worker = &workers[0];
    lists(&pool, worker, &[("a", "/1")]);
    computes(&pool, worker, "a", 1, 7);
    worker.becomes_another();
    lists(&pool, worker, &[("a", "/2")]);
    assert_eq!(worker.engine.facts.adapter_changes(), 1);
    assert!(!holds(&pool, worker, "a", 7));
}

#[test]
fn blocks_are_dropped_when_an_adapter_comes_from_another_path_and_only_its_own() {
    let (pool, workers) = pool(&["both", "both"]);
    for worker in &workers {
        lists(&pool, worker, &[("a", "/1"), ("b", "/b")]);
        computes(&pool, worker, "a", 1, 7);
        computes(&pool, worker, "b", 2, 7);
    }
    let worker = &workers[0];
    lists(&pool, worker, &[("a", "/1"), ("b", "/b")]);
    // It is unloaded, and loaded again from the same path: the engine finds its blocks again.
    lists(&pool, worker, &[("b", "/b")]);
    computes(&pool, worker, "a", 3, 8);
    lists(&pool, worker, &[("a", "/1"), ("b", "/b")]);
    assert_eq!([7, 8].map(|token| holds(&pool, worker, "a", token)), [true, true]);
    assert_eq!(worker.engine.facts.adapter_changes(), 0);
    // From another path, with a prompt before the engine is asked again.
    lists(&pool, worker, &[("b", "/b")]);
    computes(&pool, worker, "a", 4, 9);
    lists(&pool, worker, &[("a", "/2"), ("b", "/b")]);
    assert_eq!([7, 8, 9].map(|token| holds(&pool, worker, "a", token)), [false, false, true]);
    assert_eq!(worker.engine.facts.adapter_changes(), 1);
    // In place: the number of the load stays.
    lists(&pool, worker, &[("a", "/3"), ("b", "/b")]);
    assert!(!holds(&pool, worker, "a", 9));
    assert!(holds(&pool, worker, "b", 7) && holds(&pool, &workers[1], "a", 7));
}

#[test]
fn blocks_that_were_first_told_of_after_the_engine_was_asked_last_are_of_the_earlier_load() {
    let (pool, workers) = pool(&["both"]);
    lists(&pool, &workers[0], &[("a", "/1")]);
    computes(&pool, &workers[0], "a", 1, 7);
    lists(&pool, &workers[0], &[("a", "/2")]);
    assert!(!holds(&pool, &workers[0], "a", 7));
    // Loaded in place, with the number of the load whose blocks have come since.
    computes(&pool, &workers[0], "a", 2, 8);
    lists(&pool, &workers[0], &[("a", "/3")]);
    assert!(!holds(&pool, &workers[0], "a", 8));
}

#[test]
fn workers_agree_on_an_adapter_unless_both_name_different_paths() {
    let (pool, workers) = pool(&["both", "both", "both"]);
    let agree = |name| workers[0].agrees_on(name, &workers[1]);
    assert!(agree(Some("a")), "nothing is known");
    lists(&pool, &workers[0], &[("a", "/1")]);
    assert!(agree(Some("a")), "of one nothing is known");
    lists(&pool, &workers[1], &[("a", "/2")]);
    assert!(!agree(Some("a")) && agree(Some("b")) && agree(None));
    lists(&pool, &workers[1], &[("a", "/1")]);
    assert!(agree(Some("a")));
    let mut pathless = listed(&[("a", "")]);
    pathless[1].root = None;
    pool.learn_adapters(&workers[1], &names(), &[0, 0], &pathless);
    assert!(agree(Some("a")), "it names no path");
}

#[test]
fn an_adapter_may_be_had_as_long_as_a_worker_in_service_has_it_or_has_not_told() {
    let (pool, workers) = pool(&["prefill", "decode", "decode"]);
    assert!(pool.may_have_adapter("a") && pool.typical_holder("a").is_none());
    lists(&pool, &workers[0], &[("a", "/1")]);
    lists(&pool, &workers[1], &[]);
    assert!(pool.may_have_adapter("a"), "the last one has not told");
    lists(&pool, &workers[2], &[]);
    assert!(!pool.may_have_adapter("a"), "no prefill worker serves alone");
    lists(&pool, &workers[2], &[("a", "/2")]);
    assert_eq!(pool.typical_holder("a").unwrap().id(), "w2");
    workers[2].health.lifecycle.change(Event::Drain, "a test");
    assert!(!pool.may_have_adapter("a") && pool.typical_holder("a").is_none());
    for worker in &workers[1..] {
        worker.health.lifecycle.change(Event::Drain, "a test");
    }
    assert!(pool.may_have_adapter("a"), "none is in service");
}

#[test]
fn the_typical_path_is_the_one_of_most_workers() {
    let (pool, workers) = pool(&["both", "both", "both"]);
    for (worker, path) in workers.iter().zip(["/1", "/2", "/2"]) {
        lists(&pool, worker, &[("a", path)]);
    }
    assert!(pool.typical_holder("a").unwrap().agrees_on(Some("a"), &workers[2]));
    lists(&pool, &workers[1], &[("a", "/1")]);
    assert!(pool.typical_holder("a").unwrap().agrees_on(Some("a"), &workers[0]));
}
