//! What the index guarantees about a worker's events, one behaviour per test.

use splitrail_kv::{
    AppliedBlocks, BlockAdapter, BlockHash, EngineHash, HashSeed, Index, IndexConfig, KvEvent,
    Namespace, Overlap, Overlaps, StoredBlock, Tier, WorkerKey, chain_hashes,
};

const SEED: HashSeed = HashSeed(7);
const W0: WorkerKey = WorkerKey { worker: 0, rank: 0 };
const W0_RANK1: WorkerKey = WorkerKey { worker: 0, rank: 1 };
const W1: WorkerKey = WorkerKey { worker: 1, rank: 0 };

fn index(max_blocks_per_worker: usize) -> Index {
    Index::new(IndexConfig {
        model: "m".to_owned(),
        block_size: 2,
        seed: SEED,
        max_blocks_per_worker,
    })
}

/// Blocks of two equal tokens; engine hash and token come in pairs.
fn blocks(named: &[(u64, u32)]) -> Vec<StoredBlock> {
    named
        .iter()
        .map(|&(hash, token)| StoredBlock {
            hash: EngineHash(hash),
            tokens: vec![token; 2],
            opaque: false,
        })
        .collect()
}

fn stored(parent: Option<u64>, named: &[(u64, u32)], tier: Tier) -> KvEvent {
    let parent = parent.map(EngineHash);
    KvEvent::Stored { parent, blocks: blocks(named), adapter: None, salt: None, tier }
}

fn on_device(parent: Option<u64>, named: &[(u64, u32)]) -> KvEvent {
    stored(parent, named, Tier::Device)
}

fn removed(hashes: &[u64], tier: Tier) -> KvEvent {
    KvEvent::Removed { hashes: hashes.iter().copied().map(EngineHash).collect(), tier }
}

fn prompt_in(salt: Option<&str>, adapter: Option<&str>, tokens: &[u32]) -> Vec<BlockHash> {
    let tokens: Vec<u32> = tokens.iter().flat_map(|&token| [token; 2]).collect();
    let mut out = Vec::new();
    chain_hashes(&Namespace { salt, model: "m", adapter, block_size: 2 }, SEED, &tokens, &mut out);
    out
}

fn overlap_in(index: &Index, worker: WorkerKey, prompt: &[BlockHash]) -> Overlap {
    index.check().unwrap();
    let mut overlaps = Overlaps::new();
    index.find(prompt, &mut overlaps);
    let overlap = overlaps.get(worker);
    assert_eq!(overlap.by_tier.iter().sum::<u32>(), overlap.blocks);
    overlap
}

fn overlap(index: &Index, worker: WorkerKey, tokens: &[u32]) -> u32 {
    overlap_in(index, worker, &prompt_in(None, None, tokens)).blocks
}

#[test]
fn a_run_from_several_events_matches_up_to_the_first_difference() {
    let mut index = index(100);
    assert_eq!(index.apply(W0, &on_device(None, &[(1, 10), (2, 20)])).stored, 2);
    assert_eq!(index.apply(W0, &on_device(Some(2), &[(3, 30)])).stored, 1);
    assert_eq!(overlap(&index, W0, &[10, 20, 30, 40]), 3);
    assert_eq!(overlap(&index, W0, &[10, 20, 31]), 2);
    assert_eq!(overlap(&index, W0, &[20, 30]), 0);
    assert_eq!(overlap(&index, W1, &[10, 20, 30]), 0);
}

#[test]
fn a_block_is_resident_until_its_last_copy_is_removed() {
    let mut index = index(100);
    for _ in 0..3 {
        index.apply(W0, &on_device(None, &[(1, 10)]));
    }
    for left in [1, 1, 0] {
        assert_eq!(index.apply(W0, &removed(&[1], Tier::Device)).removed, 1);
        assert_eq!(overlap(&index, W0, &[10]), left);
    }
    assert_eq!(index.apply(W0, &removed(&[1], Tier::Device)).unknown, 1);
}

