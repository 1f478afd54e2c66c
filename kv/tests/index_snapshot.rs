//! A worker's blocks as a value, and back.
#![allow(clippy::unwrap_used)]

use splitrail_kv::{
    Applied, EngineHash, HashSeed, Index, IndexConfig, KvEvent, SnapshotBlock, StoredBlock, Tier,
    WorkerKey,
};

const W0: WorkerKey = WorkerKey { worker: 0, rank: 0 };
const W1: WorkerKey = WorkerKey { worker: 1, rank: 3 };

fn index(max_blocks_per_worker: usize) -> Index {
    let (model, seed) = ("m".to_owned(), HashSeed(7));
    Index::new(IndexConfig { model, block_size: 1, seed, max_blocks_per_worker })
}

/// Engine hashes fall while positions rise, so neither order hides the other.
fn filled() -> Index {
    let mut index = index(100);
    let block = |hash: u64, opaque| StoredBlock {
        hash: EngineHash(hash),
        tokens: vec![u32::try_from(hash).unwrap()],
        opaque,
    };
    for (parent, hashes, tier) in [
        (None, 91..=99, Tier::Device),
        (Some(91), 80..=81, Tier::Host),
        (None, 98..=99, Tier::Disk),
    ] {
        let blocks = hashes.rev().map(|hash| block(hash, hash == 80)).collect();
        let parent = parent.map(EngineHash);
        index.apply(W0, &KvEvent::Stored { parent, blocks, adapter: None, salt: None, tier });
    }
    index
}

#[test]
fn parents_come_before_their_children() {
    let index = filled();
    let blocks = index.snapshot(W0);
    assert_eq!(blocks.len(), 11);
    for (at, block) in blocks.iter().enumerate() {
        let known = |hash| blocks[..at].iter().any(|before| before.hash == hash);
        assert!(block.parent.is_none_or(known), "{block:?}");
        assert_eq!(block.opaque, block.engine == EngineHash(80));
    }
    assert_eq!(blocks[0].copies, [1, 0, 1, 0]);
    assert_eq!(index.snapshot(W1), []);
}

#[test]
fn a_restored_worker_goes_on_as_the_original_would() {
    let mut index = filled();
    let mut reversed = index.snapshot(W0);
    reversed.reverse();
    let applied = index.restore(W1, reversed);
    assert_eq!(applied, Applied { stored: 11, ..Applied::default() });
    index.check().unwrap();
    assert_eq!(index.snapshot(W1), index.snapshot(W0));
    assert_eq!(index.block_counts(W1), index.block_counts(W0));

    let removed = KvEvent::Removed { hashes: vec![EngineHash(99)], tier: Tier::Device };
    assert_eq!(index.apply(W1, &removed), index.apply(W0, &removed));
    assert_eq!(index.snapshot(W1), index.snapshot(W0));
}

#[test]
fn a_restore_replaces_what_was_there() {
    let mut index = filled();
    let one = index.snapshot(W0)[0];
    let applied = index.restore(W0, [one]);
    assert_eq!(applied, Applied { stored: 1, removed: 11, ..Applied::default() });
    index.check().unwrap();
    assert_eq!(index.snapshot(W0), [one]);
    assert_eq!(index.restore(W0, []).removed, 1);
    assert_eq!(index.workers().count(), 0);
}

#[test]
fn a_restore_keeps_to_the_bound_and_refuses_contradictions() {
    let blocks = filled().snapshot(W0);
    let mut index = index(2);
    let nothing = SnapshotBlock { copies: [0; Tier::COUNT], ..blocks[0] };
    let no_parent = SnapshotBlock { parent: None, ..blocks[1] };
    let other = SnapshotBlock { engine: blocks[0].engine, ..blocks[1] };
    let given = [nothing, no_parent, blocks[0], other, blocks[2], blocks[3]];
    let applied = index.restore(W0, given);
    index.check().unwrap();
    let expected =
        Applied { malformed: 2, stored: 3, replaced: 1, over_limit: 1, ..Applied::default() };
    assert_eq!(applied, expected);
    assert_eq!(index.snapshot(W0), [other, blocks[2]]);
}

#[test]
fn absurd_counts_of_copies_do_no_harm() {
    let mut index = filled();
    let many = SnapshotBlock { copies: [u32::MAX; Tier::COUNT], ..index.snapshot(W0)[0] };
    let twin = SnapshotBlock { engine: EngineHash(1), ..many };
    assert_eq!(index.restore(W0, [many, many, twin]).stored, 3);
    index.check().unwrap();
    assert_eq!(index.block_counts(W0), [2; Tier::COUNT]);
    assert_eq!(index.clear_worker(W0), 2);
    assert_eq!(index.distinct_blocks(), 0);
}
