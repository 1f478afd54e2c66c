//! A copy of a worker's blocks at one moment, which is fast to take and is sorted later.
//!
//! It copies two words for each block in memory order, and leaves all sorting for later, so that the index
//! is not borrowed meanwhile.

use std::collections::BTreeMap;
use std::ops::Range;

use super::forest::{Forest, ROOT};
use super::snapshot::RUN_BLOCKS_MAX;
use super::strips::Place;
use super::{BlockName, Index, RunNames, SnapshotRun, WorkerKey};
use crate::event::{EngineHash, Tier};
use crate::hash::BlockHash;

/// Stands for a run of which the worker holds nothing.
const NOT_HELD: u32 = u32::MAX;

/// A name and its copies by tier.
type Name = (EngineHash, [u32; Tier::COUNT]);

/// All blocks that a worker held at one moment.
#[derive(Debug, Default)]
pub struct FrozenBlocks {
    runs: Vec<FrozenRun>,
    hashes: Vec<u64>,
    /// One name of each held block.
    names: Vec<u64>,
    held: Vec<u64>,
    /// Number of names, including further ones.
    names_count: usize,
    /// All names of blocks that have more than one name, or copies other than a single one on the
    /// device.
    special: BTreeMap<u32, Vec<Name>>,
}

#[derive(Clone, Copy, Debug)]
struct FrozenRun {
    depth: u32,
    /// Index of its first block in `hashes`.
    from: u32,
    len: u32,
    /// Whether there is a block before its first one.
    hangs: bool,
    parent: u64,
}

/// The run that was found last. Neighbours in memory are usually neighbours in their chain, so the
/// next block is usually in the same run.
#[derive(Default)]
struct LastRun {
    strip: u32,
    blocks: Range<u32>,
    run: u32,
}

impl LastRun {
    #[inline]
    fn locate(&mut self, forest: &Forest, place: Place) -> Option<(u32, u32)> {
        if place.strip != self.strip || !self.blocks.contains(&place.offset) {
            let (run, at) = forest.locate(place)?;
            let start = place.offset - at;
            *self = Self { strip: place.strip, blocks: start..start + forest.run(run).len(), run };
        }
        Some((self.run, place.offset - self.blocks.start))
    }
}

impl Index {
    /// A copy of all that a worker holds, with about twenty bytes per block.
    pub fn freeze(&self, worker: WorkerKey) -> FrozenBlocks {
        let mut frozen = FrozenBlocks::default();
        let Some(known) = self.workers.get(&worker) else {
            return frozen;
        };
        frozen.hashes.reserve(known.names.len());
        let bases = self.freeze_runs(worker, &mut frozen);
        frozen.names = vec![0; frozen.hashes.len()];
        frozen.held = vec![0; frozen.hashes.len().div_ceil(64)];
        let mut last_run = LastRun::default();
        for (lane, name, place) in known.names.iter() {
            let Some((run, at)) = last_run.locate(&self.forest, place) else {
                continue;
            };
            let block = bases[run as usize] + at;
            let (word, bit) = (block as usize / 64, 1 << (block % 64));
            let is_further = frozen.held[word] & bit != 0;
            if is_further || known.names.is_special(lane) {
                let first = EngineHash(frozen.names[block as usize]);
                let all = frozen.special.entry(block).or_insert_with(|| match is_further {
                    true => vec![(first, [1, 0, 0, 0])],
                    false => Vec::new(),
                });
                all.push((EngineHash(name), known.copies(lane)));
            }
            frozen.names_count += 1;
            frozen.held[word] |= bit;
            frozen.names[block as usize] = name;
        }
        frozen
    }

    /// Copies the runs of which a worker holds blocks, and the runs before them; returns where each
    /// run begins in the copy.
    fn freeze_runs(&self, worker: WorkerKey, frozen: &mut FrozenBlocks) -> Vec<u32> {
        let mut bases = vec![NOT_HELD; self.forest.metas.len()];
        let Some(known) = self.workers.get(&worker) else {
            return bases;
        };
        let mut last_run = LastRun::default();
        for (mut place, present) in known.names.groups() {
            let mut left = present;
            while left != 0 {
                place.offset += left.trailing_zeros();
                left = (left >> left.trailing_zeros()) & !1;
                let Some((mut run, _)) = last_run.locate(&self.forest, place) else {
                    continue;
                };
                while run != ROOT && bases[run as usize] == NOT_HELD {
                    bases[run as usize] = frozen.hashes.len() as u32;
                    self.freeze_run(run, frozen);
                    run = self.forest.parent_of(run);
                }
            }
        }
        bases
    }

