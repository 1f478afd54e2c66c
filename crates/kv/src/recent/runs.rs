//! Prompts with common prefixes, as a tree of runs of blocks, for all workers together.
//!
//! Hashes are chained, so a run is found by the hash of its first block, wherever in the tree it
//! is. Two prompts are equal up to the block before the first difference of their hashes. So a walk
//! along a prompt takes one step for each run, comparing one hash in each, and a binary search
//! where prompts differ. There, a run is split in two. All blocks of a run belong to the same
//! prompts.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use crate::hash::BlockHash;
use crate::index::WorkerKey;

/// The number of a run; valid until the run is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunId(u32);

/// A part of one or more prompts.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// The run before it.
    parent: Option<RunId>,
    /// Never empty while the run is in use.
    pub(super) blocks: Vec<BlockHash>,
    /// The workers that hold the run, sorted, each with its last prompt that contained the run.
    /// Never empty while the run is in use; all of them hold the run before as well.
    pub(super) holders: Vec<(WorkerKey, u64)>,
}

/// The runs of all workers.
#[derive(Debug, Default)]
pub(super) struct Runs {
    runs: Vec<Run>,
    /// Unused numbers.
    free: Vec<RunId>,
    /// Runs by their first blocks.
    starts: HashMap<BlockHash, RunId, Spread>,
}

impl Runs {
    /// The run with which `hashes` begin, after `parent`, and the number of equal blocks.
    pub(super) fn next(
        &self,
        parent: Option<RunId>,
        hashes: &[BlockHash],
    ) -> Option<(RunId, usize)> {
        let at = *self.starts.get(hashes.first()?)?;
        let run = self.get(at);
        // Two hashes that are equal by chance.
        if run.parent != parent {
            return None;
        }
        let most = run.blocks.len().min(hashes.len());
        if run.blocks[most - 1] == hashes[most - 1] {
            return Some((at, most));
        }
        let (mut alike, mut parted) = (1, most - 1);
        while alike < parted {
            let middle = alike.midpoint(parted);
            match run.blocks[middle] == hashes[middle] {
                true => alike = middle + 1,
                false => parted = middle,
            }
        }
        Some((at, alike))
    }

    /// Splits a run in two; the end keeps its number. Returns the number of the first part.
    pub(super) fn cut(&mut self, at: RunId, blocks: usize) -> RunId {
        let run = self.get_mut(at);
        let end = run.blocks.split_off(blocks);
        let mut begin = std::mem::replace(&mut run.blocks, end);
        begin.shrink_to_fit();
        let (first, second) = (begin[0], run.blocks[0]);
        let begin = Run { parent: run.parent, blocks: begin, holders: run.holders.clone() };
        let place = self.put(begin);
        self.get_mut(at).parent = Some(place);
        self.starts.insert(first, place);
        self.starts.insert(second, at);
        place
    }

    /// Assigns this run to a prompt of a worker; returns the worker's prompt that had it before.
    pub(super) fn give(&mut self, at: RunId, worker: WorkerKey, number: u64) -> Option<u64> {
        let holders = &mut self.get_mut(at).holders;
        match holders.binary_search_by_key(&worker, |(holder, _)| *holder) {
            Ok(place) => Some(std::mem::replace(&mut holders[place].1, number)),
            Err(place) => {
                holders.insert(place, (worker, number));
                None
            }
        }
    }

    /// Adds the rest of a prompt, at least one block, after its common part with others.
    pub(super) fn append(
        &mut self,
        parent: Option<RunId>,
        worker: WorkerKey,
        number: u64,
        hashes: &[BlockHash],
    ) -> RunId {
        let holders = vec![(worker, number)];
        let place = self.put(Run { parent, blocks: hashes.to_vec(), holders });
        self.starts.insert(hashes[0], place);
        place
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
            } else if run.holders.len() > 1 {
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
        run.holders.retain(|(holder, _)| *holder != worker);
        let (parent, first) = (run.parent, run.blocks[0]);
        if run.holders.is_empty() {
            *run = Run::default();
            self.free.push(at);
            // By chance, the entry may belong to another run.
            if self.starts.get(&first) == Some(&at) {
                self.starts.remove(&first);
            }
        }
        parent
    }

    /// Whether this is the last prompt of a worker that contains a run.
    fn has(&self, at: RunId, worker: WorkerKey, number: u64) -> bool {
        let holders = &self.get(at).holders;
        let place = holders.binary_search_by_key(&worker, |(holder, _)| *holder);
        place.is_ok_and(|place| holders[place].1 == number)
    }

    /// Number of blocks in all runs, counted once for each holder.
    pub(super) fn listed_blocks(&self) -> usize {
        self.runs.iter().map(|run| run.blocks.len() * run.holders.len()).sum()
    }

    pub(super) fn get(&self, at: RunId) -> &Run {
        &self.runs[at.0 as usize]
    }

    fn get_mut(&mut self, at: RunId) -> &mut Run {
        &mut self.runs[at.0 as usize]
    }

    fn put(&mut self, run: Run) -> RunId {
        match self.free.pop() {
            Some(place) => {
                *self.get_mut(place) = run;
                place
            }
            None => {
                self.runs.push(run);
                // There are fewer runs than blocks, and memory cannot hold as many blocks.
                RunId((self.runs.len() - 1) as u32)
            }
        }
    }
}

/// Hashes chained hashes with one multiplication by a random key, so that the result cannot be
/// predicted by someone who knows their seed.
#[derive(Clone, Copy, Debug)]
struct Spread {
    key: u64,
    spread: u64,
}

impl Default for Spread {
    fn default() -> Self {
        Self { key: RandomState::new().hash_one(0), spread: 0 }
    }
}

impl BuildHasher for Spread {
    type Hasher = Self;

    fn build_hasher(&self) -> Self {
        *self
    }
}

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.spread
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, value: u64) {
        let product = u128::from(self.spread ^ value ^ self.key) * 0x9e37_79b9_7f4a_7c15;
        self.spread = product as u64 ^ (product >> 64) as u64;
    }
}
