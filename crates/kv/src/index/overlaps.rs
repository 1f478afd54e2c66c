//! The result of a lookup: how many blocks of a prompt each worker holds.

use std::sync::Arc;

use super::shared::Slots;
use super::worker_key::WorkerKey;
use crate::event::Tier;

/// How much of a prompt one worker can use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Overlap {
    /// Length of the longest prefix of full blocks that the worker holds in any tier and can use: of a
    /// worker with several cache groups, up to a resume point.
    pub blocks: u32,
    /// The same blocks by the fastest tier that has them (indexed by `Tier as usize`); the parts
    /// sum to `blocks`.
    pub by_tier: [u32; Tier::COUNT],
}

impl Overlap {
    /// This overlap with the blocks that the worker can load from a store that another worker has
    /// reported: all workers share it. The store's blocks are taken to be the last of those that the
    /// other worker has, because engines evict the end of a prompt first.
    #[must_use]
    pub fn with_store(mut self, holder: Self) -> Self {
        let in_store = holder.by_tier[Tier::Remote as usize];
        let reaches = in_store > 0 && self.blocks >= holder.blocks - in_store;
        if reaches && self.blocks < holder.blocks {
            self.by_tier[Tier::Remote as usize] += holder.blocks - self.blocks;
            self.blocks = holder.blocks;
        }
        self
    }
}

/// How much of a prompt a worker with several cache groups has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ResumedPrompt {
    /// The number of leading blocks that it holds in the spine.
    pub(super) held: u32,
    /// The blocks up to the deepest resume point that it can use.
    pub(super) usable: u32,
    /// The same if the engine drops the last block that it finds in the spine.
    pub(super) shortened: u32,
}

/// The overlaps of all workers with one prompt. Keep one and pass it to
/// [`IndexReader::find`](super::IndexReader::find) repeatedly: it reuses its memory.
///
/// It stores depths with sets of workers rather than a figure per worker, so that finding costs
/// almost nothing per worker. Reading all overlaps takes one step per worker; reading one takes one
/// step per depth.
#[derive(Clone, Debug, Default)]
pub struct Overlaps {
    pub(super) slots: Arc<Slots>,
    /// Depths at which several workers' overlaps end, each with a set in `bits`.
    pub(super) groups: Vec<u32>,
    /// For each of `groups`, the words of a set of slots.
    pub(super) bits: Vec<u64>,
    /// Workers whose overlap ends alone at a depth: slot in the upper half, depth in the lower.
    pub(super) singles: Vec<u64>,
    /// Slot, tier, and number of blocks for which this is the fastest tier.
    pub(super) slower: Vec<(u16, u8, u32)>,
    /// By slot, what the workers with several cache groups have; empty if there is no such worker.
    pub(super) resumed: Vec<Option<ResumedPrompt>>,
    /// The most blocks of the prompt that any worker can use.
    pub(super) resumed_max: u32,
    /// Sets of slots that a walk needs: still matching, matching next, ended.
    pub(super) alive: Vec<u64>,
    pub(super) next: Vec<u64>,
    pub(super) parted: Vec<u64>,
}

impl Overlaps {
    /// An empty result.
    pub fn new() -> Self {
        Self::default()
    }

    /// The worker's overlap; zero if the worker does not hold the first block.
    pub fn get(&self, worker: WorkerKey) -> Overlap {
        self.slots.of(worker).map_or_else(Overlap::default, |slot| self.of(slot))
    }

    /// [`Self::get`], and the same for an engine that drops the last block of a hit, as vLLM does with
    /// EAGLE and MTP: the draft layers need the tokens before the first new one to be computed.
    pub fn with_and_without_last_block(&self, worker: WorkerKey) -> [Overlap; 2] {
        let Some(slot) = self.slots.of(worker) else { return Default::default() };
        let held = self.depth(slot);
        let usable = self.resumed(slot).map_or_else(
            || [held, held.min(self.resumed_max).saturating_sub(1)],
            |resumed| [resumed.usable, resumed.shortened],
        );
        usable.map(|usable| self.cut(slot, held, usable))
    }

    /// What the worker holds of the prompt in full attention.
    pub fn spine(&self, worker: WorkerKey) -> Overlap {
        let Some(slot) = self.slots.of(worker) else { return Overlap::default() };
        let held = self.depth(slot);
        self.cut(slot, held, held)
    }

    /// The number of leading blocks of the prompt that the worker holds in full attention. Of a worker
    /// with several cache groups it may be more than the worker can use.
    pub fn spine_blocks(&self, worker: WorkerKey) -> u32 {
        self.slots.of(worker).map_or(0, |slot| self.depth(slot))
    }

    /// Whether the worker has several cache groups, so that it uses a prefix up to a resume point.
    pub fn has_resume_points(&self, worker: WorkerKey) -> bool {
        !self.resumed.is_empty()
            && self.slots.of(worker).is_some_and(|slot| self.resumed(slot).is_some())
    }

