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
mod groups;
mod host;
mod sequence;

use std::collections::HashMap;
use std::ops::Range;

pub use groups::GroupKind;
pub use sequence::{ExtraKey, Media, Namespace, Sequence};

use free_list::FreeList;
use host::HostTier;
use sequence::GroupBlocks;

/// The key of full attention's blocks, whatever number the group has in events.
const FULL: usize = usize::MAX;

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
    /// Full blocks that a cache group besides full attention now holds; perhaps none of those whose
    /// tokens it names.
    GroupStored {
        /// The number of the group.
        group: usize,
        /// Its kind.
        kind: GroupKind,
        /// The blocks.
        stored: StoredBlocks,
    },
    /// One physical block of a cache group besides full attention was removed.
    GroupRemoved {
        /// The number of the group.
        group: usize,
        /// Chained hash of the block.
        hash: u64,
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
    /// The cache group, and the hash of the tokens.
    key: Option<(usize, u64)>,
    users: u32,
}

/// The block pool of one engine.
#[derive(Debug)]
pub struct KvCache {
    block_size: usize,
    blocks: Vec<Block>,
    free: FreeList,
    /// Physical blocks per group and hash, oldest first; a hit uses the oldest.
    known: HashMap<(usize, u64), Vec<u32>>,
    /// The cache groups besides full attention, which takes the number after theirs.
    groups: Vec<GroupKind>,
    drops_last_block: bool,
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
            groups: Vec::new(),
            drops_last_block: false,
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

    /// Adds cache groups besides full attention. All groups take blocks from the same pool.
    #[must_use]
    pub fn with_groups(self, groups: Vec<GroupKind>) -> Self {
        Self { groups, ..self }
    }

    /// Sets whether the last block of a hit is computed again, as with EAGLE and MTP.
    #[must_use]
    pub fn dropping_last_block(self, drops_last_block: bool) -> Self {
        Self { drops_last_block, ..self }
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
        let is_device = |hash: &&u64| self.known.contains_key(&(FULL, **hash));
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

    /// The hashes of full attention in the prefix cache with their numbers of physical copies.
    pub fn resident(&self) -> impl Iterator<Item = (u64, usize)> {
        let full = self.known.iter().filter(|((group, _), _)| *group == FULL);
        full.map(|((_, hash), copies)| (*hash, copies.len()))
    }

    /// Number of blocks from the start of the sequence that a request would hit now.
    #[must_use]
    pub fn hit_blocks(&self, sequence: &Sequence) -> usize {
        let is_held =
            |group: usize, index: usize| self.known.contains_key(&(group, sequence.hashes[index]));
        let passes = |blocks: usize| {
            let mut groups = self.groups.iter().enumerate();
            groups.all(|(group, kind)| {
                let needed = kind.needed(blocks, self.block_size);
                (blocks - needed..blocks).all(|index| is_held(group, index))
            })
        };
        let most = self.full_hits(sequence).saturating_sub(usize::from(self.drops_last_block));
        (0..=most).rev().find(|blocks| passes(*blocks)).unwrap_or(0)
    }

    /// Number of blocks from the start of the sequence that full attention holds, without the last
    /// token.
    fn full_hits(&self, sequence: &Sequence) -> usize {
        let most = self.last_point(sequence).min(sequence.hashes.len());
        let held = sequence.hashes[..most].iter();
        held.take_while(|hash| self.known.contains_key(&(FULL, **hash))).count()
    }

    /// The last block boundary before a sequence's last token, in blocks.
    fn last_point(&self, sequence: &Sequence) -> usize {
        sequence.tokens.len().saturating_sub(1) / self.block_size
    }

    /// Gives a new sequence blocks for all its tokens, reusing cached ones. `keep_free` further
    /// blocks must stay free.
    ///
    /// Returns the number of blocks hit, or `None`, without any change, if there are not enough
    /// blocks.
    pub fn admit(&mut self, sequence: &mut Sequence, keep_free: usize) -> Option<usize> {
        let hits = self.hit_blocks(sequence);
        let id_of = |group: usize, index: usize| self.known[&(group, sequence.hashes[index])][0];
        let hit_ids: Vec<u32> = (0..hits).map(|index| id_of(FULL, index)).collect();
        let points = [self.last_point(sequence), self.full_hits(sequence)];
        let beside = self.groups.iter().enumerate().map(|(group, kind)| {
            let needed = kind.needed(hits, self.block_size);
            let hits_here = (hits - needed..hits).map(|index| id_of(group, index));
            (hits_here.collect::<Vec<_>>(), kind.kept(&points, hits, self.block_size))
        });
        let beside: Vec<_> = beside.collect();
        let all_hits: Vec<u32> =
            hit_ids.iter().chain(beside.iter().flat_map(|(ids, _)| ids)).copied().collect();
        let idle_hits = all_hits.iter().filter(|id| self.blocks[**id as usize].users == 0).count();
        let kept: usize = beside.iter().map(|(_, kept)| kept.len()).sum();
        let fresh = sequence.tokens.len().div_ceil(self.block_size) - hits + kept;
        if fresh + idle_hits + keep_free > self.free.len() {
            return None;
        }
        for id in &all_hits {
            let block = &mut self.blocks[*id as usize];
            if block.users == 0 {
                self.free.remove(*id);
            }
            block.users += 1;
        }
        sequence.blocks = hit_ids;
        sequence.registered = hits;
        self.grow(sequence, sequence.tokens.len());
        sequence.beside = beside
            .into_iter()
            .map(|(hits, kept)| {
                let kept = kept.into_iter().filter_map(|index| Some((index, self.take_free()?)));
                GroupBlocks { hits, kept: kept.collect() }
            })
            .collect();
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
            let Some(id) = self.take_free() else {
                return false;
            };
            sequence.blocks.push(id);
        }
        true
    }

