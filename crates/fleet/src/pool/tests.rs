//! Tests of what placing a prompt sees of workers.

use serde_json::json;
use splitrail_kv::{
    CacheGroup, EngineHash, GroupRule, HashSeed, KvEvent, Namespace, StoredBlock, Tier,
    chain_hashes,
};

use super::*;
use crate::parity::{Cause, Parity};
use crate::speculative_index::SpeculativeBlocks;
use splitrail_engine::load::EngineLoad;

pub(super) fn index(block_size: u32) -> IndexConfig {
    IndexConfig { model: "m".into(), block_size, seed: HashSeed(1), max_blocks_per_worker: 8 }
}

#[test]
fn what_is_found_out_about_an_engine_reaches_the_worker_that_has_taken_its_place() {
    let pool = Pool::new(index(2), None);
    let enter = |address: &str| {
        let config = format!(r#"{{"id": "w", "role": "both", "url": "http://{address}"}}"#);
        let (config, authority) = (serde_json::from_str(&config).unwrap(), address.parse());
        pool.enter(|number| Worker::new(number, config, authority.unwrap()))
    };
    let replace = |before: &Worker, address: &str| {
        let after = enter(address);
        after.succeed_to(before);
        pool.leave(before);
        after
    };
    let before = enter("w:1");
    before.record_restart();
    let after = replace(&before, "w:1");
    let last = replace(&after, "w:1");
    pool.change_engine(&before, |worker| worker.transfer.push.strand());
    pool.change_engine(&after, |worker| worker.quarantine("a test"));
    assert_eq!((last.transfer.push.stranded(), last.is_quarantined()), (1, true));
    last.record_restart();
    pool.change_engine(&before, |worker| worker.quarantine("a test"));
    assert!(!last.is_quarantined(), "its engine is another process");
    let elsewhere = replace(&last, "w:2");
    pool.change_engine(&last, |worker| worker.quarantine("a test"));
    assert!(last.is_quarantined() && !elsewhere.is_quarantined(), "it is another engine");
}

#[test]
fn overlap_is_believed_only_while_events_come_in_and_the_worker_agrees() {
    let config: splitrail_config::model::WorkerConfig = serde_json::from_str(
        r#"{"id": "w", "role": "both", "url": "http://w:1", "kv_events": "tcp://w:2"}"#,
    )
    .unwrap();
    let pool = Pool::new(index(2), None);
    let worker = pool.enter(|number| Worker::new(number, config, "w:1".parse().unwrap()));
    let tokens = vec![5, 6];
    let block = StoredBlock { hash: EngineHash(1), tokens: tokens.clone(), opaque: false };
    let stored = KvEvent::Stored {
        parent: None,
        blocks: vec![block],
        adapter: None,
        salt: None,
        tier: Tier::Device,
    };
    pool.index().apply(rank_key(WorkerIndex(0), 0), &stored);
    let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: 2 };
    let mut hashes = Vec::new();
    chain_hashes(&namespace, HashSeed(1), &tokens, &mut hashes);
    let overlap = || {
        let roster = pool.roster();
        let (leg, now) = (Leg::Aggregated, Instant::now());
        let query = CandidateQuery {
            prompt_tokens: 1 << 20,
            leg,
            hashes: &hashes,
            exclusions: &[],
            readable_blocks: 0,
            takes_prefix: false,
            from: None,
            now,
        };
        let seen = pool.candidates(&roster, query);
        seen[0].overlap_blocks
    };
    assert_eq!(overlap(), 0);
    worker.set_events_current(true);
    assert_eq!(overlap(), 1);
    worker.set_events_current(false);
    assert_eq!(overlap(), 0);
    worker.set_events_current(true);
    worker.kv.parity.set_asked(true);
    assert_eq!(overlap(), 0, "not asked yet");
    worker.kv.parity.record(0, Parity::Ok);
    assert_eq!(overlap(), 1);
    worker.kv.parity.record(0, Parity::Mismatch(Cause::Template));
    assert_eq!(overlap(), 0);
}

const SPECULATIVE: SpeculativeIndexConfig = SpeculativeIndexConfig {
    speculative_ttl: Duration::from_secs(2),
    approximate_ttl: Duration::from_secs(120),
    blocks_max: 8,
};

/// A pool of one worker with events, its worker, and a prompt of three blocks.
fn assuming(config: SpeculativeIndexConfig) -> (Pool, Arc<Worker>, Vec<BlockHash>) {
    let worker: splitrail_config::model::WorkerConfig = serde_json::from_str(
        r#"{"id": "w", "role": "both", "url": "http://w:1", "kv_events": "tcp://w:2"}"#,
    )
    .unwrap();
    let pool = Pool::new(index(2), None).with_speculative_index(config);
    let worker = pool.enter(|number| Worker::new(number, worker, "w:1".parse().unwrap()));
    let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: 2 };
    let mut hashes = Vec::new();
    chain_hashes(&namespace, HashSeed(1), &[1, 2, 3, 4, 5, 6], &mut hashes);
    (pool, worker, hashes)
}

