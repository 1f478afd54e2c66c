//! Rendezvous hashing: the same first blocks go to the same worker.

use super::{PublishedCandidate, PublishedChoice};
use splitrail_policy::{CandidateIndex, SplitMix64};

/// The maximum number of requests of a worker, relative to an equal share.
const BOUND: f64 = 1.25;

/// The first number of SplitMix64 with this seed.
fn mix(seed: u64) -> u64 {
    SplitMix64::new(seed).next_u64()
}

/// Chooses the worker with the largest weight; the last of equal ones.
pub(super) fn choose(candidates: &[PublishedCandidate], blocks: &[u32]) -> PublishedChoice {
    let weights = weights(candidates, blocks);
    let order = descending(&weights);
    chosen(order[0], &order)
}

/// Chooses the first worker in descending order of weight whose outstanding requests are within the
/// bound.
pub(super) fn choose_bounded(candidates: &[PublishedCandidate], blocks: &[u32]) -> PublishedChoice {
    let order = descending(&weights(candidates, blocks));
    let requests = |worker: &PublishedCandidate| u64::from(worker.candidate.requests);
    let total: u64 = candidates.iter().map(requests).sum();
    let bound = (BOUND * (total + 1) as f64 / candidates.len() as f64).ceil();
    let within = order.iter().find(|i| (requests(&candidates[**i]) as f64) < bound);
    chosen(*within.unwrap_or(&order[0]), &order)
}

fn weights(candidates: &[PublishedCandidate], blocks: &[u32]) -> Vec<u64> {
    let first = blocks.iter().take(2);
    let prompt = first.fold(0, |hash, block| mix(hash ^ (u64::from(*block) + 1)));
    let number = |worker: &PublishedCandidate| u64::from(worker.candidate.worker.0);
    candidates.iter().map(|worker| mix(prompt ^ mix(number(worker) + 1))).collect()
}

fn descending(weights: &[u64]) -> Vec<CandidateIndex> {
    let mut order: Vec<_> = CandidateIndex::all(weights.len()).collect();
    order.sort_by_key(|i| std::cmp::Reverse((weights[*i], *i)));
    order
}

/// The cost of a candidate is its position in the order.
fn chosen(index: CandidateIndex, order: &[CandidateIndex]) -> PublishedChoice {
    let mut costs = vec![0.0; order.len()];
    order.iter().enumerate().for_each(|(rank, i)| costs[*i] = rank as f64);
    PublishedChoice { index, tied: 1, fetch_blocks: 0, costs }
}
