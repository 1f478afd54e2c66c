//! What one worker holds: the side of the index that its events change.

use std::collections::BTreeMap;

use super::adapters::AdapterBlocks;
use super::doubles::Doubles;
use super::forest::{Forest, Span};
use super::holders::ABSENT;
use super::names::{Lane, Names};
use super::strips::Place;
use super::waiting_events::WaitingEvents;
use crate::event::{EngineHash, Tier};

/// One worker, or one rank of a worker.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) slot: u16,
    pub(super) names: Names,
    /// For each tier, the number of names with a copy there.
    pub(super) counts: [usize; Tier::COUNT],
    /// Copies per tier, for names with copies other than one in the fastest tier.
    pub(super) copies: BTreeMap<Lane, [u32; Tier::COUNT]>,
    /// Blocks with several names.
    pub(super) doubles: BTreeMap<Place, Doubles>,
    /// Events that wait for their parent.
    pub(super) waiting_events: WaitingEvents,
    /// Which of the blocks belong to adapters.
    pub(super) adapters: AdapterBlocks,
}

/// The fastest tier with a copy; [`ABSENT`] if there is none.
pub(super) fn fastest(copies: &[u32; Tier::COUNT]) -> u8 {
    copies.iter().position(|copies| *copies > 0).map_or(ABSENT, |tier| tier as u8)
}

impl Worker {
    pub(super) fn new(slot: u16) -> Self {
        Self {
            slot,
            names: Names::default(),
            counts: [0; Tier::COUNT],
            copies: BTreeMap::new(),
            doubles: BTreeMap::new(),
            waiting_events: WaitingEvents::default(),
            adapters: AdapterBlocks::default(),
        }
    }

    /// The copies of a name, per tier.
    pub(super) fn copies(&self, lane: Lane) -> [u32; Tier::COUNT] {
        match self.names.is_special(lane) {
            false => [1, 0, 0, 0],
            true => self.copies.get(&lane).copied().unwrap_or_default(),
        }
    }

    /// Adds copies of a name in a tier.
    pub(super) fn add_copies(&mut self, forest: &mut Forest, lane: Lane, tier: Tier, count: u32) {
        let mut copies = self.copies(lane);
        let before = fastest(&copies);
        let held = &mut copies[tier as usize];
        self.counts[tier as usize] += usize::from(*held == 0);
        *held = held.saturating_add(count);
        self.names.set_special(lane);
        self.copies.insert(lane, copies);
        if fastest(&copies) != before {
            self.retier(forest, lane, fastest(&copies));
        }
    }

    /// Removes one copy; `None` if there is none in that tier, and otherwise whether it was the
    /// last in any tier. In that case the caller must still remove the name.
    pub(super) fn take_copy(
        &mut self,
        forest: &mut Forest,
        lane: Lane,
        tier: Tier,
    ) -> Option<bool> {
        if !self.names.is_special(lane) {
            if tier != Tier::Device {
                return None;
            }
            self.counts[Tier::Device as usize] -= 1;
            return Some(true);
        }
        let copies = self.copies.get_mut(&lane)?;
        let before = fastest(copies);
        let held = &mut copies[tier as usize];
        *held = held.checked_sub(1)?;
        self.counts[tier as usize] -= usize::from(*held == 0);
        let after = fastest(copies);
        if after == ABSENT {
            self.copies.remove(&lane);
            return Some(true);
        }
        if after != before {
            self.retier(forest, lane, after);
        }
        Some(false)
    }

    /// Removes all copies of a block but one from a tier; returns how many that were. The block
    /// stays where it is shown.
    pub(super) fn take_further_copies(&mut self, hash: EngineHash, tier: Tier) -> u32 {
        let lane = self.names.find(hash.0);
        let copies = lane.and_then(|lane| self.copies.get_mut(&lane));
        let Some(held) = copies.map(|copies| &mut copies[tier as usize]) else {
            return 0;
        };
        let further = held.saturating_sub(1);
        *held -= further;
        further
    }

    /// Removes a name with all its copies.
    pub(super) fn forget(&mut self, forest: &mut Forest, lane: Lane) {
        for (tier, copies) in self.copies(lane).iter().enumerate() {
            self.counts[tier] -= usize::from(*copies > 0);
        }
        self.copies.remove(&lane);
        let place = self.names.place(lane);
        self.names.remove(lane);
        self.release(forest, place, lane);
    }

    /// Releases the block of a removed name; another name may still hold the block.
    pub(super) fn release(&mut self, forest: &mut Forest, place: Place, lane: Lane) {
        let tier = self.release_double(place, lane);
        self.show(forest, place, tier);
    }

    /// Releases blocks `from` to `to` of a strip; none of them has two names.
    pub(super) fn release_span(&mut self, forest: &mut Forest, strip: u32, from: u32, to: u32) {
        let mut to = to;
        // From the end, because later blocks keep earlier ones.
        while to > from {
            let Some((run, at)) = forest.locate(Place { strip, offset: to - 1 }) else {
                return;
            };
            let start = forest.meta(run).start;
            let first = from.max(start);
            forest.set_tier(Span { run, from: first - start, to: at + 1 }, self.slot, ABSENT);
            forest.tidy(run);
            to = first;
        }
    }

    /// Publishes to readers in which tier a block is.
    pub(super) fn show(&self, forest: &mut Forest, place: Place, tier: u8) {
        let Some((run, at)) = forest.locate(place) else {
            return;
        };
        forest.set_tier(Span { run, from: at, to: at + 1 }, self.slot, tier);
        if tier == ABSENT {
            forest.tidy(run);
        }
    }

    /// Frees memory that the names no longer need.
    pub(super) fn shrink_if_sparse(&mut self) {
        if self.names.is_sparse() {
            let moved = self.names.shrink();
            let copies = std::mem::take(&mut self.copies);
            self.copies = copies.into_iter().map(|(lane, copies)| (moved(lane), copies)).collect();
            self.doubles.values_mut().for_each(|doubles| doubles.move_to(&moved));
        }
    }

    /// Releases everything in the forest. Readers do not see the worker any more.
    pub(super) fn leave(&self, forest: &mut Forest) {
        let mut last = None;
        for (place, present) in self.names.groups() {
            let mut left = present;
            while left != 0 {
                let lane = left.trailing_zeros();
                let place = Place { offset: place.offset + lane, ..place };
                let Some((run, at)) = forest.locate(place) else {
                    left &= left - 1;
                    continue;
                };
                // Blocks of the group in the same run need not be examined.
                let end = lane + (forest.run(run).len() - at);
                left = if end >= u8::BITS { 0 } else { left & (u8::MAX << end) };
                if last != Some(run) {
                    last = Some(run);
                    forest.drop_holder(run, self.slot);
                    forest.tidy(run);
                }
            }
        }
    }

    pub(super) fn bytes(&self) -> usize {
        const PER_COPY: usize = size_of::<(Lane, [u32; Tier::COUNT])>() * 2;
        self.names.bytes()
            + self.copies.len() * PER_COPY
            + self.doubles.values().map(Doubles::bytes).sum::<usize>()
            + self.waiting_events.bytes()
            + self.adapters.bytes()
    }
}
