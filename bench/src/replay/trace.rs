//! The requests that are replayed: read from a trace, or generated with the statistics of a public
//! trace.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use splitrail_replay::trace::{TraceSelection, read};
use splitrail_sim::cluster::Workload;
use splitrail_sim::cluster::workload::WorkloadBuilder;

use super::Failure;
use crate::index::generate;
use crate::splitmix::mix;

/// Numbers by which Mooncake's conversation trace is recognised, for which there are reference
/// figures: requests, blocks, and leading blocks that an unlimited cache of all workers would find.
const CONVERSATION_TRACE: (usize, u64, u64) = (12_031, 288_500, 105_710);

/// Interval between two bursts of arrivals, as in that trace, in milliseconds.
const BURST_INTERVAL_MS: f64 = 3_000.0;
/// Duration of the trace in milliseconds.
const DURATION_MS: f64 = 3_537_000.0;
/// Number of tokens per block.
const BLOCK_TOKENS: u32 = 512;

/// Reads a trace, or generates requests if there is no path. Also returns whether the trace is the
/// one with reference figures.
pub(super) fn load(path: Option<&Path>) -> Result<(Workload, bool), Failure> {
    let Some(path) = path else { return Ok((conversations(), false)) };
    let file = File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let workload = read(BufReader::new(file), TraceSelection::default())
        .map_err(|e| format!("{}: {e}", path.display()))?;
    let seen = (workload.requests().len(), workload.total_blocks(), workload.ceiling_blocks());
    Ok((workload, seen == CONVERSATION_TRACE))
}

/// Generates conversations whose requests arrive in bursts.
fn conversations() -> Workload {
    let requests = generate();
    let mut builder = WorkloadBuilder::new(BLOCK_TOKENS);
    let bursts = DURATION_MS / BURST_INTERVAL_MS;
    for (i, blocks) in requests.iter().enumerate() {
        let draw = mix(i as u64 ^ 0x0D1CE);
        let burst = (i as f64 / requests.len() as f64 * bursts).floor();
        let input = blocks.len() as u32 * BLOCK_TOKENS - (draw % u64::from(BLOCK_TOKENS)) as u32;
        let output = 20 + (draw >> 16) % 640;
        let blocks: Vec<u64> = blocks.iter().copied().map(u64::from).collect();
        builder.push(burst * BURST_INTERVAL_MS, input, output as u32, &blocks);
    }
    builder.finish()
}
