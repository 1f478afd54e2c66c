//! Blocks that a worker holds under several names.
//!
//! An engine names a block by its content, so two names for one content occur only if the engine
//! restarted without being noticed, or its names depend on more than the router knows. The block is
//! held until the last of its names is removed, in the fastest tier of any name.

use std::collections::BTreeMap;

use super::forest::{Forest, Span};
use super::holders::ABSENT;
use super::names::Lane;
use super::strips::Place;
use super::worker::{Worker, fastest};
use crate::event::Tier;

/// The names of one block.
#[derive(Debug, Default)]
pub(super) struct Doubles {
    /// Fastest tier of the first name, or [`ABSENT`] after its removal.
    first: u8,
    /// The further names and their fastest tiers; their number is limited only by the worker's
    /// bound on names.
    further: BTreeMap<Lane, u8>,
    /// Number of further names by fastest tier.
    by_tier: [u32; Tier::COUNT],
}

impl Doubles {
    fn fastest(&self) -> u8 {
        self.first.min(fastest(&self.by_tier))
    }

    /// Sets the fastest tier of a further name; [`ABSENT`] removes the name.
    fn set(&mut self, lane: Lane, tier: u8) {
        let before = match tier {
            ABSENT => self.further.remove(&lane),
            _ => self.further.insert(lane, tier),
        };
        if let Some(before) = before {
            self.by_tier[usize::from(before)] -= 1;
        }
        if tier != ABSENT {
            self.by_tier[usize::from(tier)] += 1;
        }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of::<(Place, Self)>() + self.further.len() * size_of::<(Lane, u8)>() * 2
    }

    /// Updates the lanes after names have moved.
    pub(super) fn move_to(&mut self, moved: impl Fn(Lane) -> Lane) {
        let further = std::mem::take(&mut self.further);
        self.further = further.into_iter().map(|(lane, tier)| (moved(lane), tier)).collect();
    }

    fn names(&self) -> usize {
        self.further.len() + usize::from(self.first != ABSENT)
    }
}

impl Worker {
    /// Notes that new names hold these blocks in a tier. The first name is at `lane`, the others
    /// follow it as `lane_at` says.
    pub(super) fn hold(
        &mut self,
        forest: &mut Forest,
        span: Span,
        tier: u8,
        lane_at: impl Fn(&Self, u32) -> Option<Lane>,
    ) {
        if forest.holds_none(span, self.slot) {
            return forest.set_tier(span, self.slot, tier);
        }
        for at in span.from..span.to {
            let held = forest.tier_of(span.run, self.slot, at);
            let mut shown = tier;
            if held != ABSENT
                && let Some(lane) = lane_at(self, at)
            {
                let place = forest.place(span.run, at);
                let first = Doubles { first: held, ..Doubles::default() };
                let doubles = self.doubles.entry(place).or_insert(first);
                doubles.set(lane, tier);
                shown = doubles.fastest();
            }
            forest.set_tier(Span { from: at, to: at + 1, ..span }, self.slot, shown);
        }
    }

    /// Notes that a name's fastest tier has changed.
    pub(super) fn retier(&mut self, forest: &mut Forest, lane: Lane, tier: u8) {
        let place = self.names.place(lane);
        let shown = match self.doubles.get_mut(&place) {
            None => tier,
            Some(doubles) => {
                match doubles.further.contains_key(&lane) {
                    true => doubles.set(lane, tier),
                    false => doubles.first = tier,
                }
                doubles.fastest()
            }
        };
        self.show(forest, place, shown);
    }

    /// Notes that a name of a block was removed; returns the tier in which other names still hold
    /// the block.
    pub(super) fn release_double(&mut self, place: Place, lane: Lane) -> u8 {
        let Some(doubles) = self.doubles.get_mut(&place) else {
            return ABSENT;
        };
        match doubles.further.contains_key(&lane) {
            true => doubles.set(lane, ABSENT),
            false => doubles.first = ABSENT,
        }
        let fastest = doubles.fastest();
        if doubles.names() < 2 {
            // The remaining name is an ordinary one again.
            self.doubles.remove(&place);
        }
        fastest
    }
}
