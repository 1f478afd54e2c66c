//! Applies the events of one engine as a router without shims does: decodes their bytes, hashes
//! their tokens and changes the index.

use std::io;

use rmp::encode::{write_array_len, write_f64, write_map_len, write_nil, write_str, write_uint};
use splitrail_engine::kv_events::{DecodeLimits, Decoder};
use splitrail_kv::{AppliedBlocks, HashSeed, Index, IndexConfig, WorkerKey};

use super::super::measure::{Span, span};
use super::super::plan::{Chain, Op};
use super::trace::MAX_BLOCKS;
use crate::splitmix::mix;

const BLOCK_SIZE: u32 = 16;

/// The events of one worker, encoded as vLLM publishes them.
pub(super) fn payloads(worker: u32, chains: &[Chain], ops: &[Op]) -> io::Result<Vec<Vec<u8>>> {
    let mut payloads = Vec::new();
    for op in ops {
        if let Op::Store { worker: of, parent, chain, from, to } = op
            && *of == worker
        {
            let blocks = &chains[*chain as usize][*from as usize..*to as usize];
            payloads.push(payload(*parent, blocks)?);
        }
    }
    Ok(payloads)
}

/// A batch of one event: `[timestamp, [event], data parallel rank]`.
fn payload(parent: Option<u64>, blocks: &[super::super::adapters::Block]) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    write_array_len(&mut out, 3)?;
    write_f64(&mut out, 1.0)?;
    write_array_len(&mut out, 1)?;
    write_map_len(&mut out, 6)?;
    write_str(&mut out, "type")?;
    write_str(&mut out, "BlockStored")?;
    write_str(&mut out, "block_hashes")?;
    write_array_len(&mut out, blocks.len() as u32)?;
    for block in blocks {
        write_uint(&mut out, block.engine)?;
    }
    write_str(&mut out, "parent_block_hash")?;
    match parent {
        Some(parent) => _ = write_uint(&mut out, parent)?,
        None => write_nil(&mut out)?,
    }
    write_str(&mut out, "token_ids")?;
    write_array_len(&mut out, blocks.len() as u32 * BLOCK_SIZE)?;
    for block in blocks {
        for token in 0..u64::from(BLOCK_SIZE) {
            write_uint(&mut out, mix(block.content ^ token << 56) % 100_000)?;
        }
    }
    write_str(&mut out, "block_size")?;
    write_uint(&mut out, BLOCK_SIZE.into())?;
    write_str(&mut out, "medium")?;
    write_str(&mut out, "GPU")?;
    write_uint(&mut out, 0)?;
    Ok(out)
}

/// Decodes all batches and applies them to an empty index. Returns the number of stored blocks, and
/// the duration.
pub(super) fn apply(payloads: &[Vec<u8>]) -> io::Result<(usize, Span)> {
    let mut index = Index::new(IndexConfig {
        model: "bench".to_owned(),
        block_size: BLOCK_SIZE,
        seed: HashSeed(1),
        max_blocks_per_worker: MAX_BLOCKS,
    });
    let mut decoder = Decoder::new(DecodeLimits::default());
    let mut applied = AppliedBlocks::default();
    let mut failed = None;
    let span = span(|| {
        for payload in payloads {
            match decoder.decode(payload) {
                Ok(batch) => {
                    for event in &batch.events {
                        applied += index.apply(WorkerKey { worker: 0, rank: 0 }, event);
                    }
                }
                Err(error) => failed = Some(error),
            }
        }
    });
    match failed {
        Some(error) => Err(io::Error::other(error.to_string())),
        None => Ok((applied.stored, span)),
    }
}
