//! Peer fetches: which workers can send and take prefixes, within which bounds, and what becomes of
//! failures.

use splitrail_kv::{
    BlockHash, EngineHash, HashSeed, IndexConfig, KvEvent, Namespace, StoredBlock, Tier,
    chain_hashes,
};
use splitrail_policy::WorkerIndex;

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::Pool;
use splitrail_workload::fetches::{FetchBooking, PeerFetches, Prefix};

const BOUNDS: FetchBounds = FetchBounds { min_tokens: 4, max_per_worker: 2, ..FetchBounds::SINGLE };

/// A pool of workers, the first of which holds three blocks of two tokens, and the blocks.
fn pool(keys: &str) -> (Pool, [Arc<Worker>; 2], Vec<BlockHash>) {
    let index = IndexConfig {
        model: "m".into(),
        block_size: 2,
        seed: HashSeed(1),
        max_blocks_per_worker: 8,
    };
    let pool = Pool::new(index, None);
    pool.fetch_bounds.store(Some(Arc::new(BOUNDS)));
    let workers = ["a", "b"].map(|id| {
        let config = format!(
            r#"{{"id": "{id}", "role": "prefill", "url": "http://{id}:1", "kv_events": "tcp://{id}:2"{keys}}}"#
        );
        let config = serde_json::from_str(&config).unwrap();
        let worker = pool.enter(|at| Worker::new(at, config, format!("{id}:1").parse().unwrap()));
        worker.set_probed(true, "a test");
        worker.set_synced();
        worker.set_events_current(true);
        worker
    });
    let tokens = [1, 2, 3, 4, 5, 6];
    let block = |at: usize| StoredBlock {
        hash: EngineHash(at as u64),
        tokens: tokens[2 * at..2 * at + 2].to_vec(),
        opaque: false,
    };
    let blocks = (0..3).map(block).collect();
    let (adapter, salt, tier) = (None, None, Tier::Device);
    let stored = KvEvent::Stored { parent: None, blocks, adapter, salt, tier };
    pool.index().apply(rank_key(WorkerIndex(0), 0), &stored);
    let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: 2 };
    let mut hashes = Vec::new();
    chain_hashes(&namespace, HashSeed(1), &tokens, &mut hashes);
    (pool, workers, hashes)
}

fn sources(pool: &Pool, hashes: &[BlockHash], now: Instant) -> Vec<(u32, u32)> {
    let mut sources = Vec::new();
    pool.list_sources(&pool.roster(), hashes, now, &mut sources);
    sources.iter().map(|source| (source.worker.0, source.blocks)).collect()
}

fn prefix(hashes: &[BlockHash]) -> Prefix {
    Prefix { rank: None, blocks: hashes.len() as u32, last: *hashes.last().unwrap() }
}

#[test]
fn a_source_is_a_worker_whose_confirmed_blocks_are_to_be_believed() {
    let now = Instant::now();
    let (pool, [holder, _], hashes) = pool("");
    assert_eq!(sources(&pool, &hashes, now), [(0, 3)]);
    assert_eq!(sources(&pool, &hashes[..1], now), [], "less than a fetch must bring");
    assert!(pool.holds(&holder, None, &hashes));

    holder.set_events_current(false);
    assert_eq!(sources(&pool, &hashes, now), [], "its events are cut off");
    assert!(!pool.holds(&holder, None, &hashes));
    holder.set_events_current(true);

    assert!(pool.learn_block_size(&holder, 2));
    assert_eq!(sources(&pool, &hashes, now), [(0, 3)]);
    holder.engine.facts.set_block_size(Some(4));
    assert_eq!(sources(&pool, &hashes, now), [], "its blocks have another size");
    holder.engine.facts.set_block_size(None);

    holder.set_draining(true, "a test");
    assert_eq!(sources(&pool, &hashes, now), [], "it takes no work");
    holder.set_draining(false, "a test");

    pool.fetch_bounds.store(None);
    assert_eq!(sources(&pool, &hashes, now), [], "peer fetches are off");
}

#[test]
fn workers_that_need_a_trial_take_part_after_a_good_one() {
    let now = Instant::now();
    let (pool, [holder, other], hashes) = pool("");
    let bounds = FetchBounds { needs_trial: true, ..BOUNDS };
    pool.fetch_bounds.store(Some(Arc::new(bounds)));
    let part = || (sources(&pool, &hashes, now).len(), can_take(&other, bounds, 2, now));
    let [source, fetcher] = [&holder, &other].map(|worker| &worker.transfer.fetches);
    assert_eq!(part(), (0, false));
    fetcher.trial_failed(now);
    let may_try = |after| fetcher.may_try(now + Duration::from_secs(after));
    assert_eq!([0, 29, 30].map(may_try), [false, false, true], "it is tried again");
    let second = now + Duration::from_secs(30);
    fetcher.trial_begins(second);
    fetcher.trial_failed(second);
    assert_eq!([89, 90].map(may_try), [false, true], "after twice the time");
    assert_eq!(part(), (0, false));
    PeerFetches::trial_succeeded(source, fetcher);
    assert_eq!(part(), (1, true));
    assert!(!can_take(&holder, bounds, 2, now), "it has only sent");
    assert!(can_take(&holder, BOUNDS, 2, now), "no trial is needed");
}

