//! The index looks at itself: both of its sides must tell the same story.

use std::collections::BTreeMap;

use super::worker_map::{WorkerMap, held_tiers};
use super::{Index, WorkerKey};
use crate::event::Tier;
use crate::hash::BlockHash;
use crate::invariants::Violation;

type Expected = BTreeMap<(BlockHash, WorkerKey), [u32; Tier::COUNT]>;

impl Index {
    /// Checks the whole index; for tests, simulation and audits, since it costs
    /// a copy of everything.
    ///
    /// # Errors
    /// The first violation that is found: the holders of a block are not what
    /// the workers' maps sum to, something empty has stayed, a count or a bound
    /// is wrong.
    pub fn check(&self) -> Result<(), Violation> {
        let mut expected = Expected::new();
        for (&worker, map) in &self.workers {
            self.check_worker(worker, map, &mut expected)?;
        }
        let mut seen = 0;
        for (hash, list) in self.holders.iter() {
            if list.is_empty() || !list.is_sorted_by(|a, b| a.worker < b.worker) {
                return Err(Violation::HolderList { hash });
            }
            for holder in list {
                seen += 1;
                if expected.get(&(hash, holder.worker)) != Some(&holder.names) {
                    return Err(Violation::Holder { hash, worker: holder.worker });
                }
            }
        }
        if seen == expected.len() {
            return Ok(());
        }
        let missing = expected.keys().find(|(hash, worker)| {
            !self.holders.of(*hash).iter().any(|holder| holder.worker == *worker)
        });
        missing.map_or(Ok(()), |&(hash, worker)| Err(Violation::Holder { hash, worker }))
    }

    fn check_worker(
        &self,
        worker: WorkerKey,
        map: &WorkerMap,
        expected: &mut Expected,
    ) -> Result<(), Violation> {
        if map.is_empty() {
            return Err(Violation::EmptyWorker { worker });
        }
        if map.len() > self.limit() {
            let (blocks, limit) = (map.len(), self.limit());
            return Err(Violation::OverLimit { worker, blocks, limit });
        }
        let mut counts = [0; Tier::COUNT];
        for (engine, entry) in map.iter() {
            if entry.copies == [0; Tier::COUNT] {
                return Err(Violation::EmptyBlock { worker, engine });
            }
            for tier in held_tiers(entry) {
                counts[tier as usize] += 1;
                if !entry.content.opaque {
                    let names = expected.entry((entry.content.hash, worker)).or_default();
                    names[tier as usize] += 1;
                }
            }
        }
        if counts != map.counts() {
            return Err(Violation::Counts { worker, counted: map.counts(), held: counts });
        }
        Ok(())
    }
}