/// Numbers of confirmed, speculative and underway blocks of the only worker.
fn seen(pool: &Pool, hashes: &[BlockHash], now: Instant) -> (u32, u32, u32) {
    let roster = pool.roster();
    let (leg, exclusions, readable_blocks) = (Leg::Aggregated, &[][..], 0);
    let takes_prefix = false;
    let prompt_tokens = 1 << 20;
    let query = CandidateQuery {
        leg,
        hashes,
        prompt_tokens,
        exclusions,
        readable_blocks,
        takes_prefix,
        from: None,
        now,
    };
    let seen = pool.candidates(&roster, query)[0];
    (seen.overlap_blocks, seen.speculative_blocks, seen.underway_blocks)
}

fn after(start: Instant, ms: u64) -> Instant {
    start + Duration::from_millis(ms)
}

#[test]
fn sent_blocks_are_underway_until_confirmed_or_expired() {
    let (pool, worker, hashes) = assuming(SPECULATIVE);
    worker.set_events_current(true);
    let start = Instant::now();
    pool.speculative_index.sent(start, &worker, None, &hashes);
    pool.speculative_index.computed(start, &worker, None, &hashes);
    assert_eq!(seen(&pool, &hashes, after(start, 1998)), (0, 3, 3));
    let block = StoredBlock { hash: EngineHash(1), tokens: vec![1, 2], opaque: false };
    let (blocks, tier) = (vec![block], Tier::Device);
    let stored = KvEvent::Stored { parent: None, blocks, adapter: None, salt: None, tier };
    pool.index().apply(rank_key(WorkerIndex(0), 0), &stored);
    assert_eq!(seen(&pool, &hashes, after(start, 1999)), (1, 3, 2));
    assert_eq!(seen(&pool, &hashes, after(start, 2001)), (1, 1, 0));
    assert_eq!(pool.speculative_index.blocks(&worker), SpeculativeBlocks::default());
}

#[test]
fn without_events_computed_blocks_are_speculative_for_longer_and_renewed() {
    let (pool, worker, hashes) = assuming(SPECULATIVE);
    let start = Instant::now();
    pool.speculative_index.computed(start, &worker, None, &hashes);
    pool.speculative_index.computed(after(start, 100_000), &worker, None, &hashes[..2]);
    assert_eq!(seen(&pool, &hashes, after(start, 119_998)), (0, 3, 0));
    assert_eq!(seen(&pool, &hashes, after(start, 120_001)), (0, 2, 0));
    assert_eq!(seen(&pool, &hashes, after(start, 219_998)), (0, 2, 0));
    assert_eq!(seen(&pool, &hashes, after(start, 220_001)), (0, 0, 0));
    // Once the worker's events are known, they replace the speculative blocks.
    pool.speculative_index.computed(after(start, 220_001), &worker, None, &hashes);
    pool.speculative_index.confirmed(WorkerIndex(0));
    assert_eq!(seen(&pool, &hashes, after(start, 220_002)), (0, 0, 0));
}

#[test]
fn speculative_blocks_are_bounded_by_the_capacity_that_an_engine_reports() {
    let (pool, worker, hashes) = assuming(SPECULATIVE);
    let start = Instant::now();
    worker.set_load(start, EngineLoad { total_blocks: Some(2), ..EngineLoad::default() });
    pool.speculative_index.computed(start, &worker, None, &hashes);
    assert_eq!(seen(&pool, &hashes, start), (0, 2, 0));
}

#[test]
fn no_blocks_are_speculative_when_disabled_or_after_a_restart() {
    let (pool, worker, hashes) = assuming(SpeculativeIndexConfig::OFF);
    let start = Instant::now();
    pool.speculative_index.sent(start, &worker, None, &hashes);
    pool.speculative_index.computed(start, &worker, None, &hashes);
    assert_eq!(seen(&pool, &hashes, start), (0, 0, 0));
    let (pool, worker, hashes) = assuming(SPECULATIVE);
    pool.speculative_index.sent(start, &worker, None, &hashes);
    pool.speculative_index.computed(start, &worker, None, &hashes);
    assert_eq!(seen(&pool, &hashes, start), (0, 3, 0));
    pool.speculative_index.forget(WorkerIndex(0));
    assert_eq!(seen(&pool, &hashes, start), (0, 0, 0));
}

#[test]
fn a_seed_makes_the_draws_repeatable() {
    let pool = |rng_seed| {
        let pool = Pool::new(index(2), rng_seed);
        (0..4).map(|_| pool.draw()).collect::<Vec<_>>()
    };
    assert_eq!(pool(Some(7)), pool(Some(7)));
    assert_ne!(pool(Some(7)), pool(Some(8)));
    assert_ne!(pool(None), pool(None));
}

