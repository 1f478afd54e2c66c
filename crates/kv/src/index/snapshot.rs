//! A worker's blocks as a value, for a newly attached router or for an audit.

use super::{Index, WorkerKey};
use crate::event::{EngineHash, Tier};
use crate::hash::BlockHash;

/// Maximum length of a run of a snapshot in blocks, so that a stream of runs has parts of bounded
/// size.
pub(super) const RUN_BLOCKS_MAX: usize = 1024;

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
    /// All that a worker holds, as runs: parents before children. The same state gives the same order.
    pub fn snapshot(&self, worker: WorkerKey) -> impl Iterator<Item = SnapshotRun> {
        self.freeze(worker).runs().collect::<Vec<_>>().into_iter()
    }
}
