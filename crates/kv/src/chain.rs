//! The block hashes of a prompt, computed while its tokens arrive.

use crate::hash::{BlockHash, BlockHasher, HashSeed, Namespace};

/// The hashes of a prompt's full blocks, as far as its tokens have arrived.
///
/// Tokens may be appended in any portions: the hashes are those of
/// [`chain_hashes`](crate::chain_hashes) over all of them.
#[derive(Clone, Debug)]
pub struct Chain {
    hasher: BlockHasher,
    block_size: usize,
    root: BlockHash,
    hashes: Vec<BlockHash>,
    /// Tokens after the last full block.
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

    /// The hash that takes the place of a parent of the first block: chains with the same root
    /// share their blocks.
    #[must_use]
    pub fn root(&self) -> BlockHash {
        self.root
    }

    /// Number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The hashes of the full blocks, first block first.
    #[must_use]
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// The tokens after the last full block.
    #[must_use]
    pub fn rest(&self) -> &[u32] {
        &self.rest
    }

    /// The hashes of the full blocks, first block first.
    #[must_use]
    pub fn into_hashes(self) -> Vec<BlockHash> {
        self.hashes
    }

    /// Reserves memory for the blocks of this many further tokens.
    pub fn reserve(&mut self, tokens: usize) {
        self.hashes.reserve(tokens.checked_div(self.block_size).unwrap_or_default() + 1);
    }

    /// Uses the memory of `hashes` for the hashes. To be called while the chain is empty.
    pub(crate) fn reuse(&mut self, mut hashes: Vec<BlockHash>) {
        hashes.clear();
        self.hashes = hashes;
    }

    /// Appends tokens.
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

    /// Appends tokens that were hashed before: `hashes` are those of the blocks that the tokens
    /// fill, and `rest` are the tokens after the last full block. The hashing must have been done
    /// by a chain in the same state as this one.
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
