//! Which of a worker's blocks were computed with which load of an adapter, so that those of an
//! earlier load can be dropped: the forest knows an adapter's name only as a part of hashes.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use crate::event::{BlockAdapter, EngineHash, StoredBlock};

/// Hashes that are noted beyond twice the number of the worker's blocks before those of blocks that
/// are gone are removed.
const SPARE: usize = 1024;

/// The blocks of one worker that belong to adapters, by the adapter's name and the number of its load.
#[derive(Debug, Default)]
pub(super) struct AdapterBlocks {
    noted: BTreeMap<(String, u64), Vec<EngineHash>>,
    /// The number of hashes in all lists.
    count: usize,
}

impl AdapterBlocks {
    /// Notes stored blocks. The worker holds `held` blocks, and `is_held` says which.
    pub(super) fn note(
        &mut self,
        adapter: &BlockAdapter,
        blocks: &[StoredBlock],
        held: usize,
        is_held: impl Fn(EngineHash) -> bool,
    ) {
        let noted = self.noted.entry((adapter.name.clone(), adapter.load)).or_default();
        noted.extend(blocks.iter().map(|block| block.hash));
        self.count += blocks.len();
        if self.count > held.saturating_mul(2).saturating_add(SPARE) {
            self.remove_gone(is_held);
        }
    }

    /// Removes the hashes of blocks that are gone, and those that a later load has as well.
    fn remove_gone(&mut self, is_held: impl Fn(EngineHash) -> bool) {
        let mut seen = BTreeSet::new();
        for noted in self.noted.values_mut().rev() {
            noted.retain(|hash| is_held(*hash) && seen.insert(*hash));
            noted.shrink_to_fit();
        }
        self.noted.retain(|_, noted| !noted.is_empty());
        self.count = seen.len();
    }

    /// The number of the latest load of an adapter that has blocks.
    pub(super) fn latest(&self, adapter: &str) -> Option<u64> {
        let (found, _) = self.noted.range(loads(adapter, u64::MAX)).next_back()?;
        Some(found.1)
    }

    /// Removes and returns the blocks of an adapter's loads up to a number.
    pub(super) fn take(&mut self, adapter: &str, through: u64) -> Vec<EngineHash> {
        let keys = self.noted.range(loads(adapter, through)).map(|(key, _)| key.clone());
        let keys: Vec<_> = keys.collect();
        let taken: Vec<_> =
            keys.iter().filter_map(|key| self.noted.remove(key)).flatten().collect();
        self.count -= taken.len();
        taken
    }

    pub(super) fn bytes(&self) -> usize {
        let bytes = |noted: &Vec<EngineHash>| noted.capacity() * size_of::<EngineHash>();
        self.noted.values().map(bytes).sum()
    }
}

/// The keys of an adapter's loads up to a number.
fn loads(adapter: &str, through: u64) -> RangeInclusive<(String, u64)> {
    (adapter.to_owned(), 0)..=(adapter.to_owned(), through)
}
