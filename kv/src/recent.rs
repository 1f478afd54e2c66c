//! What was routed lately, and is assumed to be held until something better is known.
//!
//! Two uses. *Speculative*: a prompt that was just sent to a worker will be in its
//! cache before its events say so; siblings that arrive meanwhile should follow it.
//! Such entries live for seconds. *Approximate*: of an engine without events nothing
//! better is ever known; what was sent to it is assumed to stay for a time, as long
//! as the engine has room. Either way it is a guess: it may choose a worker, never
//! tell a client what was cached.
//!
//! A block belongs to the last prompt that had it. Of prompts that begin alike, the
//! later one has the common blocks, so what is left of the earlier one is its end; and
//! what is taken out, for time or for room, is taken from the end. So no block is ever
//! assumed without those before it, and each is listed once: memory is in proportion
//! to the blocks assumed, however often they are renewed. What begins alike is renewed
//! as a whole (`tree`): that takes as long as comparing the hashes.

use std::collections::{BTreeMap, BTreeSet};

use crate::event::{EngineHash, Tier};
use crate::hash::{BlockHash, HashSeed};
use crate::index::{HashedBlock, Index, IndexConfig, IndexReader, WorkerKey};

mod tree;

use tree::{NodeId, Tree};

/// How long guesses are kept, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecentConfig {
    /// For how long a routed prompt is assumed to be held.
    pub lifetime_ms: u64,
    /// Bound on the blocks that are assumed of one worker, unless its capacity is
    /// known to be less.
    pub max_blocks_per_worker: usize,
}

/// Blocks whose time has come that one call takes out at most, so that no request pays
/// for all others.
pub const EXPIRED_BLOCKS_MAX: usize = 4096;

/// What was routed lately.
#[derive(Debug)]
pub struct Recent {
    config: RecentConfig,
    index: Index,
    /// Prompts that still have a block, by number: oldest first, and first to expire.
    routed: BTreeMap<u64, Routed>,
    workers: BTreeMap<WorkerKey, Assumed>,
    /// Prompts so far.
    count: u64,
    /// The latest time that was told: it never goes back.
    now_ms: u64,
}

/// What is assumed of one worker.
#[derive(Debug, Default)]
struct Assumed {
    /// Its prompts among [`Recent::routed`].
    numbers: BTreeSet<u64>,
    /// Their blocks, each with the number of the last prompt that had it.
    tree: Tree,
}

#[derive(Clone, Copy, Debug)]
struct Routed {
    worker: WorkerKey,
    expires_ms: u64,
    /// Where its last blocks are.
    tail: NodeId,
}

impl Recent {
    /// Nothing yet.
    pub fn new(config: RecentConfig) -> Self {
        let index = Index::new(IndexConfig {
            model: String::new(),
            block_size: 0,
            seed: HashSeed(0),
            max_blocks_per_worker: config.max_blocks_per_worker,
        });
        Self {
            config,
            index,
            routed: BTreeMap::new(),
            workers: BTreeMap::new(),
            count: 0,
            now_ms: 0,
        }
    }

    /// A view for any thread. Its overlaps are guesses.
    pub fn reader(&self) -> IndexReader {
        self.index.reader()
    }

    /// A prompt was sent to a worker; `capacity_blocks` is what the worker can hold,
    /// if it has said so. Blocks beyond the bound push out what was sent longest ago.
    pub fn record(
        &mut self,
        now_ms: u64,
        worker: WorkerKey,
        hashes: &[BlockHash],
        capacity_blocks: Option<usize>,
    ) {
        self.expire(now_ms);
        let bound = capacity_blocks.unwrap_or(usize::MAX).min(self.config.max_blocks_per_worker);
        let hashes = &hashes[..hashes.len().min(bound)];
        if hashes.is_empty() {
            return;
        }
        self.count += 1;
        let number = self.count;
        let (known, last) = self.renew(worker, number, hashes);
        // Room is made first: the index has the same bound.
        let excess = self.blocks(worker) + hashes.len() - known;
        self.make_room(worker, excess.saturating_sub(bound));
        let missing: Vec<_> = hashes[known..].iter().map(named).collect();
        let parent = known.checked_sub(1).map(|last| EngineHash(hashes[last].0));
        self.index.store(worker, parent, &missing, Tier::Device);
        let assumed = self.workers.entry(worker).or_default();
        let Some(tail) = assumed.tree.append(last, number, &hashes[known..]) else { return };
        assumed.numbers.insert(number);
        let expires_ms = self.now_ms.saturating_add(self.config.lifetime_ms);
        self.routed.insert(number, Routed { worker, expires_ms, tail });
    }

