//! Candidates of workers with data-parallel ranks: blocks, speculative blocks and load of each
//! rank.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use splitrail_kv::{
    BlockHash, EngineHash, HashSeed, IndexConfig, KvEvent, Namespace, StoredBlock, Tier,
    chain_hashes,
};

use crate::ranks::rank_key;
use crate::{CandidateQuery, Pool};
use splitrail_config::model::SpeculativeIndexConfig;
use splitrail_policy::WorkerIndex;

use super::*;

const TOKENS: [u32; 6] = [1, 2, 3, 4, 5, 6];

fn block(i: usize) -> StoredBlock {
    let tokens = TOKENS[2 * i..2 * i + 2].to_vec();
    StoredBlock { hash: EngineHash(i as u64), tokens, opaque: false }
}

/// A worker with two ranks, which hold these numbers of blocks of the prompt.
fn pool(takes_rank_header: bool, held: [usize; 2]) -> (Pool, Arc<Worker>, Vec<BlockHash>) {
    let config = serde_json::json!({
        "id": "w", "role": "both", "url": "http://w:1", "kv_events": "tcp://w:2",
        "data_parallel_ranks": 2, "takes_rank_header": takes_rank_header,
    });
    let config = serde_json::from_value(config).unwrap();
    let index = IndexConfig {
        model: "m".into(),
        block_size: 2,
        seed: HashSeed(1),
        max_blocks_per_worker: 8,
    };
    let pool = Pool::new(index, None).with_speculative_index(SpeculativeIndexConfig::default());
    let worker = pool.enter(|number| Worker::new(number, config, "w:1".parse().unwrap()));
    worker.set_events_current(true);
    for (rank, blocks) in (0..).zip(held) {
        let blocks = (0..blocks).map(block).collect();
        let (adapter, salt, tier) = (None, None, Tier::Device);
        let stored = KvEvent::Stored { parent: None, blocks, adapter, salt, tier };
        pool.index().apply(rank_key(WorkerIndex(0), rank), &stored);
    }
    let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: 2 };
    let mut hashes = Vec::new();
    chain_hashes(&namespace, HashSeed(1), &TOKENS, &mut hashes);
    (pool, worker, hashes)
}

fn seen(pool: &Pool, hashes: &[BlockHash]) -> Vec<Candidate> {
    let (leg, now) = (Leg::Aggregated, Instant::now());
    pool.candidates(
        &pool.roster(),
        CandidateQuery {
            leg,
            hashes,
            prompt_tokens: 1 << 20,
            exclusions: &[],
            readable_blocks: 0,
            takes_prefix: false,
            from: None,
            now,
        },
    )
}

#[test]
fn each_rank_is_a_candidate_with_its_own_blocks_and_bookings() {
    let (pool, worker, hashes) = pool(true, [1, 3]);
    let booking = worker.book(Some(1), 10, 20);
    let figures = |seen: &[Candidate]| -> Vec<_> {
        let figures = |c: &Candidate| (c.rank, c.overlap_blocks, c.requests, c.prefill_tokens);
        seen.iter().map(figures).collect()
    };
    assert_eq!(figures(&seen(&pool, &hashes)), [(Some(0), 1, 0, 0), (Some(1), 3, 1, 10)]);
    assert_eq!(worker.load.booked.requests(), 1);
    drop(booking);
    assert_eq!(figures(&seen(&pool, &hashes)), [(Some(0), 1, 0, 0), (Some(1), 3, 0, 0)]);
    assert_eq!(worker.load.booked.requests(), 0);
}

#[test]
fn interrupted_events_of_one_rank_do_not_affect_the_other() {
    let (pool, worker, hashes) = pool(true, [2, 3]);
    worker.ranks.get(0).unwrap().set_current(false);
    let blocks: Vec<_> = seen(&pool, &hashes).iter().map(|c| c.overlap_blocks).collect();
    assert_eq!(blocks, [0, 3]);
}

#[test]
fn blocks_that_one_rank_has_stored_remotely_can_be_loaded_by_the_other() {
    let (pool, worker, hashes) = pool(true, [2, 1]);
    let stores = |rank, parent, i, tier| {
        let (blocks, parent) = (vec![block(i)], Some(EngineHash(parent)));
        let stored = KvEvent::Stored { parent, blocks, adapter: None, salt: None, tier };
        pool.index().apply(rank_key(WorkerIndex(0), rank), &stored);
    };
    stores(0, 1, 2, Tier::Remote);
    let held = || -> Vec<_> {
        let seen = seen(&pool, &hashes);
        seen.iter().map(|c| (c.overlap_blocks, c.overlap_by_tier)).collect()
    };
    // The other rank lacks the block before the store's.
    assert_eq!(held(), [(3, [2, 0, 0, 1]), (1, [1, 0, 0, 0])]);
    stores(1, 0, 1, Tier::Device);
    assert_eq!(held(), [(3, [2, 0, 0, 1]), (3, [2, 0, 0, 1])]);
    // Nothing is known of a rank whose events are missing.
    worker.ranks.get(1).unwrap().set_current(false);
    assert_eq!(held()[1], (0, [0; 4]));
}

#[test]
fn if_the_engine_chooses_the_rank_only_blocks_on_all_ranks_count() {
    let (pool, worker, hashes) = pool(false, [2, 3]);
    let _bookings = [0, 1, 2].map(|_| worker.book(None, 10, 20));
    pool.speculative_index.sent(Instant::now(), &worker, None, &hashes);
    let seen_now = seen(&pool, &hashes);
    let [only] = seen_now[..] else { panic!("{seen_now:?}") };
    assert_eq!((only.rank, only.overlap_blocks, only.speculative_blocks), (None, 2, 2));
    assert_eq!((only.requests, only.prefill_tokens, only.active_tokens), (2, 15, 30));
    worker.ranks.get(1).unwrap().set_current(false);
    assert_eq!(seen(&pool, &hashes)[0].overlap_blocks, 0);
}

#[test]
fn blocks_sent_to_a_rank_are_speculative_for_that_rank_only() {
    let (pool, worker, hashes) = pool(true, [0, 0]);
    pool.speculative_index.sent(Instant::now(), &worker, Some(1), &hashes);
    let speculative: Vec<_> = seen(&pool, &hashes).iter().map(|c| c.speculative_blocks).collect();
    assert_eq!(speculative, [0, 3]);
    assert_eq!(pool.speculative_index.blocks(&worker).speculative, 3);
}

#[test]
fn an_engine_tells_how_busy_each_of_its_ranks_is() {
    let (pool, worker, hashes) = pool(true, [0, 0]);
    let requests_by_rank = vec![7, 2];
    let load = EngineLoad { running: Some(9), requests_by_rank, ..EngineLoad::default() };
    worker.set_load(Instant::now(), load);
    let requests: Vec<_> = seen(&pool, &hashes).iter().map(|c| c.requests).collect();
    assert_eq!(requests, [7, 2]);
}
