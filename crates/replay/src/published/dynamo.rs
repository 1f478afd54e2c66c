//! Dynamo's rule: the worker with the fewest blocks to compute, for this prompt and for queued ones.

use splitrail_policy::{Candidate, Query};

/// The cost in blocks. `prefill_tokens` are the tokens that each outstanding prompt still had to
/// compute when it was routed.
pub(super) fn cost(worker: &Candidate, query: Query) -> f64 {
    let tokens = (worker.prefill_tokens + query.prompt_tokens) as f64;
    let blocks = tokens / f64::from(query.block_size.max(1));
    (blocks - f64::from(worker.overlap_blocks)).max(0.0)
}
