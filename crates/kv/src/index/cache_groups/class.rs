//! The cache groups of a worker that have the same rule and block size: a block counts if all of
//! them hold it.

use std::collections::{BTreeMap, BTreeSet};

use super::{GroupBlocks, Spine, SpineBlock};
use crate::event::{CacheGroup, EngineHash, GroupRule};

/// The size of a class's blocks in relation to the blocks of the spine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    /// A block is as large as this many blocks of the spine.
    Multiple(u32),
    /// This many blocks are as large as one of the spine. Only the hash at the end of a block of the
    /// spine is known there, so the others are placed by counting in their event.
    Part(u32),
    /// Neither, so that no depth can be resumed.
    Unrelated,
}

/// Groups with the same rule and block size.
#[derive(Debug)]
pub(super) struct Class {
    rule: GroupRule,
    block_size: u32,
    scale: Scale,
    /// The number of blocks before a depth that must be held there, unless the prompt's start or that
    /// of the chunk is nearer.
    need: u32,
    /// The depths in blocks of the spine of whose multiples each can be resumed although nothing is held
    /// there.
    boundary: Option<u32>,
    /// The numbers of the groups.
    groups: Vec<u32>,
    names: BTreeMap<EngineHash, Name>,
    nodes: BTreeMap<NodeKey, Node>,
    /// Each node and one that follows it.
    followers: BTreeSet<(NodeKey, NodeKey)>,
    /// Whether names may be without a place, because the spine had not stored their blocks yet.
    lacks_places: bool,
}

/// The name of a block's place: the chained hash if the spine has one there, else the engine's.
type NodeKey = u64;

/// What the groups hold under one of the engine's hashes.
#[derive(Debug)]
struct Name {
    /// Copies, for each group.
    copies: Vec<u32>,
    /// The block's place, if it is known.
    node: Option<NodeKey>,
}

/// A block at a known place.
#[derive(Debug, Default)]
struct Node {
    /// Names that stand for the block: usually one.
    names: u32,
    /// Names under which all groups hold the block.
    held: u32,
    before: Option<NodeKey>,
    /// Blocks from the prompt's start to the end of this one.
    length: u32,
    /// Consecutive held blocks that end with this one, counted up to the class's need.
    run: u32,
    /// The block of the spine that ends here.
    end: Option<SpineBlock>,
}

/// Where a block is.
#[derive(Clone, Copy, Debug)]
struct Place {
    key: NodeKey,
    before: Option<NodeKey>,
    length: u32,
    end: Option<SpineBlock>,
}

impl Class {
    pub(super) fn new(group: CacheGroup, spine_block_size: u32) -> Self {
        let block_size = group.block_size.max(1);
        let scale = match spine_block_size {
            0 => Scale::Unrelated,
            spine if block_size.is_multiple_of(spine) => Scale::Multiple(block_size / spine),
            spine if spine.is_multiple_of(block_size) => Scale::Part(spine / block_size),
            _ => Scale::Unrelated,
        };
        let need = match group.rule {
            GroupRule::Prefix => u32::MAX,
            GroupRule::Window { tokens } => tokens.saturating_sub(1).div_ceil(block_size).max(1),
            GroupRule::Chunk { tokens } => tokens.div_ceil(block_size).saturating_add(1),
            GroupRule::State => 1,
        };
        let boundary = match group.rule {
            GroupRule::Chunk { tokens } => boundary([tokens, block_size, spine_block_size]),
            _ => None,
        };
        Self {
            rule: group.rule,
            block_size: group.block_size,
            scale,
            need,
            boundary,
            groups: Vec::new(),
            names: BTreeMap::new(),
            nodes: BTreeMap::new(),
            followers: BTreeSet::new(),
            lacks_places: false,
        }
    }

    /// Whether a group belongs to this class.
    pub(super) fn is_of(&self, group: CacheGroup) -> bool {
        self.rule == group.rule && self.block_size == group.block_size
    }

    /// Adds a group, which holds nothing yet: so no block counts until it does.
    pub(super) fn add_group(&mut self, group: u32) {
        self.groups.push(group);
        self.names.values_mut().for_each(|name| name.copies.push(0));
        self.nodes.values_mut().for_each(|node| (node.held, node.run) = (0, 0));
    }

