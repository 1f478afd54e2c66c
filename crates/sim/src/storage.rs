//! KV storage outside of engines, which several engines share.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of blocks; the oldest are dropped.
const BLOCKS_MAX: usize = 1 << 18;

/// A storage of KV blocks; clones share their content. Engines that share it must have equal block
/// sizes and hash seeds.
#[derive(Debug, Clone, Default)]
pub struct SharedStorage(Arc<Mutex<Blocks>>);

#[derive(Debug, Default)]
struct Blocks {
    known: HashSet<u64>,
    order: VecDeque<u64>,
}

impl SharedStorage {
    /// Number of blocks in the storage.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks().known.len()
    }

    /// Whether the storage is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops all blocks.
    pub fn clear(&self) {
        *self.blocks() = Blocks::default();
    }

    /// Stores these blocks.
    pub(crate) fn store(&self, hashes: &[u64]) {
        let mut blocks = self.blocks();
        for hash in hashes {
            if blocks.known.insert(*hash) {
                blocks.order.push_back(*hash);
            }
        }
        while blocks.order.len() > BLOCKS_MAX {
            if let Some(oldest) = blocks.order.pop_front() {
                blocks.known.remove(&oldest);
            }
        }
    }

    /// Number of leading blocks in the storage.
    pub(crate) fn leading(&self, hashes: &[u64]) -> usize {
        let blocks = self.blocks();
        hashes.iter().take_while(|hash| blocks.known.contains(hash)).count()
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
