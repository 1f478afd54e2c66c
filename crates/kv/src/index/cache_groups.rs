//! What the cache groups of one worker hold besides the spine, and where prompts can be resumed
//! because of it.
//!
//! An engine of a hybrid model uses a cached prefix only if each group holds what it needs there. The
//! *spine* is the group of full attention, whose blocks are in the forest. The other groups keep few
//! blocks: those before a prompt's resume points. A *resume point* is a depth at which all of them
//! hold what they need, so what a worker can use of a prompt is the deepest resume point that is not
//! beyond the spine.

mod class;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::class::Class;
use super::resume_points::{PointWriter, ResumePoints};
use crate::event::{CacheGroup, EngineHash};
use crate::hash::BlockHash;

/// A block of the spine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpineBlock {
    pub(super) hash: BlockHash,
    /// Blocks from the prompt's start to the end of this one.
    pub(super) depth: u32,
}

/// The blocks of one worker's full attention, by the engine's names.
pub(super) trait Spine {
    /// The block with this name.
    fn find(&self, name: EngineHash) -> Option<SpineBlock>;
    /// The chained hash of the block that is `back` blocks before the one with this name.
    fn before(&self, name: EngineHash, back: u32) -> Option<BlockHash>;
}

/// What a stored event says of one group.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupBlocks<'a> {
    pub(super) group: CacheGroup,
    /// The block before the event's tokens; `None` at a prompt's start.
    pub(super) parent: Option<EngineHash>,
    /// Number of tokens of the event, which may be more than those of its blocks.
    pub(super) tokens: u32,
    /// The blocks that were stored, in prompt order; some in between may be left out.
    pub(super) hashes: &'a [EngineHash],
}

/// The cache groups of one worker, except the spine.
#[derive(Debug)]
pub(super) struct CacheGroups {
    /// Tokens per block of the spine.
    block_size: u32,
    /// The class of each group, by the group's number.
    groups: BTreeMap<u32, usize>,
    classes: Vec<Class>,
    points: PointWriter,
    shown: Arc<ResumePoints>,
    /// Blocks of the spine after which a class may pass or fail since the last look.
    changed: Vec<SpineBlock>,
}

impl CacheGroups {
    pub(super) fn new(block_size: u32) -> Self {
        Self {
            block_size,
            groups: BTreeMap::new(),
            classes: Vec::new(),
            points: PointWriter::default(),
            shown: Arc::new(ResumePoints::new()),
            changed: Vec::new(),
        }
    }

    /// What readers see.
    pub(super) fn shown(&self) -> &Arc<ResumePoints> {
        &self.shown
    }

    /// Number of names, over all groups.
    pub(super) fn len(&self) -> usize {
        self.classes.iter().map(Class::len).sum()
    }

    /// Stores one copy of each block of an event; returns the number of blocks that found no room
    /// within `limit` names.
    pub(super) fn store(
        &mut self,
        event: GroupBlocks<'_>,
        spine: &impl Spine,
        limit: usize,
    ) -> usize {
        let class = self.class_of(event.group);
        if self.len() > limit {
            // Each further group takes room for all names of its class.
            self.clear();
        }
        let room = limit.saturating_sub(self.len());
        let left_out = self.classes[class].store(event, spine, room, &mut self.changed);
        self.show();
        left_out
    }

    /// Places blocks that groups have stored before the spine has: engines may send the events of each
    /// group apart.
    pub(super) fn spine_stored(
        &mut self,
        hashes: impl Iterator<Item = EngineHash> + Clone,
        spine: &impl Spine,
    ) {
        for class in self.classes.iter_mut().filter(|class| class.lacks_places()) {
            hashes.clone().for_each(|hash| class.place_late(hash, spine, &mut self.changed));
        }
        self.show();
    }

    /// Removes one copy of each block from a group; returns how many there were.
    pub(super) fn remove(&mut self, group: u32, hashes: &[EngineHash]) -> usize {
        let Some(class) = self.groups.get(&group) else { return 0 };
        let class = &mut self.classes[*class];
        let removed = hashes.iter().filter(|hash| class.remove(group, **hash, &mut self.changed));
        let removed = removed.count();
        self.show();
        removed
    }

    /// Removes all copies of blocks from all groups.
    pub(super) fn drop_blocks(&mut self, hashes: &[EngineHash]) {
        for class in &mut self.classes {
            hashes.iter().for_each(|hash| class.drop_block(*hash, &mut self.changed));
        }
        self.show();
    }

    /// Drops all blocks, and remembers which groups there are.
    pub(super) fn clear(&mut self) {
        self.classes.iter_mut().for_each(Class::clear);
        self.points.clear(&self.shown);
    }

    pub(super) fn bytes(&self) -> usize {
        self.points.bytes() + self.classes.iter().map(Class::bytes).sum::<usize>()
    }

    fn class_of(&mut self, group: CacheGroup) -> usize {
        if let Some(class) = self.groups.get(&group.number) {
            if self.classes[*class].is_of(group) {
                return *class;
            }
            // The engine serves another model now.
            self.clear();
            self.groups.clear();
            self.classes.clear();
        }
        let class = self.classes.iter().position(|class| class.is_of(group)).unwrap_or_else(|| {
            self.classes.push(Class::new(group, self.block_size));
            self.classes.len() - 1
        });
        self.classes[class].add_group(group.number);
        self.groups.insert(group.number, class);
        // Depths at which only chunks are needed, and a chunk begins.
        let boundaries: Option<Vec<_>> = self.classes.iter().map(Class::boundary).collect();
        let boundary = boundaries.and_then(|all| match all[..] {
            [one] => Some(one),
            _ => None,
        });
        self.shown.set_boundary(boundary);
        // The new group holds nothing.
        self.points.clear(&self.shown);
        class
    }

    /// Shows to readers what has changed.
    fn show(&mut self) {
        let Self { classes, points, shown, changed, .. } = self;
        for end in changed.drain(..) {
            let is_point = classes.iter().all(|class| class.passes(end));
            points.set(shown, end.hash, end.depth, is_point);
        }
    }
}