    /// Drops all blocks.
    pub(super) fn clear(&mut self) {
        self.names.clear();
        self.nodes.clear();
        self.followers.clear();
        self.lacks_places = false;
    }

    /// Number of names, once for each group.
    pub(super) fn len(&self) -> usize {
        self.names.len() * self.groups.len()
    }

    /// Whether names may be without a place, because the spine had not stored their blocks yet.
    pub(super) fn lacks_places(&self) -> bool {
        self.lacks_places
    }

    /// Of whose multiples, in blocks of the spine, each depth can be resumed although nothing is held
    /// there.
    pub(super) fn boundary(&self) -> Option<u32> {
        self.boundary
    }

    /// Whether the groups hold what they need to resume after a block of the spine.
    pub(super) fn passes(&self, end: SpineBlock) -> bool {
        self.boundary.is_some_and(|boundary| end.depth.is_multiple_of(boundary))
            || self.nodes.get(&end.hash.0).is_some_and(|node| node.run >= self.needed(node.length))
    }

    /// The number of blocks that must be held before a depth in blocks of this class.
    fn needed(&self, length: u32) -> u32 {
        let GroupRule::Chunk { tokens } = self.rule else { return self.need.min(length) };
        let [end, tokens, block] = [length, tokens, self.block_size].map(u64::from);
        let start = end * block / tokens.max(1) * tokens;
        length - (start / block.max(1)).min(end) as u32
    }

    /// Stores one copy of each block of an event, of those whose names have `room`; adds to `changed`
    /// the blocks of the spine after which the class may pass or fail now. Returns the number of names
    /// that found no room.
    pub(super) fn store(
        &mut self,
        event: GroupBlocks<'_>,
        spine: &impl Spine,
        mut room: usize,
        changed: &mut Vec<SpineBlock>,
    ) -> usize {
        let Some(group) = self.groups.iter().position(|known| *known == event.group.number) else {
            return 0;
        };
        let mut left_out = 0;
        let places = self.places(event, spine);
        for (hash, place) in event.hashes.iter().zip(places) {
            if !self.names.contains_key(hash) {
                let Some(left) = room.checked_sub(self.groups.len()) else {
                    left_out += 1;
                    continue;
                };
                room = left;
            }
            self.store_one(*hash, group, place, changed);
        }
        left_out
    }

    fn store_one(
        &mut self,
        hash: EngineHash,
        group: usize,
        place: Option<Place>,
        changed: &mut Vec<SpineBlock>,
    ) {
        let copies = vec![0; self.groups.len()];
        let name = self.names.entry(hash).or_insert(Name { copies, node: None });
        let was_counted = name.node.is_some() && name.is_held();
        name.copies[group] = name.copies[group].saturating_add(1);
        let is_held = name.is_held();
        let is_new = name.node.is_none();
        let Some(key) = name.node.or(place.map(|place| place.key)) else {
            self.lacks_places = true;
            return;
        };
        name.node = Some(key);
        place.into_iter().for_each(|place| self.put(place));
        let node = self.nodes.entry(key).or_default();
        node.names += u32::from(is_new);
        node.held += u32::from(is_held && !was_counted);
        self.count_runs(key, changed);
    }

    /// Finds the place of a block that was stored before the spine stored it.
    pub(super) fn place_late(
        &mut self,
        hash: EngineHash,
        spine: &impl Spine,
        changed: &mut Vec<SpineBlock>,
    ) {
        let Scale::Multiple(blocks) = self.scale else { return };
        let name = self.names.get_mut(&hash).filter(|name| name.node.is_none());
        let Some(name) = name.filter(|_| self.lacks_places) else { return };
        let Some(place) = place_on_spine(hash, blocks, spine) else { return };
        name.node = Some(place.key);
        let is_held = name.is_held();
        self.put(place);
        let node = self.nodes.entry(place.key).or_default();
        node.names += 1;
        node.held += u32::from(is_held);
        self.count_runs(place.key, changed);
    }

    /// Adds what a place says of its node.
    fn put(&mut self, place: Place) {
        let node = self.nodes.entry(place.key).or_default();
        if node.names == 0 {
            node.length = place.length;
        }
        node.end = node.end.or(place.end);
        // An event need not name the block before its first.
        if node.before.is_none() {
            node.before = place.before;
            self.followers.extend(place.before.map(|before| (before, place.key)));
        }
    }

