//! A snapshot that arrives in parts, while other workers' events continue.

use proptest::prelude::*;
use splitrail_kv::{
    AppliedBlocks, BlockHash, EngineHash, HashSeed, HashedBlock, Index, IndexConfig, RunNames,
    SnapshotRun, Tier, WorkerKey,
};

const GIVER: WorkerKey = WorkerKey { worker: 0, rank: 0 };
const TAKER: WorkerKey = WorkerKey { worker: 1, rank: 0 };
const OTHER: WorkerKey = WorkerKey { worker: 2, rank: 0 };

fn index(max_blocks_per_worker: usize) -> Index {
    let (model, seed) = ("m".to_owned(), HashSeed(7));
    Index::new(IndexConfig { model, block_size: 1, seed, max_blocks_per_worker })
}

/// The chain of a prompt of small numbers: equal prefixes have equal hashes.
fn chain(prompt: &[u8]) -> Vec<HashedBlock> {
    let mut hash = 1u64;
    let next = |token: &u8| {
        hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u64::from(*token) + 1);
        HashedBlock { engine: EngineHash(hash), hash: BlockHash(hash) }
    };
    prompt.iter().map(next).collect()
}

#[derive(Clone, Debug)]
enum Step {
    Store(Vec<u8>),
    Remove(Vec<u8>, usize),
}

fn prompt() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(0..3u8, 1..12)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        prompt().prop_map(Step::Store),
        (prompt(), 0..12usize).prop_map(|(prompt, at)| Step::Remove(prompt, at)),
    ]
}

fn apply(index: &mut Index, worker: WorkerKey, step: &Step) -> AppliedBlocks {
    match step {
        Step::Store(prompt) => index.store(worker, None, &chain(prompt), Tier::Device),
        Step::Remove(prompt, at) => {
            let name = chain(prompt)[*at % prompt.len()].engine;
            index.remove(worker, &[name], Tier::Device)
        }
    }
}

proptest! {
    #[test]
    fn events_of_other_workers_between_the_parts_of_a_restore_are_applied_correctly(
        given in proptest::collection::vec(step(), 0..20),
        before in proptest::collection::vec(step(), 0..10),
        between in proptest::collection::vec(step(), 0..20),
        cut_off in any::<bool>(),
        expected in prop_oneof![Just(0), 0..200usize, Just(usize::MAX)],
    ) {
        let mut source = index(1000);
        given.iter().for_each(|step| _ = apply(&mut source, GIVER, step));
        let mut runs: Vec<SnapshotRun> = source.snapshot(GIVER).collect();
        if cut_off {
            runs.truncate(runs.len() / 2);
        }

        let (mut mixed, mut alone) = (index(1000), index(1000));
        for step in &before {
            apply(&mut mixed, OTHER, step);
            apply(&mut alone, OTHER, step);
        }
        let (mut restore, _) = mixed.begin_restore(TAKER, expected);
        let mut others = between.iter();
        for run in &runs {
            prop_assert_eq!(mixed.restore_run(&mut restore, run).malformed, 0);
            others.by_ref().take(2).for_each(|step| _ = apply(&mut mixed, OTHER, step));
        }
        others.for_each(|step| _ = apply(&mut mixed, OTHER, step));
        mixed.end_restore(restore);
        mixed.check().unwrap();

        between.iter().for_each(|step| _ = apply(&mut alone, OTHER, step));
        prop_assert_eq!(mixed.block_counts(OTHER), alone.block_counts(OTHER));
        let held: usize = runs.iter().map(|run| run.names.len()).sum();
        prop_assert_eq!(mixed.held(TAKER.worker), held);
        let names = |index: &Index, worker| {
            let mut names = Vec::new();
            for run in index.snapshot(worker) {
                names.extend(run.names.iter().map(|named| (named.engine, named.copies)));
            }
            names.sort();
            names
        };
        if !cut_off {
            prop_assert_eq!(names(&mixed, TAKER), names(&source, GIVER));
        }
        prop_assert_eq!(names(&mixed, OTHER), names(&alone, OTHER));
        mixed.clear_worker(TAKER);
        mixed.clear_worker(OTHER);
        prop_assert_eq!(mixed.distinct_blocks(), 0);
    }
}

#[test]
fn a_name_that_is_restored_twice_stands_for_its_last_block() {
    let run = |parent: Option<u64>, hashes: &[u64], names: &[u64]| SnapshotRun {
        parent: parent.map(BlockHash),
        hashes: hashes.iter().copied().map(BlockHash).collect(),
        names: RunNames::Plain(names.iter().copied().map(EngineHash).collect()),
    };
    // Within one row of names that are entered together, and from another run.
    let runs = [
        run(None, &[1, 2, 3, 4], &[11, 12, 12, 14]),
        run(None, &[5, 6], &[11, 16]),
        run(Some(4), &[7], &[17]),
    ];
    for expected in [0, 7] {
        let mut index = index(100);
        let (mut restore, _) = index.begin_restore(TAKER, expected);
        let applied = runs.iter().fold(AppliedBlocks::default(), |mut applied, run| {
            applied += index.restore_run(&mut restore, run);
            applied
        });
        index.end_restore(restore);
        index.check().unwrap();
        assert_eq!((applied.stored, applied.replaced, applied.malformed), (7, 2, 0));
        let mut named: Vec<(u64, u64)> = Vec::new();
        for run in index.snapshot(TAKER) {
            let names = run.names.iter();
            named.extend(names.map(|name| (name.engine.0, run.hashes[name.at as usize].0)));
        }
        named.sort_unstable();
        assert_eq!(named, [(11, 5), (12, 3), (14, 4), (16, 6), (17, 7)]);
    }
}

#[test]
fn memory_for_expected_names_that_do_not_arrive_is_freed() {
    let bytes = |expected| {
        let mut index = index(1 << 20);
        let (mut restore, _) = index.begin_restore(TAKER, expected);
        let (hashes, names) = (1..200).map(|at| (BlockHash(at), EngineHash(at))).unzip();
        let run = SnapshotRun { parent: None, hashes, names: RunNames::Plain(names) };
        assert_eq!(index.restore_run(&mut restore, &run).stored, 199);
        let during = index.bytes();
        index.end_restore(restore);
        index.check().unwrap();
        (during, index.bytes())
    };
    let (told, lied) = (bytes(199), bytes(usize::MAX));
    assert!(lied.0 > told.0 + (1 << 20), "{told:?} {lied:?}");
    assert!(lied.1 < told.1 + (1 << 12), "{told:?} {lied:?}");
}

#[test]
fn a_worker_cannot_fill_memory_with_blocks_that_it_does_not_hold() {
    let mut index = index(64);
    let (mut restore, _) = index.begin_restore(TAKER, usize::MAX);
    for prompt in 0..200u64 {
        let first = prompt * 100 + 1;
        let hashes = (first..first + 10).map(BlockHash).collect();
        let run = SnapshotRun { parent: None, hashes, names: RunNames::Plain(Vec::new()) };
        index.restore_run(&mut restore, &run);
    }
    assert!(index.distinct_blocks() <= 64 + 10, "{}", index.distinct_blocks());
    index.end_restore(restore);
    index.check().unwrap();
    assert_eq!(index.distinct_blocks(), 0);
}
