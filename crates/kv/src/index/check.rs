//! Checks the consistency of the index: its two sides must agree.

use std::collections::BTreeMap;

use super::holders::ABSENT;
use super::worker::{Worker, fastest};
use super::{Index, WorkerKey};
use crate::event::Tier;
use crate::hash::BlockHash;
use crate::invariants::Violation;

/// Per run and slot, the tier of every block.
type Expected = BTreeMap<(u32, u16), Vec<u8>>;

impl Index {
    /// Checks the whole index; for tests, simulation and audits, since it copies everything.
    ///
    /// # Errors
    /// The first violation found: the holders of a block differ from what the workers' names say,
    /// an empty entry was not removed, a count or a bound is wrong, or a run cannot be reached.
    pub fn check(&self) -> Result<(), Violation> {
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
            let hash = BlockHash(0);
            return Err(Violation::HolderList { hash });
        }
        for run in self.forest.run_ids() {
            let meta = self.forest.meta(run);
            let hash = BlockHash(self.forest.run(run).first());
            let hanging = children.get(&run).copied().unwrap_or(0);
            let parent = self.forest.parent_of(run);
            let orphaned = (meta.parent.is_some() && parent == super::forest::ROOT)
                || (parent != super::forest::ROOT
                    && meta.parent.map(|place| self.forest.locate(place))
                        != Some(Some((parent, self.forest.run(parent).len() - 1))));
            let unheld = hanging == 0 && !expected.keys().any(|(of, _)| *of == run);
            if hanging != meta.children || orphaned || unheld || !self.forest.is_head(run) {
                return Err(Violation::Run { hash });
            }
        }
        if self.forest.words.used_words() != self.forest.words_counted() {
            return Err(Violation::Words {
                used: self.forest.words.used_words(),
                counted: self.forest.words_counted(),
            });
        }
        Ok(())
    }

    /// Checks that the holders that readers see are those that the names imply.
    fn check_holders(&self, run: u32, expected: &Expected) -> Result<usize, Violation> {
        let shared = self.forest.run(run);
        let hash = BlockHash(shared.first());
        let len = shared.len();
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
                let worker = key.unwrap_or(WorkerKey { worker: u32::MAX, rank: slot });
                return Err(Violation::Holder { hash, worker });
            }
            let both = shared.full().has(&self.forest.words, slot)
                && self.forest.find_partial(run, slot).is_some();
            if both {
                return Err(Violation::HolderList { hash });
            }
        }
        Ok(seen)
    }

    fn check_worker(
        &self,
        worker: WorkerKey,
        known: &Worker,
        expected: &mut Expected,
    ) -> Result<(), Violation> {
        if known.names.is_empty() && known.waiting_events.is_empty() {
            return Err(Violation::EmptyWorker { worker });
        }
        if known.names.len() > self.limit() {
            let (blocks, limit) = (known.names.len(), self.limit());
            return Err(Violation::OverLimit { worker, blocks, limit });
        }
        let mut counts = [0; Tier::COUNT];
        let mut names = 0;
        for (lane, name, place) in known.names.iter() {
            names += 1;
            let engine = crate::event::EngineHash(name);
            let copies = known.copies(lane);
            let found = known.names.find(name) == Some(lane);
            let Some((run, at)) = self.forest.locate(place).filter(|_| found) else {
                return Err(Violation::EmptyBlock { worker, engine });
            };
            if fastest(&copies) == ABSENT {
                return Err(Violation::EmptyBlock { worker, engine });
            }
            for tier in Tier::ALL {
                counts[tier as usize] += usize::from(copies[tier as usize] > 0);
            }
            let len = self.forest.run(run).len() as usize;
            let tiers = expected.entry((run, known.slot)).or_insert_with(|| vec![ABSENT; len]);
            tiers[at as usize] = tiers[at as usize].min(fastest(&copies));
        }
        if counts != known.counts || names != known.names.len() {
            return Err(Violation::Counts { worker, counted: known.counts, held: counts });
        }
        Ok(())
    }
}
