//! Sequences of KV events, removals and snapshots, in any order, against the
//! index; the bytes are read as small numbers, each of which chooses something.

use std::collections::{BTreeMap, BTreeSet};

use splitrail_kv::{
    AppliedBlocks, BlockAdapter, BlockHash, BlockName, EngineHash, HashSeed, Index, IndexConfig,
    KvEvent, Namespace, Overlaps, RunNames, SnapshotRun, StoredBlock, Tier, WorkerKey,
    chain_hashes,
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
    let mut state = State::default();
    for _ in 0..MAX_STEPS {
        if choices.is_empty() {
            break;
        }
        step(&mut index, &mut choices, &mut state);
        assert_eq!(index.check(), Ok(()));
        find(&index, &mut overlaps, choices.tokens(6));
    }
    for worker in WORKERS {
        if !state.contradicted {
            snapshot_restores(&index, worker);
        }
        index.remove_worker(worker.worker);
        assert_eq!(index.check(), Ok(()));
    }
    assert_eq!((index.workers().count(), index.distinct_blocks()), (0, 0));
}

#[derive(Default)]
struct State {
    /// Blocks that wait for their parent, by worker.
    waiting: BTreeMap<WorkerKey, usize>,
    /// Whether chained hashes were claimed that cannot all be chained hashes. The
    /// index stays sound then, but need not make sense.
    contradicted: bool,
}

fn step(index: &mut Index, choices: &mut Choices<'_>, state: &mut State) {
    let waiting = &mut state.waiting;
    let worker = WORKERS[choices.below(4)];
    match choices.below(12) {
        0..5 => {
            let count = choices.below(5);
            let event = KvEvent::Stored {
                parent: (choices.below(3) > 0).then(|| choices.engine_hash()),
                blocks: (0..count).map(|_| choices.stored_block()).collect(),
                adapter: TEXTS[choices.below(4)]
                    .map(|name| BlockAdapter { name: name.to_owned(), load: 1 }),
                salt: TEXTS[choices.below(4)].map(str::to_owned),
                tier: choices.tier(),
            };
            let applied = index.apply(worker, &event);
            count_stored(applied, count, waiting.entry(worker).or_default());
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
            waiting.remove(&worker);
            assert_eq!(index.block_counts(worker), [0; Tier::COUNT]);
        }
        9 => {
            index.remove_worker(worker.worker);
            waiting.retain(|key, _| key.worker != worker.worker);
            assert!(index.workers().all(|key| key.worker != worker.worker));
        }
        10 => {
            let snapshot: Vec<_> = index.snapshot(WORKERS[choices.below(4)]).collect();
            let content = content(&snapshot, state.contradicted);
            let applied = index.restore(worker, snapshot);
            let restored: Vec<_> = index.snapshot(worker).collect();
            if !state.contradicted {
                assert_eq!(applied.stored, content.len());
                assert_eq!(self::content(&restored, false), content);
            }
            waiting.remove(&worker);
        }
        _ => {
            // What another router or a shim claims, true or not.
            let count = choices.below(5);
            let honest = choices.below(4) > 0;
            state.contradicted |= !honest;
            let runs: Vec<_> = (0..count).map(|_| choices.snapshot_run(honest)).collect();
            let names: usize = runs.iter().map(|run| run.names.len()).sum();
            let AppliedBlocks { stored, malformed, over_limit, .. } =
                index.restore(worker, runs.iter().cloned());
            assert_eq!(stored + malformed + over_limit, names, "{runs:?}");
            waiting.remove(&worker);
        }
    }
}

/// Every block is counted once, and once more when it is joined or dropped after
/// having waited.
fn count_stored(applied: AppliedBlocks, count: usize, waiting: &mut usize) {
    let AppliedBlocks {
        stored,
        replaced,
        removed,
        aside,
        orphaned,
        unknown,
        malformed,
        over_limit,
    } = applied;
    let counted = stored + aside + orphaned + malformed + over_limit;
    assert!(counted >= count && replaced <= stored && removed + unknown == 0, "{applied:?}");
    assert!(counted - count <= *waiting, "{applied:?} after {waiting} that waited");
    *waiting = *waiting + aside - (counted - count);
    assert!(*waiting <= 4096);
}