    fn freeze_run(&self, run: u32, frozen: &mut FrozenBlocks) {
        let (meta, len) = (self.forest.meta(run), self.forest.run(run).len());
        let parent = meta.parent.and_then(|place| self.forest.locate(place));
        frozen.runs.push(FrozenRun {
            depth: meta.depth,
            from: frozen.hashes.len() as u32,
            len,
            hangs: parent.is_some(),
            parent: parent.map_or(0, |(run, at)| self.forest.hash(run, at)),
        });
        let words = self.forest.strips.words(&self.forest.words, self.forest.place(run, 0), len);
        frozen.hashes.extend(words.iter().map(|word| word.load(super::sync::Ordering::Relaxed)));
    }
}

impl FrozenBlocks {
    /// Number of names.
    pub fn names_count(&self) -> usize {
        self.names_count
    }

    /// Memory of the copy in bytes.
    pub fn bytes(&self) -> usize {
        const PER_SPECIAL: usize = 2 * size_of::<(u32, Vec<Name>)>() + 2 * size_of::<Name>();
        (self.hashes.capacity() + self.names.capacity() + self.held.capacity()) * 8
            + self.runs.capacity() * size_of::<FrozenRun>()
            + self.special.len() * PER_SPECIAL
    }

    /// Its runs, parents before children.
    pub fn runs(&self) -> impl Iterator<Item = SnapshotRun> + '_ {
        let order = self.order();
        let mut at = 0;
        let mut pieces = Vec::new().into_iter();
        std::iter::from_fn(move || self.next(&order, &mut at, &mut pieces))
    }

    /// The numbers of the runs, by depth. The sorting is what takes time.
    pub fn order(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.runs.len() as u32).collect();
        order.sort_unstable_by_key(|run| {
            let FrozenRun { depth, from, .. } = self.runs[*run as usize];
            (depth, self.hashes[from as usize])
        });
        order
    }

    /// The blocks of a run, cut into pieces that the worker holds completely or not at all.
    pub fn pieces(&self, run: u32) -> Vec<SnapshotRun> {
        let FrozenRun { from, len, hangs, parent, .. } = self.runs[run as usize];
        let mut pieces = Vec::new();
        let mut before = hangs.then_some(BlockHash(parent));
        let (mut at, end) = (from, from + len);
        while at < end {
            let held = self.holds(at);
            let longest = end.min(at + RUN_BLOCKS_MAX as u32);
            let to = (at..longest).find(|block| self.holds(*block) != held).unwrap_or(longest);
            let hashes: Vec<_> =
                self.hashes[at as usize..to as usize].iter().map(|hash| BlockHash(*hash)).collect();
            let names = if held { self.names(at, to) } else { RunNames::Plain(Vec::new()) };
            let last = hashes.last().copied();
            pieces.push(SnapshotRun { parent: before, hashes, names });
            (before, at) = (last, to);
        }
        pieces
    }

    fn names(&self, from: u32, to: u32) -> RunNames {
        if self.special.range(from..to).next().is_none() {
            let names = self.names[from as usize..to as usize].iter();
            return RunNames::Plain(names.map(|name| EngineHash(*name)).collect());
        }
        let mut names = Vec::with_capacity((to - from) as usize);
        for block in from..to {
            let at = block - from;
            match self.special.get(&block) {
                Some(all) => {
                    let named = |&(engine, copies)| BlockName { at, engine, copies };
                    names.extend(all.iter().map(named));
                }
                None => {
                    let engine = EngineHash(self.names[block as usize]);
                    names.push(BlockName::plain(at, engine));
                }
            }
        }
        names.into_iter().collect()
    }

    fn holds(&self, block: u32) -> bool {
        self.held[block as usize / 64] >> (block % 64) & 1 == 1
    }

    fn next(
        &self,
        order: &[u32],
        at: &mut usize,
        pieces: &mut std::vec::IntoIter<SnapshotRun>,
    ) -> Option<SnapshotRun> {
        loop {
            if let Some(piece) = pieces.next() {
                return Some(piece);
            }
            *pieces = self.pieces(*order.get(*at)?).into_iter();
            *at += 1;
        }
    }
}
