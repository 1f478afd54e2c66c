//! The prefix index of one model: which worker holds which blocks.
//!
//! Two sides which always change together: per worker, from the engine's hashes
//! to ours with the physical copies per tier (what events write), and from our
//! hashes to the workers that hold them (what prompts read).

mod check;
mod holders;
mod overlaps;
mod snapshot;
mod table;
mod worker_map;

use std::collections::BTreeMap;
use std::fmt;

pub use self::overlaps::{Overlap, Overlaps};
pub use self::snapshot::SnapshotBlock;

use self::holders::Holders;
use self::worker_map::{Content, StoreOutcome, WorkerMap};
use crate::event::{EngineHash, KvEvent, StoredBlock, Tier};
use crate::hash::{BlockHash, HashSeed, Namespace, next_hash};

/// A worker as the index sees it: one cache. The ranks of a data-parallel
/// engine have a cache each, so each is a worker of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerKey {
    /// The worker's number in the fleet.
    pub worker: u32,
    /// Its data-parallel rank; 0 where there is only one.
    pub rank: u16,
}

impl fmt::Display for WorkerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.worker, self.rank)
    }
}

/// What an index needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexConfig {
    /// The configured name of the model; part of every namespace.
    pub model: String,
    /// Tokens per KV block.
    pub block_size: u32,
    /// The cluster's hash seed.
    pub seed: HashSeed,
    /// Bound on distinct engine hashes per worker and rank; more are not
    /// indexed. Above `u32::MAX` it is taken as `u32::MAX`.
    pub max_blocks_per_worker: usize,
}

/// What became of an event, in blocks.
///
/// Of a [`KvEvent::Stored`], each block is counted once among `stored`,
/// `orphaned`, `malformed` and `over_limit`; of a [`KvEvent::Removed`], each
/// hash once among `removed` and `unknown`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Indexed, as new blocks or as further copies.
    pub stored: usize,
    /// Those of `stored` whose engine hash stood for other content before: a
    /// sign that the worker restarted and nobody noticed.
    pub replaced: usize,
    /// Copies taken away; for [`KvEvent::Cleared`], distinct blocks dropped.
    pub removed: usize,
    /// Stored under a parent that the worker is not known to hold, or after a
    /// malformed block of the same event: not indexed.
    pub orphaned: usize,
    /// Removed without being held in that tier.
    pub unknown: usize,
    /// Not exactly one block size of tokens: not indexed.
    pub malformed: usize,
    /// Beyond [`IndexConfig::max_blocks_per_worker`]: not indexed.
    pub over_limit: usize,
}

impl Applied {
    fn count(&mut self, outcome: StoreOutcome) {
        match outcome {
            StoreOutcome::Stored => self.stored += 1,
            StoreOutcome::Replaced => {
                self.stored += 1;
                self.replaced += 1;
            }
            StoreOutcome::OverLimit => self.over_limit += 1,
        }
    }
}

/// Where the next block of a stored run goes.
#[derive(Clone, Copy)]
struct Place {
    /// Hash of the block before, or the namespace's root.
    before: BlockHash,
    position: u32,
    opaque: bool,
}

/// The prefix index of one model.
///
/// Memory is in proportion to what is held now, bounded by
/// [`IndexConfig::max_blocks_per_worker`] times the workers that are applied.
#[derive(Clone, Debug)]
pub struct Index {
    config: IndexConfig,
    /// Ordered, so that a worker's ranks are neighbours. No map is empty.
    workers: BTreeMap<WorkerKey, WorkerMap>,
    holders: Holders,
}

impl Index {
    /// An empty index.
    pub fn new(config: IndexConfig) -> Self {
        Self { config, workers: BTreeMap::new(), holders: Holders::default() }
    }

    /// What the index was made with.
    pub fn config(&self) -> &IndexConfig {
        &self.config
    }

    /// Applies one event of a worker. Events must come in the worker's order;
    /// after a gap, clear the worker and start from a snapshot or a replay.
    pub fn apply(&mut self, worker: WorkerKey, event: &KvEvent) -> Applied {
        match event {
            KvEvent::Stored { parent, blocks, adapter, salt, tier } => {
                let place = match parent {
                    None => Some(self.start(salt.as_deref(), adapter.as_deref())),
                    Some(parent) => self.after(worker, *parent),
                };
                self.store(worker, place, blocks, *tier)
            }
            KvEvent::Removed { hashes, tier } => self.remove(worker, hashes, *tier),
            KvEvent::Cleared => {
                Applied { removed: self.clear_worker(worker), ..Applied::default() }
            }
        }
    }

