//! Host memory behind the blocks: what is evicted from accelerator memory is kept here for a while.

use std::collections::{HashMap, VecDeque};

use super::StoredBlocks;

/// The blocks in host memory, and what is needed to announce a block that moves there.
#[derive(Debug)]
pub(super) struct HostTier {
    capacity: usize,
    /// The blocks in accelerator memory, one by one.
    device: HashMap<u64, StoredBlocks>,
    /// The blocks in host memory, the one that leaves next first.
    order: VecDeque<u64>,
}

impl HostTier {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, device: HashMap::new(), order: VecDeque::new() }
    }

    pub(super) fn contains(&self, hash: u64) -> bool {
        self.order.contains(&hash)
    }

    /// Remembers blocks that are in accelerator memory now.
    pub(super) fn describe(&mut self, stored: &StoredBlocks, block_size: usize) {
        for (at, hash) in stored.hashes.iter().enumerate() {
            let one = StoredBlocks {
                hashes: vec![*hash],
                parent: at.checked_sub(1).map_or(stored.parent, |at| Some(stored.hashes[at])),
                tokens: stored.tokens[at * block_size..(at + 1) * block_size].to_vec(),
                adapter: stored.adapter.clone(),
                extra_keys: vec![stored.extra_keys[at].clone()],
                medium: super::Medium::Host,
            };
            self.device.insert(*hash, one);
        }
    }

    /// Moves the last copy of a block from accelerator memory to host memory. Returns the block, if it
    /// was not there already, and the one that it has displaced.
    pub(super) fn take_in(&mut self, hash: u64) -> (Option<StoredBlocks>, Option<u64>) {
        let described = self.device.remove(&hash);
        if self.capacity == 0 || self.touch(hash) {
            return (None, None);
        }
        self.order.push_back(hash);
        let displaced = (self.order.len() > self.capacity).then(|| self.order.pop_front());
        (described, displaced.flatten())
    }

    /// Marks a block as used now. Returns whether it is in host memory.
    pub(super) fn touch(&mut self, hash: u64) -> bool {
        let Some(at) = self.order.iter().position(|one| *one == hash) else { return false };
        self.order.remove(at);
        self.order.push_back(hash);
        true
    }

    pub(super) fn clear(&mut self) {
        self.device.clear();
        self.order.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }
}
