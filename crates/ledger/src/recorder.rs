//! Records decisions for replay: hashes and figures of each prompt, no content.
//!
//! A line has the members of a trace line (`timestamp`, `input_length`, `output_length`,
//! `hash_ids`), so that readers of traces can read it, and the decision beside them.

use rand::RngExt;
use serde::Serialize;
use splitrail_kv::BlockHash;

use super::decisions::Decision;
use super::lines::Lines;
use crate::stages::StageTimes;
use splitrail_config::RecordConfig;

/// Where decisions are written down.
#[derive(Debug)]
pub struct Recorder {
    lines: Lines,
    /// The share of requests that are, from 0 to 1.
    sample: f64,
}

/// What a prompt's line needs besides its decision; kept while it is served.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Hashes of its full blocks, by name.
    hash_ids: Vec<u64>,
    /// Tokens per block.
    block_size: u32,
    /// Its length, or what it weighs where its tokens are not known.
    input_length: u64,
}

impl Prompt {
    /// A prompt by its blocks. Their names are the upper 53 bits of their hashes: numbers that
    /// every reader of JSON takes as they are.
    pub fn new(hashes: &[BlockHash], block_size: u32, input_length: u64) -> Self {
        let hash_ids = hashes.iter().map(|hash| hash.0 >> 11).collect();
        Self { hash_ids, block_size, input_length }
    }
}

/// How a request went.
#[derive(Clone, Copy, Debug)]
pub struct Times<'a> {
    /// When it arrived, in milliseconds since 1970.
    pub arrived_unix_ms: u64,
    /// Until its answer began; `None` if none did.
    pub ttft_ms: Option<f64>,
    /// Until it ended.
    pub total_ms: f64,
    /// Of its stages.
    pub stages: &'a StageTimes,
}

/// One line.
#[derive(Serialize)]
struct Line<'a> {
    /// Of this form.
    version: u32,
    timestamp: u64,
    input_length: u64,
    /// 0 if nobody knows.
    output_length: u32,
    hash_ids: &'a [u64],
    block_size: u32,
    endpoint: &'static str,
    ttft_ms: Option<f64>,
    total_ms: f64,
    stages_ms: &'a StageTimes,
    decision: &'a Decision,
}

impl Recorder {
    /// The version of its lines.
    pub const VERSION: u32 = 1;

    /// Writes the configured share of requests to these lines.
    pub fn new(lines: Lines, config: &RecordConfig) -> Self {
        Self { lines, sample: config.sample }
    }

    /// The file, for the task that writes it.
    pub fn lines(&self) -> &Lines {
        &self.lines
    }

    /// Whether a request that begins now is one of the sample.
    pub fn takes_one(&self) -> bool {
        self.lines.is_open() && (self.sample >= 1.0 || rand::rng().random::<f64>() < self.sample)
    }

    /// Writes a prompt down.
    pub fn write(
        &self,
        endpoint: &'static str,
        times: Times<'_>,
        prompt: &Prompt,
        decision: &Decision,
    ) {
        self.lines.write(&Line {
            version: Self::VERSION,
            timestamp: times.arrived_unix_ms,
            input_length: prompt.input_length,
            output_length: decision.ledger().completion_tokens().unwrap_or(0),
            hash_ids: &prompt.hash_ids,
            block_size: prompt.block_size,
            endpoint,
            ttft_ms: times.ttft_ms,
            total_ms: times.total_ms,
            stages_ms: times.stages,
            decision,
        });
    }
}
