//! Many workers at once, of which some have several cache groups: each has what it would have alone.

use proptest::collection::vec;
use proptest::prelude::*;
use splitrail_kv::{
    CacheGroup, EngineHash, GroupRule, HashSeed, Index, IndexConfig, KvEvent, Namespace, Overlap,
    Overlaps, StoredBlock, Tier, WorkerKey, chain_hashes,
};

const BLOCK_SIZE: u32 = 4;
const SEED: HashSeed = HashSeed(7);
const BLOCKS: u32 = 100;

/// Blocks of the prompt that a worker holds, and the depths of its resume points if it has several cache
/// groups.
type Held = (u32, Option<Vec<u32>>);

fn held() -> impl Strategy<Value = Held> {
    (1..=BLOCKS, proptest::option::weighted(0.7, vec(1..=BLOCKS, 0..4)))
}

fn tokens(block: u32) -> Vec<u32> {
    vec![block; BLOCK_SIZE as usize]
}

fn index(workers: &[Held]) -> Index {
    let mut index = Index::new(IndexConfig {
        model: "m".into(),
        block_size: BLOCK_SIZE,
        seed: SEED,
        max_blocks_per_worker: 1 << 16,
    });
    for (worker, (held, points)) in (0..).zip(workers) {
        let key = WorkerKey { worker, rank: 0 };
        let name = |block: u32| EngineHash(block.into());
        let block = |block| StoredBlock { hash: name(block), tokens: tokens(block), opaque: false };
        let blocks = (1..=*held).map(block).collect();
        let (adapter, salt, tier) = (None, None, Tier::Device);
        index.apply(key, &KvEvent::Stored { parent: None, blocks, adapter, salt, tier });
        let group = CacheGroup { number: 1, rule: GroupRule::State, block_size: BLOCK_SIZE };
        if let Some(points) = points {
            let hashes = points.iter().filter(|point| *point <= held).map(|point| name(*point));
            let (parent, tokens, hashes) = (None, held * BLOCK_SIZE, hashes.collect());
            index.apply(key, &KvEvent::GroupStored { group, parent, tokens, hashes });
        }
    }
    index.check().unwrap();
    index
}

/// The blocks that a worker holds, those that it can use, and those that it can use without the last one
/// that it finds.
fn expected((held, points): &Held, resumed_max: u32) -> [u32; 3] {
    let Some(points) = points else {
        return [*held, *held, (*held).min(resumed_max).saturating_sub(1)];
    };
    let deepest = |most: u32| {
        let points = points.iter().filter(|point| *point <= held && **point <= most);
        points.max().copied().unwrap_or(0)
    };
    [*held, deepest(resumed_max), deepest(resumed_max.min(held.saturating_sub(1)))]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn each_of_many_workers_uses_what_it_would_use_alone(
        workers in vec(held(), 1..150),
        resumed_max in BLOCKS - 1..=BLOCKS,
    ) {
        let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: BLOCK_SIZE };
        let prompt: Vec<u32> = (1..=BLOCKS).flat_map(tokens).collect();
        let mut hashes = Vec::new();
        chain_hashes(&namespace, SEED, &prompt, &mut hashes);
        let mut overlaps = Overlaps::new();
        index(&workers).reader().find_resumed(&hashes, resumed_max, &mut overlaps);
        for (worker, held) in (0..).zip(&workers) {
            let key = WorkerKey { worker, rank: 0 };
            let on_device = |blocks| Overlap { blocks, by_tier: [blocks, 0, 0, 0] };
            let [whole, shortened] = overlaps.with_and_without_last_block(key);
            let found = [overlaps.spine(key), overlaps.get(key), shortened];
            prop_assert_eq!(found, expected(held, resumed_max).map(on_device));
            prop_assert_eq!(whole, overlaps.get(key));
            prop_assert_eq!(overlaps.has_resume_points(key), held.1.is_some());
        }
        let found: Vec<_> = overlaps.iter().map(|(key, found)| (key.worker, found.blocks)).collect();
        for (worker, blocks) in found {
            let held = &workers[worker as usize];
            prop_assert_eq!(blocks, expected(held, resumed_max)[1]);
        }
    }
}

#[test]
fn a_group_whose_event_comes_before_that_of_the_spine_counts() {
    let mut index = index(&[]);
    let key = WorkerKey { worker: 0, rank: 0 };
    let name = |block: u32| EngineHash(block.into());
    let group = CacheGroup { number: 1, rule: GroupRule::State, block_size: BLOCK_SIZE };
    let (parent, adapter, salt, tier) = (None, None, None, Tier::Device);
    let early = KvEvent::GroupStored { group, parent, tokens: 8, hashes: vec![name(2)] };
    index.apply(key, &early);
    let block = |block| StoredBlock { hash: name(block), tokens: tokens(block), opaque: false };
    let blocks = vec![block(1), block(2), block(3)];
    index.apply(key, &KvEvent::Stored { parent, blocks, adapter, salt, tier });
    let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: BLOCK_SIZE };
    let prompt: Vec<u32> = (1..=4).flat_map(tokens).collect();
    let (mut hashes, mut overlaps) = (Vec::new(), Overlaps::new());
    chain_hashes(&namespace, SEED, &prompt, &mut hashes);
    let mut usable = |index: &Index| {
        index.reader().find_resumed(&hashes, 4, &mut overlaps);
        (overlaps.spine_blocks(key), overlaps.get(key).blocks)
    };
    assert_eq!(usable(&index), (3, 2));
    index.apply(key, &KvEvent::GroupRemoved { group: 1, hashes: vec![name(2)] });
    assert_eq!(usable(&index), (3, 0));
    index.check().unwrap();
}
