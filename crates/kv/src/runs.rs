//! Prompts with common prefixes, as a tree of runs of blocks.
//!
//! Hashes are chained, so a run is found by the hash of its first block, wherever in the tree it
//! is. Two prompts are equal up to the block before the first difference of their hashes. So a walk
//! along a prompt takes one step for each run, comparing one hash in each, and a binary search
//! where prompts differ. There, a run is split in two. All blocks of a run belong to the same
//! prompts.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use crate::hash::{BlockHash, common_blocks};

/// The number of a run; valid until the run is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RunId(u32);

/// What is known of a run.
pub(crate) trait Note: Default {
    /// Splits the note of a run of `blocks` blocks that is cut after the first `first` of them:
    /// returns the note of the first part, and keeps that of the end.
    fn cut(&mut self, first: usize, blocks: usize) -> Self;
}

/// A part of one or more prompts.
#[derive(Debug, Default)]
pub(crate) struct PromptRun<T> {
    /// The run before it.
    pub(crate) parent: Option<RunId>,
    /// Never empty while the run is in use.
    pub(crate) blocks: Vec<BlockHash>,
    /// What is known of the run.
    pub(crate) note: T,
}

/// The runs of all prompts.
#[derive(Debug, Default)]
pub(crate) struct Runs<T> {
    runs: Vec<PromptRun<T>>,
    /// Unused numbers.
    free: Vec<RunId>,
    /// Runs by their first blocks.
    starts: HashMap<BlockHash, RunId, KeyedHasher>,
}

impl<T: Note> Runs<T> {
    /// The run with which `hashes` begin, after `parent`, and the number of equal blocks.
    pub(crate) fn next(
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
        Some((at, common_blocks(&run.blocks, hashes)))
    }

    /// Splits a run in two; the end keeps its number. Returns the number of the first part.
    pub(crate) fn cut(&mut self, at: RunId, blocks: usize) -> RunId {
        let run = self.get_mut(at);
        let note = run.note.cut(blocks, run.blocks.len());
        let end = run.blocks.split_off(blocks);
        let mut begin = std::mem::replace(&mut run.blocks, end);
        begin.shrink_to_fit();
        let (first, second) = (begin[0], run.blocks[0]);
        let begin = PromptRun { parent: run.parent, blocks: begin, note };
        let place = self.put(begin);
        self.get_mut(at).parent = Some(place);
        self.starts.insert(first, place);
        self.starts.insert(second, at);
        place
    }

    /// Adds the rest of a prompt, at least one block, after its common part with others.
    pub(crate) fn append(&mut self, parent: Option<RunId>, hashes: &[BlockHash], note: T) -> RunId {
        let place = self.put(PromptRun { parent, blocks: hashes.to_vec(), note });
        self.starts.insert(hashes[0], place);
        place
    }

    /// Removes a run that no other run follows.
    pub(crate) fn remove(&mut self, at: RunId) -> PromptRun<T> {
        let run = std::mem::take(self.get_mut(at));
        self.free.push(at);
        // By chance, the entry may belong to another run.
        if let Some(first) = run.blocks.first()
            && self.starts.get(first) == Some(&at)
        {
            self.starts.remove(first);
        }
        run
    }

    /// All runs that are in use.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (RunId, &PromptRun<T>)> {
        let runs = self.runs.iter().enumerate();
        let runs = runs.map(|(at, run)| (RunId(at as u32), run));
        runs.filter(|(_, run)| !run.blocks.is_empty())
    }

    pub(crate) fn get(&self, at: RunId) -> &PromptRun<T> {
        &self.runs[at.0 as usize]
    }

    pub(crate) fn get_mut(&mut self, at: RunId) -> &mut PromptRun<T> {
        &mut self.runs[at.0 as usize]
    }

    fn put(&mut self, run: PromptRun<T>) -> RunId {
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
struct KeyedHasher {
    key: u64,
    spread: u64,
}

impl Default for KeyedHasher {
    fn default() -> Self {
        Self { key: RandomState::new().hash_one(0), spread: 0 }
    }
}

impl BuildHasher for KeyedHasher {
    type Hasher = Self;

    fn build_hasher(&self) -> Self {
        *self
    }
}

impl Hasher for KeyedHasher {
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
