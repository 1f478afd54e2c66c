//! Runs one writer and one reader in every order that the memory model allows, with one or two
//! thread switches in the middle of an operation (more take hours):
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p splitrail-kv --release --lib model_check`
#![allow(clippy::unwrap_used)]

use std::ops::RangeInclusive;

use super::{HashedBlock, Index, IndexConfig, Overlaps, WorkerKey};
use crate::event::{EngineHash, Tier};
use crate::hash::{BlockHash, HashSeed};

fn key(worker: u32) -> WorkerKey {
    WorkerKey { worker, rank: 0 }
}

/// Blocks whose name equals their hash.
fn store(index: &mut Index, worker: u32, parent: Option<u64>, hashes: &[u64], tier: Tier) {
    let block = |hash: &u64| HashedBlock { engine: EngineHash(*hash), hash: BlockHash(*hash) };
    let blocks: Vec<_> = hashes.iter().map(block).collect();
    let applied = index.store(key(worker), parent.map(EngineHash), &blocks, tier);
    assert_eq!(applied.stored, blocks.len());
}

fn remove(index: &mut Index, worker: u32, hashes: &[u64], tier: Tier) {
    let names: Vec<_> = hashes.iter().copied().map(EngineHash).collect();
    assert_eq!(index.remove(key(worker), &names, tier).removed, names.len());
}

/// While the writer changes an index, a reader finds a prompt once: each of these workers must have
/// an overlap within its range.
fn check(
    preemptions: usize,
    prepare: fn(&mut Index),
    write: fn(&mut Index),
    prompt: &'static [u64],
    expected: &'static [(u32, RangeInclusive<u32>)],
) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(move || {
        let (model, max_blocks_per_worker) = ("m".to_owned(), 100);
        let config = IndexConfig { model, block_size: 1, seed: HashSeed(7), max_blocks_per_worker };
        let mut index = Index::new(config);
        prepare(&mut index);
        let reader = index.reader();
        let reading = loom::thread::spawn(move || {
            let prompt: Vec<_> = prompt.iter().copied().map(BlockHash).collect();
            let mut overlaps = Overlaps::new();
            reader.find(&prompt, &mut overlaps);
            for (worker, range) in expected {
                let found = overlaps.get(key(*worker));
                assert!(range.contains(&found.blocks), "{worker}: {found:?}");
                assert_eq!(found.by_tier.iter().sum::<u32>(), found.blocks);
            }
        });
        write(&mut index);
        reading.join().unwrap();
    });
}

#[test]
fn a_partial_holder_becomes_a_full_one_and_back() {
    let prepare = |index: &mut Index| {
        store(index, 0, None, &[1, 2, 3], Tier::Device);
        store(index, 1, None, &[1, 2], Tier::Device);
    };
    let write = |index: &mut Index| {
        store(index, 1, Some(2), &[3], Tier::Device);
        remove(index, 1, &[3], Tier::Device);
    };
    check(2, prepare, write, &[1, 2, 3], &[(0, 3..=3), (1, 2..=3)]);
}

#[test]
fn a_run_that_moves_to_other_words_is_read_correctly() {
    let prepare = |index: &mut Index| store(index, 0, None, &[1, 2], Tier::Device);
    let write = |index: &mut Index| {
        store(index, 0, Some(2), &[3], Tier::Device);
        // The previous words now belong to another run.
        store(index, 1, None, &[8, 9], Tier::Device);
    };
    check(2, prepare, write, &[1, 2, 3], &[(0, 2..=3), (1, 0..=0)]);
    check(2, prepare, write, &[1, 2, 4], &[(0, 2..=2), (1, 0..=0)]);
}

#[test]
fn a_run_is_split_before_a_branch() {
    let prepare = |index: &mut Index| {
        store(index, 0, None, &[1, 2, 3], Tier::Device);
        store(index, 1, None, &[1, 2], Tier::Device);
    };
    let write = |index: &mut Index| store(index, 2, None, &[1, 9], Tier::Device);
    check(1, prepare, write, &[1, 2, 3], &[(0, 3..=3), (1, 2..=2), (2, 0..=1)]);
}

#[test]
fn a_run_that_is_shortened_and_extended_differently_is_read_correctly() {
    let prepare = |index: &mut Index| store(index, 0, None, &[1, 2, 3], Tier::Device);
    let write = |index: &mut Index| {
        remove(index, 0, &[3, 2], Tier::Device);
        store(index, 0, Some(1), &[9], Tier::Device);
    };
    check(1, prepare, write, &[1, 2, 3], &[(0, 1..=3)]);
    check(1, prepare, write, &[1, 9], &[(0, 1..=2)]);
}

#[test]
fn a_run_that_is_freed_and_reused_is_read_correctly() {
    let prepare = |index: &mut Index| {
        store(index, 0, None, &[1], Tier::Device);
        store(index, 1, None, &[5], Tier::Device);
    };
    let write = |index: &mut Index| {
        remove(index, 1, &[5], Tier::Device);
        store(index, 0, None, &[7, 8], Tier::Device);
    };
    check(1, prepare, write, &[5], &[(0, 0..=0), (1, 0..=1)]);
    check(1, prepare, write, &[7, 8], &[(0, 0..=2), (1, 0..=0)]);
}

#[test]
fn a_set_that_shrinks_and_frees_its_words_is_read_correctly() {
    let prepare = |index: &mut Index| {
        (0..5).for_each(|worker| store(index, worker, None, &[1], Tier::Device));
        remove(index, 0, &[1], Tier::Device);
        remove(index, 1, &[1], Tier::Device);
        store(index, 0, None, &[6], Tier::Device);
    };
    let write = |index: &mut Index| {
        remove(index, 2, &[1], Tier::Device);
        // Read as a word of a set, this value would contain every slot.
        store(index, 5, None, &[u64::MAX], Tier::Device);
    };
    let expected = &[(0, 0..=0), (1, 0..=0), (2, 0..=1), (3, 1..=1), (4, 1..=1), (5, 0..=0)];
    check(2, prepare, write, &[1], expected);
}

#[test]
fn a_list_of_partial_holders_moves() {
    let prepare = |index: &mut Index| {
        store(index, 0, None, &[1, 2, 3], Tier::Device);
        store(index, 1, None, &[1], Tier::Device);
        store(index, 2, None, &[1, 2], Tier::Device);
    };
    let write = |index: &mut Index| {
        store(index, 3, None, &[1], Tier::Device);
        remove(index, 1, &[1], Tier::Device);
    };
    check(2, prepare, write, &[1, 2, 3], &[(0, 3..=3), (1, 0..=1), (2, 2..=2), (3, 0..=1)]);
}

#[test]
fn blocks_change_their_tier() {
    let prepare = |index: &mut Index| {
        store(index, 0, None, &[1, 2], Tier::Host);
    };
    let write = |index: &mut Index| {
        store(index, 0, None, &[1], Tier::Device);
        remove(index, 0, &[1], Tier::Host);
    };
    check(2, prepare, write, &[1, 2], &[(0, 2..=2)]);
}

#[test]
fn a_slot_gets_another_worker() {
    let prepare = |index: &mut Index| store(index, 0, None, &[1], Tier::Device);
    let write = |index: &mut Index| {
        index.clear_worker(key(0));
        store(index, 1, None, &[1, 2], Tier::Device);
    };
    check(1, prepare, write, &[1, 2], &[(0, 0..=1), (1, 0..=2)]);
}
