//! The result of a lookup: how many blocks of a prompt were recently sent to each worker.

use crate::index::WorkerKey;

/// How many leading blocks of a prompt are speculative on each worker. Keep one and pass it to
/// [`RecentPrompts::find`](super::RecentPrompts::find) repeatedly: it reuses its memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecentOverlaps {
    /// Sorted by worker.
    held: Vec<(WorkerKey, u32)>,
}

impl RecentOverlaps {
    /// The number of speculative blocks of a worker; 0 if there is none.
    pub fn get(&self, worker: WorkerKey) -> u32 {
        let place = self.held.binary_search_by_key(&worker, |(holder, _)| *holder);
        place.map_or(0, |place| self.held[place].1)
    }

    /// Drops the results and keeps the memory.
    pub fn clear(&mut self) {
        self.held.clear();
    }

    /// Sets the workers that hold the first run.
    pub(super) fn begin(&mut self, holders: &[(WorkerKey, u64)], blocks: u32) {
        self.held.clear();
        self.held.extend(holders.iter().map(|(worker, _)| (*worker, blocks)));
    }

    /// Sets the depth of the workers that hold one more run: some of the previous ones, in the same
    /// order.
    pub(super) fn deepen(&mut self, holders: &[(WorkerKey, u64)], blocks: u32) {
        let mut held = self.held.iter_mut();
        for (worker, _) in holders {
            if let Some((_, deepest)) = held.find(|(before, _)| before == worker) {
                *deepest = blocks;
            }
        }
    }
}
