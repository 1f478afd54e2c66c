//! Readers in parallel with a writer: every result must be explained by what each worker held at
//! some time during the call, and whatever was held all the time must be found.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use splitrail_kv::{
    BlockHash, BlockName, EngineHash, HashSeed, HashedBlock, Index, IndexConfig, IndexReader,
    Overlaps, Tier, WorkerKey,
};

/// Pseudo-random numbers that are the same in every run.
struct PseudoRandom(u64);

impl PseudoRandom {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        ((self.0 >> 33) as usize) % bound
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// The settings of a run of the writer.
#[derive(Clone, Copy)]
struct Shape {
    workers: usize,
    trunks: usize,
    trunk_blocks: usize,
    branches: usize,
    branch_blocks: usize,
    events: usize,
    /// After this many events, enough blocks are added and removed that memory moves.
    flood_every: usize,
}

const FLOOD_CHAINS: usize = 30;
const FLOOD_BLOCKS: usize = 1500;

fn key(worker: usize) -> WorkerKey {
    WorkerKey { worker: worker as u32 / 2, rank: worker as u16 % 2 }
}

/// Engines choose their own names for blocks; here each worker in a different way.
fn name(worker: usize, hash: u64) -> EngineHash {
    EngineHash(hash ^ (worker as u64) << 3)
}

/// Chained hashes of a prefix of a trunk and a branch after it.
fn chain(trunk: usize, cut: usize, branch: usize, len: usize) -> Vec<u64> {
    let mut before = 0_u64;
    let chained = (0..len).map(|at| {
        let symbol = if at < cut { trunk } else { 1000 + branch } as u64;
        before = (before ^ (symbol << 32 | (at as u64 + 1))).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        before = before.rotate_left(29);
        before
    });
    chained.collect()
}

impl Shape {
    fn prompt(self, random: &mut PseudoRandom) -> Vec<u64> {
        let cut = match random.below(3) {
            0 => self.trunk_blocks,
            1 => self.trunk_blocks / 2,
            _ => 1 + random.below(self.trunk_blocks),
        };
        let len = 1 + random.below(cut + self.branch_blocks);
        chain(random.below(self.trunks), cut, random.below(self.branches), len)
    }
}

/// The effect of an event on a block of a worker: the fastest tier that has the block afterwards.
type Effect = (usize, u64, Option<Tier>);

/// The writer's log, by which readers check their results.
#[derive(Default)]
struct Log {
    /// Effects of events by number, recorded before the event is applied.
    effects: Mutex<Vec<Arc<Vec<Effect>>>>,
    begun: AtomicUsize,
    done: AtomicUsize,
    stopped: AtomicBool,
}

type Copies = [u32; Tier::COUNT];

struct Writer {
    index: Index,
    held: Vec<HashMap<u64, Copies>>,
    log: Arc<Log>,
}

fn fastest(copies: &Copies) -> Option<Tier> {
    copies.iter().position(|copies| *copies > 0).map(|tier| Tier::ALL[tier])
}

impl Writer {
    fn applied(&mut self, effects: Vec<Effect>, apply: impl FnOnce(&mut Index)) {
        let number = {
            let mut all = self.log.effects.lock().unwrap();
            all.push(Arc::new(effects));
            all.len()
        };
        self.log.begun.store(number, Ordering::SeqCst);
        apply(&mut self.index);
        self.log.done.store(number, Ordering::SeqCst);
    }

    fn overlap(&self, worker: usize, prompt: &[u64]) -> usize {
        prompt.iter().take_while(|hash| self.held[worker].contains_key(hash)).count()
    }

    fn store(&mut self, worker: usize, prompt: &[u64], again: bool, tier: Tier) {
        let from = if again { 0 } else { self.overlap(worker, prompt) };
        let mut effects = Vec::new();
        for hash in &prompt[from..] {
            let copies = self.held[worker].entry(*hash).or_default();
            copies[tier as usize] += 1;
            effects.push((worker, *hash, fastest(copies)));
        }
        let block =
            |hash: &u64| HashedBlock { engine: name(worker, *hash), hash: BlockHash(*hash) };
        let blocks: Vec<_> = prompt[from..].iter().map(block).collect();
        let parent = from.checked_sub(1).map(|before| name(worker, prompt[before]));
        self.applied(effects, |index| {
            assert_eq!(index.store(key(worker), parent, &blocks, tier).stored, blocks.len());
        });
    }

    /// Removes a copy of each block from the fastest tier of the first block.
    fn remove(&mut self, worker: usize, hashes: &[u64]) {
        let mut hashes = hashes;
        while let Some(tier) = hashes.first().and_then(|hash| fastest(&self.held[worker][hash])) {
            let same = |hash: &&u64| fastest(&self.held[worker][*hash]) == Some(tier);
            let count = hashes.iter().take_while(same).count();
            let mut effects = Vec::new();
            for hash in &hashes[..count] {
                let copies = self.held[worker].get_mut(hash).unwrap();
                copies[tier as usize] -= 1;
                effects.push((worker, *hash, fastest(copies)));
            }
            self.held[worker].retain(|_, copies| fastest(copies).is_some());
            let names: Vec<_> = hashes[..count].iter().map(|hash| name(worker, *hash)).collect();
            self.applied(effects, |index| {
                assert_eq!(index.remove(key(worker), &names, tier).removed, count);
            });
            hashes = &hashes[count..];
        }
    }

