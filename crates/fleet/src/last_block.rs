//! Whether a worker's engine drops the last block of each hit: learned from the cached tokens that it
//! reports, as no event, metric or endpoint says it.
//!
//! vLLM does so with EAGLE and MTP (`use_eagle_block_drop`), whose draft layers need the hidden states of
//! the tokens before the first new one.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

/// Number of figures in a row that only the other rule explains until it is the worker's.
const CERTAIN: u32 = 8;

/// What one worker's engine does with the last block of a hit.
#[derive(Debug, Default)]
pub struct LastBlock {
    is_dropped: AtomicBool,
    /// Figures that only the other rule explains, since the last that this one explains.
    contradictions: AtomicU32,
}

impl LastBlock {
    /// Whether the engine drops it.
    pub fn is_dropped(&self) -> bool {
        self.is_dropped.load(Relaxed)
    }

    /// The tokens of a hit of `blocks` blocks that the engine does not compute by its rule, and those by
    /// the other one.
    pub(super) fn tokens_of(&self, blocks: u32, block_size: u32) -> [u32; 2] {
        let [kept, dropped] = [blocks, blocks.saturating_sub(1)].map(|blocks| blocks * block_size);
        if self.is_dropped() { [dropped, kept] } else { [kept, dropped] }
    }

    /// Compares the cached tokens that the engine found with those that its rule and the other one
    /// promise: `[promised, otherwise, found]`. Returns whether the other rule is the worker's from now on.
    pub(super) fn compare(&self, [promised, otherwise, found]: [u32; 3]) -> bool {
        if promised == otherwise || (found != promised && found != otherwise) {
            return false;
        }
        if found == promised {
            self.contradictions.store(0, Relaxed);
            return false;
        }
        // Only one of several that count at once reaches the number.
        if self.contradictions.fetch_add(1, Relaxed) + 1 != CERTAIN {
            return false;
        }
        self.contradictions.store(0, Relaxed);
        self.is_dropped.fetch_xor(true, Relaxed);
        true
    }

    /// Forgets what was learned, because the engine is another process.
    pub(super) fn forget(&self) {
        self.is_dropped.store(false, Relaxed);
        self.contradictions.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_replaced_by_figures_in_a_row_that_only_the_other_explains() {
        let last_block = LastBlock::default();
        let learns = |figures: &[[u32; 3]]| -> Vec<bool> {
            figures.iter().map(|figures| last_block.compare(*figures)).collect()
        };
        let (kept, dropped, neither, equal) = ([64, 32, 64], [64, 32, 32], [64, 32, 0], [0; 3]);
        assert!(!learns(&[dropped; 7]).contains(&true));
        assert!(!learns(&[kept]).contains(&true));
        // Figures that fit neither rule, or both, leave the count as it is.
        assert!(!learns(&[[dropped, neither, equal]; 7].concat()).contains(&true));
        assert!(!last_block.is_dropped());
        assert_eq!(learns(&[dropped]), [true]);
        assert!(last_block.is_dropped());
        // An engine that keeps it is found out in the same way.
        assert!(!learns(&[[32, 64, 64]; 7]).contains(&true));
        assert_eq!(learns(&[[32, 64, 64]]), [true]);
        assert!(!last_block.is_dropped());
    }
}
