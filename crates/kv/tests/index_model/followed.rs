//! A follower of the changes, and a receiver of a snapshot, have the same state as the index.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use splitrail_kv::{
    BlockHash, Change, EngineHash, Index, IndexConfig, KvEvent, SnapshotRun, Tier, WorkerKey,
};

use crate::model::{Model, WORKERS};
use crate::ops::{Op, event, op};
use crate::{BLOCK_SIZE, LIMIT, SEED};

type Content = BTreeMap<EngineHash, (Option<BlockHash>, BlockHash, [u32; Tier::COUNT])>;

/// The content of a snapshot by name, independent of how it is cut into runs.
fn content(runs: impl IntoIterator<Item = SnapshotRun>) -> Content {
    let mut content = Content::new();
    for run in runs {
        for named in run.names.iter() {
            let at = named.at as usize;
            let before = at.checked_sub(1).map_or(run.parent, |before| Some(run.hashes[before]));
            let said = (before, run.hashes[at], named.copies);
            assert!(content.insert(named.engine, said).is_none(), "a name stands for one block");
        }
    }
    content
}

fn new_index() -> Index {
    Index::new(IndexConfig {
        model: "m".to_owned(),
        block_size: BLOCK_SIZE as u32,
        seed: SEED,
        max_blocks_per_worker: LIMIT,
    })
}

/// Applies an event, and applies its changes to another index.
fn apply(index: &mut Index, follower: &mut Index, worker: WorkerKey, event: &KvEvent) {
    let (mut stored, mut removed) = (0, 0);
    let applied = index.apply_observed(worker, event, &mut |change| match change {
        Change::Stored { parent, blocks, tier } => {
            stored += blocks.len();
            let applied = follower.store(worker, parent, blocks, tier);
            assert_eq!(applied.stored, blocks.len(), "{event:?}");
        }
        Change::Removed { names, tier } => {
            removed += names.len();
            assert_eq!(follower.remove(worker, names, tier).unknown, 0, "{event:?}");
        }
        Change::Cleared => assert!(follower.clear_worker(worker) > 0),
    });
    assert_eq!(applied.stored, stored, "{event:?}");
    if !matches!(event, KvEvent::Cleared) {
        assert!(removed <= applied.removed + stored, "{event:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn changes_and_copies_lead_to_the_same_state(ops in vec(op(), 1..90)) {
        let (mut index, mut follower) = (new_index(), new_index());
        let mut model = Model::default();
        for op in &ops {
            if let Some((worker, event, space)) = event(&model, op) {
                model.apply(worker, &event, space);
                apply(&mut index, &mut follower, worker, &event);
            }
            if let Op::RemoveWorker { worker } = op {
                index.remove_worker(*worker);
                follower.remove_worker(*worker);
                model.remove_worker(*worker);
            }
            prop_assert!(follower.check().is_ok());
            for worker in WORKERS {
                let held = content(index.snapshot(worker));
                prop_assert_eq!(&content(follower.snapshot(worker)), &held);
                let mut restored = new_index();
                let names: usize = index.snapshot(worker).map(|run| run.names.len()).sum();
                prop_assert_eq!(restored.restore(worker, index.snapshot(worker)).stored, names);
                prop_assert_eq!(&content(restored.snapshot(worker)), &held);
            }
        }
    }
}