    fn clear(&mut self, worker: usize) {
        let held = std::mem::take(&mut self.held[worker]);
        let effects = held.keys().map(|hash| (worker, *hash, None)).collect();
        self.applied(effects, |index| {
            assert_eq!(index.clear_worker(key(worker)), held.len());
        });
    }

    /// Worker `to` gets a snapshot of worker `from`.
    fn restore(&mut self, from: usize, to: usize) {
        let mut effects: Vec<_> = self.held[to].keys().map(|hash| (to, *hash, None)).collect();
        let copied = |(hash, copies): (&u64, &Copies)| (to, *hash, fastest(copies));
        for (hash, copies) in &self.held[from] {
            // During the restore, a block first has one copy in the fastest tier.
            effects.push((to, *hash, Some(Tier::Device)));
            let tiers = Tier::ALL.into_iter().filter(|tier| copies[*tier as usize] > 0);
            effects.extend(tiers.map(|tier| (to, *hash, Some(tier))));
        }
        effects.extend(self.held[from].iter().map(copied));
        self.held[to] = self.held[from].clone();
        let mut runs: Vec<_> = self.index.snapshot(key(from)).collect();
        let other = |engine: EngineHash| EngineHash(engine.0 ^ ((from ^ to) as u64) << 3);
        for run in &mut runs {
            let names = run.names.iter();
            run.names =
                names.map(|named| BlockName { engine: other(named.engine), ..named }).collect();
        }
        self.applied(effects, |index| {
            index.restore(key(to), runs);
        });
    }

    /// Adds and removes enough blocks for words in use to be moved.
    fn flood(&mut self, worker: usize) {
        for number in 0..FLOOD_CHAINS {
            let chain = chain(10_000 + number, FLOOD_BLOCKS, 0, FLOOD_BLOCKS);
            self.store(worker, &chain, false, Tier::Device);
        }
        self.clear(worker);
    }

    fn step(&mut self, shape: Shape, random: &mut PseudoRandom) {
        // The first worker keeps its blocks.
        let worker = 1 + random.below(shape.workers - 1);
        match random.below(20) {
            0..10 => {
                let tier = [Tier::Device, Tier::Device, Tier::Device, Tier::Host][random.below(4)];
                let prompt = shape.prompt(random);
                self.store(worker, &prompt, random.below(5) == 0, tier);
            }
            10..15 => {
                let prompt = shape.prompt(random);
                let held = self.overlap(worker, &prompt);
                let from = held.saturating_sub(1 + random.below(shape.branch_blocks));
                let evicted: Vec<_> = prompt[from..held].iter().rev().copied().collect();
                self.remove(worker, &evicted);
            }
            15..18 => {
                let mut held: Vec<_> = self.held[worker].keys().copied().collect();
                held.sort_unstable();
                held.retain(|_| random.one_in(8));
                self.remove(worker, &held);
            }
            18 => self.clear(worker),
            _ => self.restore(random.below(shape.workers), worker),
        }
    }
}

/// The tiers in which a block was, and whether it was held all the time.
#[derive(Clone, Copy)]
struct Seen {
    tiers: [bool; Tier::COUNT],
    always: bool,
}

/// A reader's own record of what workers hold.
struct History {
    held: HashMap<(usize, u64), Tier>,
    known: usize,
    log: Arc<Log>,
}

impl History {
    fn advance(&mut self, to: usize) {
        let all: Vec<_> = self.log.effects.lock().unwrap()[self.known..to].to_vec();
        for (worker, hash, tier) in all.iter().flat_map(|effects| effects.iter()) {
            match tier {
                Some(tier) => drop(self.held.insert((*worker, *hash), *tier)),
                None => drop(self.held.remove(&(*worker, *hash))),
            }
        }
        self.known = to;
    }

