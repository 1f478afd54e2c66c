//! Most overlap first.

use super::Sight;
use crate::candidate::Candidate;

/// Prompt tokens outstanding of those with the most overlap; all others are out of the
/// question.
pub(super) fn costs(candidates: &[Candidate], sight: Sight) -> Vec<f64> {
    let most = candidates.iter().map(|candidate| sight.blocks(candidate)).max();
    let cost = |candidate: &Candidate| match Some(sight.blocks(candidate)) == most {
        true => candidate.active_tokens as f64,
        false => f64::INFINITY,
    };
    candidates.iter().map(cost).collect()
}
