//! Encodes KV events as vLLM publishes them.

use std::time::{SystemTime, UNIX_EPOCH};

use rmp::encode::{write_array_len, write_f64, write_map_len, write_nil, write_str, write_uint};
use splitrail_kv::{BlockHash, HashSeed, Namespace, chain_hashes};

use super::Failure;
use super::engine::BLOCK_SIZE;
use super::router::MODEL;
use crate::splitmix::mix;

/// The leading blocks of a prompt.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    number: u64,
    blocks: usize,
}

impl Chain {
    /// The chain with a number. Chains with different numbers have no block in common.
    pub(super) fn new(number: u64, blocks: usize) -> Self {
        Self { number, blocks }
    }

    /// The engine's names of the blocks.
    fn names(&self) -> impl Iterator<Item = u64> {
        let seed = mix(self.number);
        (0..self.blocks as u64).map(move |place| mix(seed ^ place))
    }

    fn tokens(&self) -> Vec<u32> {
        let count = self.blocks as u64 * u64::from(BLOCK_SIZE);
        let seed = mix(!self.number);
        (0..count).map(|place| (mix(seed ^ place) % 100_000) as u32).collect()
    }

    /// The block hashes by which a router with this seed looks the chain up.
    pub(super) fn hashes(&self, seed: HashSeed) -> Vec<BlockHash> {
        let namespace =
            Namespace { salt: None, model: MODEL, adapter: None, block_size: BLOCK_SIZE };
        let mut hashes = Vec::new();
        chain_hashes(&namespace, seed, &self.tokens(), &mut hashes);
        hashes
    }
}

/// A batch of one or two events: `[timestamp, [events], data parallel rank]`.
///
/// # Errors
/// None in practice: writing to memory does not fail.
pub(super) fn batch(stored: &Chain, removed: Option<&Chain>) -> Result<Vec<u8>, Failure> {
    let mut out = Vec::new();
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
    write_array_len(&mut out, 3)?;
    write_f64(&mut out, seconds)?;
    write_array_len(&mut out, 1 + u32::from(removed.is_some()))?;
    if let Some(removed) = removed {
        write_map_len(&mut out, 3)?;
        write_str(&mut out, "type")?;
        write_str(&mut out, "BlockRemoved")?;
        write_names(&mut out, removed)?;
        write_str(&mut out, "medium")?;
        write_str(&mut out, "GPU")?;
    }
    write_map_len(&mut out, 8)?;
    write_str(&mut out, "type")?;
    write_str(&mut out, "BlockStored")?;
    write_names(&mut out, stored)?;
    write_str(&mut out, "parent_block_hash")?;
    write_nil(&mut out)?;
    write_str(&mut out, "token_ids")?;
    let tokens = stored.tokens();
    write_array_len(&mut out, u32::try_from(tokens.len())?)?;
    for token in tokens {
        write_uint(&mut out, token.into())?;
    }
    write_str(&mut out, "block_size")?;
    write_uint(&mut out, BLOCK_SIZE.into())?;
    write_str(&mut out, "lora_id")?;
    write_nil(&mut out)?;
    write_str(&mut out, "medium")?;
    write_str(&mut out, "GPU")?;
    write_str(&mut out, "lora_name")?;
    write_nil(&mut out)?;
    write_uint(&mut out, 0)?;
    Ok(out)
}

fn write_names(out: &mut Vec<u8>, chain: &Chain) -> Result<(), Failure> {
    write_str(out, "block_hashes")?;
    write_array_len(out, u32::try_from(chain.blocks)?)?;
    for name in chain.names() {
        write_uint(out, name)?;
    }
    Ok(())
}
