//! The pairs of tokens that are merged, with their ranks.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use crate::tokenizer::file::Text;

/// Maximum length in bytes of words that are searched for the next pair. For longer words the pairs
/// are in a heap, so that no word takes quadratic time.
const SHORT_BYTES: usize = 48;

/// The rank of a pair that does not merge.
const NONE: u32 = u32::MAX;

/// A pair and its merge.
#[derive(Clone, Copy, Debug)]
struct Merge {
    pair: (u32, u32),
    rank: u32,
    product: u32,
}

const EMPTY: Merge = Merge { pair: (NONE, NONE), rank: NONE, product: NONE };

/// All merges of a vocabulary.
pub(super) struct Merges {
    /// The token of each byte.
    of_byte: [u32; 256],
    /// A hash table by pair, at least half of which is empty.
    slots: Box<[Merge]>,
    shift: u32,
}

impl Merges {
    /// Builds the table from pairs in the order of their ranks.
    ///
    /// # Errors
    /// A token that is not in the vocabulary.
    pub(super) fn new(
        of_byte: [u32; 256],
        tokens: &HashMap<Text<'_>, u32>,
        pairs: Vec<(Text<'_>, Text<'_>)>,
    ) -> Result<Self, &'static str> {
        let bits = (pairs.len() * 2).next_power_of_two().trailing_zeros().max(1);
        let mut all = Self { of_byte, slots: vec![EMPTY; 1 << bits].into(), shift: 64 - bits };
        let mut whole = String::new();
        for (rank, (left, right)) in (0..NONE).zip(pairs) {
            whole.clear();
            whole.push_str(&left.0);
            whole.push_str(&right.0);
            let id = |text: &Text<'_>| tokens.get(text).copied().filter(|id| *id != NONE);
            let merge = match (id(&left), id(&right), id(&Text::from(whole.as_str()))) {
                (Some(left), Some(right), Some(product)) => {
                    Merge { pair: (left, right), rank, product }
                }
                _ => return Err("merges of texts that are not tokens"),
            };
            // If a pair occurs twice, the last rank applies.
            let slot = all.slot(merge.pair);
            all.slots[slot] = merge;
        }
        Ok(all)
    }

    fn slot(&self, pair: (u32, u32)) -> usize {
        let key = (u64::from(pair.0) << 32 | u64::from(pair.1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut slot = (key >> self.shift) as usize;
        while self.slots[slot].pair != pair && self.slots[slot].rank != NONE {
            slot = (slot + 1) & (self.slots.len() - 1);
        }
        slot
    }

    /// Rank and product of a pair; the rank is [`NONE`] if the pair does not merge.
    fn of(&self, left: u32, right: u32) -> (u32, u32) {
        let merge = &self.slots[self.slot((left, right))];
        (merge.rank, merge.product)
    }

    /// Whether merging turns a word into this single token.
    pub(super) fn make(&self, word: &[u8], id: u32) -> bool {
        let mut ids = Vec::with_capacity(word.len());
        self.append(word, &mut ids);
        ids == [id]
    }

    pub(super) fn append(&self, word: &[u8], ids: &mut Vec<u32>) {
        match word.len() {
            0..=SHORT_BYTES => self.append_short(word, ids),
            _ => self.append_long(word, ids),
        }
    }

    fn append_short(&self, word: &[u8], ids: &mut Vec<u32>) {
        let mut tokens = [0; SHORT_BYTES];
        // The merge of each token with the next one.
        let mut merges = [(NONE, NONE); SHORT_BYTES];
        let mut len = word.len();
        for (token, byte) in tokens.iter_mut().zip(word) {
            *token = self.of_byte[usize::from(*byte)];
        }
        for at in 1..len {
            merges[at - 1] = self.of(tokens[at - 1], tokens[at]);
        }
        loop {
            // The first pair with the lowest rank.
            let ranks = merges[..len.saturating_sub(1)].iter().map(|merge| merge.0);
            let Some((at, _)) = ranks.enumerate().min_by_key(|(_, rank)| *rank) else { break };
            let (rank, product) = merges[at];
            if rank == NONE {
                break;
            }
            tokens[at] = product;
            tokens.copy_within(at + 2..len, at + 1);
            merges.copy_within(at + 2..len, at + 1);
            len -= 1;
            if at > 0 {
                merges[at - 1] = self.of(tokens[at - 1], product);
            }
            if at + 1 < len {
                merges[at] = self.of(product, tokens[at + 1]);
            }
        }
        ids.extend_from_slice(&tokens[..len]);
    }

    fn append_long(&self, word: &[u8], ids: &mut Vec<u32>) {
        let mut chain = Chain::new(word.iter().map(|byte| self.of_byte[usize::from(*byte)]));
        let mut waiting = BinaryHeap::with_capacity(word.len());
        let offer = |waiting: &mut BinaryHeap<_>, chain: &Chain, at: usize| {
            let Some(next) = chain.next(at) else { return };
            let pair = (chain.tokens[at], chain.tokens[next]);
            let (rank, product) = self.of(pair.0, pair.1);
            if rank != NONE {
                waiting.push(Reverse((rank, at, pair, product)));
            }
        };
        for at in 0..word.len() {
            offer(&mut waiting, &chain, at);
        }
        while let Some(Reverse((_, at, pair, product))) = waiting.pop() {
            // One of the two tokens may have been merged with another one since.
            let Some(next) = chain.next(at) else { continue };
            if (chain.tokens[at], chain.tokens[next]) != pair {
                continue;
            }
            chain.join(at, next, product);
            if let Some(before) = chain.before(at) {
                offer(&mut waiting, &chain, before);
            }
            offer(&mut waiting, &chain, at);
        }
        let mut at = Some(0);
        while let Some(here) = at {
            ids.push(chain.tokens[here]);
            at = chain.next(here);
        }
    }
}

/// Tokens linked to their neighbours. A token that was merged into another one is [`NONE`].
struct Chain {
    tokens: Vec<u32>,
    nexts: Vec<usize>,
    befores: Vec<usize>,
}

impl Chain {
    fn new(tokens: impl Iterator<Item = u32>) -> Self {
        let tokens: Vec<u32> = tokens.collect();
        let nexts = (1..=tokens.len()).collect();
        let befores = (0..tokens.len()).map(|at| at.wrapping_sub(1)).collect();
        Self { tokens, nexts, befores }
    }

    fn next(&self, at: usize) -> Option<usize> {
        Some(self.nexts[at]).filter(|next| *next < self.tokens.len())
    }

    fn before(&self, at: usize) -> Option<usize> {
        Some(self.befores[at]).filter(|before| *before < self.tokens.len())
    }

    /// Replaces two neighbours by one token.
    fn join(&mut self, at: usize, next: usize, product: u32) {
        self.tokens[at] = product;
        self.tokens[next] = NONE;
        self.nexts[at] = self.nexts[next];
        if let Some(after) = self.next(at) {
            self.befores[after] = at;
        }
    }
}