#[test]
fn each_block_counts_for_its_fastest_tier() {
    let mut index = index(100);
    index.apply(W0, &stored(None, &[(1, 10), (2, 20), (3, 30)], Tier::Disk));
    index.apply(W0, &stored(None, &[(1, 10), (2, 20)], Tier::Host));
    index.apply(W0, &stored(None, &[(1, 10)], Tier::Device));
    let prompt = prompt_in(None, None, &[10, 20, 30]);
    let whole = overlap_in(&index, W0, &prompt);
    assert_eq!(whole, Overlap { blocks: 3, by_tier: [1, 1, 1, 0] });
    assert_eq!(index.block_counts(W0), [1, 2, 3, 0]);

    assert_eq!(index.apply(W0, &removed(&[1], Tier::Device)).removed, 1);
    assert_eq!(overlap_in(&index, W0, &prompt), Overlap { blocks: 3, by_tier: [0, 2, 1, 0] });
    // A copy in one tier does not count in another.
    assert_eq!(index.apply(W0, &removed(&[3], Tier::Host)).unknown, 1);
    assert_eq!(overlap_in(&index, W0, &prompt).blocks, 3);
}

#[test]
fn a_gap_ends_the_overlap_until_the_block_returns() {
    let mut index = index(100);
    index.apply(W0, &on_device(None, &[(1, 10), (2, 20), (3, 30)]));
    index.apply(W0, &removed(&[2], Tier::Device));
    assert_eq!(overlap(&index, W0, &[10, 20, 30]), 1);
    assert_eq!(index.block_counts(W0)[0], 2);
    index.apply(W0, &on_device(Some(1), &[(2, 20)]));
    assert_eq!(overlap(&index, W0, &[10, 20, 30]), 3);
}

#[test]
fn an_overlap_does_not_resume_after_a_gap() {
    let mut index = index(100);
    for worker in [W0, W0_RANK1, W1] {
        index.apply(worker, &on_device(None, &[(1, 10), (2, 20), (3, 30)]));
    }
    index.apply(W0_RANK1, &removed(&[2], Tier::Device));
    index.apply(W0, &removed(&[1], Tier::Device));
    let found = [W0, W0_RANK1, W1].map(|worker| overlap(&index, worker, &[10, 20, 30]));
    assert_eq!(found, [0, 1, 3]);
}

#[test]
fn blocks_under_an_unknown_parent_wait_for_it() {
    let mut index = index(100);
    let applied = index.apply(W0, &on_device(Some(9), &[(1, 10), (2, 20)]));
    assert_eq!(applied, AppliedBlocks { aside: 2, ..AppliedBlocks::default() });
    // A hash of another worker or rank is not a parent.
    index.apply(W1, &on_device(None, &[(9, 5)]));
    index.apply(W0_RANK1, &on_device(None, &[(9, 5)]));
    assert_eq!(overlap(&index, W0, &[5, 10, 20]), 0);
    assert_eq!(index.workers().collect::<Vec<_>>(), [W0_RANK1, W1]);
    let applied = index.apply(W0, &on_device(None, &[(9, 5)]));
    assert_eq!(applied, AppliedBlocks { stored: 3, ..AppliedBlocks::default() });
    assert_eq!(overlap(&index, W0, &[5, 10, 20]), 3);
}

#[test]
fn a_chain_that_arrives_in_reverse_order_is_joined_completely() {
    let mut index = index(100);
    for (parent, name) in [(3, 4), (2, 3), (1, 2)] {
        let applied = index.apply(W0, &on_device(Some(parent), &[(name, name as u32)]));
        assert_eq!(applied, AppliedBlocks { aside: 1, ..AppliedBlocks::default() });
        assert_eq!(index.workers().count(), 0);
    }
    assert_eq!(index.apply(W0, &on_device(None, &[(1, 1)])).stored, 4);
    assert_eq!(overlap(&index, W0, &[1, 2, 3, 4]), 4);
}

#[test]
fn a_copy_removed_while_it_waits_does_not_come_back() {
    let mut index = index(100);
    index.apply(W0, &stored(Some(9), &[(1, 10), (2, 20)], Tier::Host));
    assert_eq!(index.apply(W0, &removed(&[2, 2], Tier::Device)).unknown, 2);
    let applied = index.apply(W0, &removed(&[2, 2], Tier::Host));
    assert_eq!(applied, AppliedBlocks { removed: 1, unknown: 1, ..AppliedBlocks::default() });
    index.apply(W0, &on_device(None, &[(9, 5)]));
    assert_eq!(overlap(&index, W0, &[5, 10, 20]), 2);
    assert_eq!(index.block_counts(W0), [1, 1, 0, 0]);
}

