//! Sequences of KV events, removals and snapshots, in any order, against the
//! index; the bytes are read as small numbers, each of which chooses something.

use splitrail_kv::invariants::check_overlap;
use splitrail_kv::{
    Applied, BlockHash, EngineHash, HashSeed, Index, IndexConfig, KvEvent, Namespace, Overlaps,
    SnapshotBlock, StoredBlock, Tier, WorkerKey, chain_hashes,
};

const BLOCK_SIZE: u32 = 2;
const LIMIT: usize = 9;
const SEED: HashSeed = HashSeed(7);
const MAX_STEPS: usize = 200;
const TEXTS: [Option<&str>; 4] = [None, Some(""), Some("x"), Some("y")];
const WORKERS: [WorkerKey; 4] = [
    WorkerKey { worker: 0, rank: 0 },
    WorkerKey { worker: 0, rank: 1 },
    WorkerKey { worker: 1, rank: 0 },
    WorkerKey { worker: u32::MAX, rank: u16::MAX },
];

pub(crate) fn check(data: &[u8]) {
    let mut choices = Choices { data, at: 0 };
    let mut index = Index::new(IndexConfig {
        model: "m".to_owned(),
        block_size: BLOCK_SIZE,
        seed: SEED,
        max_blocks_per_worker: LIMIT,
    });
    let mut overlaps = Overlaps::new();
    for _ in 0..MAX_STEPS {
        if choices.is_empty() {
            break;
        }
        step(&mut index, &mut choices);
        assert_eq!(index.check(), Ok(()));
        find(&index, &mut overlaps, choices.tokens(6));
    }
    for worker in WORKERS {
        snapshot_restores(&index, worker);
        index.remove_worker(worker.worker);
        assert_eq!(index.check(), Ok(()));
    }
    assert_eq!((index.workers().count(), index.distinct_blocks()), (0, 0));
}

fn step(index: &mut Index, choices: &mut Choices<'_>) {
    let worker = WORKERS[choices.below(4)];
    match choices.below(12) {
        0..5 => {
            let count = choices.below(5);
            let event = KvEvent::Stored {
                parent: (choices.below(3) > 0).then(|| choices.engine_hash()),
                blocks: (0..count).map(|_| choices.stored_block()).collect(),
                adapter: TEXTS[choices.below(4)].map(str::to_owned),
                salt: TEXTS[choices.below(4)].map(str::to_owned),
                tier: choices.tier(),
            };
            let Applied { stored, replaced, removed, orphaned, unknown, malformed, over_limit } =
                index.apply(worker, &event);
            assert_eq!(stored + orphaned + malformed + over_limit, count, "{event:?}");
            assert!(replaced <= stored && removed + unknown == 0, "{event:?}");
        }
        5..8 => {
            let hashes: Vec<_> = (0..choices.below(6)).map(|_| choices.engine_hash()).collect();
            let count = hashes.len();
            let event = KvEvent::Removed { hashes, tier: choices.tier() };
            let applied = index.apply(worker, &event);
            assert_eq!(applied.removed + applied.unknown, count, "{event:?}");
        }
        8 => {
            index.apply(worker, &KvEvent::Cleared);
            assert_eq!(index.block_counts(worker), [0; Tier::COUNT]);
        }
        9 => {
            index.remove_worker(worker.worker);
            assert!(index.workers().all(|key| key.worker != worker.worker));
        }
        10 => {
            let snapshot = index.snapshot(WORKERS[choices.below(4)]);
            index.restore(worker, snapshot);
        }
        _ => {
            // What another router or a side-car claims, true or not.
            let count = choices.below(5);
            let blocks: Vec<_> = (0..count).map(|_| choices.snapshot_block()).collect();
            let Applied { stored, malformed, over_limit, .. } =
                index.restore(worker, blocks.iter().copied());
            assert_eq!(stored + malformed + over_limit, count, "{blocks:?}");
        }
    }
}

/// Every answer adds up, and comes from workers that hold something.
fn find(index: &Index, overlaps: &mut Overlaps, tokens: Vec<u32>) {
    let mut hashes = Vec::new();
    for salt in TEXTS {
        let namespace = Namespace { salt, model: "m", adapter: None, block_size: BLOCK_SIZE };
        chain_hashes(&namespace, SEED, &tokens, &mut hashes);
        index.find(&hashes, overlaps);
        for (worker, overlap) in overlaps.iter() {
            assert_eq!(check_overlap(&overlap), Ok(()));
            assert!((1..=hashes.len()).contains(&(overlap.blocks as usize)));
            let held = index.block_counts(worker);
            for tier in Tier::ALL {
                assert!(overlap.by_tier[tier as usize] as usize <= held[tier as usize]);
            }
        }
    }
}

/// A worker's snapshot, given to an empty index, makes the same state there.
fn snapshot_restores(index: &Index, worker: WorkerKey) {
    let mut other = Index::new(index.config().clone());
    let snapshot = index.snapshot(worker);
    let applied = other.restore(worker, snapshot.iter().rev().copied());
    assert_eq!(applied, Applied { stored: snapshot.len(), ..Applied::default() });
    assert_eq!(other.check(), Ok(()));
    assert_eq!(other.snapshot(worker), snapshot);
    assert_eq!(other.block_counts(worker), index.block_counts(worker));
}

struct Choices<'a> {
    data: &'a [u8],
    at: usize,
}

impl Choices<'_> {
    fn is_empty(&self) -> bool {
        self.at >= self.data.len()
    }

    /// The next number below `bound`; 0 once the bytes are used up.
    fn below(&mut self, bound: usize) -> usize {
        let byte = self.data.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        usize::from(byte) % bound
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        let bits = self.below(256);
        (0..count).map(|place| (bits >> place & 1) as u32).collect()
    }

    fn tier(&mut self) -> Tier {
        Tier::ALL[self.below(Tier::COUNT)]
    }

    /// One of few, so that names meet again.
    fn engine_hash(&mut self) -> EngineHash {
        EngineHash(self.below(12) as u64)
    }

    fn stored_block(&mut self) -> StoredBlock {
        // Now and then not one block size of tokens.
        let count = if self.below(16) == 0 { self.below(4) } else { BLOCK_SIZE as usize };
        StoredBlock {
            hash: self.engine_hash(),
            tokens: self.tokens(count),
            opaque: self.below(8) == 0,
        }
    }

    fn snapshot_block(&mut self) -> SnapshotBlock {
        const COPIES: [u32; 4] = [0, 1, 2, u32::MAX];
        const POSITIONS: [u32; 4] = [0, 1, 2, u32::MAX];
        SnapshotBlock {
            engine: self.engine_hash(),
            hash: BlockHash(self.below(4) as u64),
            parent: (self.below(2) > 0).then(|| BlockHash(self.below(4) as u64)),
            position: POSITIONS[self.below(4)],
            opaque: self.below(4) == 0,
            copies: Tier::ALL.map(|_| COPIES[self.below(4)]),
        }
    }
}
