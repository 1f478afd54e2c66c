//! Who holds a block: the side of the index that a prompt reads.

use super::WorkerKey;
use super::table::{Table, shrink};
use crate::event::Tier;
use crate::hash::BlockHash;

/// One worker which holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) worker: WorkerKey,
    /// Per tier, how many of the worker's engine hashes stand for this block
    /// and have a copy there. Engine hashes rather than copies: the worker's map
    /// counts the copies, and a count here is bounded by that map's size.
    pub(super) names: [u32; Tier::COUNT],
}

impl Holder {
    /// The fastest tier with the block. A holder without any is removed at once,
    /// so the fallback is never taken.
    pub(super) fn fastest(&self) -> usize {
        self.names.iter().position(|&names| names > 0).unwrap_or(Tier::COUNT - 1)
    }

    fn is_empty(&self) -> bool {
        self.names == [0; Tier::COUNT]
    }
}

/// From block hash to holders, each list sorted by worker, none empty.
#[derive(Clone, Debug, Default)]
pub(super) struct Holders {
    table: Table<BlockHash, Vec<Holder>>,
}

impl Holders {
    /// The workers which hold the block, sorted; empty for an unknown block.
    pub(super) fn of(&self, hash: BlockHash) -> &[Holder] {
        self.table.get(&hash).map_or(&[], Vec::as_slice)
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (BlockHash, &[Holder])> {
        self.table.iter().map(|(hash, list)| (*hash, list.as_slice()))
    }

    /// One more engine hash of `worker` stands for the block in `tier`.
    pub(super) fn add(&mut self, hash: BlockHash, worker: WorkerKey, tier: Tier) {
        // Most blocks are held by one worker: begin with room for just one.
        let list = self.table.entry(hash).or_insert_with(|| Vec::with_capacity(1));
        let at = match list.binary_search_by_key(&worker, |holder| holder.worker) {
            Ok(at) => at,
            Err(at) => {
                list.insert(at, Holder { worker, names: [0; Tier::COUNT] });
                at
            }
        };
        list[at].names[tier as usize] += 1;
    }

    /// Takes back one [`Self::add`].
    pub(super) fn remove(&mut self, hash: BlockHash, worker: WorkerKey, tier: Tier) {
        let Some(list) = self.table.get_mut(&hash) else {
            return;
        };
        let Ok(at) = list.binary_search_by_key(&worker, |holder| holder.worker) else {
            return;
        };
        let names = &mut list[at].names[tier as usize];
        *names = names.saturating_sub(1);
        if !list[at].is_empty() {
            return;
        }
        list.remove(at);
        if list.is_empty() {
            self.table.remove(&hash);
            shrink(&mut self.table);
        } else if list.capacity() > 4 * list.len() {
            list.shrink_to(2 * list.len());
        }
    }
}
