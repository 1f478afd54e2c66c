//! A reader that is paused for a long time between reading the version and reading the rest.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::event::{EngineHash, Tier};
use crate::hash::HashSeed;
use crate::index::{HashedBlock, Index, IndexConfig, Overlap, WorkerKey};

fn index() -> Index {
    let (model, seed) = ("m".to_owned(), HashSeed(7));
    let max_blocks_per_worker = 1_000_000;
    Index::new(IndexConfig { model, block_size: 1, seed, max_blocks_per_worker })
}

fn worker(worker: u32) -> WorkerKey {
    WorkerKey { worker, rank: 0 }
}

fn store(index: &mut Index, of: u32, hashes: &[u64]) {
    let block = |hash: &u64| HashedBlock { engine: EngineHash(*hash), hash: BlockHash(*hash) };
    let blocks: Vec<_> = hashes.iter().map(block).collect();
    assert_eq!(index.store(worker(of), None, &blocks, Tier::Device).stored, blocks.len());
}

fn chain(number: u64, blocks: u64) -> Vec<u64> {
    (0..blocks).map(|at| (number << 32 | (at + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

fn prompt(hashes: &[u64]) -> Vec<BlockHash> {
    hashes.iter().copied().map(BlockHash).collect()
}

#[test]
fn a_worker_in_a_reused_slot_is_not_taken_for_the_previous_one() {
    let mut index = index();
    let (reader, mut overlaps) = (index.reader(), Overlaps::new());
    store(&mut index, 0, &[1]);
    // These workers stay and are found as before: some in a set, one alone.
    for of in 2..9 {
        store(&mut index, of, if of == 8 { &[1, 2] } else { &[1, 2, 3] });
    }
    for back in [false, true] {
        let before = reader.shared.state.load_full();
        index.clear_worker(worker(0));
        store(&mut index, 1, &[1, 2, 3]);
        if back {
            index.clear_worker(worker(1));
            store(&mut index, 0, &[1]);
        }
        let found = reader.find_in(&before, &prompt(&[1, 2, 3, 4]), &mut overlaps);
        assert!(found.is_ok(), "a worker that repeatedly joins and leaves delays no reader");
        // Worker 0 never had more than one block.
        assert!(overlaps.get(worker(0)).blocks <= 1);
        let told: Vec<_> = overlaps
            .iter()
            .filter(|(key, _)| key.worker > 0)
            .map(|(_, told)| told.blocks)
            .collect();
        assert_eq!(told, [2, 3, 3, 3, 3, 3, 3]);
        index.clear_worker(worker(1));
    }
}

#[test]
fn a_worker_in_a_reused_slot_leaves_no_blocks_of_slower_tiers() {
    let mut index = index();
    let (reader, mut overlaps) = (index.reader(), Overlaps::new());
    store(&mut index, 0, &[1]);
    store(&mut index, 2, &[1]);
    let before = reader.shared.state.load_full();
    index.clear_worker(worker(0));
    let block = HashedBlock { engine: EngineHash(1), hash: BlockHash(1) };
    index.store(worker(1), None, &[block], Tier::Disk);
    assert!(reader.find_in(&before, &prompt(&[1, 2]), &mut overlaps).is_ok());
    assert_eq!(overlaps.with_and_without_last_block(worker(0)), [Overlap::default(); 2]);
}

#[test]
fn a_worker_that_joins_during_a_lookup_is_not_counted() {
    let mut index = index();
    let (reader, mut overlaps) = (index.reader(), Overlaps::new());
    store(&mut index, 0, &[1]);
    let before = reader.shared.state.load_full();
    store(&mut index, 1, &[1, 2]);
    assert!(reader.find_in(&before, &prompt(&[1, 2]), &mut overlaps).is_ok());
    assert_eq!((overlaps.iter().count(), overlaps.len(), overlaps.deepest()), (1, 1, 1));
}

#[test]
fn words_with_a_reused_number_are_not_taken_for_the_previous_ones() {
    words_are_reused(&[0]);
}

#[test]
fn words_with_a_reused_number_are_recognised_after_all_words_were_freed() {
    words_are_reused(&[]);
}

fn words_are_reused(kept: &[usize]) {
    let mut index = index();
    let (reader, mut overlaps, mut expected) = (index.reader(), Overlaps::new(), Overlaps::new());
    let chains: Vec<_> = (0..60).map(|number| chain(number, 3000)).collect();
    for chain in &chains[..30] {
        for of in 0..6 {
            store(&mut index, of, &chain[..chain.len() - of as usize * 100]);
        }
    }
    let before = reader.shared.state.load_full();
    // Words in use move to other words, and their old numbers are then reused.
    for (_, chain) in chains[..30].iter().enumerate().filter(|(at, _)| !kept.contains(at)) {
        let names: Vec<_> = chain.iter().rev().copied().map(EngineHash).collect();
        for of in 0..6 {
            index.remove(worker(of), &names, Tier::Device);
        }
    }
    for (number, chain) in chains.iter().enumerate().skip(30) {
        for of in (0..6).filter(|of| !(*of as usize + number).is_multiple_of(6)) {
            store(&mut index, of, &chain[..chain.len() - (of as usize * 37 + number) % 200]);
        }
    }
    let mut seen = 0;
    for chain in &chains {
        let prompt = prompt(chain);
        index.find(&prompt, &mut expected);
        if reader.find_in(&before, &prompt, &mut overlaps).is_ok() {
            seen += 1;
            for of in (0..6).map(worker) {
                assert_eq!(overlaps.get(of), expected.get(of));
            }
        }
    }
    assert!(seen < chains.len(), "the state is out of date");
}
