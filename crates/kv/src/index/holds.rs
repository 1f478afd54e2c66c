//! Whether a worker holds a block that is given only by its chained hash.

use super::strips::Place;
use super::{Index, WorkerKey};
use crate::hash::BlockHash;

impl Index {
    /// Enables [`Index::holds`] from now on. Takes about eight bytes for each block.
    pub fn enable_holds(&mut self) {
        self.forest.strips.build_finder(&self.forest.words);
    }

    /// Whether a worker holds, in any tier, the block with this chained hash and all blocks before
    /// it, `blocks` in total; zero blocks are always held. False if there is no block with that
    /// hash at that depth, and if [`Index::enable_holds`] was not called.
    ///
    /// Takes one step for each run along the prompt.
    pub fn holds(&self, worker: WorkerKey, blocks: u32, last: BlockHash) -> bool {
        let Some(deepest) = blocks.checked_sub(1) else {
            return true;
        };
        let Some(slot) = self.workers.get(&worker).map(|worker| worker.slot) else {
            return false;
        };
        let Some(mut place) = self.find_block(deepest, last.0) else {
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

    /// The place of a block with this many blocks before it.
    fn find_block(&self, depth: u32, hash: u64) -> Option<Place> {
        let strips = &self.forest.strips;
        strips.with_hash(hash).find_map(|strip| {
            let &(start, run) = strips.pieces(strip).first()?;
            let offset = (depth + start).checked_sub(self.forest.meta(run).depth)?;
            let place = Place { strip, offset };
            let is_there =
                offset < strips.len(strip) && strips.hash(&self.forest.words, place) == hash;
            is_there.then_some(place)
        })
    }
}
