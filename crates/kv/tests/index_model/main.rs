//! The index against a naive model that keeps whole prefixes instead of hashes and finds overlaps
//! by comparing everything.
#![allow(clippy::unwrap_used)]

mod followed;
mod model;
mod ops;

use proptest::collection::vec;
use proptest::prelude::*;
use splitrail_kv::{
    EngineHash, HashSeed, Index, IndexConfig, KvEvent, Namespace, Overlaps, chain_hashes,
};

use crate::model::{Model, SPACES, WORKERS};
use crate::ops::{Op, event, op};

const BLOCK_SIZE: usize = 2;
const LIMIT: usize = 14;
const SEED: HashSeed = HashSeed(7);

fn step(index: &mut Index, model: &mut Model, op: &Op) -> Result<(), TestCaseError> {
    if let Some((worker, event, space)) = event(model, op) {
        let applied = index.apply(worker, &event);
        prop_assert_eq!(applied, model.apply(worker, &event, space), "{:?}", event);
    }
    match *op {
        Op::RemoveWorker { worker } => {
            index.remove_worker(worker);
            model.remove_worker(worker);
        }
        Op::Restore { from, to } => {
            let (from, to) = (WORKERS[from], WORKERS[to]);
            let snapshot: Vec<_> = index.snapshot(from).collect();
            let names: usize = snapshot.iter().map(|run| run.names.len()).sum();
            prop_assert_eq!(index.restore(to, snapshot).stored, names);
            let held = model.0.get(&from).cloned();
            model.forget(to);
            model.0.extend(held.map(|held| (to, held)));
        }
        _ => {}
    }
    Ok(())
}

fn compare(index: &Index, model: &Model, overlaps: &mut Overlaps) -> Result<(), TestCaseError> {
    index.check().map_err(|violation| TestCaseError::fail(violation.to_string()))?;
    prop_assert!(index.workers().eq(model.0.keys().copied()));
    for worker in WORKERS {
        prop_assert_eq!(index.block_counts(worker), model.block_counts(worker));
    }
    let mut hashes = Vec::new();
    for (held_space, prompt) in model.prompts() {
        for space in [held_space, SPACES[0]] {
            let (salt, adapter) = space;
            let namespace = Namespace { salt, model: "m", adapter, block_size: BLOCK_SIZE as u32 };
            chain_hashes(&namespace, SEED, &prompt.concat(), &mut hashes);
            index.find(&hashes, overlaps);
            for worker in WORKERS {
                let overlap = overlaps.get(worker);
                prop_assert_eq!(overlap.by_tier.iter().sum::<u32>(), overlap.blocks);
                prop_assert_eq!(overlap, model.overlap(worker, space, &prompt));
                // The lookup by a prompt's last block alone agrees.
                for blocks in [overlap.blocks, overlap.blocks + 1, hashes.len() as u32] {
                    if let Some(hash) = hashes.get((blocks as usize).wrapping_sub(1)) {
                        let holds = blocks <= overlap.blocks;
                        prop_assert_eq!(index.holds(worker, blocks, *hash), holds);
                        prop_assert!(!index.holds(worker, blocks + 1, *hash));
                    }
                }
            }
            prop_assert!(overlaps.iter().all(|(_, overlap)| overlap.blocks > 0));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 160, ..ProptestConfig::default() })]

    #[test]
    fn the_index_agrees_with_the_model_after_every_operation(ops in vec(op(), 1..90)) {
        let mut index = Index::new(IndexConfig {
            model: "m".to_owned(),
            block_size: BLOCK_SIZE as u32,
            seed: SEED,
            max_blocks_per_worker: LIMIT,
        });
        let mut model = Model::default();
        let mut overlaps = Overlaps::new();
        index.enable_holds();
        for op in &ops {
            step(&mut index, &mut model, op)?;
            compare(&index, &model, &mut overlaps)?;
        }
        // After every copy has been removed, nothing is left.
        for (worker, held) in &model.0 {
            for (hash, (_, tiers)) in held {
                for (&tier, &copies) in tiers {
                    let hashes = vec![EngineHash(*hash); copies as usize];
                    let removed = KvEvent::Removed { hashes, tier };
                    prop_assert_eq!(index.apply(*worker, &removed).removed, copies as usize);
                }
            }
        }
        prop_assert_eq!((index.workers().count(), index.distinct_blocks()), (0, 0));
        prop_assert!(index.check().is_ok());
    }
}
