//! The prefix index of one model: which worker holds which blocks.
//!
//! The index has two sides, which one writer changes together. The *forest* is what prompts read:
//! the blocks of all workers as runs of consecutive blocks, each with the set of workers that hold
//! it. The *names* are what events write: for each worker, a map from the engine's hashes to places
//! in the forest. See `kv/README.md` for the layout.

#[cfg(all(test, not(loom)))]
mod access_hook;
mod adapter_loads;
mod adapters;
mod applied;
mod apply;
mod cache_groups;
mod chain;
mod check;
mod compact;
mod doubles;
mod finder;
mod forest;
mod frozen;
mod heads;
mod holders;
mod holds;
mod hybrid;
#[cfg(all(test, not(loom)))]
mod interleaved;
mod join;
mod line;
#[cfg(all(test, loom))]
mod model_check;
mod names;
mod observe;
mod overlaps;
mod reader;
mod restore;
mod resume_points;
mod run;
mod shared;
mod snapshot;
mod store;
mod strips;
mod sync;
mod waiting_events;
mod words;
mod worker;
mod worker_key;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use self::applied::{AppliedBlocks, HashedBlock};
pub use self::frozen::FrozenBlocks;
pub use self::observe::Change;
pub use self::overlaps::{Overlap, Overlaps};
pub use self::reader::IndexReader;
pub use self::restore::Restore;
pub use self::snapshot::{BlockName, RunNames, SnapshotRun};
pub use self::worker_key::WorkerKey;

use self::cache_groups::CacheGroups;
use self::forest::Forest;
use self::names::NAMES_MAX;
use self::observe::Observer;
use self::run::SLOTS_MAX;
use self::worker::Worker;
use crate::event::{EngineHash, StoredBlock, Tier};
use crate::hash::{BlockHash, BlockHasher, HashSeed, Namespace};

/// Blocks to be stored, by their tokens.
#[derive(Clone, Copy)]
struct TokenBlocks<'a> {
    blocks: &'a [StoredBlock],
    tier: Tier,
}

/// The settings of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexConfig {
    /// The configured name of the model; part of every namespace.
    pub model: String,
    /// Tokens per KV block.
    pub block_size: u32,
    /// The cluster's hash seed.
    pub seed: HashSeed,
    /// Maximum number of distinct engine hashes per worker and rank; further ones are not indexed.
    /// Values above eight million are treated as eight million.
    pub max_blocks_per_worker: usize,
}

/// The writer of the prefix index of one model. Readers are made by [`Index::reader`].
///
/// Memory is proportional to what workers hold now, and bounded by
/// [`IndexConfig::max_blocks_per_worker`] times the number of workers.
#[derive(Debug)]
pub struct Index {
    config: IndexConfig,
    hasher: BlockHasher,
    forest: Forest,
    /// Ordered, so that a worker's ranks are neighbours. No worker in the map is empty.
    workers: BTreeMap<WorkerKey, Worker>,
    /// The cache groups of workers that have named some besides the spine.
    hybrids: BTreeMap<WorkerKey, CacheGroups>,
    /// The namespace of the last first block with its root hash, since most events share it.
    root: Option<(Option<String>, Option<String>, BlockHash)>,
    /// Hashes of the event that is being applied.
    hashed: Vec<HashedBlock>,
}

/// Mixed into the hash of a block that depends on more than tokens, so that no prompt has this
/// hash.
const OPAQUE: u64 = 0x5be0_cd19_137e_2179;

impl Index {
    /// An empty index.
    pub fn new(config: IndexConfig) -> Self {
        Self {
            hasher: BlockHasher::new(config.seed),
            config,
            forest: Forest::new(),
            workers: BTreeMap::new(),
            hybrids: BTreeMap::new(),
            root: None,
            hashed: Vec::new(),
        }
    }

    /// The settings of the index.
    pub fn config(&self) -> &IndexConfig {
        &self.config
    }

    /// Changes the block size, also for existing readers, if nothing is indexed; returns whether it
    /// was changed.
    pub fn set_block_size(&mut self, tokens: u32) -> bool {
        let empty = self.workers.is_empty() && self.hybrids.is_empty();
        if empty {
            self.config.block_size = tokens;
            self.root = None;
        }
        empty
    }

    /// A reader for any thread, which sees all later changes.
    pub fn reader(&self) -> IndexReader {
        IndexReader { shared: Arc::clone(self.forest.shared()) }
    }

    /// Finds how much of a prompt each worker holds; see [`IndexReader::find`].
    pub fn find(&self, hashes: &[BlockHash], out: &mut Overlaps) {
        self.reader().find(hashes, out);
    }

    /// Hashes blocks after `before` and stores them.
    fn store_tokens(
        &mut self,
        worker: WorkerKey,
        parent: Option<EngineHash>,
        mut before: BlockHash,
        run: TokenBlocks<'_>,
        observer: &mut impl Observer,
    ) -> AppliedBlocks {
        let TokenBlocks { blocks, tier } = run;
        let block_size = self.config.block_size as usize;
        let is_whole = |block: &&StoredBlock| block_size > 0 && block.tokens.len() == block_size;
        let hasher = self.hasher;
        let mut hashed = std::mem::take(&mut self.hashed);
        hashed.clear();
        hashed.extend(blocks.iter().take_while(is_whole).map(|block| {
            before = hasher.next(before, &block.tokens);
            if block.opaque {
                before.0 ^= OPAQUE;
            }
            HashedBlock { engine: block.hash, hash: before }
        }));
        let mut applied = self.store(worker, parent, &hashed, tier);
        if applied.stored > 0 {
            // If storing stops, it stops for all following blocks as well.
            let blocks = &hashed[..applied.stored];
            observer.see(Change::Stored { parent, blocks, tier });
        }
        if let Some(behind) = blocks.len().checked_sub(hashed.len() + 1) {
            applied.malformed += 1;
            applied.orphaned += behind;
        }
        self.hashed = hashed;
        applied
    }

