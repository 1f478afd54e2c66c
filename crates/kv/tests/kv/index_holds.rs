//! Lookups by a prompt's last block alone, while chains are added and removed.

use proptest::prelude::*;
use splitrail_kv::{
    BlockHash, EngineHash, HashSeed, HashedBlock, Index, IndexConfig, Overlaps, Tier, WorkerKey,
};

const W: WorkerKey = WorkerKey { worker: 0, rank: 0 };

fn index() -> Index {
    let (model, seed) = ("m".to_owned(), HashSeed(7));
    Index::new(IndexConfig { model, block_size: 16, seed, max_blocks_per_worker: 8 << 20 })
}

/// A chain's hashes: the first `shared` blocks are common to all chains of the same `family`.
fn chain(family: u64, own: u64, shared: u64, blocks: u64) -> Vec<HashedBlock> {
    let mix = |a: u64, b: u64| (a ^ b.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let spread = |value: u64| value ^ value >> 29 ^ value << 31;
    (0..blocks)
        .map(|at| {
            // A hash stands for all blocks before it, so it depends on where chains differ.
            let own = if at < shared { 0 } else { own * 1_000 + shared + 1 };
            let hash = spread(mix(mix(family + 1, own + 1), at + 1));
            HashedBlock { engine: EngineHash(!hash), hash: BlockHash(hash) }
        })
        .collect()
}

/// Compares with a walk from the first block, for every block.
fn assert_agrees(index: &Index, chain: &[HashedBlock], overlaps: &mut Overlaps) {
    let hashes: Vec<_> = chain.iter().map(|block| block.hash).collect();
    index.find(&hashes, overlaps);
    let held = overlaps.get(W).blocks;
    for (blocks, hash) in (1..).zip(&hashes) {
        assert_eq!(index.holds(W, blocks, *hash), blocks <= held, "{blocks} of {held}");
    }
    assert!(!index.holds(W, 1, hashes[hashes.len() - 1]) || hashes.len() == 1);
    assert!(!index.holds(W, u32::MAX, hashes[0]));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_lookup_by_the_last_block_agrees_with_a_walk(
        enabled_at in 0_usize..40,
        ops in prop::collection::vec(
            (0_u64..3, 0_u64..12, 0_u64..60, 1_u64..400, 0_usize..400, any::<bool>()), 1..60),
    ) {
        let (mut index, mut overlaps) = (index(), Overlaps::new());
        for (at, (family, own, shared, blocks, from, evicts)) in ops.into_iter().enumerate() {
            if at == enabled_at {
                index.enable_holds();
            }
            let chain = chain(family, own, shared, blocks);
            if evicts {
                // Usually from the end, sometimes from the middle.
                let gone: Vec<_> = chain.iter().skip(from).take(150).rev().map(|b| b.engine).collect();
                index.remove(W, &gone, Tier::Device);
            } else {
                index.store(W, None, &chain, Tier::Device);
            }
            if at >= enabled_at {
                assert_agrees(&index, &chain, &mut overlaps);
            }
        }
    }
}

#[test]
fn zero_blocks_are_always_held_and_without_tracing_no_block_is() {
    let mut index = index();
    let chain = chain(0, 0, 0, 5);
    index.store(W, None, &chain, Tier::Device);
    assert!(index.holds(W, 0, BlockHash(0)));
    assert!(!index.holds(W, 5, chain[4].hash));
    index.enable_holds();
    assert!(index.holds(W, 5, chain[4].hash));
    assert!(!index.holds(WorkerKey { worker: 1, rank: 0 }, 5, chain[4].hash));
}

#[test]
fn tracing_takes_few_bytes_per_block_also_after_replacements() {
    const CHAINS: u64 = 100;
    let mut index = index();
    index.enable_holds();
    for own in 0..6 * CHAINS {
        index.store(W, None, &chain(0, own, 8, 200), Tier::Device);
        if let Some(old) = own.checked_sub(CHAINS) {
            let gone: Vec<_> =
                chain(0, old, 8, 200).iter().skip(8).rev().map(|b| b.engine).collect();
            assert_eq!(index.remove(W, &gone, Tier::Device).unknown, 0);
        }
    }
    let blocks = index.block_counts(W)[0];
    assert!(index.bytes() < 60 * blocks, "{} bytes for {blocks} blocks", index.bytes());
    index.check().unwrap();
}