    /// Removes one copy of a block from a group; returns whether there was one.
    pub(super) fn remove(
        &mut self,
        group: u32,
        hash: EngineHash,
        changed: &mut Vec<SpineBlock>,
    ) -> bool {
        let group = self.groups.iter().position(|known| *known == group);
        let (Some(group), Some(name)) = (group, self.names.get_mut(&hash)) else {
            return false;
        };
        let was_held = name.is_held();
        let Some(left) = name.copies[group].checked_sub(1) else {
            return false;
        };
        name.copies[group] = left;
        let (is_held, is_gone) = (name.is_held(), name.copies.iter().all(|copies| *copies == 0));
        let key = name.node;
        if is_gone {
            self.names.remove(&hash);
        }
        if let Some(key) = key {
            self.release(key, was_held && !is_held, is_gone, changed);
        }
        true
    }

    /// Removes all copies of a block.
    pub(super) fn drop_block(&mut self, hash: EngineHash, changed: &mut Vec<SpineBlock>) {
        if let Some(name) = self.names.remove(&hash)
            && let Some(key) = name.node
        {
            self.release(key, name.is_held(), true, changed);
        }
    }

    fn release(
        &mut self,
        key: NodeKey,
        is_lost: bool,
        is_gone: bool,
        changed: &mut Vec<SpineBlock>,
    ) {
        let Some(node) = self.nodes.get_mut(&key) else { return };
        node.held -= u32::from(is_lost);
        node.names -= u32::from(is_gone);
        self.count_runs(key, changed);
        let before = self.nodes.get(&key).and_then(|node| node.before);
        let near: Vec<_> = [key].into_iter().chain(before).chain(self.after(key)).collect();
        near.into_iter().for_each(|key| self.drop_if_unused(key));
    }

