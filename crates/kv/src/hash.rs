//! Namespaces and chained block hashes.
//!
//! The byte layout below is a contract: routers and shims of different versions exchange these
//! hashes. A change of the layout needs a new `NAMESPACE_DOMAIN` and a new [`HASH_LAYOUT`], which
//! router and shim compare when a shim attaches. A pinned value in the tests guards the layout.

use xxhash_rust::xxh3::Xxh3;

use crate::chain::Chain;
use crate::splitmix::SplitMix64;

/// The version of how namespaces and blocks are hashed. A router and a shim exchange hashes only if
/// their versions are equal.
pub const HASH_LAYOUT: u32 = 2;

/// Identifies the layout of a namespace's serialisation, with its version.
const NAMESPACE_DOMAIN: &[u8] = b"splitrail/namespace/2";

/// The seed of every hash; the same for all routers and shims of a cluster.
///
/// Keep it secret from clients: a client that knows the seed can search for collisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HashSeed(pub u64);

/// The hash of a block *and of everything before it*, down to the namespace.
///
/// Two equal values therefore stand for the same whole prefix. The hash identifies a prefix; it
/// does not say that any worker holds its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub u64);

/// What must agree, besides tokens, before KV can be shared.
///
/// There is deliberately no `Default`: a forgotten part would let two tenants or two adapters use
/// each other's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Namespace<'a> {
    /// The cache salt exactly as it was sent to the engine; no salt differs from the empty salt.
    pub salt: Option<&'a str>,
    /// The configured name of the model (never an alias).
    pub model: &'a str,
    /// The adapter (LoRA) name, if any.
    pub adapter: Option<&'a str>,
    /// Tokens per KV block.
    pub block_size: u32,
}

impl Namespace<'_> {
    /// The hash that takes the parent's place for a prompt's first block.
    ///
    /// Every field is tagged or length-prefixed, so no two namespaces are serialised alike.
    pub fn root(&self, seed: HashSeed) -> BlockHash {
        let mut hasher = Xxh3::with_seed(seed.0);
        hasher.update(NAMESPACE_DOMAIN);
        update_text(&mut hasher, self.model);
        update_optional_text(&mut hasher, self.salt);
        update_optional_text(&mut hasher, self.adapter);
        hasher.update(&self.block_size.to_le_bytes());
        BlockHash(hasher.digest())
    }
}

fn update_text(hasher: &mut Xxh3, text: &str) {
    hasher.update(&(text.len() as u64).to_le_bytes());
    hasher.update(text.as_bytes());
}

fn update_optional_text(hasher: &mut Xxh3, text: Option<&str>) {
    match text {
        None => hasher.update(&[0]),
        Some(text) => {
            hasher.update(&[1]);
            update_text(hasher, text);
        }
    }
}

/// Number of tokens that are mixed together.
const STRIPE_TOKENS: usize = 16;
const STRIPE_WORDS: usize = STRIPE_TOKENS / 2;

/// Hashes blocks with the keys of one seed.
///
/// A block's tokens are mixed sixteen at a time as XXH3 mixes short inputs: pairs of 64-bit words,
/// each with a key of its own, are multiplied to 128 bits and folded. Only the result, one number
/// per block, is chained, with one multiplication; so only that multiplication must wait for the
/// previous block, and a processor works on several blocks in parallel. That makes it five times as
/// fast as XXH3 over parent and tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHasher {
    words: [u64; STRIPE_WORDS],
    block: u64,
    chain: u64,
}

/// The exclusive or of both halves of the product.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

impl BlockHasher {
    /// The keys are the seed's next outputs of SplitMix64; those used as factors are odd.
    pub fn new(HashSeed(seed): HashSeed) -> Self {
        let mut keys = SplitMix64::new(seed);
        let words = [(); STRIPE_WORDS].map(|()| keys.next_u64());
        Self { words, block: keys.next_u64() | 1, chain: keys.next_u64() | 1 }
    }

    /// The hash of a block with the given tokens after `parent`.
    #[inline]
    pub fn next(&self, parent: BlockHash, tokens: &[u32]) -> BlockHash {
        let len = tokens.len() as u64;
        let mixed = match tokens.try_into() {
            // The block size of most engines; `stripes` gives the same result.
            Ok(stripe) => len ^ self.stripe(stripe),
            Err(_) => self.stripes(len, tokens),
        };
        BlockHash(fold(parent.0 ^ mixed, self.chain))
    }

    /// Mixes any number of tokens; missing tokens of the last stripe are zero.
    fn stripes(&self, len: u64, tokens: &[u32]) -> u64 {
        let mut stripes = tokens.chunks(STRIPE_TOKENS).map(|tokens| {
            let mut stripe = [0; STRIPE_TOKENS];
            stripe[..tokens.len()].copy_from_slice(tokens);
            self.stripe(&stripe)
        });
        let first = stripes.next().unwrap_or_else(|| self.stripe(&[0; STRIPE_TOKENS]));
        stripes.fold(len ^ first, |mixed, stripe| fold(mixed, self.block) ^ stripe)
    }

    #[inline]
    fn stripe(&self, tokens: &[u32; STRIPE_TOKENS]) -> u64 {
        let word = |at: usize| {
            let pair = u64::from(tokens[2 * at]) | u64::from(tokens[2 * at + 1]) << 32;
            pair ^ self.words[at]
        };
        (0..STRIPE_WORDS / 2).fold(0, |mixed, at| mixed ^ fold(word(2 * at), word(2 * at + 1)))
    }
}

/// The number of leading blocks that two prompts have in common. Hashes are chained, so that all blocks
/// before an equal one are equal.
pub fn common_blocks(one: &[BlockHash], other: &[BlockHash]) -> usize {
    let (mut alike, mut parted) = (0, one.len().min(other.len()));
    while alike < parted {
        let middle = alike.midpoint(parted);
        match one[middle] == other[middle] {
            true => alike = middle + 1,
            false => parted = middle,
        }
    }
    alike
}

/// The hashes of all full blocks of tokens whose first block follows `root`, first block first. A block
/// size of zero has no blocks.
pub fn hashes_after(
    root: BlockHash,
    seed: HashSeed,
    block_size: u32,
    tokens: &[u32],
) -> Vec<BlockHash> {
    if block_size == 0 {
        return Vec::new();
    }
    let (hasher, mut parent) = (BlockHasher::new(seed), root);
    let blocks = tokens.chunks_exact(block_size as usize);
    blocks
        .map(|block| {
            parent = hasher.next(parent, block);
            parent
        })
        .collect()
}

/// The hashes of all full blocks of a prompt, first block first.
///
/// Clears `out` and reuses its memory. Tokens after the last full block have no
/// hash; a block size of zero has no blocks.
pub fn chain_hashes(
    namespace: &Namespace<'_>,
    seed: HashSeed,
    tokens: &[u32],
    out: &mut Vec<BlockHash>,
) {
    let mut chain = Chain::new(namespace, seed);
    chain.reuse(std::mem::take(out));
    chain.append(tokens);
    *out = chain.into_hashes();
}