#[test]
fn a_source_loads_what_it_holds_in_slower_tiers_before_it_sends() {
    let now = Instant::now();
    let (pool, _, hashes) = pool("");
    let names = vec![EngineHash(2)];
    let block = StoredBlock { hash: EngineHash(2), tokens: vec![5, 6], opaque: false };
    let (adapter, salt, parent) = (None, None, Some(EngineHash(1)));
    let stored = KvEvent::Stored { parent, blocks: vec![block], adapter, salt, tier: Tier::Disk };
    let key = rank_key(WorkerIndex(0), 0);
    pool.index().apply(key, &stored);
    pool.index().apply(key, &KvEvent::Removed { hashes: names, tier: Tier::Device });
    let mut sources = Vec::new();
    pool.list_sources(&pool.roster(), &hashes, now, &mut sources);
    let [device, all] = sources[..] else { panic!("{sources:?}") };
    assert_eq!((device.blocks, device.wait_ns, all.blocks), (2, 0, 3));
    // Two tokens of 327,680 bytes, at 5 GB/s.
    assert_eq!(all.wait_ns, 131_072);
}

#[test]
fn a_worker_that_chooses_the_rank_itself_takes_no_part() {
    let (pool, [_, other], hashes) =
        pool(r#", "data_parallel_ranks": 2, "takes_rank_header": false"#);
    let now = Instant::now();
    assert_eq!(sources(&pool, &hashes, now), []);
    assert!(!can_take(&other, BOUNDS, 2, now));
}

#[test]
fn a_worker_has_no_more_fetches_than_it_may_and_none_is_left_behind() {
    let (pool, [holder, other], hashes) = pool("");
    let begin = || {
        FetchBooking::begin(
            &holder.transfer.fetches,
            &other.transfer.fetches,
            prefix(&hashes),
            BOUNDS,
            500,
        )
    };
    let first = begin().unwrap();
    assert!(first.is_alone());
    let second = begin().unwrap();
    assert!(!first.is_alone());
    assert!(begin().is_none());
    let fetches =
        |worker: &Worker| (worker.transfer.fetches.sending(), worker.transfer.fetches.taking());
    assert_eq!((other.transfer.fetches.incoming_ns(), fetches(&holder)), (1000, (2, 0)));
    assert_eq!(sources(&pool, &hashes, Instant::now()), []);
    drop((first, second));
    assert_eq!((other.transfer.fetches.incoming_ns(), fetches(&holder)), (0, (0, 0)));
    assert!(other.transfer.fetches.arriving(prefix(&hashes)).is_none());
    assert_eq!(sources(&pool, &hashes, Instant::now()), [(0, 3)]);
}

#[test]
fn only_an_engine_that_has_shown_its_flag_gets_legs_that_take_prefixes() {
    let (_pool, [_, other], _) = pool("");
    let now = Instant::now();
    assert!(!takes_prefixes(&other, now), "nothing is known of it");
    other.transfer.read_back.set_keeps_for_read_back(false);
    assert!(!takes_prefixes(&other, now));
    other.transfer.read_back.set_keeps_for_read_back(true);
    assert!(takes_prefixes(&other, now));
    other.transfer.read_back.ended(false, now);
    assert!(!takes_prefixes(&other, now), "a leg that was to read has failed");
    assert!(takes_prefixes(&other, now + Duration::from_secs(30)));
    other.becomes_another();
    assert!(!takes_prefixes(&other, now), "another process has shown nothing");
}

#[test]
fn a_worker_that_failed_is_left_alone_for_a_while() {
    let (pool, [holder, other], hashes) = pool("");
    let now = Instant::now();
    let booking = FetchBooking::begin(
        &holder.transfer.fetches,
        &other.transfer.fetches,
        prefix(&hashes),
        BOUNDS,
        0,
    )
    .unwrap();
    assert!(!holder.transfer.fetches.failed_with(&other.transfer.fetches, now));
    booking.both_did(false, now);
    drop(booking);
    let later = now + Duration::from_secs(30);
    assert!(holder.transfer.fetches.failed_with(&other.transfer.fetches, now));
    assert!(!holder.transfer.fetches.failed_with(&other.transfer.fetches, later));
    assert!(
        !other.transfer.fetches.failed_with(&holder.transfer.fetches, now),
        "in the other direction"
    );
    for (at, allowed) in [(now, false), (later, true)] {
        assert_eq!(sources(&pool, &hashes, at).len(), usize::from(allowed));
        assert_eq!(can_take(&other, BOUNDS, 2, at), allowed);
    }
}

#[tokio::test]
async fn requests_for_the_same_prefix_learn_whether_it_has_arrived() {
    let (_pool, [holder, other], hashes) = pool("");
    let fetched = prefix(&hashes);
    for arrives in [true, false] {
        let booking = FetchBooking::begin(
            &holder.transfer.fetches,
            &other.transfer.fetches,
            fetched,
            BOUNDS,
            0,
        )
        .unwrap();
        let shorter = prefix(&hashes[..2]);
        assert!(other.transfer.fetches.arriving(shorter).is_none());
        assert!(holder.transfer.fetches.arriving(fetched).is_none());
        let mut arriving = other.transfer.fetches.arriving(fetched).unwrap();
        if arrives {
            booking.arrived();
        }
        drop(booking);
        assert_eq!(arriving.wait_for(|has_arrived| *has_arrived).await.is_ok(), arrives);
    }
}

#[test]
fn of_two_fetches_of_one_prefix_each_ends_its_own() {
    let (_pool, [holder, other], hashes) = pool("");
    let fetched = prefix(&hashes);
    let begin = || {
        FetchBooking::begin(&holder.transfer.fetches, &other.transfer.fetches, fetched, BOUNDS, 0)
    };
    let (first, second) = (begin().unwrap(), begin().unwrap());
    drop(second);
    let arriving = other.transfer.fetches.arriving(fetched).unwrap();
    assert!(arriving.has_changed().is_ok(), "the first is under way");
    drop(first);
    assert!(other.transfer.fetches.arriving(fetched).is_none());
}