    /// The workers with at least one block. Groups come in the order of increasing depth; otherwise
    /// there is no order.
    pub fn iter(&self) -> impl Iterator<Item = (WorkerKey, Overlap)> + '_ {
        self.depths().filter_map(|(slot, depth)| {
            let key = (*self.slots.keys.get(usize::from(slot))?)?;
            Some((key, self.overlap(slot, depth)))
        })
    }

    /// The workers with at least one block and the number of leading blocks that each holds in the
    /// spine.
    pub(super) fn depths(&self) -> impl Iterator<Item = (u16, u32)> + '_ {
        let singles = self.singles.iter().map(|word| ((word >> 32) as u16, *word as u32));
        let words = self.words();
        let groups = self.groups.iter().enumerate().flat_map(move |(group, depth)| {
            let set = &self.bits[group * words..(group + 1) * words];
            slots_in(set).map(move |slot| (slot, *depth))
        });
        singles.chain(groups)
    }

    /// Number of workers with at least one block.
    pub fn len(&self) -> usize {
        self.singles.len() + self.bits.iter().map(|word| word.count_ones() as usize).sum::<usize>()
    }

    /// True if no worker has the prompt's first block.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.singles.is_empty()
    }

    /// The largest overlap of any worker, in blocks.
    pub fn deepest(&self) -> u32 {
        let singles = self.singles.iter().map(|word| *word as u32).max();
        self.groups.last().copied().max(singles).unwrap_or(0)
    }

    /// The longest overlap that has blocks in a store; empty if there is none.
    pub fn longest_with_store(&self) -> Overlap {
        let stores = self.slower.iter().filter(|(_, tier, _)| *tier == Tier::Remote as u8);
        stores.map(|(slot, ..)| self.of(*slot)).max_by_key(|found| found.blocks).unwrap_or_default()
    }

    /// Drops the results and keeps the memory.
    pub fn clear(&mut self) {
        self.groups.clear();
        self.bits.clear();
        self.singles.clear();
        self.slower.clear();
        self.resumed.clear();
    }

    /// Drops workers whose slot has been given to another worker.
    pub(super) fn forget_others(&mut self, now: &Slots) {
        let mut same = vec![0_u64; self.words()];
        for (slot, (before, now)) in self.slots.owners.iter().zip(&now.owners).enumerate() {
            same[slot / 64] |= u64::from(before == now) << (slot % 64);
        }
        let stays = |slot: u16| same[usize::from(slot) / 64] >> (slot % 64) & 1 == 1;
        self.singles.retain(|word| stays((*word >> 32) as u16));
        self.slower.retain(|(slot, ..)| stays(*slot));
        let words = self.words();
        let mut kept = 0;
        for group in 0..self.groups.len() {
            let (from, to) = (group * words, kept * words);
            self.bits.copy_within(from..from + words, to);
            let set = &mut self.bits[to..to + words];
            set.iter_mut().zip(&same).for_each(|(word, same)| *word &= same);
            if set.iter().any(|word| *word != 0) {
                self.groups[kept] = self.groups[group];
                kept += 1;
            }
        }
        self.groups.truncate(kept);
        self.bits.truncate(kept * words);
    }

    /// Number of words of a set of slots.
    pub(super) fn words(&self) -> usize {
        self.slots.words()
    }

    fn of(&self, slot: u16) -> Overlap {
        match self.depth(slot) {
            0 => Overlap::default(),
            depth => self.overlap(slot, depth),
        }
    }

    fn resumed(&self, slot: u16) -> Option<ResumedPrompt> {
        *self.resumed.get(usize::from(slot))?
    }

    /// The number of leading blocks that a worker holds in the spine.
    fn depth(&self, slot: u16) -> u32 {
        if let Some(resumed) = self.resumed(slot) {
            return resumed.held;
        }
        let (word, bit) = (usize::from(slot) / 64, slot % 64);
        let words = self.words();
        for (group, depth) in self.groups.iter().enumerate() {
            if self.bits[group * words + word] >> bit & 1 == 1 {
                return *depth;
            }
        }
        let single = self.singles.iter().find(|word| (*word >> 32) as u16 == slot);
        single.map_or(0, |word| *word as u32)
    }

    fn overlap(&self, slot: u16, held: u32) -> Overlap {
        let usable = self.resumed(slot).map_or(held, |resumed| resumed.usable);
        self.cut(slot, held, usable)
    }

    /// The first `usable` of the `held` blocks of a worker.
    fn cut(&self, slot: u16, held: u32, usable: u32) -> Overlap {
        let mut by_tier = [0; Tier::COUNT];
        if self.slower.is_empty() {
            by_tier[Tier::Device as usize] = usable;
            return Overlap { blocks: usable, by_tier };
        }
        by_tier[Tier::Device as usize] = held;
        for &(_, tier, slower) in self.slower.iter().filter(|(of, _, _)| *of == slot) {
            by_tier[Tier::Device as usize] -= slower;
            by_tier[usize::from(tier)] += slower;
        }
        let mut beyond = held - usable;
        // Engines evict the end of a prompt first, so the last blocks are in the slowest tier.
        for blocks in by_tier.iter_mut().rev() {
            let less = beyond.min(*blocks);
            *blocks -= less;
            beyond -= less;
        }
        Overlap { blocks: usable, by_tier }
    }
}

/// The slots of a set, in order.
pub(super) fn slots_in(set: &[u64]) -> impl Iterator<Item = u16> + '_ {
    set.iter().enumerate().flat_map(|(place, word)| {
        let mut left = *word;
        std::iter::from_fn(move || {
            let bit = left.trailing_zeros();
            left &= left.checked_sub(1)?;
            Some((place * 64) as u16 + bit as u16)
        })
    })
}
