//! Namespaces and chained block hashes.
//!
//! The byte layout below is a contract: routers and side-cars of different
//! versions exchange these hashes, so a change of layout needs a new
//! `NAMESPACE_DOMAIN` and an agreement at attach time. A pinned value in the
//! tests guards it.

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Names the layout of a namespace's serialisation, with its version.
const NAMESPACE_DOMAIN: &[u8] = b"splitrail/namespace/1";

/// Blocks up to this many tokens are laid out on the stack and hashed at once;
/// larger ones are streamed. Both give the same hash, the first is faster.
const STACK_TOKENS: usize = 128;
const PARENT_BYTES: usize = size_of::<u64>();
const TOKEN_BYTES: usize = size_of::<u32>();

/// The seed of every hash; the same for all routers and side-cars of a cluster.
///
/// Keep it out of clients' sight: whoever knows it can look for collisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HashSeed(pub u64);

/// The hash of a block *and of everything before it*, down to the namespace.
///
/// Two equal values therefore stand for the same whole prefix. It says which
/// prefix is meant, never that the blocks of that prefix are resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub u64);

/// What must agree, besides tokens, before KV can be shared.
///
/// There is deliberately no `Default`: forgetting a part would let two tenants
/// or two adapters see each other's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Namespace<'a> {
    /// The cache salt exactly as the engine was sent it; no salt is not the
    /// empty salt.
    pub salt: Option<&'a str>,
    /// The configured name of the model (never an alias).
    pub model: &'a str,
    /// The adapter (LoRA) name, if any.
    pub adapter: Option<&'a str>,
    /// Tokens per KV block.
    pub block_size: u32,
}

impl Namespace<'_> {
    /// The hash which takes the parent's place for a prompt's first block.
    ///
    /// Every field is tagged or length-prefixed, so no two namespaces serialise
    /// alike.
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

/// The hash of a block with the given tokens after `parent`: seeded XXH3 (64
/// bits) over the parent and then the tokens, all little endian.
pub fn next_hash(seed: HashSeed, parent: BlockHash, tokens: &[u32]) -> BlockHash {
    if tokens.len() > STACK_TOKENS {
        return next_hash_streamed(seed, parent, tokens);
    }
    let mut buffer = [0_u8; PARENT_BYTES + STACK_TOKENS * TOKEN_BYTES];
    let used = PARENT_BYTES + tokens.len() * TOKEN_BYTES;
    buffer[..PARENT_BYTES].copy_from_slice(&parent.0.to_le_bytes());
    lay_out(tokens, &mut buffer[PARENT_BYTES..used]);
    BlockHash(xxh3_64_with_seed(&buffer[..used], seed.0))
}

fn next_hash_streamed(seed: HashSeed, parent: BlockHash, tokens: &[u32]) -> BlockHash {
    let mut hasher = Xxh3::with_seed(seed.0);
    hasher.update(&parent.0.to_le_bytes());
    let mut buffer = [0_u8; STACK_TOKENS * TOKEN_BYTES];
    for part in tokens.chunks(STACK_TOKENS) {
        let bytes = &mut buffer[..part.len() * TOKEN_BYTES];
        lay_out(part, bytes);
        hasher.update(bytes);
    }
    BlockHash(hasher.digest())
}

fn lay_out(tokens: &[u32], bytes: &mut [u8]) {
    for (token, place) in tokens.iter().zip(bytes.chunks_exact_mut(TOKEN_BYTES)) {
        place.copy_from_slice(&token.to_le_bytes());
    }
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
    out.clear();
    let block_size = namespace.block_size as usize;
    if block_size == 0 {
        return;
    }
    out.reserve(tokens.len() / block_size);
    let mut parent = namespace.root(seed);
    for block in tokens.chunks_exact(block_size) {
        parent = next_hash(seed, parent, block);
        out.push(parent);
    }
}
