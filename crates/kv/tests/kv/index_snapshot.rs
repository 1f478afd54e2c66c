//! A worker's blocks as a stream of runs, and back.

use std::collections::{BTreeMap, BTreeSet};

use splitrail_kv::{
    AppliedBlocks, BlockHash, BlockName, EngineHash, HashSeed, HashedBlock, Index, IndexConfig,
    KvEvent, Overlap, Overlaps, RunNames, SnapshotRun, StoredBlock, Tier, WorkerKey,
};

const W0: WorkerKey = WorkerKey { worker: 0, rank: 0 };
const W1: WorkerKey = WorkerKey { worker: 1, rank: 3 };
const W2: WorkerKey = WorkerKey { worker: 2, rank: 0 };
const PLAIN: [u32; Tier::COUNT] = [1, 0, 0, 0];

fn index(max_blocks_per_worker: usize) -> Index {
    let (model, seed) = ("m".to_owned(), HashSeed(7));
    Index::new(IndexConfig { model, block_size: 1, seed, max_blocks_per_worker })
}

/// Engine hashes decrease while positions increase, so that a confusion of the two orders is
/// noticed.
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

fn snapshot(index: &Index, worker: WorkerKey) -> Vec<SnapshotRun> {
    index.snapshot(worker).collect()
}

/// The content of a snapshot for each name, independent of how it is cut into runs: the block, the
/// block before it, the copies.
type Content = BTreeMap<EngineHash, (Option<BlockHash>, BlockHash, [u32; Tier::COUNT])>;

fn content(runs: &[SnapshotRun]) -> Content {
    let mut content = Content::new();
    for run in runs {
        for named in run.names.iter() {
            let at = named.at as usize;
            let before = at.checked_sub(1).map_or(run.parent, |before| Some(run.hashes[before]));
            assert!(
                content.insert(named.engine, (before, run.hashes[at], named.copies)).is_none(),
                "a name stands for one block"
            );
        }
    }
    content
}

fn assert_parents_first(runs: &[SnapshotRun]) {
    let mut known = BTreeSet::<BlockHash>::new();
    for run in runs {
        assert!(run.parent.is_none_or(|parent| known.contains(&parent)), "{run:?}");
        known.extend(&run.hashes);
    }
}

fn removed(hashes: &[u64]) -> KvEvent {
    let hashes = hashes.iter().copied().map(EngineHash).collect();
    KvEvent::Removed { hashes, tier: Tier::Device }
}

/// Blocks with these chained hashes, named by the hash plus `offset`.
fn hashed(hashes: impl IntoIterator<Item = u64>, offset: u64) -> Vec<HashedBlock> {
    let block = |hash| HashedBlock { engine: EngineHash(hash + offset), hash: BlockHash(hash) };
    hashes.into_iter().map(block).collect()
}

fn overlap(index: &Index, worker: WorkerKey, hashes: impl IntoIterator<Item = u64>) -> Overlap {
    let prompt: Vec<_> = hashes.into_iter().map(BlockHash).collect();
    let mut overlaps = Overlaps::new();
    index.find(&prompt, &mut overlaps);
    overlaps.get(worker)
}

#[test]
fn a_snapshot_lists_parents_first_and_all_copies() {
    let index = filled();
    let runs = snapshot(&index, W0);
    assert_parents_first(&runs);
    let content = content(&runs);
    assert_eq!(content.len(), 11);
    let copies = |name| content[&EngineHash(name)].2;
    assert_eq!([99, 97, 81].map(copies), [[1, 0, 1, 0], PLAIN, [0, 1, 0, 0]]);
    assert_eq!(snapshot(&index, W1), []);
    assert_eq!(runs, snapshot(&index, W0));
}

#[test]
fn a_restored_worker_behaves_like_the_original() {
    let mut index = filled();
    let applied = index.restore(W1, snapshot(&index, W0));
    assert_eq!(applied, AppliedBlocks { stored: 11, ..AppliedBlocks::default() });
    index.check().unwrap();
    assert_eq!(snapshot(&index, W1), snapshot(&index, W0));
    assert_eq!(index.block_counts(W1), index.block_counts(W0));

    for event in [removed(&[99]), removed(&[95]), KvEvent::Cleared] {
        assert_eq!(index.apply(W1, &event), index.apply(W0, &event));
        index.check().unwrap();
        assert_eq!(content(&snapshot(&index, W1)), content(&snapshot(&index, W0)));
    }
}

