//! Rendezvous hashing: the same first blocks go to the same worker.

use super::PublishedChoice;
use splitrail_policy::{Candidate, CandidateIndex, SplitMix64};

/// The maximum number of requests of a worker, relative to an equal share.
const BOUND: f64 = 1.25;

/// The first number of SplitMix64 with this seed.
fn mix(seed: u64) -> u64 {
    SplitMix64::new(seed).next_u64()
}

/// Chooses the worker with the largest weight; the last of equal ones.
pub(super) fn choose(candidates: &[Candidate], blocks: &[u32]) -> PublishedChoice {
    PublishedChoice::only(descending(&weights(candidates, blocks))[0])
}

/// Chooses the first worker in descending order of weight whose outstanding requests are within the
/// bound.
pub(super) fn choose_bounded(candidates: &[Candidate], blocks: &[u32]) -> PublishedChoice {
    let order = descending(&weights(candidates, blocks));
    let requests = |worker: &Candidate| u64::from(worker.requests);
    let total: u64 = candidates.iter().map(requests).sum();
    let bound = (BOUND * (total + 1) as f64 / candidates.len() as f64).ceil();
    let within = order.iter().find(|i| (requests(&candidates[**i]) as f64) < bound);
    PublishedChoice::only(*within.unwrap_or(&order[0]))
}

fn weights(candidates: &[Candidate], blocks: &[u32]) -> Vec<u64> {
    let first = blocks.iter().take(2);
    let prompt = first.fold(0, |hash, block| mix(hash ^ (u64::from(*block) + 1)));
    let number = |worker: &Candidate| u64::from(worker.worker.0);
    candidates.iter().map(|worker| mix(prompt ^ mix(number(worker) + 1))).collect()
}

fn descending(weights: &[u64]) -> Vec<CandidateIndex> {
    let mut order: Vec<_> = CandidateIndex::all(weights.len()).collect();
    order.sort_by_key(|i| std::cmp::Reverse((weights[*i], *i)));
    order
}
