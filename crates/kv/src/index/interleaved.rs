//! Interleaves a reader and the writer on one thread, in the same order in every run: a reader
//! reads after each single store of the writer, and the writer applies whole events before single
//! loads of a reader.
#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::access_hook::{Access, with_hook};
use super::{HashedBlock, Index, IndexConfig, Overlaps, WorkerKey};
use crate::event::{EngineHash, Tier};
use crate::hash::{BlockHash, HashSeed};

struct PseudoRandom(u64);

impl PseudoRandom {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        ((self.0 >> 33) as usize) % bound
    }
}

const WORKERS: usize = 7;
const TRUNK: usize = 6;
const BRANCH: usize = 4;

fn key(worker: usize) -> WorkerKey {
    WorkerKey { worker: worker as u32, rank: 0 }
}

/// Chained hashes of a trunk's first `cut` blocks and a branch after them.
fn chain(cut: usize, branch: usize) -> Vec<u64> {
    let mut before = 0_u64;
    let chained = (0..cut + BRANCH).map(|at| {
        let symbol = if at < cut { 0 } else { 1 + branch } as u64;
        before = (before ^ (symbol << 32 | (at as u64 + 1))).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        before = before.rotate_left(29);
        before
    });
    chained.collect()
}

fn prompts() -> Vec<Vec<u64>> {
    [(TRUNK, 0), (TRUNK, 1), (2, 0), (3, 1), (1, 1)].map(|(cut, to)| chain(cut, to)).to_vec()
}

type Copies = [u32; Tier::COUNT];
type Held = Vec<BTreeMap<u64, Copies>>;

fn fastest(copies: &Copies) -> Option<usize> {
    copies.iter().position(|copies| *copies > 0)
}

/// What a reader may see of a block: the tiers in which it was during the call, and whether it was
/// held all the time.
#[derive(Clone, Copy)]
struct Seen {
    tiers: [bool; Tier::COUNT],
    always: bool,
}

/// What a reader may see of a prompt, by worker.
#[derive(Clone)]
struct Allowed(Vec<Vec<Seen>>);

impl Allowed {
    fn at(held: &Held, prompt: &[u64]) -> Self {
        let none = Seen { tiers: [false; Tier::COUNT], always: true };
        let mut allowed = Self(vec![vec![none; prompt.len()]; held.len()]);
        allowed.or(held, prompt);
        allowed
    }

    /// Adds a state that also existed during the call.
    fn or(&mut self, held: &Held, prompt: &[u64]) {
        for (seen, held) in self.0.iter_mut().zip(held) {
            for (seen, hash) in seen.iter_mut().zip(prompt) {
                match held.get(hash).and_then(fastest) {
                    Some(tier) => seen.tiers[tier] = true,
                    None => seen.always = false,
                }
            }
        }
    }

    fn check(&self, overlaps: &Overlaps) {
        for (worker, seen) in self.0.iter().enumerate() {
            let found = overlaps.get(key(worker));
            let depth = found.blocks as usize;
            let at_least = seen.iter().take_while(|seen| seen.always).count();
            let at_most = seen.iter().take_while(|seen| seen.tiers.contains(&true)).count();
            assert!(
                (at_least..=at_most).contains(&depth),
                "{worker}: {depth} of {at_least}..={at_most}"
            );
            assert_eq!(found.by_tier.iter().sum::<u32>(), found.blocks);
            for (tier, blocks) in found.by_tier.iter().enumerate() {
                let could_be = seen[..depth].iter().filter(|seen| seen.tiers[tier]).count();
                assert!(*blocks as usize <= could_be, "{worker}: {blocks} of {could_be} in {tier}");
            }
        }
        let listed: u32 = overlaps.iter().map(|(_, overlap)| overlap.blocks).sum();
        let told: u32 = (0..self.0.len()).map(|worker| overlaps.get(key(worker)).blocks).sum();
        assert_eq!(listed, told, "each worker is listed once");
    }
}

/// An event before it is applied.
enum Event {
    Store { worker: usize, from: usize, prompt: Vec<u64>, tier: Tier },
    Remove { worker: usize, hashes: Vec<u64>, tier: Tier },
    Clear { worker: usize },
}

struct World {
    index: Index,
    held: Held,
    random: PseudoRandom,
}

impl World {
    /// With this many further workers, which get the first slots.
    fn new(seed: u64, beside: usize) -> Self {
        let (model, max_blocks_per_worker) = ("m".to_owned(), 10_000);
        let config = IndexConfig { model, block_size: 1, seed: HashSeed(7), max_blocks_per_worker };
        let mut index = Index::new(config);
        for worker in 0..beside {
            let block = HashedBlock { engine: EngineHash(1), hash: BlockHash(worker as u64) };
            index.store(key(1000 + worker), None, &[block], Tier::Device);
        }
        Self { index, held: vec![BTreeMap::new(); WORKERS], random: PseudoRandom(seed) }
    }

