//! Traces: one JSON object per line.

use std::io::{self, BufRead};

use serde::Deserialize;
use splitrail_sim::cluster::Workload;
use splitrail_sim::cluster::workload::WorkloadBuilder;
use thiserror::Error;

/// The most bytes of one line: about 400,000 block names.
const LINE_BYTES_MAX: usize = 8 << 20;

/// The most requests that are read, since all of them are kept.
const REQUESTS_MAX: usize = 20_000_000;

/// Why a trace cannot be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A line that is no request.
    #[error("line {line}: {reason}")]
    Line {
        /// From 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// Nothing to serve.
    #[error("the trace has no requests")]
    Empty,
}

/// A request in the form of the public Mooncake traces.
#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// Reads a trace whose blocks have so many tokens.
///
/// # Errors
/// If it cannot be read, a line is no request, or there is none.
pub fn read(mut input: impl BufRead, block_tokens: u32) -> Result<Workload, TraceError> {
    let mut builder = WorkloadBuilder::new(block_tokens);
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
        let length = |name: &str, tokens: u64| {
            let reason = || fail(format!("{name} is {tokens}, and the most is {}", i32::MAX));
            i32::try_from(tokens).map(i32::unsigned_abs).map_err(|_| reason())
        };
        let input_tokens = length("input_length", request.input_length)?;
        let output_tokens = length("output_length", request.output_length)?;
        requests += 1;
        if requests > REQUESTS_MAX {
            return Err(fail(format!("more than {REQUESTS_MAX} requests")));
        }
        builder.push(request.timestamp, input_tokens, output_tokens, &request.hash_ids);
    }
    if requests == 0 {
        return Err(TraceError::Empty);
    }
    Ok(builder.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_and_bad_ones_are_named() {
        let text =
            "{\"timestamp\": 3, \"input_length\": 0, \"output_length\": 7, \"hash_ids\": [9]}\n\n";
        let trace = read(text.as_bytes(), 512).expect("a trace");
        let request = trace.requests()[0];
        assert_eq!((request.input_tokens, request.output_tokens, request.blocks), (1, 7, 1));
        let bad = format!("{text}{{\"timestamp\": 3}}\n");
        let error = read(bad.as_bytes(), 512).expect_err("no request").to_string();
        assert!(error.starts_with("line 3: missing field"), "{error}");
        assert!(matches!(read(&b"\n"[..], 512), Err(TraceError::Empty)));
    }
}