    fn start(&self, salt: Option<&str>, adapter: Option<&str>) -> Place {
        let IndexConfig { model, block_size, seed, .. } = &self.config;
        let namespace = Namespace { salt, model, adapter, block_size: *block_size };
        Place { before: namespace.root(*seed), position: 0, opaque: false }
    }

    /// The namespace needs no second look here: it is in the parent's hash.
    fn after(&self, worker: WorkerKey, parent: EngineHash) -> Option<Place> {
        let parent = self.workers.get(&worker)?.content(parent)?;
        Some(Place {
            before: parent.hash,
            position: parent.position.saturating_add(1),
            opaque: parent.opaque,
        })
    }

    fn store(
        &mut self,
        worker: WorkerKey,
        mut place: Option<Place>,
        blocks: &[StoredBlock],
        tier: Tier,
    ) -> Applied {
        let mut applied = Applied::default();
        let limit = self.limit();
        let block_size = self.config.block_size as usize;
        let map = self.workers.entry(worker).or_insert_with(|| WorkerMap::new(worker));
        for block in blocks {
            let Some(Place { before, position, opaque }) = place else {
                applied.orphaned += 1;
                continue;
            };
            if block_size == 0 || block.tokens.len() != block_size {
                applied.malformed += 1;
                place = None;
                continue;
            }
            let content = Content {
                hash: next_hash(self.config.seed, before, &block.tokens),
                parent: (position > 0).then_some(before),
                position,
                opaque: opaque || block.opaque,
            };
            let named = (block.hash, content);
            applied.count(map.store(&mut self.holders, limit, named, (tier, 1)));
            place = Some(Place {
                before: content.hash,
                position: position.saturating_add(1),
                opaque: content.opaque,
            });
        }
        if map.is_empty() {
            self.workers.remove(&worker);
        }
        applied
    }

    fn remove(&mut self, worker: WorkerKey, hashes: &[EngineHash], tier: Tier) -> Applied {
        let mut applied = Applied::default();
        let Some(map) = self.workers.get_mut(&worker) else {
            return Applied { unknown: hashes.len(), ..applied };
        };
        for &hash in hashes {
            if map.remove(&mut self.holders, hash, tier) {
                applied.removed += 1;
            } else {
                applied.unknown += 1;
            }
        }
        if map.is_empty() {
            self.workers.remove(&worker);
        }
        applied
    }

    /// Finds how much of a prompt each worker holds; `hashes` are the prompt's,
    /// from [`chain_hashes`](crate::hash::chain_hashes). Clears `out` first.
    pub fn find(&self, hashes: &[BlockHash], out: &mut Overlaps) {
        out.collect(&self.holders, hashes);
    }

    /// Drops all that one rank of a worker holds; returns how many distinct
    /// blocks that was.
    pub fn clear_worker(&mut self, worker: WorkerKey) -> usize {
        self.workers.remove(&worker).map_or(0, |map| map.clear(&mut self.holders))
    }

    /// Drops all that a worker holds, in every rank, in time proportional to
    /// that; returns how many distinct blocks that was.
    pub fn remove_worker(&mut self, worker: u32) -> usize {
        let mut removed = 0;
        let ranks = WorkerKey { worker, rank: 0 }..=WorkerKey { worker, rank: u16::MAX };
        while let Some((&key, _)) = self.workers.range(ranks.clone()).next() {
            removed += self.clear_worker(key);
        }
        removed
    }

    /// Distinct engine hashes with at least one copy, per tier (indexed by
    /// `Tier as usize`). A block in two tiers counts in both.
    pub fn block_counts(&self, worker: WorkerKey) -> [usize; Tier::COUNT] {
        self.workers.get(&worker).map_or([0; Tier::COUNT], WorkerMap::counts)
    }

    /// The workers which hold at least one block, sorted by key.
    pub fn workers(&self) -> impl Iterator<Item = WorkerKey> + '_ {
        self.workers.keys().copied()
    }

    /// Distinct prefixes that could be matched, over all workers.
    pub fn distinct_blocks(&self) -> usize {
        self.holders.len()
    }

    /// Holders count a worker's engine hashes in 32 bits.
    fn limit(&self) -> usize {
        self.config.max_blocks_per_worker.min(u32::MAX as usize)
    }
}
