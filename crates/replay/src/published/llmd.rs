//! llm-d's rule: the worker with the highest sum of scores, in which the prefix counts twice and the
//! queue once.

use splitrail_policy::{Candidate, Query};

const PREFIX_WEIGHT: f64 = 2.0;

/// The negated scores.
pub(super) fn costs(candidates: &[Candidate], query: Query) -> Vec<f64> {
    let waiting = candidates.iter().map(|worker| worker.waiting);
    let (least, most) = waiting.fold((u32::MAX, 0), |(a, b), n| (a.min(n), b.max(n)));
    let score = |worker: &Candidate| {
        let blocks = f64::from(query.prompt_blocks.max(1));
        let prefix = PREFIX_WEIGHT * f64::from(worker.overlap_blocks) / blocks;
        let queue = match most == least {
            true => 1.0,
            false => f64::from(most - worker.waiting) / f64::from(most - least),
        };
        -(prefix + queue)
    };
    candidates.iter().map(score).collect()
}
