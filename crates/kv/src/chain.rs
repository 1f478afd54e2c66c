//! The block hashes of a prompt, made while its tokens arrive.

use crate::hash::{BlockHash, BlockHasher, HashSeed, Namespace};

/// The hashes of a prompt's full blocks, as far as its tokens are there.
///
/// Tokens may come in any portions: the hashes are those of [`chain_hashes`](crate::chain_hashes)
/// over all of them.
#[derive(Clone, Debug)]
pub struct Chain {
    hasher: BlockHasher,
    block_size: usize,
    root: BlockHash,
    hashes: Vec<BlockHash>,
    /// Tokens behind the last full block.
    rest: Vec<u32>,
    tokens: usize,
}

impl Chain {
    /// A prompt without tokens. With a block size of zero it never has a block.
    pub fn new(namespace: &Namespace<'_>, seed: HashSeed) -> Self {
        Self {
            hasher: BlockHasher::new(seed),
            block_size: namespace.block_size as usize,
            root: namespace.root(seed),
            hashes: Vec::new(),
            rest: Vec::new(),
            tokens: 0,
        }
    }

    /// What the first block's hash follows upon: chains of one root share their blocks.
    #[must_use]
    pub fn root(&self) -> BlockHash {
        self.root
    }

    /// How many tokens there are.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The hashes of the full blocks, first block first.
    #[must_use]
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// The tokens behind the last full block.
    #[must_use]
    pub fn rest(&self) -> &[u32] {
        &self.rest
    }

    /// The hashes of the full blocks, first block first.
    #[must_use]
    pub fn into_hashes(self) -> Vec<BlockHash> {
        self.hashes
    }

    /// Makes room for the blocks of so many tokens more.
    pub fn reserve(&mut self, tokens: usize) {
        self.hashes.reserve(tokens.checked_div(self.block_size).unwrap_or_default() + 1);
    }

    /// Has hashes written where others were, before there are any.
    pub(crate) fn reuse(&mut self, mut hashes: Vec<BlockHash>) {
        hashes.clear();
        self.hashes = hashes;
    }

    /// Goes on with these tokens.
    pub fn append(&mut self, tokens: &[u32]) {
        self.tokens += tokens.len();
        if self.block_size == 0 {
            return;
        }
        let mut tokens = tokens;
        if !self.rest.is_empty() {
            let missing = self.block_size - self.rest.len();
            let (filling, others) = tokens.split_at(missing.min(tokens.len()));
            self.rest.extend_from_slice(filling);
            if filling.len() < missing {
                return;
            }
            self.hashes.push(self.hasher.next(self.last(), &self.rest));
            self.rest.clear();
            tokens = others;
        }
        let blocks = tokens.chunks_exact(self.block_size);
        self.rest.extend_from_slice(blocks.remainder());
        let (hasher, mut parent) = (self.hasher, self.last());
        self.hashes.extend(blocks.map(|block| {
            parent = hasher.next(parent, block);
            parent
        }));
    }

    /// Goes on with so many tokens whose work is done: these are the hashes of the blocks that
    /// they fill, and what they leave behind the last full block. The work has to be that of a
    /// chain that was the same as this one before them.
    pub fn append_done(&mut self, tokens: usize, hashes: &[BlockHash], rest: &[u32]) {
        self.tokens += tokens;
        self.hashes.extend_from_slice(hashes);
        self.rest.clear();
        self.rest.extend_from_slice(rest);
    }

    fn last(&self) -> BlockHash {
        self.hashes.last().copied().unwrap_or(self.root)
    }
}