    fn root(&mut self, salt: Option<&str>, adapter: Option<&str>) -> BlockHash {
        if let Some((known_salt, known_adapter, root)) = &self.root
            && known_salt.as_deref() == salt
            && known_adapter.as_deref() == adapter
        {
            return *root;
        }
        let IndexConfig { model, block_size, seed, .. } = &self.config;
        let root = Namespace { salt, model, adapter, block_size: *block_size }.root(*seed);
        self.root = Some((salt.map(str::to_owned), adapter.map(str::to_owned), root));
        root
    }

    /// The chained hash of a block that a worker holds. It includes the namespace, which need not
    /// be checked again.
    fn hash_of(&self, worker: WorkerKey, engine: EngineHash) -> Option<BlockHash> {
        let names = &self.workers.get(&worker)?.names;
        let (run, at) = self.forest.locate(names.place(names.find(engine.0)?))?;
        Some(BlockHash(self.forest.hash(run, at)))
    }

    /// The state of a worker; if the worker is new, it gets a state and a slot. `None` if all slots
    /// are in use.
    fn admit(&mut self, worker: WorkerKey) -> Option<u16> {
        if let Some(known) = self.workers.get(&worker) {
            return Some(known.slot);
        }
        let taken: Vec<_> = self.forest.slots().keys.iter().map(Option::is_some).collect();
        let slot = taken.iter().position(|taken| !taken).unwrap_or(taken.len());
        let slot = u16::try_from(slot).ok().filter(|slot| *slot < SLOTS_MAX)?;
        let slots = self.forest.slots().with(worker, slot);
        self.forest.add_slot(slots, slot);
        self.workers.insert(worker, Worker::new(slot));
        Some(slot)
    }

    /// Drops all that one rank of a worker holds; returns the number of distinct blocks. Readers
    /// stop seeing the worker immediately, before its blocks are removed.
    pub fn clear_worker(&mut self, worker: WorkerKey) -> usize {
        self.forget_groups(worker);
        self.clear_spine(worker)
    }

    /// Drops the blocks of the spine.
    fn clear_spine(&mut self, worker: WorkerKey) -> usize {
        let Some(known) = self.workers.remove(&worker) else {
            return 0;
        };
        self.forest.remove_slot(worker, known.slot);
        known.leave(&mut self.forest);
        self.forest.compact_if_sparse();
        known.names.len()
    }

    /// Drops all that a worker holds, in every rank, in time proportional to the number of blocks;
    /// returns how many distinct blocks that was.
    pub fn remove_worker(&mut self, worker: u32) -> usize {
        self.forget_groups_of_ranks(worker);
        let mut removed = 0;
        while let Some((&key, _)) = self.workers.range(Self::ranks(worker)).next() {
            removed += self.clear_spine(key);
        }
        removed
    }

    /// Drops the state and the slot of a worker that holds nothing.
    fn dismiss_if_empty(&mut self, worker: WorkerKey) {
        let is_empty =
            |worker: &Worker| worker.names.is_empty() && worker.waiting_events.is_empty();
        if self.workers.get(&worker).is_some_and(is_empty) {
            self.clear_spine(worker);
        }
    }

    /// Number of distinct engine hashes with at least one copy, per tier (indexed by `Tier as
    /// usize`). A block in two tiers counts in both.
    pub fn block_counts(&self, worker: WorkerKey) -> [usize; Tier::COUNT] {
        self.workers.get(&worker).map_or([0; Tier::COUNT], |worker| worker.counts)
    }

    /// The number of further engine hashes that a worker may have.
    pub fn room(&self, worker: WorkerKey) -> usize {
        let held = self.workers.get(&worker).map_or(0, |worker| worker.names.len());
        self.limit().saturating_sub(held)
    }

    /// Number of distinct engine hashes of a worker, over all its ranks.
    pub fn held(&self, worker: u32) -> usize {
        self.workers.range(Self::ranks(worker)).map(|(_, rank)| rank.names.len()).sum()
    }

    /// The workers that hold at least one block, sorted by key.
    pub fn workers(&self) -> impl Iterator<Item = WorkerKey> + '_ {
        let holding = self.workers.iter().filter(|(_, worker)| !worker.names.is_empty());
        holding.map(|(key, _)| *key)
    }

    /// Number of distinct blocks in all chains, including blocks that no worker holds any more but
    /// that others follow. Takes time proportional to the number of runs.
    pub fn distinct_blocks(&self) -> usize {
        self.forest.run_ids().map(|run| self.forest.run(run).len() as usize).sum()
    }

    /// Memory of the index in bytes, without the allocator's overhead.
    pub fn bytes(&self) -> usize {
        let groups = self.hybrids.values().map(CacheGroups::bytes).sum::<usize>();
        self.forest.bytes() + self.workers.values().map(Worker::bytes).sum::<usize>() + groups
    }

    /// The maximum number of distinct engine hashes of each worker.
    pub fn limit(&self) -> usize {
        self.config.max_blocks_per_worker.min(NAMES_MAX)
    }
}
