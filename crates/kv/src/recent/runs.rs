//! The runs of prompts that were recently routed, for all workers together.

use crate::index::WorkerKey;
use crate::runs::{Note, RunId, Runs};

/// The workers that hold a run, sorted, each with its last prompt that contained the run. Never
/// empty while the run is in use; all of them hold the run before as well.
pub(super) type Holders = Vec<(WorkerKey, u64)>;

impl Note for Holders {
    fn cut(&mut self, _first: usize, _blocks: usize) -> Self {
        self.clone()
    }
}

impl Runs<Holders> {
    /// Assigns this run to a prompt of a worker; returns the worker's prompt that had it before.
    pub(super) fn give(&mut self, at: RunId, worker: WorkerKey, number: u64) -> Option<u64> {
        let holders = &mut self.get_mut(at).note;
        match holders.binary_search_by_key(&worker, |(holder, _)| *holder) {
            Ok(place) => Some(std::mem::replace(&mut holders[place].1, number)),
            Err(place) => {
                holders.insert(place, (worker, number));
                None
            }
        }
    }

    /// Removes up to this many blocks from the end of what a prompt owns, whose last run is `at`;
    /// returns their number, and where the remainder ends.
    pub(super) fn trim(
        &mut self,
        mut at: RunId,
        worker: WorkerKey,
        number: u64,
        most: usize,
    ) -> (usize, Option<RunId>) {
        let mut taken = 0;
        while taken < most {
            let run = self.get_mut(at);
            let blocks = run.blocks.len();
            let left = blocks.saturating_sub(most - taken);
            if left == 0 {
                let parent = self.let_go(at, worker);
                taken += blocks;
                let before = parent.filter(|parent| self.has(*parent, worker, number));
                let Some(before) = before else { return (taken, None) };
                at = before;
            } else if run.note.len() > 1 {
                let begin = self.cut(at, left);
                self.let_go(at, worker);
                return (most, Some(begin));
            } else {
                // No other run follows, because its holders would be holders of this one.
                run.blocks.truncate(left);
                if left < run.blocks.capacity() / 4 {
                    run.blocks.shrink_to_fit();
                }
                return (most, Some(at));
            }
        }
        (taken, Some(at))
    }

    /// Notes that a worker holds a run no more, and frees a run without holders; returns the run
    /// before it.
    fn let_go(&mut self, at: RunId, worker: WorkerKey) -> Option<RunId> {
        let run = self.get_mut(at);
        run.note.retain(|(holder, _)| *holder != worker);
        let parent = run.parent;
        if run.note.is_empty() {
            self.remove(at);
        }
        parent
    }

    /// Whether this is the last prompt of a worker that contains a run.
    fn has(&self, at: RunId, worker: WorkerKey, number: u64) -> bool {
        let holders = &self.get(at).note;
        let place = holders.binary_search_by_key(&worker, |(holder, _)| *holder);
        place.is_ok_and(|place| holders[place].1 == number)
    }

    /// Number of blocks in all runs, counted once for each holder.
    pub(super) fn listed_blocks(&self) -> usize {
        self.iter().map(|(_, run)| run.blocks.len() * run.note.len()).sum()
    }
}
