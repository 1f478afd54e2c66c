//! A paged KV cache with prefix caching, which behaves block for block like that of vLLM's V1
//! engine.
//!
//! Facts observed on a recorded vLLM 0.32.0:
//! - the last prompt token is always computed, so `n` tokens hit at most `(n - 1) / block_size`
//!   blocks; the recomputed last block is stored once more, as another physical block under the
//!   same hash;
//! - a finished sequence frees its tail first, so tails are evicted first;
//! - freed blocks without a hash go to the front of the free list, blocks with a hash to its back;
//! - a removal is announced when a physical block is reused, one event per block.

mod free_list;
mod host;
mod sequence;

use std::collections::HashMap;

pub use sequence::{ExtraKey, Media, Namespace, Sequence};

use free_list::FreeList;
use host::HostTier;

/// Where a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// In accelerator memory.
    Device,
    /// In host memory.
    Host,
}

/// A change of the cache that is announced.
#[derive(Debug, Clone, PartialEq)]
pub enum CacheEvent {
    /// Full blocks that the prefix cache now holds.
    Stored(StoredBlocks),
    /// One physical block under this hash was removed.
    Removed {
        /// Chained hash of the block.
        hash: u64,
        /// Where it was.
        medium: Medium,
    },
    /// All blocks were removed.
    Cleared,
}

/// A run of consecutive full blocks of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredBlocks {
    /// Chained hash per block.
    pub hashes: Vec<u64>,
    /// Hash of the block before the first; `None` at the prompt's start.
    pub parent: Option<u64>,
    /// Tokens of all blocks.
    pub tokens: Vec<u32>,
    /// Adapter name and number.
    pub adapter: Option<(u32, String)>,
    /// For each block, what its hash includes besides tokens (adapter, images, salt).
    pub extra_keys: Vec<Option<Vec<ExtraKey>>>,
    /// Where they are.
    pub medium: Medium,
}

#[derive(Debug, Clone, Copy, Default)]
struct Block {
    hash: Option<u64>,
    users: u32,
}

/// The block pool of one engine.
#[derive(Debug)]
pub struct KvCache {
    block_size: usize,
    blocks: Vec<Block>,
    free: FreeList,
    /// Physical blocks per hash, oldest first; a hit uses the oldest.
    known: HashMap<u64, Vec<u32>>,
    host: Option<HostTier>,
    events: Vec<CacheEvent>,
}

impl KvCache {
    /// A cache of `total_blocks` blocks of `block_size` tokens. Block 0 is the engine's null block,
    /// so one block less can be used.
    ///
    /// # Panics
    /// If there is no usable block, or a block has no tokens.
    #[must_use]
    pub fn new(total_blocks: u32, block_size: usize) -> Self {
        assert!(total_blocks > 1 && block_size > 0, "a cache needs usable blocks");
        Self {
            block_size,
            blocks: vec![Block::default(); total_blocks as usize],
            free: FreeList::new(total_blocks),
            known: HashMap::new(),
            host: None,
            events: Vec::new(),
        }
    }

    /// Sets the maximum number of evicted blocks that stay in host memory. The block that was not used
    /// for the longest time leaves first. With 0, no block stays.
    #[must_use]
    pub fn with_host_blocks(self, host_blocks: usize) -> Self {
        Self { host: (host_blocks > 0).then(|| HostTier::new(host_blocks)), ..self }
    }

    /// Number of blocks in host memory.
    #[must_use]
    pub fn host_blocks(&self) -> usize {
        self.host.as_ref().map_or(0, HostTier::len)
    }

