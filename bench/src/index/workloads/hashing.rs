//! Measures the time from tokens to chained block hashes. Both peers hash the tokens of a block
//! first and then chain the hashes. They are called through their plain functions, which are faster
//! than their types; one row also measures the types of `dynamo-tokens`.

use std::hint::black_box;
use std::io;
use std::time::Instant;

use dynamo_tokens::{
    TokenBlockSequence, compute_block_hash_for_tokens, compute_next_sequence_hash,
};
use kv_index::{SequenceHash, chain_prefix_hash, compute_content_hash};

use super::super::adapters::ours::Hashing;
use super::super::goals::measure;
use super::super::measure::Percentiles;
use super::super::report::Better;
use super::super::run::Run;
use crate::splitmix::mix;

const TOKENS: usize = 131_072;
const BLOCK_SIZE: usize = 16;
/// A salt, as a namespace has one.
const SALT: u64 = 1337;

pub(super) fn run(run: &mut Run) -> io::Result<()> {
    let tokens: Vec<u32> = (0..TOKENS as u64).map(|at| (mix(at) % 150_000) as u32).collect();
    let rounds = run.pick(200, 1_000);
    let mut ours = Hashing::new(BLOCK_SIZE as u32);
    let (mut plain, mut chain) = (Vec::new(), Vec::new());
    let mut samples: [Vec<u64>; 4] = Default::default();
    for _ in 0..rounds {
        samples[0].push(timed(|| ours.run(black_box(&tokens))));
        samples[1].push(timed(|| dynamo(black_box(&tokens), &mut plain)));
        samples[2].push(timed(|| kv_index(black_box(&tokens), &mut chain)));
        samples[3].push(timed(|| {
            let blocks = TokenBlockSequence::from_slice(black_box(&tokens), 16, Some(SALT));
            blocks.last_complete_block().map_or(0, |block| block.sequence_hash())
        }));
    }
    let [ours, dynamo, chain, types] =
        samples.map(|mut samples| Some(Percentiles::of(&mut samples).p50 / 1e3));
    let note = Some("dynamo-tokens, its plain functions".to_owned());
    let unit = (measure::HASHING, "us", Better::Less);
    run.row("hashing", unit, [ours, dynamo, None], note)?;
    let note = Some("dynamo-tokens' TokenBlockSequence; kv-index's functions".to_owned());
    let unit = ("the same, other forms", "us", Better::Less);
    run.row("hashing", unit, [ours, types, chain], note)?;
    for_a_lookup(run, &tokens)
}

/// Measures the hashes that a lookup needs. The peers look up by hashes of single blocks, which are
/// not chained.
fn for_a_lookup(run: &mut Run, tokens: &[u32]) -> io::Result<()> {
    let mut hashing = Hashing::new(BLOCK_SIZE as u32);
    let (mut of_dynamo, mut of_chain) = (Vec::new(), Vec::new());
    let mut samples: [Vec<u64>; 3] = Default::default();
    for _ in 0..run.pick(200, 1_000) {
        samples[0].push(timed(|| hashing.run(black_box(tokens))));
        samples[1].push(timed(|| {
            of_dynamo.clear();
            let blocks = black_box(tokens).chunks_exact(BLOCK_SIZE);
            of_dynamo.extend(blocks.map(|block| compute_block_hash_for_tokens(block, SALT)));
            of_dynamo.len() as u64
        }));
        samples[2].push(timed(|| {
            of_chain.clear();
            let blocks = black_box(tokens).chunks_exact(BLOCK_SIZE);
            of_chain.extend(blocks.map(compute_content_hash));
            of_chain.len() as u64
        }));
    }
    let figures = samples.map(|mut samples| Some(Percentiles::of(&mut samples).p50 / 1e3));
    let note = Some("peers: block by block, without a chain".to_owned());
    run.row("hashing", ("what a lookup needs of them", "us", Better::Less), figures, note)
}

fn timed(work: impl FnOnce() -> u64) -> u64 {
    let start = Instant::now();
    black_box(work());
    start.elapsed().as_nanos() as u64
}

fn dynamo(tokens: &[u32], out: &mut Vec<u64>) -> u64 {
    out.clear();
    let mut last = None;
    for block in tokens.chunks_exact(BLOCK_SIZE) {
        let block = compute_block_hash_for_tokens(block, SALT);
        let hash = last.map_or(block, |parent| compute_next_sequence_hash(parent, block));
        out.push(hash);
        last = Some(hash);
    }
    last.unwrap_or_default()
}

fn kv_index(tokens: &[u32], out: &mut Vec<SequenceHash>) -> u64 {
    out.clear();
    let mut last: Option<SequenceHash> = None;
    for block in tokens.chunks_exact(BLOCK_SIZE) {
        let block = compute_content_hash(block);
        let hash = last.map_or(SequenceHash(block.0), |parent| chain_prefix_hash(parent, block));
        out.push(hash);
        last = Some(hash);
    }
    last.map_or(0, |hash| hash.0)
}