#[test]
fn a_snapshot_contains_gaps_and_the_blocks_after_them() {
    let mut index = index(100);
    index.store(W0, None, &hashed(1..=9, 100), Tier::Device);
    index.apply(W0, &removed(&[101, 104, 105, 108]));
    let runs = snapshot(&index, W0);
    assert_parents_first(&runs);
    let held: Vec<_> = content(&runs).values().map(|(_, hash, _)| hash.0).collect();
    assert_eq!(held, [2, 3, 6, 7, 9]);

    // A router without any state of the worker learns also the blocks that no worker holds.
    let mut other = Index::new(index.config().clone());
    assert_eq!(other.restore(W1, runs.clone()).stored, 5);
    other.check().unwrap();
    assert_eq!(content(&snapshot(&other, W1)), content(&runs));
    assert_eq!(overlap(&other, W1, 1..=9).blocks, 0);
    for (name, blocks) in [(1, 3), (5, 3), (4, 7), (8, 9)] {
        let parent = (name > 1).then_some(EngineHash(name + 99));
        if name == 5 {
            // The blocks between two gaps can only be stored in order.
            assert_eq!(other.store(W1, parent, &hashed([5], 100), Tier::Device).orphaned, 1);
        } else {
            let missing = if name == 4 { hashed([4, 5], 100) } else { hashed([name], 100) };
            other.store(W1, parent, &missing, Tier::Device);
        }
        other.check().unwrap();
        assert_eq!(overlap(&other, W1, 1..=9).blocks, blocks, "after {name}");
    }
}

#[test]
fn a_snapshot_splits_long_chains_into_bounded_runs() {
    let mut index = index(100_000);
    index.store(W0, None, &hashed(1..=20_000, 0), Tier::Device);
    let runs = snapshot(&index, W0);
    assert!(runs.iter().all(|run| (1..=1024).contains(&run.hashes.len())));
    assert_parents_first(&runs);
    assert_eq!(content(&runs).len(), 20_000);
    let mut other = Index::new(index.config().clone());
    assert_eq!(other.restore(W0, runs).stored, 20_000);
    assert_eq!(overlap(&other, W0, 1..=20_001).blocks, 20_000);
    other.check().unwrap();
}

#[test]
fn a_restore_next_to_other_workers_cuts_and_follows_their_chains() {
    let mut other = index(100);
    other.store(W1, None, &hashed([1, 2, 3, 4, 50, 51], 0), Tier::Device);
    other.store(W2, None, &hashed([1, 60, 61], 0), Tier::Device);
    let mut index = index(100);
    index.store(W0, None, &hashed([1, 2, 3, 70, 71], 0), Tier::Host);
    index.store(W0, Some(EngineHash(1)), &hashed([60, 61, 62], 0), Tier::Device);
    assert_eq!(other.restore(W0, snapshot(&index, W0)).stored, 8);
    other.check().unwrap();
    assert_eq!(content(&snapshot(&other, W0)), content(&snapshot(&index, W0)));
    assert_eq!(overlap(&other, W0, [1, 2, 3, 70, 71]).by_tier, [0, 5, 0, 0]);
    assert_eq!(overlap(&other, W0, [1, 2, 3, 4]).blocks, 3);
    assert_eq!(overlap(&other, W1, [1, 2, 3, 4, 50, 51]).blocks, 6);
    assert_eq!(overlap(&other, W2, [1, 60, 61, 62]).blocks, 3);
}

#[test]
fn a_restore_replaces_all_previous_blocks() {
    let mut index = filled();
    let mut one = snapshot(&index, W0).swap_remove(0);
    one.hashes.truncate(1);
    one.names = one.names.iter().filter(|named| named.at == 0).collect();
    let applied = index.restore(W0, [one.clone()]);
    assert_eq!(applied, AppliedBlocks { stored: 1, removed: 11, ..AppliedBlocks::default() });
    index.check().unwrap();
    assert_eq!(snapshot(&index, W0), [one]);
    assert_eq!(index.restore(W0, []).removed, 1);
    assert_eq!(index.workers().count(), 0);
}

#[test]
fn a_restore_drops_blocks_that_wait_for_their_parent() {
    let mut index = index(100);
    let blocks = vec![StoredBlock { hash: EngineHash(2), tokens: vec![2], opaque: false }];
    let parent = Some(EngineHash(1));
    let tier = Tier::Device;
    let waits = KvEvent::Stored { parent, blocks, adapter: None, salt: None, tier };
    assert_eq!(index.apply(W0, &waits).aside, 1);
    index.restore(W0, []);
    index.check().unwrap();
    index.store(W0, None, &hashed([1], 0), Tier::Device);
    assert_eq!(index.block_counts(W0)[0], 1);
}

/// A run of consecutive blocks with one plain name each.
fn run(parent: Option<u64>, hashes: &[u64]) -> SnapshotRun {
    SnapshotRun {
        parent: parent.map(BlockHash),
        hashes: hashes.iter().copied().map(BlockHash).collect(),
        names: RunNames::Plain(hashes.iter().copied().map(EngineHash).collect()),
    }
}