#[test]
fn waiting_events_and_blocks_are_bounded_and_the_oldest_is_dropped() {
    let mut index = index(10_000);
    for name in 0..64 {
        assert_eq!(index.apply(W0, &on_device(Some(1000), &[(name, 7)])).orphaned, 0);
    }
    let applied = index.apply(W0, &on_device(Some(1000), &[(64, 8)]));
    assert_eq!(applied, AppliedBlocks { aside: 1, orphaned: 1, ..AppliedBlocks::default() });

    let many: Vec<_> = (0..4096).map(|name| (2000 + name, 9)).collect();
    let applied = index.apply(W0, &on_device(Some(1000), &many));
    assert_eq!(applied, AppliedBlocks { aside: 4096, orphaned: 64, ..AppliedBlocks::default() });
    let too_many: Vec<_> = (0..4097).map(|name| (9000 + name, 9)).collect();
    let applied = index.apply(W0, &on_device(Some(1000), &too_many));
    assert_eq!(applied, AppliedBlocks { orphaned: 4097, ..AppliedBlocks::default() });
    assert_eq!(index.apply(W0, &on_device(None, &[(1000, 5)])).stored, 4097);
    assert_eq!(overlap(&index, W0, &[5, 9, 9]), 3);
    assert_eq!(overlap(&index, W0, &[5, 8]), 1);
}

#[test]
fn a_malformed_block_ends_its_run() {
    let mut index = index(100);
    let mut event = on_device(None, &[(1, 10), (2, 20), (3, 30)]);
    let KvEvent::Stored { blocks, .. } = &mut event else { unreachable!() };
    blocks[1].tokens.push(20);
    let applied = index.apply(W0, &event);
    assert_eq!(
        applied,
        AppliedBlocks { stored: 1, malformed: 1, orphaned: 1, ..AppliedBlocks::default() }
    );
    assert_eq!(overlap(&index, W0, &[10, 20, 30]), 1);
}

#[test]
fn a_block_size_of_zero_indexes_nothing() {
    let config = IndexConfig { block_size: 0, ..index(100).config().clone() };
    let mut index = Index::new(config);
    let mut event = on_device(None, &[(1, 10)]);
    let KvEvent::Stored { blocks, .. } = &mut event else { unreachable!() };
    blocks[0].tokens.clear();
    assert_eq!(index.apply(W0, &event).malformed, 1);
    assert_eq!(index.workers().count(), 0);
}

#[test]
fn opaque_blocks_and_what_follows_are_known_and_never_matched() {
    let mut index = index(100);
    let mut event = on_device(None, &[(1, 10), (2, 20), (3, 30)]);
    let KvEvent::Stored { blocks, .. } = &mut event else { unreachable!() };
    blocks[1].opaque = true;
    assert_eq!(index.apply(W0, &event).stored, 3);
    assert_eq!(index.apply(W0, &on_device(Some(3), &[(4, 40)])).stored, 1);
    assert_eq!(overlap(&index, W0, &[10, 20, 30, 40]), 1);
    assert_eq!(index.block_counts(W0)[0], 4);
    // The same tokens without the image do not continue the chain with the image.
    index.apply(W0, &on_device(Some(1), &[(9, 20)]));
    assert_eq!(overlap(&index, W0, &[10, 20, 30, 40]), 2);
    let applied = index.apply(W0, &removed(&[9, 4, 3, 2, 1], Tier::Device));
    assert_eq!(applied, AppliedBlocks { removed: 5, ..AppliedBlocks::default() });
    assert_eq!(index.workers().count(), 0);
}

#[test]
fn two_engine_hashes_of_one_block_hold_it_until_both_are_gone() {
    let mut index = index(100);
    index.apply(W0, &on_device(None, &[(1, 10)]));
    index.apply(W0, &on_device(None, &[(2, 10)]));
    assert_eq!(index.block_counts(W0)[0], 2);
    assert_eq!(index.distinct_blocks(), 1);
    index.apply(W0, &removed(&[1], Tier::Device));
    assert_eq!(overlap(&index, W0, &[10]), 1);
    index.apply(W0, &removed(&[2], Tier::Device));
    assert_eq!(overlap(&index, W0, &[10]), 0);
    assert_eq!(index.distinct_blocks(), 0);
}

