//! The trace: a given one, or one of the statistics of a public one.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use splitrail_replay::trace::{Select, read};
use splitrail_sim::cluster::Workload;
use splitrail_sim::cluster::workload::WorkloadBuilder;

use super::Failure;
use crate::index::{generate, mix};

/// Requests and distinct blocks of Mooncake's conversation trace, which the reference figures
/// are of.
const CONVERSATION: (usize, u64, u64) = (12_031, 288_500, 105_710);

/// Between two bursts of arrivals, as in that trace.
const TICK_MS: f64 = 3_000.0;
/// How long it lasts.
const SPAN_MS: f64 = 3_537_000.0;
const BLOCK_TOKENS: u32 = 512;

/// Loads a trace, or makes one; says whether it is the one of the reference figures.
pub(super) fn load(path: Option<&Path>) -> Result<(Workload, bool), Failure> {
    let Some(path) = path else { return Ok((conversations(), false)) };
    let file = File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let workload = read(BufReader::new(file), Select::default())
        .map_err(|e| format!("{}: {e}", path.display()))?;
    let seen = (workload.requests().len(), workload.total_blocks(), workload.ceiling_blocks());
    Ok((workload, seen == CONVERSATION))
}

/// Conversations in bursts.
fn conversations() -> Workload {
    let requests = generate();
    let mut builder = WorkloadBuilder::new(BLOCK_TOKENS);
    let ticks = SPAN_MS / TICK_MS;
    for (i, blocks) in requests.iter().enumerate() {
        let draw = mix(i as u64 ^ 0x0D1CE);
        let tick = (i as f64 / requests.len() as f64 * ticks).floor();
        let input = blocks.len() as u32 * BLOCK_TOKENS - (draw % u64::from(BLOCK_TOKENS)) as u32;
        let output = 20 + (draw >> 16) % 640;
        let blocks: Vec<u64> = blocks.iter().copied().map(u64::from).collect();
        builder.push(tick * TICK_MS, input, output as u32, &blocks);
    }
    builder.finish()
}
