//! Whether a worker holds a block that is given by its chained hash alone.

use super::strips::Place;
use super::{Index, WorkerKey};
use crate::hash::BlockHash;

impl Index {
    /// From now on [`Index::holds`] can be asked. Takes about eight
    /// bytes for each block.
    pub fn trace_blocks(&mut self) {
        self.forest.strips.trace(&self.forest.words);
    }

    /// Whether a worker holds, in any tier, the block with this chained hash and all before
    /// it, `blocks` of them altogether; no block is always held. False where there is no
    /// block of that hash so far from its prompt's start, and where
    /// [`Index::trace_blocks`] was not called.
    ///
    /// Takes as many steps as the prompt lies along runs.
    pub fn holds(&self, worker: WorkerKey, blocks: u32, last: BlockHash) -> bool {
        let Some(deepest) = blocks.checked_sub(1) else {
            return true;
        };
        let Some(slot) = self.workers.get(&worker).map(|worker| worker.slot) else {
            return false;
        };
        let Some(mut place) = self.find_traced(deepest, last.0) else {
            return false;
        };
        while let Some((run, at)) = self.forest.locate(place) {
            if self.forest.beginning(run, slot) <= at {
                return false;
            }
            match self.forest.meta(run).parent {
                None => return true,
                Some(before) => place = before,
            }
        }
        false
    }

    /// The place of a block with so many others before it.
    fn find_traced(&self, depth: u32, hash: u64) -> Option<Place> {
        let strips = &self.forest.strips;
        strips.traced(hash).find_map(|strip| {
            let &(start, run) = strips.pieces(strip).first()?;
            let offset = (depth + start).checked_sub(self.forest.meta(run).depth)?;
            let place = Place { strip, offset };
            let is_there =
                offset < strips.len(strip) && strips.hash(&self.forest.words, place) == hash;
            is_there.then_some(place)
        })
    }
}
