//! Prompts that begin alike, as a tree of runs of blocks.
//!
//! Hashes are chained, so a run is found by the hash of its first block, wherever it hangs,
//! and what two prompts have in common ends where their hashes first differ. There, a run is
//! cut in two. All blocks of a run belong to the same prompt.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use crate::hash::BlockHash;

/// A run's place in its tree; good until the run is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeId(u32);

/// The runs of one worker.
#[derive(Debug, Default)]
pub(super) struct Tree {
    nodes: Vec<Node>,
    /// Places without a run.
    free: Vec<NodeId>,
    /// Runs by their first blocks.
    starts: HashMap<BlockHash, NodeId, Spread>,
    /// In all runs.
    blocks: usize,
}

#[derive(Debug)]
struct Node {
    /// What it follows upon.
    parent: Option<NodeId>,
    /// The last prompt that had it.
    number: u64,
    /// Never empty while it is in use.
    blocks: Vec<BlockHash>,
}

impl Tree {
    /// Gives the next run of a prompt to a number: the one that `hashes` begin with, after
    /// `parent`. Says where it is, how many blocks it has, and which number had them; `None` if
    /// there is none. If the prompt leaves the run, the run ends there.
    pub(super) fn renew(
        &mut self,
        parent: Option<NodeId>,
        number: u64,
        hashes: &[BlockHash],
    ) -> Option<(NodeId, usize, u64)> {
        let mut at = *self.starts.get(hashes.first()?)?;
        let node = self.node(at);
        // Two hashes that are equal by accident.
        if node.parent != parent {
            return None;
        }
        let alike = node.blocks.iter().zip(hashes).take_while(|(a, b)| a == b).count();
        if alike < node.blocks.len() {
            at = self.cut(at, alike);
        }
        let before = std::mem::replace(&mut self.node_mut(at).number, number);
        Some((at, alike, before))
    }

    /// Cuts a run in two; the end keeps its place. Says where the beginning is.
    fn cut(&mut self, at: NodeId, blocks: usize) -> NodeId {
        let node = self.node_mut(at);
        let end = node.blocks.split_off(blocks);
        let mut begin = std::mem::replace(&mut node.blocks, end);
        begin.shrink_to_fit();
        let (first, second) = (begin[0], node.blocks[0]);
        let begin = Node { parent: node.parent, number: node.number, blocks: begin };
        let place = self.put(begin);
        self.node_mut(at).parent = Some(place);
        self.starts.insert(first, place);
        self.starts.insert(second, at);
        place
    }

    /// Adds the rest of a prompt behind what it has in common with others; says where its last
    /// block is. `None` if it has no block, or one that is elsewhere by accident.
    pub(super) fn append(
        &mut self,
        parent: Option<NodeId>,
        number: u64,
        hashes: &[BlockHash],
    ) -> Option<NodeId> {
        let Some(first) = hashes.first() else { return parent };
        let place = self.put(Node { parent, number, blocks: hashes.to_vec() });
        self.blocks += hashes.len();
        self.starts.insert(*first, place);
        Some(place)
    }

    /// Takes up to so many blocks off the end of what the last prompt of a run has; says where
    /// the rest of it ends.
    pub(super) fn trim(
        &mut self,
        mut at: NodeId,
        most: usize,
        gone: &mut Vec<BlockHash>,
    ) -> Option<NodeId> {
        let number = self.node(at).number;
        loop {
            let node = self.node_mut(at);
            let left = node.blocks.len().saturating_sub(most - gone.len());
            let before = gone.len();
            gone.extend(node.blocks.drain(left..).rev());
            if left > 0 && left < node.blocks.capacity() / 4 {
                node.blocks.shrink_to_fit();
            }
            self.blocks -= gone.len() - before;
            if left > 0 {
                return Some(at);
            }
            let parent = self.node(at).parent;
            if let Some(first) = gone.last()
                && self.starts.get(first) == Some(&at)
            {
                self.starts.remove(first);
            }
            self.node_mut(at).blocks = Vec::new();
            self.free.push(at);
            at = parent.filter(|parent| self.node(*parent).number == number)?;
            if gone.len() == most {
                return Some(at);
            }
        }
    }

    /// Blocks in all runs.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// The same, counted.
    pub(super) fn listed_blocks(&self) -> usize {
        self.nodes.iter().map(|node| node.blocks.len()).sum()
    }

    fn put(&mut self, node: Node) -> NodeId {
        match self.free.pop() {
            Some(place) => {
                *self.node_mut(place) = node;
                place
            }
            None => {
                self.nodes.push(node);
                // There are fewer than blocks, of which memory has no room for so many.
                NodeId((self.nodes.len() - 1) as u32)
            }
        }
    }

    fn node(&self, at: NodeId) -> &Node {
        &self.nodes[at.0 as usize]
    }

    fn node_mut(&mut self, at: NodeId) -> &mut Node {
        &mut self.nodes[at.0 as usize]
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
