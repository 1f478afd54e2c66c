//! Workers of hybrid models: their cache groups besides the spine.

use std::sync::Arc;

use super::cache_groups::{CacheGroups, GroupBlocks, Spine, SpineBlock};
use super::forest::Forest;
use super::names::Names;
use super::{AppliedBlocks, Index, WorkerKey};
use crate::event::{EngineHash, StoredBlock};
use crate::hash::BlockHash;

/// The spine of a worker, which has no blocks if the worker is not known.
struct WorkerSpine<'a> {
    names: Option<&'a Names>,
    forest: &'a Forest,
}

impl Spine for WorkerSpine<'_> {
    fn find(&self, name: EngineHash) -> Option<SpineBlock> {
        let names = self.names?;
        let (run, at) = self.forest.locate(names.place(names.find(name.0)?))?;
        let depth = self.forest.meta(run).depth + at + 1;
        Some(SpineBlock { hash: BlockHash(self.forest.hash(run, at)), depth })
    }

    fn before(&self, name: EngineHash, mut back: u32) -> Option<BlockHash> {
        let names = self.names?;
        let (mut run, mut at) = self.forest.locate(names.place(names.find(name.0)?))?;
        while back > at {
            back -= at + 1;
            (run, at) = self.forest.locate(self.forest.meta(run).parent?)?;
        }
        Some(BlockHash(self.forest.hash(run, at - back)))
    }
}

impl Index {
    /// Stores blocks of a cache group other than the spine.
    pub(super) fn store_in_group(
        &mut self,
        worker: WorkerKey,
        event: GroupBlocks<'_>,
    ) -> AppliedBlocks {
        if !self.hybrids.contains_key(&worker) {
            self.hybrids.insert(worker, CacheGroups::new(self.config.block_size));
            self.publish_resume_points();
        }
        let limit = self.limit();
        let names = self.workers.get(&worker).map(|known| &known.names);
        let spine = WorkerSpine { names, forest: &self.forest };
        let groups = self.hybrids.get_mut(&worker);
        let over_limit = groups.map_or(0, |groups| {
            let limit = limit.saturating_sub(names.map_or(0, Names::len));
            groups.store(event, &spine, limit)
        });
        let stored = event.hashes.len() - over_limit;
        AppliedBlocks { stored, over_limit, ..AppliedBlocks::default() }
    }

    /// Places blocks that other groups of the worker have stored before the spine has.
    pub(super) fn place_late(&mut self, worker: WorkerKey, blocks: &[StoredBlock]) {
        if let Some(groups) = self.hybrids.get_mut(&worker) {
            let names = self.workers.get(&worker).map(|known| &known.names);
            let spine = WorkerSpine { names, forest: &self.forest };
            groups.spine_stored(blocks.iter().map(|block| block.hash), &spine);
        }
    }

    /// Removes one copy of each block from a cache group other than the spine.
    pub(super) fn remove_from_group(
        &mut self,
        worker: WorkerKey,
        group: u32,
        hashes: &[EngineHash],
    ) -> AppliedBlocks {
        let groups = self.hybrids.get_mut(&worker);
        let removed = groups.map_or(0, |groups| groups.remove(group, hashes));
        AppliedBlocks { removed, unknown: hashes.len() - removed, ..AppliedBlocks::default() }
    }

    /// Forgets the cache groups of a worker.
    pub(super) fn forget_groups(&mut self, worker: WorkerKey) {
        if self.hybrids.remove(&worker).is_some() {
            self.publish_resume_points();
        }
    }

    /// Forgets the cache groups of all ranks of a worker.
    pub(super) fn forget_groups_of_ranks(&mut self, worker: u32) {
        let before = self.hybrids.len();
        self.hybrids.retain(|key, _| key.worker != worker);
        if self.hybrids.len() < before {
            self.publish_resume_points();
        }
    }

    fn publish_resume_points(&mut self) {
        let shown = self.hybrids.iter().map(|(key, groups)| (*key, Arc::clone(groups.shown())));
        self.forest.set_resume_points(shown.collect());
    }
}
