//! The cache groups of a hybrid model besides full attention, as vLLM 0.32 has them with its default
//! retention: a group keeps only what is needed before a prompt's *resume points*, which are the last
//! block boundary before the prompt's last token, and the *junction*, up to which full attention held
//! the prompt although another group did not.

use std::collections::BTreeSet;

/// The kind of a cache group, and with it what a hit of some blocks needs there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupKind {
    /// The blocks of the window before the hit's end.
    SlidingWindow {
        /// Tokens of the window, including the one that is computed.
        tokens: usize,
    },
    /// The state at the hit's end.
    Mamba,
}

impl GroupKind {
    /// The number of blocks that a hit of `blocks` blocks needs, the last ones of the hit.
    pub(super) fn needed(self, blocks: usize, block_size: usize) -> usize {
        let needed = match self {
            Self::SlidingWindow { tokens } => tokens.saturating_sub(1).div_ceil(block_size),
            Self::Mamba => 1,
        };
        needed.min(blocks)
    }

    /// The indices of the blocks that a prompt keeps in the group, of which it computes those from
    /// `hits` on.
    pub(super) fn kept(self, points: &[usize], hits: usize, block_size: usize) -> BTreeSet<usize> {
        let before = |point: &usize| point - self.needed(*point, block_size)..*point;
        points.iter().flat_map(before).filter(|index| *index >= hits).collect()
    }

    /// The name in events.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SlidingWindow { .. } => "sliding_window",
            Self::Mamba => "mamba",
        }
    }

    /// The window in events.
    pub(crate) fn window(self) -> Option<usize> {
        match self {
            Self::SlidingWindow { tokens } => Some(tokens),
            Self::Mamba => None,
        }
    }
}
