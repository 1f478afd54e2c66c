//! The depths at which a worker with several cache groups can resume a prompt, for readers.
//!
//! A point is the chained hash of the last block before it, which stands for the whole prefix and so
//! for the depth as well. Readers and the writer never wait for each other: each point is one word.

use std::collections::BTreeMap;

use super::sync::{AtomicU32, AtomicU64, Ordering, SwapCell};
use crate::hash::BlockHash;

const EMPTY: u64 = 0;
/// The value of a removed slot, after which searches continue.
const REMOVED: u64 = 1;
const SLOTS_MIN: usize = 16;
const WORD_BITS: u32 = 64;

/// The points of one worker, as readers see them.
#[derive(Debug)]
pub(super) struct ResumePoints {
    table: SwapCell<Table>,
    /// Each multiple of this depth in blocks is a point as well, if it is not 0.
    boundary: AtomicU32,
}

#[derive(Debug)]
struct Table {
    /// A hash table of the points, at most three quarters full. Its length is a power of two.
    slots: Box<[AtomicU64]>,
    /// One bit for each depth in blocks that has a point, so that readers try no other.
    depths: Box<[AtomicU64]>,
}

impl ResumePoints {
    pub(super) fn new() -> Self {
        Self { table: SwapCell::from_pointee(Table::with_room(0, 0)), boundary: AtomicU32::new(0) }
    }

    /// Makes each multiple of a depth in blocks a point as well.
    pub(super) fn set_boundary(&self, boundary: Option<u32>) {
        self.boundary.store(boundary.unwrap_or(0), Ordering::Release);
    }

    /// The deepest point of a prompt that is not beyond `blocks` blocks; 0 if there is none.
    pub(super) fn deepest(&self, hashes: &[BlockHash], blocks: u32) -> u32 {
        let boundary = self.boundary.load(Ordering::Acquire);
        let before = blocks.checked_rem(boundary).map_or(0, |beyond| blocks - beyond);
        self.deepest_in_table(hashes, blocks).max(before)
    }

    fn deepest_in_table(&self, hashes: &[BlockHash], blocks: u32) -> u32 {
        let table = self.table.load();
        let blocks = blocks.min(hashes.len() as u32);
        let words = (blocks.div_ceil(WORD_BITS) as usize).min(table.depths.len());
        for word in (0..words).rev() {
            let first = word as u32 * WORD_BITS;
            let mut left = table.depths[word].load(Ordering::Acquire);
            if blocks - first < WORD_BITS {
                left &= (1 << (blocks - first)) - 1;
            }
            while left != 0 {
                let bit = u64::BITS - 1 - left.leading_zeros();
                left &= !(1 << bit);
                if table.contains(hashes[(first + bit) as usize].0) {
                    return first + bit + 1;
                }
            }
        }
        0
    }
}

impl Table {
    fn with_room(points: usize, depths: u32) -> Self {
        let slots = (points * 2).next_power_of_two().max(SLOTS_MIN);
        let empty = |words: usize| (0..words).map(|_| AtomicU64::new(EMPTY)).collect();
        Self { slots: empty(slots), depths: empty(depths.div_ceil(WORD_BITS) as usize) }
    }

    /// The places of a search, until the caller stops at an empty one.
    fn search(&self, hash: u64) -> impl Iterator<Item = &AtomicU64> {
        let mask = self.slots.len() - 1;
        (0..self.slots.len())
            .map(move |step| &self.slots[(hash as usize).wrapping_add(step) & mask])
    }

    fn contains(&self, hash: u64) -> bool {
        let loaded = self.search(hash).map(|slot| slot.load(Ordering::Acquire));
        loaded.take_while(|slot| *slot != EMPTY).any(|slot| slot == hash)
    }

    /// Adds a hash that is not in the table; returns whether a previously empty slot is now in use.
    fn insert(&self, hash: u64) -> bool {
        for slot in self.search(hash) {
            let before = slot.load(Ordering::Relaxed);
            if before == EMPTY || before == REMOVED {
                slot.store(hash, Ordering::Release);
                return before == EMPTY;
            }
        }
        false
    }

    fn remove(&self, hash: u64) {
        for slot in self.search(hash) {
            match slot.load(Ordering::Relaxed) {
                EMPTY => return,
                found if found == hash => return slot.store(REMOVED, Ordering::Release),
                _ => {}
            }
        }
    }

    fn mark_depth(&self, depth: u32, has_points: bool) {
        let (word, bit) = ((depth - 1) / WORD_BITS, (depth - 1) % WORD_BITS);
        let word = &self.depths[word as usize];
        let before = word.load(Ordering::Relaxed) & !(1 << bit);
        word.store(before | u64::from(has_points) << bit, Ordering::Release);
    }

    fn covers(&self, depth: u32) -> bool {
        depth <= self.depths.len() as u32 * WORD_BITS
    }
}

/// The writer's side of [`ResumePoints`].
#[derive(Debug, Default)]
pub(super) struct PointWriter {
    /// The depth of each point in blocks.
    points: BTreeMap<BlockHash, u32>,
    /// The number of points of each depth.
    by_depth: BTreeMap<u32, u32>,
    /// Slots of the table that are not empty, including removed ones.
    used: usize,
}

impl PointWriter {
    /// Adds a point at a depth of at least one block, or removes it.
    pub(super) fn set(
        &mut self,
        shown: &ResumePoints,
        hash: BlockHash,
        depth: u32,
        is_point: bool,
    ) {
        // Two values of 2^64 cannot be shown.
        if self.points.contains_key(&hash) == is_point || hash.0 <= REMOVED {
            return;
        }
        match is_point {
            true => self.add(shown, hash, depth),
            false => self.take(shown, hash),
        }
    }

    fn add(&mut self, shown: &ResumePoints, hash: BlockHash, depth: u32) {
        self.points.insert(hash, depth);
        *self.by_depth.entry(depth).or_default() += 1;
        let table = shown.table.load();
        if (self.used + 1) * 4 > table.slots.len() * 3 || !table.covers(depth) {
            return self.rebuild(shown);
        }
        self.used += usize::from(table.insert(hash.0));
        table.mark_depth(depth, true);
    }

    fn take(&mut self, shown: &ResumePoints, hash: BlockHash) {
        let Some(depth) = self.points.remove(&hash) else { return };
        let table = shown.table.load();
        table.remove(hash.0);
        let of_depth = self.by_depth.entry(depth).or_default();
        *of_depth -= 1;
        if *of_depth == 0 {
            self.by_depth.remove(&depth);
            table.mark_depth(depth, false);
        }
    }

    /// Replaces what readers see by a table with room for twice the points.
    fn rebuild(&mut self, shown: &ResumePoints) {
        let deepest = self.by_depth.last_key_value().map_or(0, |(depth, _)| *depth);
        let table = Table::with_room(self.points.len(), deepest);
        for (hash, depth) in &self.points {
            table.insert(hash.0);
            table.mark_depth(*depth, true);
        }
        self.used = self.points.len();
        shown.table.swap(table.into());
    }

    /// Removes all points.
    pub(super) fn clear(&mut self, shown: &ResumePoints) {
        *self = Self::default();
        self.rebuild(shown);
    }

    pub(super) fn bytes(&self) -> usize {
        // A table has at most four slots for each point.
        self.points.len() * (4 * size_of::<u64>() + 2 * size_of::<(BlockHash, u32)>())
    }
}
