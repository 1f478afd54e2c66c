//! A worker's blocks as a value: for a newly attached router, for an audit.

use super::worker_map::{Content, Entry, StoreOutcome, WorkerMap, held_tiers};
use super::{Applied, Index, WorkerKey};
use crate::event::{EngineHash, Tier};
use crate::hash::BlockHash;

/// One block that a worker holds, under one engine hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotBlock {
    /// The engine's name for it, by which it will be removed.
    pub engine: EngineHash,
    /// Our own chained hash of it.
    pub hash: BlockHash,
    /// The hash of the block before; `None` for a prompt's first block. The
    /// worker need not hold that one (any more).
    pub parent: Option<BlockHash>,
    /// Place in the prompt, counted in blocks from 0.
    pub position: u32,
    /// The block or one before it is opaque: known, never matched.
    pub opaque: bool,
    /// Physical copies per tier, indexed by `Tier as usize`; not all zero.
    pub copies: [u32; Tier::COUNT],
}

impl SnapshotBlock {
    fn new(engine: EngineHash, entry: &Entry) -> Self {
        let Content { hash, parent, position, opaque } = entry.content;
        Self { engine, hash, parent, position, opaque, copies: entry.copies }
    }

    fn content(&self) -> Content {
        let Self { hash, parent, position, opaque, .. } = *self;
        Content { hash, parent, position, opaque }
    }

    /// Only a first block has no parent, and a block without copies is none.
    fn is_valid(&self) -> bool {
        self.parent.is_none() == (self.position == 0) && self.copies != [0; Tier::COUNT]
    }
}

impl Index {
    /// All that a worker holds: parents before children, and the same state
    /// always in the same order.
    pub fn snapshot(&self, worker: WorkerKey) -> Vec<SnapshotBlock> {
        let Some(map) = self.workers.get(&worker) else {
            return Vec::new();
        };
        let mut blocks: Vec<_> =
            map.iter().map(|(engine, entry)| SnapshotBlock::new(engine, entry)).collect();
        blocks.sort_unstable_by_key(|block| (block.position, block.engine));
        blocks
    }

    /// Replaces all that a worker holds, in any order of blocks.
    ///
    /// Hashes are taken as they are: the giver must use the same seed, model
    /// name and block size. A block that contradicts itself counts as
    /// `malformed`; of two with the same engine hash, equal ones add up and
    /// otherwise the later wins.
    pub fn restore(
        &mut self,
        worker: WorkerKey,
        blocks: impl IntoIterator<Item = SnapshotBlock>,
    ) -> Applied {
        let mut applied = Applied { removed: self.clear_worker(worker), ..Applied::default() };
        let limit = self.limit();
        let mut map = WorkerMap::new(worker);
        for block in blocks {
            if !block.is_valid() {
                applied.malformed += 1;
                continue;
            }
            let entry = Entry { content: block.content(), copies: block.copies };
            let mut worst = StoreOutcome::Stored;
            for tier in held_tiers(&entry) {
                let copies = (tier, entry.copies[tier as usize]);
                let named = (block.engine, entry.content);
                match map.store(&mut self.holders, limit, named, copies) {
                    StoreOutcome::Stored => {}
                    outcome => worst = outcome,
                }
            }
            applied.count(worst);
        }
        if !map.is_empty() {
            self.workers.insert(worker, map);
        }
        applied
    }
}
