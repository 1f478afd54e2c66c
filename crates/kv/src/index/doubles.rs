//! Blocks that a worker holds under several names.
//!
//! An engine names a block by its content, so two names for one content occur
//! only where the engine restarted unnoticed or hashes more than is known here. The block is
//! held until the last of its names is gone, in the fastest tier of any.

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
    /// Fastest tier of the name that was there first, or [`ABSENT`] once it is gone.
    first: u8,
    /// The further names, and their fastest tiers; as many as a worker cares to give.
    further: BTreeMap<Lane, u8>,
    /// How many of them have which as their fastest tier.
    by_tier: [u32; Tier::COUNT],
}

impl Doubles {
    fn fastest(&self) -> u8 {
        self.first.min(fastest(&self.by_tier))
    }

    /// Sets the fastest tier of a further name; [`ABSENT`] takes it out.
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

    /// Names have moved.
    pub(super) fn move_to(&mut self, moved: impl Fn(Lane) -> Lane) {
        let further = std::mem::take(&mut self.further);
        self.further = further.into_iter().map(|(lane, tier)| (moved(lane), tier)).collect();
    }

    fn names(&self) -> usize {
        self.further.len() + usize::from(self.first != ABSENT)
    }
}

impl Worker {
    /// New names hold these blocks in a tier, the first of them being `lane` and the
    /// others those behind it, as `lane_at` says.
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

    /// A name's fastest tier has changed.
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

    /// A name of a block is gone; says in which tier others still hold it.
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
            // The one that is left is an ordinary name again.
            self.doubles.remove(&place);
        }
        fastest
    }
}
