//! Records decisions for replay: hashes and figures of each prompt, no content.
//!
//! A line has the members of a trace line (`timestamp`, `input_length`, `output_length`,
//! `hash_ids`), so that programs for traces can read it. It also contains the decision record.

use rand::RngExt;
use serde::Serialize;
use splitrail_kv::BlockHash;

use super::decisions::Decision;
use super::lines::Lines;
use crate::timeline::RequestTimes;
use splitrail_config::RecordConfig;
use splitrail_telemetry::Metrics;

/// Writes decision records to the record file.
#[derive(Debug)]
pub struct Recorder {
    lines: Lines,
    /// The share of requests that are recorded, from 0 to 1.
    sample: f64,
}

/// The data of a prompt's line besides its decision record; kept while the prompt is served.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// The names of the full blocks.
    hash_ids: Vec<u64>,
    /// Tokens per block.
    block_size: u32,
    /// The length of the prompt in tokens, or an estimate if its tokens are not known.
    input_length: u64,
}

impl Prompt {
    /// A prompt with these block hashes. The names of the blocks are the upper 53 bits of their
    /// hashes, because every JSON reader represents such numbers exactly.
    pub fn new(hashes: &[BlockHash], block_size: u32, input_length: u64) -> Self {
        let hash_ids = hashes.iter().map(|hash| hash.0 >> 11).collect();
        Self { hash_ids, block_size, input_length }
    }
}

/// One line of the record file.
#[derive(Serialize)]
struct Line<'a> {
    /// The version of the line format.
    version: u32,
    timestamp: u64,
    input_length: u64,
    /// 0 if the number is not known.
    output_length: u32,
    hash_ids: &'a [u64],
    block_size: u32,
    endpoint: &'static str,
    #[serde(flatten)]
    times: RequestTimes,
    decision: &'a Decision,
}

impl Recorder {
    /// The present version of the line format.
    pub const VERSION: u32 = 1;

    /// Opens the file that a configuration names, for the share of requests that it names.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn open(config: &RecordConfig, metrics: &Metrics) -> std::io::Result<Self> {
        let (path, records) = (config.path.as_deref(), metrics.record_lines.clone());
        let writable = &metrics.output_file_writable;
        let lines = Lines::open("record", path, config.rotate, records, writable)?;
        Ok(Self { lines, sample: config.sample })
    }

    /// The lines, for the task that writes the file.
    pub fn lines(&self) -> &Lines {
        &self.lines
    }

    /// Whether a request that begins now is recorded; drawn at random.
    pub fn takes_one(&self) -> bool {
        self.lines.is_open() && (self.sample >= 1.0 || rand::rng().random::<f64>() < self.sample)
    }

    /// Writes the line of a prompt whose request arrived at `arrived_unix_ms`, in milliseconds
    /// since 1970.
    pub fn write(
        &self,
        endpoint: &'static str,
        arrived_unix_ms: u64,
        times: RequestTimes,
        prompt: &Prompt,
        decision: &Decision,
    ) {
        self.lines.write(&Line {
            version: Self::VERSION,
            timestamp: arrived_unix_ms,
            input_length: prompt.input_length,
            output_length: decision.ledger.completion_tokens.unwrap_or(0),
            hash_ids: &prompt.hash_ids,
            block_size: prompt.block_size,
            endpoint,
            times,
            decision,
        });
    }
}