    /// PseudoRandom the next event; `held` is updated immediately.
    fn next(&mut self) -> Event {
        let worker = self.random.below(WORKERS);
        // More chains than are looked up, so that the table of runs is rebuilt.
        let mut prompt = chain(1 + self.random.below(TRUNK), self.random.below(4));
        prompt.truncate(1 + self.random.below(prompt.len()));
        let held = &mut self.held[worker];
        match self.random.below(16) {
            0..9 => {
                let again = self.random.below(5) == 0;
                let known = prompt.iter().take_while(|hash| held.contains_key(hash)).count();
                let from = if again { 0 } else { known };
                let tier = [Tier::Device, Tier::Device, Tier::Host][self.random.below(3)];
                for hash in &prompt[from..] {
                    held.entry(*hash).or_default()[tier as usize] += 1;
                }
                Event::Store { worker, from, prompt, tier }
            }
            9..15 => {
                // From the end of a prompt, or anywhere.
                let anywhere = self.random.below(3) == 0;
                let tier = [Tier::Device, Tier::Host][self.random.below(2)];
                let held_in = |held: &BTreeMap<u64, Copies>, hash: &u64| {
                    held.get(hash).is_some_and(|copies| copies[tier as usize] > 0)
                };
                let mut hashes: Vec<u64> = match anywhere {
                    true => held.keys().copied().collect(),
                    false => prompt.iter().rev().copied().collect(),
                };
                hashes.retain(|hash| held_in(held, hash));
                hashes.truncate(1 + self.random.below(5));
                if anywhere {
                    hashes.retain(|_| self.random.below(2) == 0);
                }
                for hash in &hashes {
                    held.get_mut(hash).unwrap()[tier as usize] -= 1;
                }
                held.retain(|_, copies| fastest(copies).is_some());
                Event::Remove { worker, hashes, tier }
            }
            _ => {
                held.clear();
                Event::Clear { worker }
            }
        }
    }

    fn apply(&mut self, event: &Event) {
        match event {
            Event::Store { worker, from, prompt, tier } => {
                let block =
                    |hash: &u64| HashedBlock { engine: EngineHash(*hash), hash: BlockHash(*hash) };
                let blocks: Vec<_> = prompt[*from..].iter().map(block).collect();
                let parent = from.checked_sub(1).map(|before| EngineHash(prompt[before]));
                let applied = self.index.store(key(*worker), parent, &blocks, *tier);
                assert_eq!(applied.stored, blocks.len());
            }
            Event::Remove { worker, hashes, tier } => {
                let names: Vec<_> = hashes.iter().copied().map(EngineHash).collect();
                let applied = self.index.remove(key(*worker), &names, *tier);
                assert_eq!(applied.removed, names.len());
            }
            Event::Clear { worker } => {
                self.index.clear_worker(key(*worker));
            }
        }
    }
}

fn hashes(prompt: &[u64]) -> Vec<BlockHash> {
    prompt.iter().copied().map(BlockHash).collect()
}

fn a_reader_after_every_store(seed: u64, beside: usize, events: usize) {
    let mut world = World::new(seed, beside);
    let prompts = prompts();
    for _ in 0..events {
        let before = world.held.clone();
        let event = world.next();
        let expected: Vec<_> = prompts
            .iter()
            .map(|prompt| {
                let mut allowed = Allowed::at(&before, prompt);
                allowed.or(&world.held, prompt);
                (hashes(prompt), allowed)
            })
            .collect();
        let (reader, mut overlaps) = (world.index.reader(), Overlaps::new());
        let look = move |access| {
            if access == Access::Store {
                for (prompt, allowed) in &expected {
                    reader.find(prompt, &mut overlaps);
                    allowed.check(&overlaps);
                }
            }
        };
        with_hook(look, || world.apply(&event));
        assert_eq!(world.index.check(), Ok(()));
    }
}

#[test]
fn between_any_two_stores_readers_see_the_old_or_the_new_state() {
    a_reader_after_every_store(1, 0, 1500);
}

#[test]
fn between_any_two_stores_readers_see_the_old_or_the_new_state_in_large_sets() {
    a_reader_after_every_store(2, 62, 400);
}

/// Applies whole events at some of a reader's loads.
fn events_before_loads(seed: u64, beside: usize, calls: usize, one_in: usize) {
    let world = Rc::new(RefCell::new(World::new(seed, beside)));
    let (prompts, mut random) = (prompts(), PseudoRandom(seed + 1000));
    let (reader, mut overlaps) = (world.borrow().index.reader(), Overlaps::new());
    for _ in 0..20 {
        let event = world.borrow_mut().next();
        world.borrow_mut().apply(&event);
    }
    for _ in 0..calls {
        let prompt = prompts[random.below(prompts.len())].clone();
        let allowed = Rc::new(RefCell::new(Allowed::at(&world.borrow().held, &prompt)));
        let write = {
            let (world, allowed, prompt) = (Rc::clone(&world), Rc::clone(&allowed), prompt.clone());
            let mut random = PseudoRandom(random.below(1 << 30) as u64);
            // Enough that words are reused, but limited, so that the call ends.
            let mut left = 40;
            move |_| {
                while left > 0 && random.below(one_in) == 0 {
                    left -= 1;
                    let mut world = world.borrow_mut();
                    let event = world.next();
                    world.apply(&event);
                    allowed.borrow_mut().or(&world.held, &prompt);
                }
            }
        };
        with_hook(write, || reader.find(&hashes(&prompt), &mut overlaps));
        allowed.borrow().check(&overlaps);
    }
    assert_eq!(world.borrow().index.check(), Ok(()));
}

#[test]
fn a_reader_paused_at_any_load_sees_states_from_its_call() {
    events_before_loads(3, 0, 1000, 30);
    events_before_loads(4, 0, 800, 3);
}

#[test]
fn a_reader_paused_at_any_load_sees_states_from_its_call_in_large_sets() {
    events_before_loads(5, 62, 500, 20);
}