#[test]
fn runs_that_contradict_themselves_or_others_are_refused() {
    let good = run(None, &[1, 2, 3]);
    let named =
        |names: Vec<BlockName>| SnapshotRun { names: RunNames::Each(names), ..good.clone() };
    let each: Vec<BlockName> = good.names.iter().collect();
    let mut copiless = each.clone();
    copiless[1].copies = [0; Tier::COUNT];
    let mut gap = each.clone();
    gap.remove(1);
    let short = each[..2].to_vec();
    let mut beyond = each;
    beyond.push(BlockName { at: 3, engine: EngineHash(9), copies: PLAIN });
    let [copiless, gap, short, beyond] = [copiless, gap, short, beyond].map(named);
    let plain = |names: &[u64]| SnapshotRun {
        names: RunNames::Plain(names.iter().copied().map(EngineHash).collect()),
        ..good.clone()
    };
    let (too_few, too_many) = (plain(&[1, 2]), plain(&[1, 2, 3, 4]));
    let no_blocks = SnapshotRun { hashes: Vec::new(), ..good.clone() };
    let too_early = run(Some(3), &[4, 5]);
    for bad in [copiless, gap, short, beyond, too_few, too_many, no_blocks, too_early] {
        let mut index = index(100);
        let names = bad.names.len();
        let applied = index.restore(W0, [bad, good.clone()]);
        index.check().unwrap();
        let expected = AppliedBlocks { stored: 3, malformed: names, ..AppliedBlocks::default() };
        assert_eq!(applied, expected);
        assert_eq!(overlap(&index, W0, 1..=5).blocks, 3);
    }
}

#[test]
fn a_hash_at_a_second_place_is_refused() {
    let mut index = index(100);
    index.store(W1, None, &hashed([1, 2, 3], 0), Tier::Device);
    // A chained hash stands for one prefix only: 2 cannot follow 7.
    let mut lie = run(Some(7), &[2, 8]);
    lie.names = RunNames::Plain(vec![EngineHash(42), EngineHash(48)]);
    let applied = index.restore(W0, [run(None, &[7]), lie]);
    index.check().unwrap();
    assert_eq!(applied.stored + applied.malformed, 3);
    assert_eq!(overlap(&index, W1, 1..=3).blocks, 3);
    assert_eq!(overlap(&index, W0, 1..=3).blocks, 0);
}

#[test]
fn a_restore_keeps_to_the_bound() {
    let mut index = index(2);
    let applied = index.restore(W0, [run(None, &[1, 2, 3]), run(Some(3), &[4]), run(None, &[5])]);
    index.check().unwrap();
    // A block after one that found no room has no parent.
    assert_eq!(
        applied,
        AppliedBlocks { stored: 2, over_limit: 2, malformed: 1, ..AppliedBlocks::default() }
    );
    assert_eq!(index.distinct_blocks(), 2);
    assert_eq!(overlap(&index, W0, 1..=4).blocks, 2);
}

#[test]
fn absurd_counts_of_copies_do_no_harm() {
    let mut index = index(100);
    let many = BlockName { at: 0, engine: EngineHash(99), copies: [u32::MAX; Tier::COUNT] };
    let twin = BlockName { engine: EngineHash(1), ..many };
    let names = RunNames::Each(vec![many, many, twin]);
    let given = SnapshotRun { parent: None, hashes: vec![BlockHash(5)], names };
    assert_eq!(index.restore(W0, [given]).stored, 3);
    index.check().unwrap();
    assert_eq!(index.block_counts(W0), [2; Tier::COUNT]);
    assert_eq!(index.clear_worker(W0), 2);
    assert_eq!(index.distinct_blocks(), 0);
}

#[test]
fn a_further_name_of_a_refused_block_is_refused_as_well() {
    let mut index = index(100);
    index.store(W1, None, &hashed([1, 2], 0), Tier::Device);
    // 2 is the second block of a prompt, so it cannot be a first one.
    index.store(W2, None, &hashed([1, 3], 0), Tier::Device);
    let mut lie = run(None, &[2, 5]);
    let further = BlockName { at: 1, engine: EngineHash(99), copies: PLAIN };
    lie.names = lie.names.iter().chain([further]).collect();
    let applied = index.restore(W0, [lie]);
    assert_eq!(applied, AppliedBlocks { malformed: 3, ..AppliedBlocks::default() });
    index.check().unwrap();
}

/// Processor time of this thread in nanoseconds.
fn used_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

/// The time to restore runs of 1,024 blocks, each of which ends a run of the index, with as many
/// further names of the block at `at`.
fn time_of_further_names_ns(at: u32) -> u64 {
    const BLOCKS: u64 = 1024;
    let mut index = index(1 << 20);
    let mut long = run(None, &(1..=BLOCKS).collect::<Vec<_>>());
    index.restore(W1, [long.clone()]);
    for block in 1..BLOCKS {
        index.store(W1, Some(EngineHash(block)), &hashed([BLOCKS + block], 0), Tier::Device);
    }
    let further = |name| BlockName { at, engine: EngineHash(name), copies: PLAIN };
    long.names = long.names.iter().chain((0..BLOCKS).map(|name| further(10_000 + name))).collect();
    let before = used_ns();
    for _ in 0..20 {
        let applied = index.restore(W0, [long.clone()]);
        assert_eq!((applied.stored, applied.malformed), (2 * BLOCKS as usize, 0));
    }
    used_ns() - before
}

#[test]
fn the_time_for_a_further_name_does_not_grow_with_its_place() {
    let (first, last) = (time_of_further_names_ns(0), time_of_further_names_ns(1023));
    // About as long, or longer by the walk to the last block for each name.
    assert!(last <= 4 * first, "{first} and {last} ns");
}