#[test]
fn an_engine_hash_stands_for_its_last_content_only() {
    let mut index = index(100);
    for tier in [Tier::Device, Tier::Device, Tier::Host] {
        index.apply(W0, &stored(None, &[(1, 10)], tier));
    }
    let applied = index.apply(W0, &on_device(None, &[(1, 11)]));
    assert_eq!(applied, AppliedBlocks { stored: 1, replaced: 1, ..AppliedBlocks::default() });
    assert_eq!(overlap(&index, W0, &[10]), 0);
    assert_eq!(overlap(&index, W0, &[11]), 1);
    assert_eq!(index.block_counts(W0), [1, 0, 0, 0]);
    assert_eq!(index.apply(W0, &removed(&[1], Tier::Device)).removed, 1);
    assert_eq!((index.workers().count(), index.distinct_blocks()), (0, 0));
}

#[test]
fn cleared_drops_every_tier_and_namespace_of_that_rank_only() {
    let mut index = index(100);
    for worker in [W0, W0_RANK1, W1] {
        index.apply(worker, &on_device(None, &[(1, 10), (2, 20)]));
        index.apply(worker, &stored(None, &[(1, 10)], Tier::Remote));
        let of_adapter = KvEvent::Stored {
            parent: None,
            blocks: blocks(&[(4, 10)]),
            adapter: Some(BlockAdapter { name: "lora".to_owned(), load: 1 }),
            salt: Some("tenant-a".to_owned()),
            tier: Tier::Host,
        };
        index.apply(worker, &of_adapter);
    }
    let in_namespace = |index: &Index, worker| {
        overlap_in(index, worker, &prompt_in(Some("tenant-a"), Some("lora"), &[10])).blocks
    };
    assert_eq!(index.apply(W0, &KvEvent::Cleared).removed, 3);
    assert_eq!((overlap(&index, W0, &[10]), in_namespace(&index, W0)), (0, 0));
    assert_eq!((overlap(&index, W0_RANK1, &[10, 20]), in_namespace(&index, W0_RANK1)), (2, 1));
    // Earlier blocks are neither parents nor waiting.
    assert_eq!(index.apply(W0, &on_device(Some(2), &[(3, 30)])).aside, 1);
    assert_eq!(index.apply(W0, &KvEvent::Cleared).removed, 0);
    assert_eq!(index.apply(W0, &on_device(None, &[(1, 10), (2, 20)])).stored, 2);
    assert_eq!(overlap(&index, W0, &[10, 20, 30]), 2);
}

#[test]
fn a_cleared_tier_leaves_the_other_tiers() {
    let mut index = index(100);
    index.apply(W0, &on_device(None, &[(1, 10), (2, 20), (3, 30)]));
    index.apply(W0, &on_device(Some(2), &[(3, 30)]));
    index.apply(W0, &stored(None, &[(1, 10), (2, 20)], Tier::Host));
    index.apply(W0, &on_device(Some(7), &[(8, 80)]));
    let cleared = |tier| KvEvent::TierCleared { tier };
    assert_eq!(index.apply(W0, &cleared(Tier::Device)).removed, 4);
    assert_eq!(index.block_counts(W0), [0, 2, 0, 0]);
    assert_eq!(overlap(&index, W0, &[10, 20, 30]), 2);
    // What waited in that tier is gone, too.
    index.apply(W0, &stored(None, &[(7, 70)], Tier::Host));
    assert_eq!(overlap(&index, W0, &[70, 80]), 1);
    assert_eq!(index.apply(W0, &cleared(Tier::Device)).removed, 0);
    assert_eq!(index.apply(W0, &cleared(Tier::Host)).removed, 3);
    assert_eq!((index.workers().count(), index.distinct_blocks()), (0, 0));
    // Of a worker that has one copy of each block, all in the device's memory.
    index.apply(W0, &on_device(None, &[(1, 10), (2, 20)]));
    assert_eq!(index.apply(W0, &cleared(Tier::Host)).removed, 0);
    assert_eq!(index.apply(W0, &cleared(Tier::Device)).removed, 2);
    assert_eq!((index.workers().count(), index.distinct_blocks()), (0, 0));
}

#[test]
fn dropped_blocks_lose_all_copies_in_all_tiers() {
    let mut index = index(100);
    for _ in 0..3 {
        index.apply(W0, &on_device(None, &[(1, 10), (2, 20), (3, 30)]));
    }
    index.apply(W0, &stored(None, &[(1, 10), (2, 20)], Tier::Disk));
    let dropped = KvEvent::Dropped { hashes: [2, 3, 9].map(EngineHash).to_vec() };
    assert_eq!(index.apply(W0, &dropped).removed, 7);
    assert_eq!(overlap(&index, W0, &[10, 20, 30]), 1);
    assert_eq!(index.block_counts(W0), [1, 0, 1, 0]);
    assert_eq!(index.check(), Ok(()));
}

