//! Maps the hash of a run's first block to the run. A chained hash identifies the whole prefix, so
//! one table serves all runs, and a lookup by the hash of the next block needs no tree.

use super::sync::{AtomicU64, Ordering};

/// A slot: the upper half has bits of the hash, the lower half the run's number plus one.
#[derive(Debug)]
pub(super) struct Heads {
    slots: Box<[AtomicU64]>,
}

const EMPTY: u64 = 0;
/// The value of a removed slot, after which searches continue.
const REMOVED: u64 = u32::MAX as u64;
const SLOTS_MIN: usize = 16;

fn slot_of(hash: u64, run: u32) -> u64 {
    (hash >> 32) << 32 | u64::from(run + 1)
}

impl Heads {
    /// A table for up to `runs` runs, with which it is at most half full.
    pub(super) fn with_room(runs: usize) -> Self {
        let slots = (runs * 2).next_power_of_two().max(SLOTS_MIN);
        Self { slots: (0..slots).map(|_| AtomicU64::new(EMPTY)).collect() }
    }

    pub(super) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// The run whose first block has this hash; `begins` confirms a candidate.
    #[inline]
    pub(super) fn find(&self, hash: u64, begins: impl Fn(u32) -> bool) -> Option<u32> {
        let mask = self.slots.len() - 1;
        let mut at = hash as usize & mask;
        // At most three quarters of the slots are in use, so every search ends.
        loop {
            let slot = self.slots[at].load(Ordering::Acquire);
            if slot == EMPTY {
                return None;
            }
            let run = (slot as u32).wrapping_sub(1);
            if slot >> 32 == hash >> 32 && slot != REMOVED && begins(run) {
                return Some(run);
            }
            at = (at + 1) & mask;
        }
    }

    /// Adds a run; returns whether a previously empty slot is now in use.
    pub(super) fn insert(&self, hash: u64, run: u32) -> bool {
        let mask = self.slots.len() - 1;
        let mut at = hash as usize & mask;
        loop {
            let slot = self.slots[at].load(Ordering::Relaxed);
            if slot == EMPTY || slot == REMOVED {
                self.slots[at].store(slot_of(hash, run), Ordering::Release);
                return slot == EMPTY;
            }
            at = (at + 1) & mask;
        }
    }

    /// Removes a run; returns whether its slot is empty again.
    pub(super) fn remove(&self, hash: u64, run: u32) -> bool {
        let mask = self.slots.len() - 1;
        let mut at = hash as usize & mask;
        loop {
            let slot = self.slots[at].load(Ordering::Relaxed);
            if slot == EMPTY {
                return false;
            }
            if slot == slot_of(hash, run) {
                // A slot before an empty one needs no mark, because searches end there anyway.
                let next = self.slots[(at + 1) & mask].load(Ordering::Relaxed);
                let left = if next == EMPTY { EMPTY } else { REMOVED };
                self.slots[at].store(left, Ordering::Release);
                return left == EMPTY;
            }
            at = (at + 1) & mask;
        }
    }
}
