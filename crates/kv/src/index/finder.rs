//! Finds the strip of any chained hash, for callers that know a prompt's last block and not
//! the blocks before it.
//!
//! A slot has four bytes: the strip's number in the low bits, and bits of the hash in the high
//! bits. The place of a block within its strip follows from its depth in the prompt, so it is not
//! stored.

/// A slot that was never used: searches end at it.
const EMPTY: u32 = 0;
/// A slot whose entry was removed: searches continue after it.
const REMOVED: u32 = 1;
/// What is added to a strip's number in a slot, because lower values have the meanings above.
const FIRST: u32 = 2;
/// The share of used slots, including removed ones, at which the table is rebuilt.
const FULL: (usize, usize) = (4, 5);
/// Minimum number of slots.
const SLOTS_MIN: usize = 64;

/// The table; empty until it is first needed.
#[derive(Debug, Default)]
pub(super) struct Finder {
    slots: Vec<u32>,
    /// Number of slots that are not empty, including removed ones.
    used: usize,
    strip_bits: u32,
}

impl Finder {
    /// A table with room for one and a half times `blocks`, for strip numbers up to twice `strip`.
    pub(super) fn with_room(blocks: usize, strip: u32) -> Self {
        let slots = (blocks * 3 / 2 * FULL.1 / FULL.0).max(SLOTS_MIN);
        let strip_bits = (u32::BITS - (strip + FIRST).leading_zeros() + 1).min(u32::BITS);
        Self { slots: vec![EMPTY; slots], used: 0, strip_bits }
    }

    /// Whether this many further blocks of a strip can be added.
    pub(super) fn has_room(&self, blocks: usize, strip: u32) -> bool {
        (self.used + blocks) * FULL.1 <= self.slots.len() * FULL.0
            && u64::from(strip) + u64::from(FIRST) < 1 << self.strip_bits
    }

    /// Adds blocks of a strip; there must be [room](Finder::has_room).
    pub(super) fn add(&mut self, strip: u32, hashes: impl Iterator<Item = u64>) {
        for hash in hashes {
            let mut at = self.home(hash);
            while self.slots[at] > REMOVED {
                at = self.behind(at);
            }
            self.used += usize::from(self.slots[at] == EMPTY);
            self.slots[at] = self.slot(hash, strip);
        }
    }

    /// Removes blocks of a strip. Slots of one strip with the same hash bits are interchangeable:
    /// whichever is removed, the others still serve all their blocks.
    pub(super) fn remove(&mut self, strip: u32, hashes: impl Iterator<Item = u64>) {
        for hash in hashes {
            let slot = self.slot(hash, strip);
            let mut at = self.home(hash);
            while self.slots[at] != slot {
                if self.slots[at] == EMPTY {
                    return;
                }
                at = self.behind(at);
            }
            // A slot before an empty one needs no mark, because searches end there anyway.
            let is_end = self.slots[self.behind(at)] == EMPTY;
            self.slots[at] = if is_end { EMPTY } else { REMOVED };
            self.used -= usize::from(is_end);
        }
    }

    /// The strips that may contain a block.
    pub(super) fn strips(&self, hash: u64) -> impl Iterator<Item = u32> + '_ {
        let mut at = if self.slots.is_empty() { None } else { Some(self.home(hash)) };
        let tag = self.slot(hash, 0) >> (self.strip_bits % u32::BITS);
        let slots = std::iter::from_fn(move || {
            let slot = self.slots[at?];
            at = (slot != EMPTY).then(|| self.behind(at.unwrap_or_default()));
            at.map(|_| slot)
        });
        let mask = self.mask();
        let alike = move |slot: &u32| {
            *slot > REMOVED && (mask == u32::MAX || slot >> (self.strip_bits % u32::BITS) == tag)
        };
        slots.filter(alike).filter_map(move |slot| (slot & mask).checked_sub(FIRST))
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<u32>()
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        // Chained hashes are already evenly distributed.
        (((hash >> 32) * self.slots.len() as u64) >> 32) as usize
    }

    #[inline]
    fn behind(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }

    fn mask(&self) -> u32 {
        u32::MAX >> (u32::BITS - self.strip_bits)
    }

    #[inline]
    fn slot(&self, hash: u64, strip: u32) -> u32 {
        let tag = (hash as u32).checked_shl(self.strip_bits).unwrap_or(0);
        tag | (strip + FIRST)
    }
}