#[test]
fn removing_a_worker_removes_all_its_ranks_and_no_other_worker() {
    let mut index = index(100);
    let far = WorkerKey { worker: 0, rank: u16::MAX };
    for worker in [W0, W0_RANK1, far, W1] {
        index.apply(worker, &on_device(None, &[(1, 10), (2, 20)]));
    }
    assert_eq!(index.remove_worker(0), 6);
    assert_eq!(index.remove_worker(0), 0);
    index.check().unwrap();
    assert_eq!(index.workers().collect::<Vec<_>>(), [W1]);
    assert_eq!(overlap(&index, W1, &[10, 20]), 2);
}

#[test]
fn salts_and_adapters_never_meet_and_are_inherited() {
    let mut index = index(100);
    let event = |parent: Option<u64>, named: &[(u64, u32)], salt: Option<&str>| KvEvent::Stored {
        parent: parent.map(EngineHash),
        blocks: blocks(named),
        adapter: Some(BlockAdapter { name: "lora".to_owned(), load: 1 }),
        salt: salt.map(str::to_owned),
        tier: Tier::Device,
    };
    index.apply(W0, &event(None, &[(1, 10)], Some("tenant-a")));
    // An engine names the salt on the first block only.
    index.apply(W0, &event(Some(1), &[(2, 20)], None));

    let blocks =
        |salt, adapter| overlap_in(&index, W0, &prompt_in(salt, adapter, &[10, 20])).blocks;
    assert_eq!(blocks(Some("tenant-a"), Some("lora")), 2);
    assert_eq!(blocks(Some("tenant-b"), Some("lora")), 0);
    assert_eq!(blocks(None, Some("lora")), 0);
    assert_eq!(blocks(Some("tenant-a"), None), 0);
    assert_eq!(blocks(Some("lora"), Some("tenant-a")), 0);
}

#[test]
fn beyond_the_bound_blocks_are_counted_and_not_indexed() {
    let mut index = index(2);
    let applied = index.apply(W0, &on_device(None, &[(1, 10), (2, 20), (3, 30)]));
    assert_eq!(applied, AppliedBlocks { stored: 2, over_limit: 1, ..AppliedBlocks::default() });
    // Copies and new tiers of known blocks need no further room, and other workers have their own
    // bound.
    assert_eq!(index.apply(W0, &stored(None, &[(1, 10)], Tier::Host)).stored, 1);
    assert_eq!(index.apply(W0, &on_device(None, &[(2, 99)])).replaced, 1);
    assert_eq!(index.apply(W1, &on_device(None, &[(3, 30)])).stored, 1);
    index.apply(W0, &removed(&[2], Tier::Device));
    assert_eq!(index.apply(W0, &on_device(Some(1), &[(4, 20)])).stored, 1);
    assert_eq!(overlap(&index, W0, &[10, 20, 30]), 2);
}

#[test]
fn nothing_of_an_event_is_indexed_after_the_first_block_over_the_bound() {
    let mut index = index(2);
    index.apply(W0, &on_device(None, &[(1, 10), (2, 20)]));
    // The last block is known, but the engine's chain is broken before it.
    let applied = index.apply(W0, &on_device(None, &[(1, 10), (3, 30), (4, 40), (2, 20)]));
    assert_eq!(applied, AppliedBlocks { stored: 1, over_limit: 3, ..AppliedBlocks::default() });
    assert_eq!(overlap(&index, W0, &[10, 20]), 2);
    assert_eq!(overlap(&index, W0, &[10, 30]), 1);
    // Nothing of the part that found no room was indexed.
    assert_eq!(index.distinct_blocks(), 2);
}

#[test]
fn a_lookup_clears_the_previous_result() {
    let mut index = index(100);
    index.apply(W0, &on_device(None, &[(1, 10)]));
    index.apply(W1, &on_device(None, &[(1, 11)]));
    let mut overlaps = Overlaps::new();
    index.find(&prompt_in(None, None, &[10]), &mut overlaps);
    index.find(&prompt_in(None, None, &[11]), &mut overlaps);
    let found: Vec<_> = overlaps.iter().map(|(worker, overlap)| (worker, overlap.blocks)).collect();
    assert_eq!(found, [(W1, 1)]);
    index.find(&[], &mut overlaps);
    assert!(overlaps.is_empty());
}