    fn take_free(&mut self) -> Option<u32> {
        let id = self.free.pop_front()?;
        self.forget(id);
        self.blocks[id as usize].users = 1;
        Some(id)
    }

    fn cache(&mut self, id: u32, group: usize, hash: u64) {
        self.blocks[id as usize].key = Some((group, hash));
        self.known.entry((group, hash)).or_default().push(id);
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
            self.cache(id, FULL, hash);
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
        self.register_beside(sequence, from..until, &stored);
        if let Some(host) = &mut self.host {
            host.describe(&stored, self.block_size);
            stored.hashes.iter().for_each(|hash| {
                host.touch(*hash);
            });
        }
        self.events.push(CacheEvent::Stored(stored));
    }

    /// Adds what the groups besides full attention keep of these blocks, and announces the blocks of
    /// each group, even if it keeps none.
    fn register_beside(
        &mut self,
        sequence: &mut Sequence,
        blocks: Range<usize>,
        stored: &StoredBlocks,
    ) {
        for (group, beside) in sequence.beside.iter_mut().enumerate() {
            let kept: Vec<_> =
                beside.kept.range(blocks.clone()).map(|(at, id)| (*at, *id)).collect();
            for (index, id) in &kept {
                self.cache(*id, group, sequence.hashes[*index]);
            }
            let of_kept = |(index, _): &(usize, u32)| sequence.hashes[*index];
            let keys_of =
                |(index, _): &(usize, u32)| stored.extra_keys[index - blocks.start].clone();
            let stored = StoredBlocks {
                hashes: kept.iter().map(of_kept).collect(),
                extra_keys: kept.iter().map(keys_of).collect(),
                ..stored.clone()
            };
            let kind = self.groups[group];
            self.events.push(CacheEvent::GroupStored { group, kind, stored });
        }
    }

    /// Takes back a sequence's blocks, its tail first.
    pub fn release(&mut self, sequence: &mut Sequence) {
        let mut unhashed = Vec::new();
        let beside = std::mem::take(&mut sequence.beside).into_iter();
        let beside =
            beside.flat_map(|group| group.hits.into_iter().chain(group.kept.into_values()));
        let all: Vec<u32> = beside.chain(std::mem::take(&mut sequence.blocks)).collect();
        for id in all.into_iter().rev() {
            let block = &mut self.blocks[id as usize];
            block.users -= 1;
            if block.users > 0 {
                continue;
            }
            match block.key {
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
            block.key = None;
        }
        self.events.push(CacheEvent::Cleared);
        true
    }

    /// The changes since the last call.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }

    fn forget(&mut self, id: u32) {
        let Some(key) = self.blocks[id as usize].key.take() else {
            return;
        };
        let (group, hash) = key;
        if let Some(copies) = self.known.get_mut(&key) {
            copies.retain(|copy| *copy != id);
            if copies.is_empty() {
                self.known.remove(&key);
                if group == FULL {
                    self.move_to_host(hash);
                }
            }
        }
        if group != FULL {
            self.events.push(CacheEvent::GroupRemoved { group, hash });
            return;
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