/// The confirmed blocks of the only worker for a leg, and those if its engine did the opposite with the
/// last block of a hit.
fn usable(pool: &Pool, hashes: &[BlockHash], leg: Leg, from: Option<Location>) -> (u32, u32) {
    let query = CandidateQuery {
        leg,
        hashes,
        prompt_tokens: hashes.len() as u64 * 2 + 1,
        exclusions: &[],
        readable_blocks: 0,
        takes_prefix: false,
        from,
        now: Instant::now(),
    };
    let seen = pool.candidates(&pool.roster(), query)[0];
    (seen.overlap_blocks, seen.overlap_otherwise)
}

/// Has the only worker hold the three blocks of a prompt, and the state after some of them.
fn hold_with_states(pool: &Pool, worker: &Worker, states: &[u64]) {
    let block = |number: u32| {
        let tokens = vec![2 * number - 1, 2 * number];
        StoredBlock { hash: EngineHash(number.into()), tokens, opaque: false }
    };
    let (blocks, tier) = ((1..=3).map(block).collect(), Tier::Device);
    let stored = KvEvent::Stored { parent: None, blocks, adapter: None, salt: None, tier };
    let group = CacheGroup { number: 1, rule: GroupRule::State, block_size: 2 };
    let hashes = states.iter().map(|state| EngineHash(*state)).collect();
    let state = KvEvent::GroupStored { group, parent: None, tokens: 6, hashes };
    pool.index().apply(rank_key(WorkerIndex(0), 0), &stored);
    pool.index().apply(rank_key(WorkerIndex(0), 0), &state);
    worker.kv.event_stats.add_followed_groups(OtherGroups::named("mamba"));
}

#[test]
fn a_worker_that_is_handed_states_uses_all_that_it_holds_in_full_attention() {
    let (pool, worker, hashes) = assuming(SPECULATIVE);
    worker.set_events_current(true);
    hold_with_states(&pool, &worker, &[2, 3]);
    let from = Some(Location::default());
    assert_eq!(usable(&pool, &hashes, Leg::Prefill, None), (3, 2));
    assert_eq!(usable(&pool, &hashes[..2], Leg::Decode, from), (2, 0));
    pool.hands_over_states.store(true, Relaxed);
    // Prefill leaves the last token to decode, and computes one itself.
    assert_eq!(usable(&pool, &hashes, Leg::Prefill, None), (2, 2));
    assert_eq!(usable(&pool, &hashes, Leg::Aggregated, None), (3, 2));
    let (pool, worker, hashes) = assuming(SPECULATIVE);
    worker.set_events_current(true);
    hold_with_states(&pool, &worker, &[1]);
    assert_eq!(usable(&pool, &hashes, Leg::Decode, from), (1, 1));
    pool.hands_over_states.store(true, Relaxed);
    assert_eq!(usable(&pool, &hashes, Leg::Decode, from), (3, 3));
    assert_eq!(usable(&pool, &hashes, Leg::Decode, None), (1, 1), "it computes the prompt");
}

#[test]
fn a_worker_whose_engine_drops_the_last_block_of_a_hit_can_use_one_less() {
    let (pool, worker, hashes) = assuming(SPECULATIVE);
    worker.set_events_current(true);
    hold_with_states(&pool, &worker, &[1, 3]);
    assert_eq!(usable(&pool, &hashes, Leg::Aggregated, None), (3, 1));
    let learned: Vec<_> = (0..8).map(|_| worker.kv.last_block.compare([6, 2, 2])).collect();
    assert_eq!(learned.iter().filter(|learned| **learned).count(), 1);
    assert_eq!(usable(&pool, &hashes, Leg::Aggregated, None), (1, 3));
}

#[test]
fn the_group_whose_first_worker_joined_last_takes_the_place_of_others() {
    let pool = Pool::new(index(2), None);
    let start = Instant::now();
    let enter = |id: &str, group: &str| {
        let url = format!("http://{id}:1");
        let config = json!({"id": id, "role": "both", "url": url, "transfer_group": group});
        let config = serde_json::from_value(config).unwrap();
        let address = format!("{id}:1").parse().unwrap();
        let worker = pool.enter(|number| Worker::new(number, config, address));
        worker.joined();
        worker
    };
    let incoming = |now| pool.roster().incoming(now).map(|worker| worker.id().to_owned());
    let old = [enter("a0", "old"), enter("a1", "old")];
    let _new = [enter("b0", "new"), enter("b1", "new")];
    assert_eq!(incoming(start).as_deref(), Some("b0"));
    pool.leave(&old[0]);
    let _back = enter("a2", "old");
    assert_eq!(incoming(start).as_deref(), Some("b0"), "one that comes back replaces none");
    assert_eq!(incoming(start + Duration::from_secs(16 * 60)), None);
}
