//! Blocks to compute, this prompt's and those queued.

use super::Sight;
use crate::candidate::{Candidate, Query};

/// In blocks. `prefill_tokens` are those that were to be computed of each outstanding prompt
/// when it was routed.
pub(super) fn cost(candidate: &Candidate, query: Query, sight: Sight) -> f64 {
    let tokens = (candidate.prefill_tokens + query.prompt_tokens) as f64;
    let blocks = tokens / f64::from(query.block_size.max(1));
    (blocks - f64::from(sight.blocks(candidate))).max(0.0)
}
