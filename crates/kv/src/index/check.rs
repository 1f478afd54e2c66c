//! Checks the consistency of the index: its two sides must agree.

use std::collections::BTreeMap;

use super::holders::ABSENT;
use super::worker::{Worker, fastest};
use super::{Index, WorkerKey};
use crate::event::Tier;

/// Per run and slot, the tier of every block.
type Expected = BTreeMap<(u32, u16), Vec<u8>>;

impl Index {
    /// Checks the whole index; for tests, simulation and audits, since it copies everything.
    ///
    /// # Errors
    /// The first violation found, which is always a defect of this crate: the holders of a block differ
    /// from what the workers' names say, an empty entry was not removed, a count or a bound is wrong, or
    /// a run cannot be reached.
    pub fn check(&self) -> Result<(), String> {
        let mut expected = Expected::new();
        for (&worker, known) in &self.workers {
            self.check_worker(worker, known, &mut expected)?;
        }
        let mut children: BTreeMap<u32, u32> = BTreeMap::new();
        let mut held = 0;
        for run in self.forest.run_ids() {
            *children.entry(self.forest.parent_of(run)).or_default() += 1;
            held += self.check_holders(run, &expected)?;
        }
        if held != expected.len() {
            return Err(format!("{held} runs have holders, and {} should", expected.len()));
        }
        for run in self.forest.run_ids() {
            let meta = self.forest.meta(run);
            let first = self.forest.run(run).first();
            let hanging = children.get(&run).copied().unwrap_or(0);
            let parent = self.forest.parent_of(run);
            let orphaned = (meta.parent.is_some() && parent == super::forest::ROOT)
                || (parent != super::forest::ROOT
                    && meta.parent.map(|place| self.forest.locate(place))
                        != Some(Some((parent, self.forest.run(parent).len() - 1))));
            let unheld = hanging == 0 && !expected.keys().any(|(of, _)| *of == run);
            if hanging != meta.children || orphaned || unheld || !self.forest.is_head(run) {
                return Err(format!("run {first:016x} is not attached where it belongs"));
            }
        }
        let (used, counted) = (self.forest.words.used_words(), self.forest.words_counted());
        if used != counted {
            return Err(format!("{used} words are in use, and {counted} are used"));
        }
        Ok(())
    }

    /// Checks that the holders that readers see are those that the names imply.
    fn check_holders(&self, run: u32, expected: &Expected) -> Result<usize, String> {
        let shared = self.forest.run(run);
        let (first, len) = (shared.first(), shared.len());
        let mut seen = 0;
        for (slot, key) in self.forest.slots().keys.iter().enumerate() {
            let slot = slot as u16;
            let tiers = expected.get(&(run, slot));
            seen += usize::from(tiers.is_some());
            let tier = |at: u32| tiers.map_or(ABSENT, |tiers| tiers[at as usize]);
            let agree = (0..len).all(|at| self.forest.tier_of(run, slot, at) == tier(at));
            let beginning = (0..len).take_while(|at| tier(*at) != ABSENT).count() as u32;
            let shown = self.forest.beginning(run, slot);
            if !agree || shown != beginning {
                return Err(format!("worker {key:?} and the holders of run {first:016x} disagree"));
            }
            let both = shared.full().has(&self.forest.words, slot)
                && self.forest.find_partial(run, slot).is_some();
            if both {
                return Err(format!("slot {slot} holds all and a part of run {first:016x}"));
            }
        }
        Ok(seen)
    }

    fn check_worker(
        &self,
        worker: WorkerKey,
        known: &Worker,
        expected: &mut Expected,
    ) -> Result<(), String> {
        if known.names.is_empty() && known.waiting_events.is_empty() {
            return Err(format!("worker {worker} holds nothing and was kept"));
        }
        if known.names.len() > self.limit() {
            return Err(format!("worker {worker} has {} blocks, too many", known.names.len()));
        }
        let mut counts = [0; Tier::COUNT];
        let mut names = 0;
        for (lane, name, place) in known.names.iter() {
            names += 1;
            let copies = known.copies(lane);
            let found = known.names.find(name) == Some(lane);
            let located = self.forest.locate(place).filter(|_| found);
            let Some((run, at)) = located.filter(|_| fastest(&copies) != ABSENT) else {
                return Err(format!("worker {worker} has no copy of {name:016x} and kept it"));
            };
            for tier in Tier::ALL {
                counts[tier as usize] += usize::from(copies[tier as usize] > 0);
            }
            let len = self.forest.run(run).len() as usize;
            let tiers = expected.entry((run, known.slot)).or_insert_with(|| vec![ABSENT; len]);
            tiers[at as usize] = tiers[at as usize].min(fastest(&copies));
        }
        if counts != known.counts || names != known.names.len() {
            let counted = known.counts;
            return Err(format!(
                "worker {worker} counts {counted:?} blocks by tier, holds {counts:?}"
            ));
        }
        Ok(())
    }
}