    /// The states of a prompt's blocks from the known event up to another one.
    fn seen(&self, shape: Shape, prompt: &[u64], to: usize) -> Vec<Vec<Seen>> {
        let at = |worker: usize, hash: &u64| {
            let tier = self.held.get(&(worker, *hash));
            let tiers = Tier::ALL.map(|other| tier == Some(&other));
            Seen { tiers, always: tier.is_some() }
        };
        let row = |worker| prompt.iter().map(|hash| at(worker, hash)).collect();
        let mut seen: Vec<Vec<_>> = (0..shape.workers).map(row).collect();
        let places: HashMap<u64, usize> =
            prompt.iter().enumerate().map(|(at, hash)| (*hash, at)).collect();
        let all: Vec<_> = self.log.effects.lock().unwrap()[self.known..to].to_vec();
        for (worker, hash, tier) in all.iter().flat_map(|effects| effects.iter()) {
            let Some(at) = places.get(hash).filter(|_| *worker < shape.workers) else { continue };
            match tier {
                Some(tier) => seen[*worker][*at].tiers[*tier as usize] = true,
                None => seen[*worker][*at].always = false,
            }
        }
        seen
    }
}

fn explain(overlaps: &Overlaps, worker: usize, seen: &[Seen]) {
    let found = overlaps.get(key(worker));
    let sum: u32 = found.by_tier.iter().sum();
    assert_eq!(sum, found.blocks);
    let at_least = seen.iter().take_while(|seen| seen.always).count();
    let at_most = seen.iter().take_while(|seen| seen.tiers.contains(&true)).count();
    let depth = found.blocks as usize;
    assert!(depth <= at_most, "worker {worker} never had more than {at_most} blocks, not {depth}");
    assert!(depth >= at_least, "worker {worker} had {at_least} blocks all the while, not {depth}");
    for tier in Tier::ALL {
        let blocks = found.by_tier[tier as usize];
        let could_be = seen[..depth].iter().filter(|seen| seen.tiers[tier as usize]).count();
        assert!(blocks as usize <= could_be, "worker {worker}: {blocks} in {tier:?} of {could_be}");
    }
}

/// Looks up prompts until the writer has stopped; returns the number of calls, and of those during
/// which something changed.
fn read(reader: &IndexReader, log: &Arc<Log>, shape: Shape, seed: u64) -> (usize, usize) {
    let mut history = History { held: HashMap::new(), known: 0, log: Arc::clone(log) };
    let (mut random, mut overlaps) = (PseudoRandom(seed), Overlaps::new());
    let (mut asked, mut disturbed) = (0, 0);
    let mut is_last = false;
    while !is_last {
        is_last = log.stopped.load(Ordering::SeqCst);
        let hashes = shape.prompt(&mut random);
        let prompt: Vec<_> = hashes.iter().copied().map(BlockHash).collect();
        let done = log.done.load(Ordering::SeqCst);
        reader.find(&prompt, &mut overlaps);
        let begun = log.begun.load(Ordering::SeqCst);
        asked += 1;
        // Usually nothing changes during a call; the calls with changes matter.
        if begun == done && !is_last && !random.one_in(32) {
            continue;
        }
        history.advance(done);
        let seen = history.seen(shape, &hashes, begun);
        for (worker, seen) in seen.iter().enumerate() {
            explain(&overlaps, worker, seen);
        }
        assert!(overlaps.iter().all(|(_, overlap)| overlap.blocks > 0));
        disturbed += usize::from(begun > done);
    }
    (asked, disturbed)
}

fn readers_beside_a_writer(shape: Shape, seed: u64) {
    let (model, max_blocks_per_worker) = ("m".to_owned(), 1_000_000);
    let config = IndexConfig { model, block_size: 1, seed: HashSeed(7), max_blocks_per_worker };
    let log = Arc::new(Log::default());
    // One more worker than readers look up, for the flood.
    let held = vec![HashMap::new(); shape.workers + 1];
    let mut writer = Writer { index: Index::new(config), held, log: Arc::clone(&log) };
    for trunk in 0..shape.trunks {
        let whole = chain(trunk, shape.trunk_blocks, 0, shape.trunk_blocks);
        writer.store(0, &whole, false, Tier::Device);
    }
    let asked: Vec<_> = thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|number| {
                let (reader, log) = (writer.index.reader(), Arc::clone(&log));
                scope.spawn(move || read(&reader, &log, shape, seed + number))
            })
            .collect();
        // Stops the readers even if the writer panics.
        struct Stop<'a>(&'a Log);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.stopped.store(true, Ordering::SeqCst);
            }
        }
        let stop = Stop(&log);
        let mut random = PseudoRandom(seed);
        for event in 1..=shape.events {
            writer.step(shape, &mut random);
            if event % shape.flood_every == 0 {
                writer.flood(shape.workers);
            }
        }
        drop(stop);
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    assert_eq!(writer.index.check(), Ok(()));
    // The last lookup of each reader was on an unchanging index, where the result must be exact.
    assert!(asked.iter().all(|(asked, _)| *asked > 0), "{asked:?}");
}

#[test]
fn readers_of_few_constantly_changing_blocks_see_consistent_overlaps() {
    let (trunks, branches) = (1, 2);
    let (trunk_blocks, branch_blocks) = (6, 3);
    let shape = Shape {
        workers: 7,
        trunks,
        trunk_blocks,
        branches,
        branch_blocks,
        events: 12_000,
        flood_every: 1500,
    };
    readers_beside_a_writer(shape, 11);
}

#[test]
fn readers_of_long_chains_of_many_workers_see_consistent_overlaps() {
    let (trunks, branches) = (3, 5);
    let (trunk_blocks, branch_blocks) = (90, 60);
    let shape = Shape {
        workers: 80,
        trunks,
        trunk_blocks,
        branches,
        branch_blocks,
        events: 1200,
        flood_every: 300,
    };
    readers_beside_a_writer(shape, 5);
}
