//! Prompts with common prefixes, as a tree of runs of blocks, for all workers together.
//!
//! Hashes are chained, so a run is found by the hash of its first block, wherever in the tree it is; what
//! two prompts have in common ends where their hashes first differ, and two that are equal at a
//! block are equal up to it. So a walk along a prompt takes one step for each run, comparing one
//! hash in each, and a binary search where prompts differ. There, a run is split in two. All blocks of a
//! run belong to the same prompts.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use crate::hash::BlockHash;
use crate::index::WorkerKey;

/// A run's place; good until the run is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunId(u32);

/// A piece of one or more prompts.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// What it follows upon.
    parent: Option<RunId>,
    /// Never empty while it is in use.
    pub(super) blocks: Vec<BlockHash>,
    /// Workers that hold it, in order, each with the last of its prompts that had it. Never
    /// empty while it is in use; all of them hold the run before.
    pub(super) holders: Vec<(WorkerKey, u64)>,
}

/// The runs of all workers.
#[derive(Debug, Default)]
pub(super) struct Runs {
    runs: Vec<Run>,
    /// Places without a run.
    free: Vec<RunId>,
    /// Runs by their first blocks.
    starts: HashMap<BlockHash, RunId, Spread>,
}

impl Runs {
    /// The run that `hashes` begin with, after `parent`, and how many blocks are alike.
    pub(super) fn next(
        &self,
        parent: Option<RunId>,
        hashes: &[BlockHash],
    ) -> Option<(RunId, usize)> {
        let at = *self.starts.get(hashes.first()?)?;
        let run = self.get(at);
        // Two hashes that are equal by accident.
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

    /// Cuts a run in two; the end keeps its place. Says where the beginning is.
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

    /// A prompt of a worker has this run; says which one of its prompts had it before.
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

    /// Adds the rest of a prompt behind what it has in common with others: at least a block.
    pub(super) fn append(
        &mut self,
        parent: Option<RunId>,
        (worker, number): (WorkerKey, u64),
        hashes: &[BlockHash],
    ) -> RunId {
        let holders = vec![(worker, number)];
        let place = self.put(Run { parent, blocks: hashes.to_vec(), holders });
        self.starts.insert(hashes[0], place);
        place
    }

    /// Takes up to so many blocks off the end of what a prompt has, the last one with this
    /// run; says how many, and where the rest of it ends.
    pub(super) fn trim(
        &mut self,
        mut at: RunId,
        (worker, number): (WorkerKey, u64),
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
                // No other run follows: its holders would be among this one's.
                run.blocks.truncate(left);
                if left < run.blocks.capacity() / 4 {
                    run.blocks.shrink_to_fit();
                }
                return (most, Some(at));
            }
        }
        (taken, Some(at))
    }

    /// A worker holds a run no more, and the run may be gone; says what was before it.
    fn let_go(&mut self, at: RunId, worker: WorkerKey) -> Option<RunId> {
        let run = self.get_mut(at);
        run.holders.retain(|(holder, _)| *holder != worker);
        let (parent, first) = (run.parent, run.blocks[0]);
        if run.holders.is_empty() {
            *run = Run::default();
            self.free.push(at);
            // By accident, it may be another's.
            if self.starts.get(&first) == Some(&at) {
                self.starts.remove(&first);
            }
        }
        parent
    }

    /// Whether this is the last prompt of a worker that has a run.
    fn has(&self, at: RunId, worker: WorkerKey, number: u64) -> bool {
        let holders = &self.get(at).holders;
        let place = holders.binary_search_by_key(&worker, |(holder, _)| *holder);
        place.is_ok_and(|place| holders[place].1 == number)
    }

    /// Blocks in all runs, each as often as it is held; counted.
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
                // There are fewer than blocks, of which memory has no room for so many.
                RunId((self.runs.len() - 1) as u32)
            }
        }
    }
}

/// Chained hashes are hashes already: one multiplication makes of them what nobody can foresee,
/// who may know their seed.
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
