//! A worker's blocks as a value, for a newly attached router or for an audit.

use std::collections::{BTreeMap, BTreeSet};

use super::forest::ROOT;
use super::names::Lane;
use super::{Index, WorkerKey};
use crate::event::{EngineHash, Tier};
use crate::hash::BlockHash;

/// Maximum length of a run of a snapshot in blocks, so that a stream of runs has parts of bounded
/// size.
const RUN_BLOCKS_MAX: usize = 1024;

/// Consecutive blocks of one chain, of which the worker holds either all or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotRun {
    /// The hash of the block before; `None` at a prompt's first block. A run comes after the run
    /// that contains its parent.
    pub parent: Option<BlockHash>,
    /// The router's chained hashes of the blocks.
    pub hashes: Vec<BlockHash>,
    /// The engine's names of the blocks. Empty if the worker holds none of the blocks; such a run
    /// is included because held runs follow it.
    pub names: RunNames,
}

/// The names of a run's blocks, one for each block in the same order; further names of the same
/// blocks follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunNames {
    /// Every block has one name and one copy, on the device, which is almost always the case. Empty
    /// if no block is held.
    Plain(Vec<EngineHash>),
    /// Some blocks have further names or other copies.
    Each(Vec<BlockName>),
}

impl RunNames {
    /// Number of names.
    pub fn len(&self) -> usize {
        match self {
            Self::Plain(names) => names.len(),
            Self::Each(names) => names.len(),
        }
    }

    /// Whether the run's blocks are not held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All names, with the positions of their blocks.
    pub fn iter(&self) -> impl Iterator<Item = BlockName> + '_ {
        let (plain, each) = match self {
            Self::Plain(names) => (&names[..], &[][..]),
            Self::Each(names) => (&[][..], &names[..]),
        };
        let plain =
            plain.iter().enumerate().map(|(at, engine)| BlockName::plain(at as u32, *engine));
        plain.chain(each.iter().copied())
    }
}

impl FromIterator<BlockName> for RunNames {
    fn from_iter<T: IntoIterator<Item = BlockName>>(names: T) -> Self {
        let names: Vec<BlockName> = names.into_iter().collect();
        let is_plain =
            |(at, named): (u32, &BlockName)| *named == BlockName::plain(at, named.engine);
        match (0..).zip(&names).all(is_plain) {
            true => Self::Plain(names.into_iter().map(|named| named.engine).collect()),
            false => Self::Each(names),
        }
    }
}

/// An engine's name of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockName {
    /// The block's position in its run.
    pub at: u32,
    /// The engine's hash of the block, by which it will be removed.
    pub engine: EngineHash,
    /// Physical copies per tier, indexed by `Tier as usize`; not all zero.
    pub copies: [u32; Tier::COUNT],
}

impl BlockName {
    /// The name of a block that has one copy, on the device.
    pub(super) fn plain(at: u32, engine: EngineHash) -> Self {
        Self { at, engine, copies: [1, 0, 0, 0] }
    }
}

impl Index {
    /// All that a worker holds, as a stream of runs: parents before children. The same state gives
    /// the same order.
    pub fn snapshot(&self, worker: WorkerKey) -> impl Iterator<Item = SnapshotRun> + '_ {
        let names = self.names_by_run(worker);
        let mut runs: BTreeSet<(u32, u64, u32)> = BTreeSet::new();
        for run in names.keys() {
            let mut run = *run;
            // Includes the runs before, even if no worker holds them.
            while run != ROOT {
                let order = (self.forest.meta(run).depth, self.forest.run(run).first(), run);
                if !runs.insert(order) {
                    break;
                }
                run = self.forest.parent_of(run);
            }
        }
        runs.into_iter().flat_map(move |(_, _, run)| {
            let named = names.get(&run).map_or(&[][..], Vec::as_slice);
            self.pieces(worker, run, named)
        })
    }

    fn names_by_run(&self, worker: WorkerKey) -> BTreeMap<u32, Vec<(u32, u64, Lane)>> {
        let mut by_run: BTreeMap<u32, Vec<(u32, u64, Lane)>> = BTreeMap::new();
        let Some(known) = self.workers.get(&worker) else {
            return by_run;
        };
        for (lane, name, place) in known.names.iter() {
            if let Some((run, at)) = self.forest.locate(place) {
                by_run.entry(run).or_default().push((at, name, lane));
            }
        }
        by_run.values_mut().for_each(|names| names.sort_unstable());
        by_run
    }

    /// A run, cut into pieces that the worker holds completely or not at all.
    fn pieces(&self, worker: WorkerKey, run: u32, names: &[(u32, u64, Lane)]) -> Vec<SnapshotRun> {
        let Some(known) = self.workers.get(&worker) else {
            return Vec::new();
        };
        let len = self.forest.run(run).len();
        let mut pieces = Vec::new();
        let mut from = 0;
        let mut names = names;
        while from < len {
            let held = names.first().is_some_and(|(at, ..)| *at == from);
            let mut to = from + 1;
            let mut taken = names.partition_point(|(at, ..)| *at <= from);
            while to < len && ((to - from) as usize) < RUN_BLOCKS_MAX {
                if names.get(taken).is_some_and(|(at, ..)| *at == to) != held {
                    break;
                }
                taken += names[taken..].partition_point(|(at, ..)| *at <= to);
                to += 1;
            }
            let named = names[..taken].iter().map(|(at, name, lane)| BlockName {
                at: at - from,
                engine: EngineHash(*name),
                copies: known.copies(*lane),
            });
            pieces.push(SnapshotRun {
                parent: self.hash_before(run, from),
                hashes: (from..to).map(|at| BlockHash(self.forest.hash(run, at))).collect(),
                names: named.collect(),
            });
            names = &names[taken..];
            from = to;
        }
        pieces
    }

    fn hash_before(&self, run: u32, at: u32) -> Option<BlockHash> {
        if at > 0 {
            return Some(BlockHash(self.forest.hash(run, at - 1)));
        }
        let (parent, at) = self.forest.locate(self.forest.meta(run).parent?)?;
        Some(BlockHash(self.forest.hash(parent, at)))
    }
}
