//! KV storage outside of engines, which several engines share.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of blocks; the oldest are dropped.
const BLOCKS_MAX: usize = 1 << 18;

/// A storage of KV blocks; clones share their content. Engines that share it must have equal block
/// sizes and hash seeds. By default, each prefix of a stored prompt is found, as in LMCache.
#[derive(Debug, Clone, Default)]
pub struct SharedStorage(Arc<Mutex<Blocks>>);

#[derive(Debug, Default)]
struct Blocks {
    known: HashSet<u64>,
    order: VecDeque<u64>,
    whole_prompts: bool,
}

impl SharedStorage {
    /// From now on prompts are found as a whole only, as in vLLM's `ExampleConnector`.
    ///
    /// An engine that has computed a prompt of n tokens writes the blocks before its last token. One
    /// that looks for a prompt leaves out one token more, so that it finds nothing if n is a whole
    /// number of blocks and one token.
    pub fn find_whole_prompts_only(&self) {
        self.blocks().whole_prompts = true;
    }

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
        let mut blocks = self.blocks();
        blocks.known.clear();
        blocks.order.clear();
    }

    /// Stores a prompt of so many tokens, of whose full blocks these are the hashes.
    pub(crate) fn store(&self, hashes: &[u64], prompt_tokens: usize, block_size: usize) {
        let mut blocks = self.blocks();
        let from = match blocks.whole_prompts {
            // The hash of a block stands for all tokens up to its end.
            true => (prompt_tokens.saturating_sub(1) / block_size).saturating_sub(1),
            false => 0,
        };
        let to = if blocks.whole_prompts { prompt_tokens.saturating_sub(1) } else { prompt_tokens };
        for hash in &hashes[from..to / block_size] {
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

    /// Number of a prompt's blocks in the storage after the first `from`, which the engine has itself.
    pub(crate) fn found(
        &self,
        hashes: &[u64],
        from: usize,
        prompt_tokens: usize,
        block_size: usize,
    ) -> usize {
        let blocks = self.blocks();
        if blocks.whole_prompts {
            let looked_for = prompt_tokens.saturating_sub(2) / block_size;
            let last = looked_for.checked_sub(1).and_then(|last| hashes.get(last));
            let is_found = last.is_some_and(|hash| blocks.known.contains(hash));
            return if is_found { looked_for.saturating_sub(from) } else { 0 };
        }
        // The last token is computed in any case.
        let most = prompt_tokens.saturating_sub(1) / block_size;
        hashes[from..most].iter().take_while(|hash| blocks.known.contains(hash)).count()
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
