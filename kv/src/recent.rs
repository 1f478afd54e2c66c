//! What was routed lately, and is assumed to be held until something better is known.
//!
//! Two uses. *Speculative*: a prompt that was just sent to a worker will be in its
//! cache before its events say so; siblings that arrive meanwhile should follow it.
//! Such entries live for seconds. *Approximate*: of an engine without events nothing
//! better is ever known; what was sent to it is assumed to stay for a time, as long
//! as the engine has room. Either way it is a guess: it may choose a worker, never
//! tell a client what was cached.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use crate::event::{EngineHash, Tier};
use crate::hash::{BlockHash, HashSeed};
use crate::index::{HashedBlock, Index, IndexConfig, IndexReader, WorkerKey};

/// How long guesses are kept, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecentConfig {
    /// For how long a routed prompt is assumed to be held.
    pub lifetime_ms: u64,
    /// Bound on the blocks that are assumed of one worker, unless its capacity is
    /// known to be less.
    pub max_blocks_per_worker: usize,
}

/// Blocks taken out by one call at most, so that no request pays for all others.
const EXPIRED_BLOCKS_MAX: usize = 4096;

/// What was routed lately.
#[derive(Debug)]
pub struct Recent {
    config: RecentConfig,
    index: Index,
    workers: BTreeMap<WorkerKey, Assumed>,
    /// All workers' deadlines, in the order in which they were set, which is theirs.
    deadlines: VecDeque<(u64, WorkerKey)>,
}

/// What is assumed of one worker.
#[derive(Debug, Default)]
struct Assumed {
    /// Prompts with their numbers, oldest first.
    routed: VecDeque<Routed>,
    /// The number of the last prompt that had a block.
    touched: HashMap<BlockHash, u64>,
    count: u64,
}

#[derive(Debug)]
struct Routed {
    number: u64,
    expires_ms: u64,
    hashes: Arc<[BlockHash]>,
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
        Self { config, index, workers: BTreeMap::new(), deadlines: VecDeque::new() }
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
        let assumed = self.workers.entry(worker).or_default();
        assumed.count += 1;
        let number = assumed.count;
        let mut missing = Vec::new();
        let mut parent = None;
        for (at, hash) in hashes.iter().enumerate() {
            if assumed.touched.insert(*hash, number).is_none() {
                missing.push(HashedBlock { engine: EngineHash(hash.0), hash: *hash });
                continue;
            }
            self.index.store(worker, parent, &missing, Tier::Device);
            missing.clear();
            parent = Some(EngineHash(hashes[at].0));
        }
        self.index.store(worker, parent, &missing, Tier::Device);
        let expires_ms = now_ms.saturating_add(self.config.lifetime_ms);
        assumed.routed.push_back(Routed { number, expires_ms, hashes: hashes.into() });
        self.deadlines.push_back((expires_ms, worker));
        while assumed.touched.len() > bound {
            assumed.drop_oldest(worker, &mut self.index);
        }
    }

    /// Takes out what has had its time, a bounded amount of it per call; says whether
    /// some is left.
    pub fn expire(&mut self, now_ms: u64) -> bool {
        let mut budget = EXPIRED_BLOCKS_MAX;
        while let Some((expires_ms, worker)) = self.deadlines.front().copied() {
            if expires_ms > now_ms {
                return false;
            }
            if budget == 0 {
                return true;
            }
            self.deadlines.pop_front();
            let Some(assumed) = self.workers.get_mut(&worker) else { continue };
            // It may have been pushed out before.
            if assumed.routed.front().is_some_and(|routed| routed.expires_ms <= now_ms) {
                budget = budget.saturating_sub(assumed.drop_oldest(worker, &mut self.index));
            }
            if assumed.routed.is_empty() {
                self.workers.remove(&worker);
            }
        }
        false
    }

    /// Assumes nothing of a worker any more: it is gone, or began anew.
    pub fn forget(&mut self, worker: u32) {
        self.workers.retain(|key, _| key.worker != worker);
        self.index.remove_worker(worker);
    }

    /// Blocks that are assumed of a worker.
    pub fn blocks(&self, worker: WorkerKey) -> usize {
        self.workers.get(&worker).map_or(0, |assumed| assumed.touched.len())
    }
}

impl Assumed {
    /// Takes out the oldest prompt, as far as no later one had its blocks as well;
    /// says how many blocks were looked at.
    fn drop_oldest(&mut self, worker: WorkerKey, index: &mut Index) -> usize {
        let Some(Routed { number, hashes, .. }) = self.routed.pop_front() else {
            return 0;
        };
        let mut gone = Vec::new();
        // From the end, as an engine evicts.
        for hash in hashes.iter().rev() {
            if self.touched.get(hash) == Some(&number) {
                self.touched.remove(hash);
                gone.push(EngineHash(hash.0));
            }
        }
        index.remove(worker, &gone, Tier::Device);
        hashes.len()
    }
}
