//! The policy of the largest overlap.

use super::VisibleBlocks;
use crate::candidate::Candidate;

/// The outstanding prompt tokens of the candidates with the largest overlap; infinite for all
/// others.
pub(super) fn costs(candidates: &[Candidate], sight: VisibleBlocks) -> Vec<f64> {
    let most = candidates.iter().map(|candidate| sight.blocks(candidate)).max();
    let cost = |candidate: &Candidate| match Some(sight.blocks(candidate)) == most {
        true => candidate.active_tokens as f64,
        false => f64::INFINITY,
    };
    candidates.iter().map(cost).collect()
}
