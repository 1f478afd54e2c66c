//! The answer to "who has how much of this prompt?".

use super::WorkerKey;
use super::holders::Holders;
use crate::event::Tier;
use crate::hash::BlockHash;

/// How much of a prompt one worker holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Overlap {
    /// Length of the longest run of full blocks, from the prompt's start,
    /// which the worker holds in any tier.
    pub blocks: u32,
    /// The same blocks by the fastest tier which has them (indexed by
    /// `Tier as usize`); the parts sum to `blocks`.
    pub by_tier: [u32; Tier::COUNT],
}

impl Overlap {
    fn extend(&mut self, tier: usize) {
        self.blocks += 1;
        self.by_tier[tier] += 1;
    }
}

/// The overlaps of all workers with one prompt. Keep one and hand it to
/// [`Index::find`](super::Index::find) again and again: it reuses its memory.
#[derive(Clone, Debug, Default)]
pub struct Overlaps {
    /// Workers with at least one block, sorted.
    found: Vec<(WorkerKey, Overlap)>,
    /// Places in `found` of the workers whose run has not ended yet.
    running: Vec<usize>,
}

impl Overlaps {
    /// An empty result.
    pub fn new() -> Self {
        Self::default()
    }

    /// The worker's overlap; zero for one that holds no first block.
    pub fn get(&self, worker: WorkerKey) -> Overlap {
        self.found
            .binary_search_by_key(&worker, |(key, _)| *key)
            .map_or_else(|_| Overlap::default(), |at| self.found[at].1)
    }

    /// The workers with at least one block, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (WorkerKey, Overlap)> + '_ {
        self.found.iter().copied()
    }

    /// How many workers have at least one block.
    pub fn len(&self) -> usize {
        self.found.len()
    }

    /// True where no worker has the prompt's first block.
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Forgets the results and keeps the memory.
    pub fn clear(&mut self) {
        self.found.clear();
        self.running.clear();
    }

    /// Walks the prompt block by block until nobody's run goes on.
    ///
    /// A hash covers all blocks before it, but holding a block does not mean
    /// holding those: every step must be looked at, or holes go unseen.
    pub(super) fn collect(&mut self, holders: &Holders, hashes: &[BlockHash]) {
        self.clear();
        let Some((&first, rest)) = hashes.split_first() else {
            return;
        };
        for holder in holders.of(first) {
            let mut overlap = Overlap::default();
            overlap.extend(holder.fastest());
            self.found.push((holder.worker, overlap));
        }
        self.running.extend(0..self.found.len());
        for &hash in rest {
            if self.running.is_empty() {
                return;
            }
            let mut list = holders.of(hash).iter().peekable();
            let found = &mut self.found;
            // Both sides are sorted by worker: one pass over each.
            self.running.retain(|&at| {
                let (worker, overlap) = &mut found[at];
                while list.next_if(|holder| holder.worker < *worker).is_some() {}
                match list.next_if(|holder| holder.worker == *worker) {
                    Some(holder) => {
                        overlap.extend(holder.fastest());
                        true
                    }
                    None => false,
                }
            });
        }
    }
}
