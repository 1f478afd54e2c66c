//! Long chains held by many workers, against a naive model: sets that outgrow their forms, runs
//! that are split in their middle, evictions from the end and at random, workers that leave and
//! whose slots are reused.

use std::collections::{BTreeMap, HashMap};

use proptest::collection::vec;
use proptest::prelude::*;
use splitrail_kv::{
    BlockHash, BlockName, EngineHash, HashSeed, HashedBlock, Index, IndexConfig, Overlap, Overlaps,
    Tier, WorkerKey,
};

/// More than one word of bits.
const WORKERS: usize = 80;
const TRUNKS: u64 = 3;
const BRANCHES: u64 = 6;
const TRUNK_BLOCKS: usize = 120;
const BRANCH_BLOCKS: usize = 80;

fn key(worker: usize) -> WorkerKey {
    WorkerKey { worker: worker as u32 / 2, rank: worker as u16 % 2 }
}

/// A prompt: a prefix of a trunk, then a branch of its own.
#[derive(Clone, Copy, Debug)]
struct Prompt {
    trunk: u64,
    cut: usize,
    branch: u64,
    len: usize,
}

impl Prompt {
    /// Chained hashes: each block's hash depends on all blocks before.
    fn hashes(self) -> Vec<u64> {
        let trunk = (0..self.cut.min(self.len)).map(|at| (self.trunk, at));
        let branch = (self.cut.min(self.len)..self.len).map(|at| (100 + self.branch, at));
        let mut before = 0_u64;
        let chained = trunk.chain(branch).map(|(symbol, at)| {
            let mixed = before ^ (symbol << 32 | (at as u64 + 1));
            before = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
            before
        });
        chained.collect()
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// Some consecutive workers store what they lack of a prompt, or all of it again.
    Store {
        worker: usize,
        count: usize,
        prompt: Prompt,
        again: bool,
        tier: Tier,
    },
    /// Some workers lose the last blocks of a prompt.
    Evict {
        worker: usize,
        count: usize,
        prompt: Prompt,
        blocks: usize,
    },
    /// A worker loses blocks at any positions.
    Lose {
        worker: usize,
        picks: Vec<prop::sample::Index>,
    },
    RemoveWorker {
        worker: usize,
    },
    Clear {
        worker: usize,
    },
    /// A worker receives a snapshot of another one.
    Restore {
        from: usize,
        to: usize,
    },
}

fn prompt() -> impl Strategy<Value = Prompt> {
    let cut = prop_oneof![Just(TRUNK_BLOCKS), 1..TRUNK_BLOCKS, Just(17)];
    (0..TRUNKS, cut, 0..BRANCHES, 1..=TRUNK_BLOCKS + BRANCH_BLOCKS).prop_map(
        |(trunk, cut, branch, len)| Prompt {
            trunk,
            cut,
            branch,
            len: len.min(cut + BRANCH_BLOCKS),
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let worker = || 0..WORKERS;
    let count = || prop_oneof![3 => Just(1_usize), 2 => 2..8_usize, 1 => 60..=WORKERS];
    let tier = prop_oneof![6 => Just(Tier::Device), 1 => Just(Tier::Host), 1 => Just(Tier::Disk)];
    let store = (worker(), count(), prompt(), prop::bool::weighted(0.2), tier);
    let evict = (worker(), count(), prompt(), 1..60_usize);
    let lose = (worker(), vec(any::<prop::sample::Index>(), 1..12));
    prop_oneof![
        9 => store.prop_map(|(worker, count, prompt, again, tier)| {
            Op::Store { worker, count, prompt, again, tier }
        }),
        4 => evict.prop_map(|(worker, count, prompt, blocks)| {
            Op::Evict { worker, count, prompt, blocks }
        }),
        3 => lose.prop_map(|(worker, picks)| Op::Lose { worker, picks }),
        1 => worker().prop_map(|worker| Op::RemoveWorker { worker }),
        1 => worker().prop_map(|worker| Op::Clear { worker }),
        1 => (worker(), worker()).prop_map(|(from, to)| Op::Restore { from, to }),
    ]
}

type Copies = [u32; Tier::COUNT];

/// For each worker, the copies of its blocks; every block has a copy.
struct Model(Vec<HashMap<u64, Copies>>);

impl Model {
    fn overlap(&self, worker: usize, prompt: &[u64]) -> Overlap {
        let mut overlap = Overlap::default();
        for hash in prompt {
            let Some(copies) = self.0[worker].get(hash) else { break };
            overlap.blocks += 1;
            overlap.by_tier[copies.iter().position(|copies| *copies > 0).unwrap()] += 1;
        }
        overlap
    }

    /// Removes one copy, from the fastest tier that has one.
    fn remove(&mut self, worker: usize, hash: u64) -> Tier {
        let copies = self.0[worker].get_mut(&hash).unwrap();
        let tier = copies.iter().position(|copies| *copies > 0).unwrap();
        copies[tier] -= 1;
        if *copies == [0; Tier::COUNT] {
            self.0[worker].remove(&hash);
        }
        Tier::ALL[tier]
    }
}

struct Pair {
    index: Index,
    model: Model,
    overlaps: Overlaps,
}

/// Engines choose their own names for blocks; here each worker in a different way.
fn name(worker: usize, hash: u64) -> EngineHash {
    EngineHash(hash ^ (worker as u64) << 3)
}

impl Pair {
    fn new() -> Self {
        let (model, seed) = ("m".to_owned(), HashSeed(7));
        let max_blocks_per_worker = 1_000_000;
        let config = IndexConfig { model, block_size: 1, seed, max_blocks_per_worker };
        let model = Model(vec![HashMap::new(); WORKERS]);
        Self { index: Index::new(config), model, overlaps: Overlaps::new() }
    }

    fn store(&mut self, worker: usize, hashes: &[u64], again: bool, tier: Tier) {
        let held = self.model.overlap(worker, hashes).blocks as usize;
        let from = if again { 0 } else { held };
        let block =
            |hash: &u64| HashedBlock { engine: name(worker, *hash), hash: BlockHash(*hash) };
        let blocks: Vec<_> = hashes[from..].iter().map(block).collect();
        let parent = from.checked_sub(1).map(|before| name(worker, hashes[before]));
        let applied = self.index.store(key(worker), parent, &blocks, tier);
        assert_eq!((applied.stored, applied.replaced), (blocks.len(), 0));
        for hash in &hashes[from..] {
            self.model.0[worker].entry(*hash).or_default()[tier as usize] += 1;
        }
    }

    /// Removes copies in the given order, with a new event for each change of tier.
    fn remove(&mut self, worker: usize, hashes: &[u64]) {
        let mut by_tier: Vec<(Tier, Vec<EngineHash>)> = Vec::new();
        for hash in hashes {
            let tier = self.model.remove(worker, *hash);
            match by_tier.last_mut() {
                Some((last, names)) if *last == tier => names.push(name(worker, *hash)),
                _ => by_tier.push((tier, vec![name(worker, *hash)])),
            }
        }
        for (tier, names) in by_tier {
            let applied = self.index.remove(key(worker), &names, tier);
            assert_eq!((applied.removed, applied.unknown), (names.len(), 0));
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Store { worker, count, prompt, again, tier } => {
                let hashes = prompt.hashes();
                for worker in (worker..worker + count).map(|worker| worker % WORKERS) {
                    self.store(worker, &hashes, again, tier);
                }
            }
            Op::Evict { worker, count, prompt, blocks } => {
                let hashes = prompt.hashes();
                for worker in (worker..worker + count).map(|worker| worker % WORKERS) {
                    let held = self.model.overlap(worker, &hashes).blocks as usize;
                    let gone = hashes[held.saturating_sub(blocks)..held].iter().rev();
                    self.remove(worker, &gone.copied().collect::<Vec<_>>());
                }
            }
            Op::Lose { worker, ref picks } => {
                let mut held: Vec<u64> = self.model.0[worker].keys().copied().collect();
                held.sort_unstable();
                let picked: BTreeMap<usize, u64> = picks
                    .iter()
                    .filter(|_| !held.is_empty())
                    .map(|pick| (pick.index(held.len()), *pick.get(&held)))
                    .collect();
                self.remove(worker, &picked.into_values().collect::<Vec<_>>());
            }
            Op::RemoveWorker { worker } => {
                let ranks = [worker & !1, worker | 1];
                let held: usize = ranks.iter().map(|rank| self.model.0[*rank].len()).sum();
                assert_eq!(self.index.remove_worker(key(worker).worker), held);
                ranks.iter().for_each(|rank| self.model.0[*rank].clear());
            }
            Op::Clear { worker } => {
                assert_eq!(self.index.clear_worker(key(worker)), self.model.0[worker].len());
                self.model.0[worker].clear();
            }
            Op::Restore { from, to } if from != to => {
                let mut runs: Vec<_> = self.index.snapshot(key(from)).collect();
                let other = |engine: EngineHash| EngineHash(engine.0 ^ ((from ^ to) as u64) << 3);
                for run in &mut runs {
                    let names = run.names.iter();
                    run.names = names
                        .map(|named| BlockName { engine: other(named.engine), ..named })
                        .collect();
                }
                let applied = self.index.restore(key(to), runs);
                assert_eq!(applied.stored, self.model.0[from].len());
                self.model.0[to] = self.model.0[from].clone();
            }
            Op::Restore { .. } => {}
        }
    }

    fn compare(&mut self, hashes: &[u64]) {
        let prompt: Vec<_> = hashes.iter().copied().map(BlockHash).collect();
        self.index.find(&prompt, &mut self.overlaps);
        let mut found = 0;
        for worker in 0..WORKERS {
            let overlap = self.overlaps.get(key(worker));
            assert_eq!(overlap, self.model.overlap(worker, hashes), "worker {worker}");
            assert_eq!(overlap.by_tier.iter().sum::<u32>(), overlap.blocks);
            found += usize::from(overlap.blocks > 0);
        }
        // The iterator reports the same overlaps, each worker once.
        let all: BTreeMap<_, _> = self.overlaps.iter().collect();
        assert_eq!((all.len(), self.overlaps.len()), (found, found));
        assert_eq!(self.overlaps.iter().count(), found);
        assert!(all.iter().all(|(key, overlap)| self.overlaps.get(*key) == *overlap));
        let deepest = all.values().map(|overlap| overlap.blocks).max().unwrap_or(0);
        assert_eq!(self.overlaps.deepest(), deepest);
        assert_eq!(self.overlaps.is_empty(), found == 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn long_chains_of_many_workers_agree_with_the_model(
        ops in vec((op(), vec(prompt(), 2)), 1..40),
    ) {
        let mut pair = Pair::new();
        let mut asked = Vec::new();
        for (at, (op, prompts)) in ops.iter().enumerate() {
            pair.apply(op);
            if let Op::Store { prompt, .. } | Op::Evict { prompt, .. } = op {
                asked.push(*prompt);
                pair.compare(&prompt.hashes());
            }
            prompts.iter().for_each(|prompt| pair.compare(&prompt.hashes()));
            if at % 8 == 7 {
                prop_assert_eq!(pair.index.check(), Ok(()));
            }
        }
        asked.iter().for_each(|prompt| pair.compare(&prompt.hashes()));
        prop_assert_eq!(pair.index.check(), Ok(()));
        for worker in 0..WORKERS {
            pair.index.clear_worker(key(worker));
        }
        prop_assert_eq!(pair.index.distinct_blocks(), 0);
        prop_assert_eq!(pair.index.check(), Ok(()));
    }
}

/// Prompts of one chain each, without common blocks.
fn far_apart(prompts: u64, blocks: usize) -> Vec<Vec<u64>> {
    let chain = |trunk| Prompt { trunk, cut: blocks, branch: 0, len: blocks }.hashes();
    (0..prompts).map(|trunk| chain(trunk + 1000)).collect()
}

#[test]
fn memory_is_freed_after_most_blocks_were_evicted() {
    let mut pair = Pair::new();
    let chains = far_apart(100, 1500);
    for chain in &chains {
        pair.store(0, chain, false, Tier::Device);
    }
    for (worker, chain) in chains.iter().enumerate().take(8).skip(1) {
        pair.store(worker, chain, false, Tier::Device);
    }
    let full = pair.index.bytes();
    for chain in &chains[8..] {
        let evicted: Vec<_> = chain.iter().rev().copied().collect();
        pair.remove(0, &evicted);
    }
    assert_eq!(pair.index.check(), Ok(()));
    assert!(pair.index.bytes() * 2 < full, "{} of {full} bytes", pair.index.bytes());
    chains.iter().for_each(|chain| pair.compare(chain));
}

#[test]
fn memory_is_freed_after_most_workers_were_removed() {
    let mut pair = Pair::new();
    let chains = far_apart(WORKERS as u64, 1500);
    for (worker, chain) in chains.iter().enumerate() {
        pair.store(worker, chain, false, Tier::Device);
        pair.store(worker, &chains[0], false, Tier::Device);
    }
    let full = pair.index.bytes();
    for worker in 8..WORKERS {
        pair.index.clear_worker(key(worker));
        pair.model.0[worker].clear();
    }
    assert_eq!(pair.index.check(), Ok(()));
    assert!(pair.index.bytes() * 4 < full, "{} of {full} bytes", pair.index.bytes());
    chains.iter().for_each(|chain| pair.compare(chain));
}

#[test]
fn churn_does_not_let_memory_grow() {
    let mut pair = Pair::new();
    let chains = far_apart(400, 300);
    let mut settled = 0;
    for (at, chain) in chains.iter().enumerate() {
        pair.store(at % 4, chain, false, Tier::Device);
        if let Some(old) = at.checked_sub(100) {
            // From the end, or at random positions (sorted by hash).
            let mut evicted: Vec<_> = chains[old].iter().rev().copied().collect();
            if at % 2 == 0 {
                evicted.sort_unstable();
            }
            pair.remove(old % 4, &evicted);
        }
        if at == 200 {
            settled = pair.index.bytes();
        }
    }
    assert_eq!(pair.index.check(), Ok(()));
    let grown = pair.index.bytes();
    assert!(grown <= settled + settled / 10, "{settled} bytes became {grown}");
    chains.iter().for_each(|chain| pair.compare(chain));
}

#[test]
fn a_chain_longer_than_any_run_is_found_in_full() {
    let mut pair = Pair::new();
    let chain = far_apart(1, 36_000).remove(0);
    // Events of a few blocks each, as in a long generation, and one large event.
    let ends = (0..17_000).step_by(500).chain([17_007, 17_014, chain.len()]);
    for end in ends {
        pair.store(0, &chain[..end], false, Tier::Device);
    }
    pair.store(1, &chain, false, Tier::Device);
    pair.store(2, &chain[..30_000], false, Tier::Device);
    pair.compare(&chain);
    assert_eq!(pair.index.check(), Ok(()));
    pair.remove(1, &chain[20_000..].iter().rev().copied().collect::<Vec<_>>());
    pair.remove(2, &[chain[10_000]]);
    pair.compare(&chain);
    pair.remove(0, &chain.iter().rev().copied().collect::<Vec<_>>());
    pair.compare(&chain);
    assert_eq!(pair.index.check(), Ok(()));
}
