//! Mooncake's rule: the worker whose prefill is predicted to end first.

use super::PublishedChoice;
use splitrail_policy::{Candidate, Query};

/// The cost in nanoseconds: the wait plus `weight` times the prefill.
pub(super) fn cost(worker: &Candidate, query: Query, weight: f64) -> f64 {
    worker.wait_ns as f64 + weight * prefill_ns(worker, query, worker.overlap_blocks) as f64
}

fn prefill_ns(candidate: &Candidate, query: Query, blocks: u32) -> u64 {
    candidate.coefficients.prefill_ns(query.prompt_tokens, query.cached_tokens(blocks))
}

/// Each candidate either computes the blocks that it does not hold, or, while it works on its
/// queue, fetches the blocks of the candidate with the largest overlap.
pub(super) fn choose_with_fetch(candidates: &[Candidate], query: Query) -> PublishedChoice {
    let best = candidates.iter().map(|worker| worker.overlap_blocks).max().unwrap_or(0);
    let options: Vec<(f64, bool)> = candidates
        .iter()
        .map(|worker| {
            let computed = cost(worker, query, 1.0);
            let lacking = query.cached_tokens(best) - query.cached_tokens(worker.overlap_blocks);
            let fetch_ns = worker.coefficients.hand_off_ns(lacking);
            let start_ns = worker.wait_ns.max(fetch_ns);
            let fetched = (start_ns + prefill_ns(worker, query, best)) as f64;
            (computed.min(fetched), fetched < computed)
        })
        .collect();
    let chosen = super::first(&options.iter().map(|(cost, _)| *cost).collect::<Vec<_>>());
    let fetch_blocks = if options[chosen.index].1 { best } else { 0 };
    PublishedChoice { fetch_blocks, ..chosen }
}
