//! Reads traces: one JSON object per line.

use std::io::{self, BufRead};

use serde::Deserialize;
use splitrail_sim::cluster::Workload;
use splitrail_sim::cluster::workload::WorkloadBuilder;
use thiserror::Error;

/// Maximum length of a line in bytes: about 400,000 block names.
const LINE_BYTES_MAX: usize = 8 << 20;

/// Maximum number of requests, all of which are kept in memory.
const REQUESTS_MAX: usize = 20_000_000;

/// Why a trace cannot be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A line is not a request.
    #[error("line {line}: {reason}")]
    Line {
        /// The line's number, from 1.
        line: usize,
        /// What is wrong with the line.
        reason: String,
    },
    /// The trace has no requests.
    #[error("the trace has no requests")]
    Empty,
}

/// Default number of tokens per block: that of the public Mooncake traces.
const BLOCK_TOKENS: u32 = 512;

/// What to read of a trace.
#[derive(Clone, Copy, Debug, Default)]
pub struct TraceSelection<'a> {
    /// Tokens per block; by default from the lines, or 512.
    pub block_tokens: Option<u32>,
    /// Reads only this model's requests, if lines name the model.
    pub model: Option<&'a str>,
}

/// A request in the format of the public Mooncake traces, or of a router's record file, which adds
/// optional members.
#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
    block_size: Option<u32>,
    decision: Option<Decision>,
}

#[derive(Deserialize)]
struct Decision {
    model: Option<String>,
}

/// Reads a trace.
///
/// # Errors
/// The file cannot be read, a line is not a request or has blocks of another size, or there are no
/// requests.
pub fn read(mut input: impl BufRead, select: TraceSelection<'_>) -> Result<Workload, TraceError> {
    let mut gathered: Option<(u32, WorkloadBuilder)> = None;
    let (mut text, mut line, mut requests) = (Vec::new(), 0, 0);
    loop {
        text.clear();
        line += 1;
        let limit = LINE_BYTES_MAX as u64 + 1;
        let read = io::Read::take(&mut input, limit).read_until(b'\n', &mut text)?;
        if read == 0 {
            break;
        }
        let fail = |reason: String| TraceError::Line { line, reason };
        if read > LINE_BYTES_MAX {
            return Err(fail(format!("longer than {LINE_BYTES_MAX} bytes")));
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        let request: Line = serde_json::from_slice(&text).map_err(|e| fail(e.to_string()))?;
        if request.is_of_another(select.model) {
            continue;
        }
        let size = select.block_tokens.or(request.block_size).unwrap_or(BLOCK_TOKENS);
        let (expected, builder) =
            gathered.get_or_insert_with(|| (size, WorkloadBuilder::new(size)));
        if size != *expected {
            let reason = format!("blocks of {size} tokens after blocks of {expected}");
            return Err(fail(format!("{reason}: one model at a time")));
        }
        requests += 1;
        if requests > REQUESTS_MAX {
            return Err(fail(format!("more than {REQUESTS_MAX} requests")));
        }
        let input_tokens = length("input_length", request.input_length).map_err(fail)?;
        let output_tokens = length("output_length", request.output_length).map_err(fail)?;
        builder.push(request.timestamp, input_tokens, output_tokens, &request.hash_ids);
    }
    gathered.map(|(_, builder)| builder.finish()).ok_or(TraceError::Empty)
}

impl Line {
    fn is_of_another(&self, model: Option<&str>) -> bool {
        let whose = self.decision.as_ref().and_then(|decision| decision.model.as_deref());
        model.zip(whose).is_some_and(|(wanted, whose)| wanted != whose)
    }
}

fn length(name: &str, tokens: u64) -> Result<u32, String> {
    let fits = i32::try_from(tokens).map(i32::unsigned_abs);
    fits.map_err(|_| format!("{name} is {tokens}, and the most is {}", i32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_lines_are_reported_with_their_number() {
        let text =
            "{\"timestamp\": 3, \"input_length\": 0, \"output_length\": 7, \"hash_ids\": [9]}\n\n";
        let trace = read(text.as_bytes(), TraceSelection::default()).expect("a trace");
        let request = trace.requests()[0];
        assert_eq!((request.input_tokens, request.output_tokens, request.blocks), (1, 7, 1));
        let bad = format!("{text}{{\"timestamp\": 3}}\n");
        let error =
            read(bad.as_bytes(), TraceSelection::default()).expect_err("no request").to_string();
        assert!(error.starts_with("line 3: missing field"), "{error}");
        assert!(matches!(read(&b"\n"[..], TraceSelection::default()), Err(TraceError::Empty)));
    }

    fn recorded(model: &str, block_size: u32) -> String {
        format!(
            "{{\"version\": 1, \"timestamp\": 1, \"input_length\": 40, \"output_length\": 2, \
             \"hash_ids\": [5, 6], \"block_size\": {block_size}, \
             \"decision\": {{\"model\": \"{model}\", \"id\": 7}}}}\n"
        )
    }

    #[test]
    fn blocks_of_another_size_are_refused_unless_another_model_is_selected() {
        let text = recorded("a", 16) + &recorded("b", 32);
        let error =
            read(text.as_bytes(), TraceSelection::default()).expect_err("two sizes").to_string();
        assert!(error.contains("32 tokens after blocks of 16"), "{error}");
        let select = TraceSelection { model: Some("b"), ..TraceSelection::default() };
        let trace = read(text.as_bytes(), select).expect("a trace");
        assert_eq!((trace.requests().len(), trace.block_tokens()), (1, 32));
    }
}