    /// The blocks that follow one.
    fn after(&self, key: NodeKey) -> impl Iterator<Item = NodeKey> + '_ {
        self.followers.range((key, 0)..=(key, u64::MAX)).map(|(_, next)| *next)
    }

    /// Drops a block that is not held. A block whose place the spine does not say is kept as long as
    /// the block before or after it is held: a later event may name only one of the two.
    fn drop_if_unused(&mut self, key: NodeKey) {
        let is_named = |key: NodeKey| self.nodes.get(&key).is_some_and(|node| node.names > 0);
        let Some(node) = self.nodes.get(&key).filter(|node| node.names == 0) else { return };
        let before = node.before;
        let is_part = matches!(self.scale, Scale::Part(_));
        if is_part && (before.is_some_and(is_named) || self.after(key).any(is_named)) {
            return;
        }
        if let Some(before) = before {
            self.followers.remove(&(before, key));
        }
        self.nodes.remove(&key);
    }

    /// Counts the run of a block again, and of those after it as far as they change.
    fn count_runs(&mut self, key: NodeKey, changed: &mut Vec<SpineBlock>) {
        let mut rest = vec![key];
        while let Some(key) = rest.pop() {
            let Some(node) = self.nodes.get(&key) else { continue };
            // Lengths that grow along a chain keep one without an end from being counted for ever.
            let is_next = |before: &&Node| before.length.checked_add(1) == Some(node.length);
            let before = node.before.and_then(|before| self.nodes.get(&before)).filter(is_next);
            let run = match node.held {
                0 => 0,
                _ => before.map_or(0, |before| before.run).saturating_add(1).min(self.need),
            };
            if run == node.run {
                continue;
            }
            changed.extend(node.end);
            rest.extend(self.after(key));
            if let Some(node) = self.nodes.get_mut(&key) {
                node.run = run;
            }
        }
    }

    fn places(&self, event: GroupBlocks<'_>, spine: &impl Spine) -> Vec<Option<Place>> {
        match self.scale {
            Scale::Multiple(blocks) => {
                event.hashes.iter().map(|hash| place_on_spine(*hash, blocks, spine)).collect()
            }
            Scale::Part(parts) => self.place_by_counting(event, parts, spine),
            Scale::Unrelated => vec![None; event.hashes.len()],
        }
    }

    /// The places of blocks that are smaller than those of the spine. What an event leaves out are
    /// blocks that no resume point needs, so blocks before a known one follow each other up to it.
    fn place_by_counting(
        &self,
        event: GroupBlocks<'_>,
        parts: u32,
        spine: &impl Spine,
    ) -> Vec<Option<Place>> {
        let GroupBlocks { parent, tokens, hashes, .. } = event;
        let ends: Vec<_> = hashes.iter().map(|hash| spine.find(*hash)).collect();
        let start = match parent {
            None => Some(0),
            Some(parent) => self.length_at(parent, parts, spine),
        };
        let after = start.map(|start| start.saturating_add(tokens / self.block_size.max(1)));
        let mut lengths = vec![None; hashes.len()];
        // From the back: each block is one before the next, unless the spine says where it is.
        let mut next = after.map(|after| after.saturating_add(1));
        for (at, end) in ends.iter().enumerate().rev() {
            let known = end.map(|end| end.depth.saturating_mul(parts));
            lengths[at] = known.or_else(|| next.and_then(|next| u32::checked_sub(next, 1)));
            next = lengths[at];
        }
        // Where a block of the spine ends, its chained hash is the key, which events need not name.
        let on_spine = |at: usize, length: u32| {
            let next = (at..hashes.len()).find(|next| ends[*next].is_some())?;
            let back = ends[next]?.depth.checked_sub(length / parts)?;
            spine.before(hashes[next], back).map(|hash| hash.0)
        };
        let before = |at: usize| {
            let length = lengths[at].and_then(|length: u32| length.checked_sub(1))?;
            match at.checked_sub(1) {
                _ if length == 0 => None,
                Some(last) if lengths[last] == Some(length) => Some(key(hashes[last], ends[last])),
                None if start == Some(length) => {
                    parent.map(|parent| key(parent, spine.find(parent)))
                }
                _ if length.is_multiple_of(parts) => on_spine(at, length),
                _ => None,
            }
        };
        let place = |at: usize| {
            let length = lengths[at].filter(|length| *length > 0)?;
            let (key, end) = (key(hashes[at], ends[at]), ends[at]);
            Some(Place { key, before: before(at), length, end })
        };
        (0..hashes.len()).map(place).collect()
    }

    /// Blocks of this class up to the end of a block that the spine or the class has.
    fn length_at(&self, hash: EngineHash, parts: u32, spine: &impl Spine) -> Option<u32> {
        let own = || self.nodes.get(&hash.0).map(|node| node.length);
        spine.find(hash).map(|end| end.depth.saturating_mul(parts)).or_else(own)
    }

    pub(super) fn bytes(&self) -> usize {
        const PER_NODE: usize = 2 * size_of::<(NodeKey, Node)>() + 2 * size_of::<[NodeKey; 4]>();
        let per_name = 2 * size_of::<(EngineHash, Name)>() + self.groups.len() * size_of::<u32>();
        self.names.len() * per_name + self.nodes.len() * PER_NODE
    }
}

impl Name {
    fn is_held(&self) -> bool {
        self.copies.iter().all(|copies| *copies > 0)
    }
}

/// The least common multiple of a chunk, a block and a block of the spine, in tokens, as a number of the
/// latter.
fn boundary([chunk, block, spine]: [u32; 3]) -> Option<u32> {
    let spine = u64::from(spine);
    let common = |a: u64, b: u64| (a / greatest_common_divisor(a, b).max(1)).checked_mul(b);
    let tokens = common(common(spine, block.into())?, chunk.into()).filter(|tokens| *tokens > 0)?;
    u32::try_from(tokens / spine).ok()
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

fn key(hash: EngineHash, end: Option<SpineBlock>) -> NodeKey {
    end.map_or(hash.0, |end| end.hash.0)
}

/// The place of a block that is as large as `blocks` blocks of the spine.
fn place_on_spine(hash: EngineHash, blocks: u32, spine: &impl Spine) -> Option<Place> {
    let end = spine.find(hash).filter(|end| end.depth.is_multiple_of(blocks))?;
    let before = match end.depth == blocks {
        true => None,
        false => Some(spine.before(hash, blocks)?.0),
    };
    Some(Place { key: end.hash.0, before, length: end.depth / blocks, end: Some(end) })
}
