//! The prefix cache of a worker, or of a pool.

use super::clairvoyant::Clairvoyant;
use super::lru::Lru;

/// A prefix cache with one of two eviction rules.
#[derive(Clone, Debug)]
pub enum Cache {
    /// Evicts the least recently used block first.
    Lru(Lru),
    /// Evicts the block whose next use is furthest in the future: a reference only.
    Clairvoyant(Clairvoyant),
}

impl Cache {
    /// Whether it holds the block.
    pub fn holds(&self, block: u32) -> bool {
        match self {
            Self::Lru(cache) => cache.holds(block),
            Self::Clairvoyant(cache) => cache.holds(block),
        }
    }

    /// The share of the cache, from 0 to 1, that has blocks; 0 of one that knows the future.
    pub(super) fn fill(&self) -> f64 {
        match self {
            Self::Lru(cache) => cache.len() as f64 / cache.capacity().max(1) as f64,
            Self::Clairvoyant(_) => 0.0,
        }
    }

    /// Number of leading blocks that it holds.
    pub fn leading(&self, blocks: &[u32]) -> u32 {
        match self {
            Self::Lru(cache) => cache.leading(blocks),
            Self::Clairvoyant(cache) => {
                blocks.iter().take_while(|block| cache.holds(**block)).count() as u32
            }
        }
    }

    /// Notes that a request starts and uses the blocks that are cached.
    pub(super) fn start(&mut self, request: usize, blocks: &[u32], hits: u32) {
        match self {
            Self::Lru(cache) => cache.touch(&blocks[..hits as usize]),
            Self::Clairvoyant(cache) => cache.started(request, blocks),
        }
    }

    /// Inserts a prompt's blocks.
    pub(super) fn insert(&mut self, blocks: &[u32]) {
        match self {
            Self::Lru(cache) => cache.insert(blocks, drop),
            Self::Clairvoyant(cache) => cache.insert(blocks),
        }
    }
}
