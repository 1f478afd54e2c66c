//! The prefix cache of a worker, or of a pool.

use super::clairvoyant::Clairvoyant;
use super::lru::Lru;

/// A prefix cache under one of two ways to forget.
#[derive(Clone, Debug)]
pub enum Cache {
    /// What was used least recently goes first.
    Lru(Lru),
    /// What is used furthest ahead goes first: a reference only.
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

    /// How many of these blocks it holds before the first that it does not.
    pub fn leading(&self, blocks: &[u32]) -> u32 {
        match self {
            Self::Lru(cache) => cache.leading(blocks),
            Self::Clairvoyant(cache) => {
                blocks.iter().take_while(|block| cache.holds(**block)).count() as u32
            }
        }
    }

    /// A request starts and uses the blocks that are there.
    pub(super) fn start(&mut self, request: usize, blocks: &[u32], hits: u32) {
        match self {
            Self::Lru(cache) => cache.touch(&blocks[..hits as usize]),
            Self::Clairvoyant(cache) => cache.started(request, blocks),
        }
    }

    /// Takes a prompt's blocks in.
    pub(super) fn insert(&mut self, blocks: &[u32]) {
        match self {
            Self::Lru(cache) => cache.insert(blocks, drop),
            Self::Clairvoyant(cache) => cache.insert(blocks),
        }
    }
}