    /// Number of blocks of the sequence behind the first `hits` that must not be computed, and how many
    /// of them must be loaded from host memory.
    #[must_use]
    pub fn loadable_blocks(&self, sequence: &Sequence, hits: usize) -> (usize, usize) {
        let Some(host) = &self.host else { return (0, 0) };
        let most = sequence.tokens.len().saturating_sub(1) / self.block_size;
        let further =
            sequence.hashes.get(hits..most.min(sequence.hashes.len())).unwrap_or_default();
        let is_device = |hash: &&u64| self.known.contains_key(hash);
        let held = further.iter().take_while(|hash| is_device(hash) || host.contains(**hash));
        let held = held.count();
        (held, further[..held].iter().filter(|hash| !is_device(hash)).count())
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Number of blocks that requests can hold.
    #[must_use]
    pub fn usable_blocks(&self) -> usize {
        self.blocks.len() - 1
    }

    /// Number of blocks that no request holds (the prefix cache may still hold them).
    #[must_use]
    pub fn free_blocks(&self) -> usize {
        self.free.len()
    }

    /// Number of physical blocks in the prefix cache.
    #[must_use]
    pub fn resident_blocks(&self) -> usize {
        self.known.values().map(Vec::len).sum()
    }

    /// The hashes in the prefix cache with their numbers of physical copies.
    pub fn resident(&self) -> impl Iterator<Item = (u64, usize)> {
        self.known.iter().map(|(hash, copies)| (*hash, copies.len()))
    }

    /// Number of blocks from the start of the sequence that a request would hit now.
    #[must_use]
    pub fn hit_blocks(&self, sequence: &Sequence) -> usize {
        let most = sequence.tokens.len().saturating_sub(1) / self.block_size;
        sequence.hashes[..most.min(sequence.hashes.len())]
            .iter()
            .take_while(|hash| self.known.contains_key(hash))
            .count()
    }

    /// Gives a new sequence blocks for all its tokens, reusing cached ones. `keep_free` further
    /// blocks must stay free.
    ///
    /// Returns the number of blocks hit, or `None`, without any change, if there are not enough
    /// blocks.
    pub fn admit(&mut self, sequence: &mut Sequence, keep_free: usize) -> Option<usize> {
        let hits = self.hit_blocks(sequence);
        let hit_ids: Vec<u32> = sequence.hashes[..hits].iter().map(|h| self.known[h][0]).collect();
        let idle_hits = hit_ids.iter().filter(|id| self.blocks[**id as usize].users == 0).count();
        let fresh = sequence.tokens.len().div_ceil(self.block_size) - hits;
        if fresh + idle_hits + keep_free > self.free.len() {
            return None;
        }
        for id in &hit_ids {
            let block = &mut self.blocks[*id as usize];
            if block.users == 0 {
                self.free.remove(*id);
            }
            block.users += 1;
        }
        sequence.blocks = hit_ids;
        sequence.registered = hits;
        self.grow(sequence, sequence.tokens.len());
        Some(hits)
    }

    /// Gives a sequence the blocks for its first `tokens` tokens. Returns false, without any
    /// change, if there are not enough blocks.
    pub fn grow(&mut self, sequence: &mut Sequence, tokens: usize) -> bool {
        let missing = tokens.div_ceil(self.block_size).saturating_sub(sequence.blocks.len());
        if missing > self.free.len() {
            return false;
        }
        for _ in 0..missing {
            let Some(id) = self.free.pop_front() else {
                return false;
            };
            self.forget(id);
            self.blocks[id as usize].users = 1;
            sequence.blocks.push(id);
        }
        true
    }

    /// Adds the full blocks among the first `computed` tokens to the prefix cache.
    pub fn register(&mut self, sequence: &mut Sequence, computed: usize) {
        let from = sequence.registered;
        let until = (computed / self.block_size).min(sequence.hashes.len());
        if from >= until {
            return;
        }
        for index in from..until {
            let (id, hash) = (sequence.blocks[index], sequence.hashes[index]);
            self.blocks[id as usize].hash = Some(hash);
            self.known.entry(hash).or_default().push(id);
        }
        sequence.registered = until;
        let namespace = &sequence.namespace;
        let stored = StoredBlocks {
            hashes: sequence.hashes[from..until].to_vec(),
            parent: from.checked_sub(1).map(|index| sequence.hashes[index]),
            tokens: sequence.tokens[from * self.block_size..until * self.block_size].to_vec(),
            adapter: namespace.adapter_id.zip(namespace.adapter.clone()),
            extra_keys: (from..until).map(|index| sequence.extra_keys(index)).collect(),
            medium: Medium::Device,
        };
        if let Some(host) = &mut self.host {
            host.describe(&stored, self.block_size);
            stored.hashes.iter().for_each(|hash| {
                host.touch(*hash);
            });
        }
        self.events.push(CacheEvent::Stored(stored));
    }

    /// Takes back a sequence's blocks, its tail first.
    pub fn release(&mut self, sequence: &mut Sequence) {
        let mut unhashed = Vec::new();
        for id in std::mem::take(&mut sequence.blocks).into_iter().rev() {
            let block = &mut self.blocks[id as usize];
            block.users -= 1;
            if block.users > 0 {
                continue;
            }
            match block.hash {
                Some(_) => self.free.push_back(id),
                None => unhashed.push(id),
            }
        }
        sequence.registered = 0;
        self.free.push_front_all(&unhashed);
    }

    /// Drops all prefixes. Returns false, without any change, while any block is in use.
    pub fn clear(&mut self) -> bool {
        if self.free.len() != self.usable_blocks() {
            return false;
        }
        self.known.clear();
        self.host.iter_mut().for_each(HostTier::clear);
        for block in &mut self.blocks {
            block.hash = None;
        }
        self.events.push(CacheEvent::Cleared);
        true
    }

    /// The changes since the last call.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }

    fn forget(&mut self, id: u32) {
        let Some(hash) = self.blocks[id as usize].hash.take() else {
            return;
        };
        if let Some(copies) = self.known.get_mut(&hash) {
            copies.retain(|copy| *copy != id);
            if copies.is_empty() {
                self.known.remove(&hash);
                self.move_to_host(hash);
            }
        }
        self.events.push(CacheEvent::Removed { hash, medium: Medium::Device });
    }

    fn move_to_host(&mut self, hash: u64) {
        let Some(host) = &mut self.host else { return };
        let (stored, displaced) = host.take_in(hash);
        let removed = displaced.map(|hash| CacheEvent::Removed { hash, medium: Medium::Host });
        self.events.extend(stored.map(CacheEvent::Stored).into_iter().chain(removed));
    }
}