/// Every answer adds up, and comes from workers that hold something.
fn find(index: &Index, overlaps: &mut Overlaps, tokens: Vec<u32>) {
    let mut hashes = Vec::new();
    for salt in TEXTS {
        let namespace = Namespace { salt, model: "m", adapter: None, block_size: BLOCK_SIZE };
        chain_hashes(&namespace, SEED, &tokens, &mut hashes);
        index.find(&hashes, overlaps);
        for (worker, overlap) in overlaps.iter() {
            assert_eq!(overlap.by_tier.iter().sum::<u32>(), overlap.blocks);
            assert!((1..=hashes.len()).contains(&(overlap.blocks as usize)));
            let held = index.block_counts(worker);
            for tier in Tier::ALL {
                assert!(overlap.by_tier[tier as usize] as usize <= held[tier as usize]);
            }
        }
    }
}

/// By name: the block before, the block, the copies.
type Content = BTreeMap<EngineHash, (Option<BlockHash>, BlockHash, [u32; Tier::COUNT])>;

/// What a snapshot says, however it is cut into runs.
fn content(runs: &[SnapshotRun], contradicted: bool) -> Content {
    let mut content = Content::new();
    let mut known = BTreeSet::new();
    for run in runs {
        let in_order = run.parent.is_none_or(|parent| known.contains(&parent));
        assert!(in_order || contradicted, "parents come first");
        known.extend(run.hashes.iter().copied());
        for named in run.names.iter() {
            let at = named.at as usize;
            let before = at.checked_sub(1).map_or(run.parent, |before| Some(run.hashes[before]));
            assert_eq!(content.insert(named.engine, (before, run.hashes[at], named.copies)), None);
        }
    }
    content
}

/// A worker's snapshot, given to an empty index, makes the same state there.
fn snapshot_restores(index: &Index, worker: WorkerKey) {
    let mut other = Index::new(index.config().clone());
    let snapshot: Vec<_> = index.snapshot(worker).collect();
    let content = content(&snapshot, false);
    let applied = other.restore(worker, snapshot);
    assert_eq!(applied, AppliedBlocks { stored: content.len(), ..AppliedBlocks::default() });
    assert_eq!(other.check(), Ok(()));
    assert_eq!(self::content(&other.snapshot(worker).collect::<Vec<_>>(), false), content);
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

    /// With chained hashes that could be some, or with just any.
    fn snapshot_run(&mut self, honest: bool) -> SnapshotRun {
        let mut before = self.below(3) as u64;
        let depth = before;
        let parent = (depth > 0).then(|| BlockHash(self.below(2) as u64 + (1 << depth)));
        before = parent.map_or(1, |parent| parent.0);
        let hashes: Vec<_> = (0..self.below(4))
            .map(|_| {
                // A prefix of binary digits behind a one: no two have the same number.
                before =
                    if honest { before * 2 + self.below(2) as u64 } else { self.below(8) as u64 };
                BlockHash(before)
            })
            .collect();
        let mut names: Vec<_> = (0..hashes.len()).map(|at| self.named(at as u32)).collect();
        match self.below(8) {
            0 => names.clear(),
            // Out of order, beyond the run, or a further name of a block.
            1 | 2 => {
                let at = [0, 1, 2, u32::MAX][self.below(4)];
                names.push(self.named(at));
            }
            3 => drop(names.pop()),
            _ => {}
        }
        let names = match self.below(2) {
            0 => RunNames::Each(names),
            _ => RunNames::Plain(names.iter().map(|named| named.engine).collect()),
        };
        SnapshotRun { parent, hashes, names }
    }

    fn named(&mut self, at: u32) -> BlockName {
        const COPIES: [[u32; Tier::COUNT]; 8] = [
            [1, 0, 0, 0],
            [1, 0, 0, 0],
            [2, 0, 0, 0],
            [0, 1, 0, 0],
            [1, 1, 0, 2],
            [0, 0, 0, u32::MAX],
            [u32::MAX; Tier::COUNT],
            [0; Tier::COUNT],
        ];
        BlockName { at, engine: self.engine_hash(), copies: COPIES[self.below(8)] }
    }
}
