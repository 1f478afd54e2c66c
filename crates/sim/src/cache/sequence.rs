//! One sequence of tokens and the blocks that hold its KV.

use std::collections::BTreeMap;

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// What keeps sequences with equal tokens apart: salt, adapter and images.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Namespace {
    /// `cache_salt` of the request; part of the first block's hash.
    pub salt: Option<String>,
    /// Adapter (LoRA) name; part of every block's hash.
    pub adapter: Option<String>,
    /// From where the adapter was loaded, which stands for its weights; part of every block's hash, but
    /// not of events.
    pub adapter_path: Option<String>,
    /// Number of the adapter's load in events.
    pub adapter_id: Option<u32>,
    /// Images, in order; part of the hash of each block that contains one of their tokens.
    pub media: Vec<Media>,
}

/// One image of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Media {
    /// Identifies its content.
    pub identifier: String,
    /// Position of its first token in the prompt.
    pub from: usize,
    /// Position after its last token.
    pub to: usize,
}

/// What a block's hash includes besides its tokens, in the form of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExtraKey {
    /// A salt or an adapter's name.
    Text(String),
    /// An image and its position, relative to the block's first token.
    Media(String, i64),
}

/// The tokens of one request with the hashes of their full blocks and the blocks that hold them.
#[derive(Debug)]
pub struct Sequence {
    pub(super) tokens: Vec<u32>,
    pub(super) hashes: Vec<u64>,
    pub(super) namespace: Namespace,
    block_size: usize,
    hash_seed: u64,
    /// Physical blocks, in order of the tokens.
    pub(super) blocks: Vec<u32>,
    /// Number of `blocks` that are in the prefix cache.
    pub(super) registered: usize,
    /// For each cache group besides full attention, the blocks that the sequence uses there.
    pub(super) beside: Vec<GroupBlocks>,
}

/// The blocks of one sequence in a cache group besides full attention.
#[derive(Debug, Default)]
pub(super) struct GroupBlocks {
    /// Blocks that were hit.
    pub(super) hits: Vec<u32>,
    /// New blocks that will be cached, by their index in the sequence.
    pub(super) kept: BTreeMap<usize, u32>,
}

impl Sequence {
    /// A sequence without blocks.
    #[must_use]
    pub fn new(tokens: Vec<u32>, namespace: Namespace, block_size: usize, hash_seed: u64) -> Self {
        let mut sequence = Self {
            tokens,
            hashes: Vec::new(),
            namespace,
            block_size,
            hash_seed,
            blocks: Vec::new(),
            registered: 0,
            beside: Vec::new(),
        };
        sequence.hash_full_blocks();
        sequence
    }

    /// Appends one generated token.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.hash_full_blocks();
    }

    /// Prompt and generated tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Chained hash of each full block.
    #[must_use]
    pub fn hashes(&self) -> &[u64] {
        &self.hashes
    }

    /// Physical blocks held, in order of the tokens.
    #[must_use]
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// What distinguishes this sequence from others with equal tokens.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The untyped keys of block `index`, in the engine's order.
    pub(super) fn extra_keys(&self, index: usize) -> Option<Vec<ExtraKey>> {
        let text = |text: &String| ExtraKey::Text(text.clone());
        let adapter = self.namespace.adapter.iter().map(text);
        let salt = self.namespace.salt.iter().filter(|_| index == 0).map(text);
        let (from, to) = (index * self.block_size, (index + 1) * self.block_size);
        let media = self.namespace.media.iter().filter(|one| one.from < to && one.to > from);
        let media =
            media.map(|one| ExtraKey::Media(one.identifier.clone(), one.from as i64 - from as i64));
        let keys: Vec<ExtraKey> = adapter.chain(media).chain(salt).collect();
        (!keys.is_empty()).then_some(keys)
    }

    fn hash_full_blocks(&mut self) {
        while (self.hashes.len() + 1) * self.block_size <= self.tokens.len() {
            let index = self.hashes.len();
            let parent = self.hashes.last().copied().unwrap_or(self.hash_seed);
            let mut bytes = Vec::with_capacity(self.block_size * 4 + 16);
            for token in &self.tokens[index * self.block_size..(index + 1) * self.block_size] {
                bytes.extend_from_slice(&token.to_le_bytes());
            }
            for key in self.extra_keys(index).unwrap_or_default() {
                bytes.push(0xff); // never part of UTF-8: keys cannot run into each other
                match key {
                    ExtraKey::Text(text) => bytes.extend_from_slice(text.as_bytes()),
                    ExtraKey::Media(identifier, offset) => {
                        bytes.extend_from_slice(identifier.as_bytes());
                        bytes.extend_from_slice(&offset.to_le_bytes());
                    }
                }
            }
            if let Some(path) = &self.namespace.adapter_path {
                bytes.push(0xff);
                bytes.extend_from_slice(path.as_bytes());
            }
            self.hashes.push(xxh3_64_with_seed(&bytes, parent));
        }
    }
}