    /// Gives a prompt's leading blocks that are assumed already to its new number, and says
    /// how many those are, and where the last of them is.
    fn renew(
        &mut self,
        worker: WorkerKey,
        number: u64,
        hashes: &[BlockHash],
    ) -> (usize, Option<NodeId>) {
        let Some(assumed) = self.workers.get_mut(&worker) else { return (0, None) };
        let (mut known, mut last) = (0, None);
        while let Some((node, blocks, before)) = assumed.tree.renew(last, number, &hashes[known..])
        {
            known += blocks;
            last = Some(node);
            // Later prompts have what is before this: nothing is left of that one.
            if self.routed.get(&before).is_some_and(|routed| routed.tail == node) {
                self.routed.remove(&before);
                assumed.numbers.remove(&before);
            }
        }
        (known, last)
    }

    /// Takes out so many blocks of a worker, from the ends of its oldest prompts.
    fn make_room(&mut self, worker: WorkerKey, mut excess: usize) {
        while excess > 0 {
            let oldest = self.workers.get(&worker).and_then(|assumed| assumed.numbers.first());
            let Some(oldest) = oldest.copied() else { return };
            excess -= self.trim(oldest, excess);
        }
    }

    /// Takes out what has had its time, at most [`EXPIRED_BLOCKS_MAX`] of it per call; says
    /// whether some is left.
    pub fn expire(&mut self, now_ms: u64) -> bool {
        self.now_ms = self.now_ms.max(now_ms);
        let mut budget = EXPIRED_BLOCKS_MAX;
        while let Some((&oldest, routed)) = self.routed.first_key_value() {
            if routed.expires_ms > self.now_ms {
                return false;
            }
            if budget == 0 {
                return true;
            }
            budget -= self.trim(oldest, budget);
        }
        false
    }

    /// When the next prompt has had its time; `None` if nothing is assumed.
    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.routed.first_key_value().map(|(_, routed)| routed.expires_ms)
    }

    /// Takes up to so many blocks off a prompt's end; says how many.
    fn trim(&mut self, number: u64, most: usize) -> usize {
        let Some(routed) = self.routed.get_mut(&number) else { return 0 };
        let worker = routed.worker;
        // From the end, as an engine evicts.
        let mut gone = Vec::new();
        let Some(assumed) = self.workers.get_mut(&worker) else {
            self.routed.remove(&number);
            return 0;
        };
        match assumed.tree.trim(routed.tail, most, &mut gone) {
            Some(tail) => routed.tail = tail,
            None => {
                self.routed.remove(&number);
                assumed.numbers.remove(&number);
            }
        }
        if assumed.tree.blocks() == 0 {
            self.workers.remove(&worker);
        }
        let names: Vec<_> = gone.iter().map(|hash| EngineHash(hash.0)).collect();
        self.index.remove(worker, &names, Tier::Device);
        gone.len()
    }

    /// Assumes nothing of a worker any more: it is gone, or began anew.
    pub fn forget(&mut self, worker: u32) {
        let ranks = WorkerKey { worker, rank: 0 }..=WorkerKey { worker, rank: u16::MAX };
        while let Some((&key, _)) = self.workers.range(ranks.clone()).next() {
            let numbers = self.workers.remove(&key).unwrap_or_default().numbers;
            for number in numbers {
                self.routed.remove(&number);
            }
        }
        self.index.remove_worker(worker);
    }

    /// Blocks that are assumed of a worker.
    pub fn blocks(&self, worker: WorkerKey) -> usize {
        self.workers.get(&worker).map_or(0, |assumed| assumed.tree.blocks())
    }

    /// Blocks that are listed for their deadlines, over all workers: as many as are assumed,
    /// however often they were renewed.
    pub fn listed_blocks(&self) -> usize {
        self.workers.values().map(|assumed| assumed.tree.listed_blocks()).sum()
    }
}

/// The index wants an engine's name for each block; its hash is as good as any.
fn named(hash: &BlockHash) -> HashedBlock {
    HashedBlock { engine: EngineHash(hash.0), hash: *hash }
}
