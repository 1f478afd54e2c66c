//! Chooses a worker for a leg.

use std::cmp::Ordering;

use serde::Serialize;

use crate::candidate::{Candidate, Leg, Query, RESUME_CREDIT};
use crate::coefficients::Coefficients;
use crate::fetch::{BestSources, FetchPlan, Source};
use crate::index::{CandidateIndex, WorkerIndex};
use crate::load::blocks_to_load;
use crate::policy::Policy;
use crate::predicted::{Common, CostTerms, Load, terms};
use crate::read_back::AvailablePrefix;
use splitrail_kv::mix;

/// A choice with its reasons. It can be decided repeatedly to reuse its memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// The chosen candidate.
    pub index: CandidateIndex,
    /// Every candidate's cost under the policy, in the order given; lower is better.
    pub costs: Vec<f64>,
    /// The terms of the costs in the same order, if the policy computes milliseconds.
    pub terms: Vec<CostTerms>,
    /// The fetch that makes a candidate cheapest, in the same order; `None` where computing is
    /// cheaper. Empty if the decision had no sources.
    pub fetches: Vec<Option<FetchPlan>>,
    /// Why a candidate could not be chosen, in the same order; `None` if it could be chosen.
    pub vetoes: Vec<Option<Veto>>,
    /// The cheapest of the other candidates that could be chosen.
    pub runner_up: Option<CandidateIndex>,
    /// The cost of the runner-up minus the cost of the chosen candidate. Negative if the policy did
    /// not choose the cheapest.
    pub margin: f64,
    /// The price of each millisecond of extra work; 0 if the policy has no such price.
    pub extra_work_price: f64,
    /// The largest overlap among the candidates that could be chosen.
    pub best_overlap_blocks: u32,
    eligible: Vec<CandidateIndex>,
    load: Load,
    sources: BestSources,
}

/// Why a worker could not be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Veto {
    /// The worker is not up, and other workers are.
    Down,
    /// The worker is saturated, and other workers are not.
    Busy,
    /// The worker is in its slow start, and this request is not in its share.
    SlowStart,
    /// The worker is about to be replaced and holds too little of the prompt, and one of those that
    /// replace it has time.
    Outgoing,
    /// The request has waited for the worker for as long as it was worth, and other workers are idle.
    Occupied,
}

/// Chooses one of the candidates; `None` if there are none.
///
/// Workers that are down are considered only if all workers are down: a real attempt then gives the
/// client the real error. `sources` are the workers that a candidate could fetch a prefix from.
pub fn pick(
    policy: &Policy,
    candidates: &[Candidate],
    sources: &[Source],
    query: Query,
) -> Option<Choice> {
    let mut choice = Choice::default();
    choice.decide(policy, candidates, sources, &query, 0).then_some(choice)
}

impl Choice {
    /// The fetch of the chosen candidate.
    pub fn fetch(&self) -> Option<FetchPlan> {
        self.fetches.get(self.index.0).copied().flatten()
    }

    /// The part that the chosen candidate will not compute: the blocks that it holds or will hold,
    /// those that it fetches, and those that it reads back.
    pub fn available_prefix(&self, candidates: &[Candidate], query: &Query) -> AvailablePrefix {
        let fetched = self.fetch().map_or(0, |fetch| fetch.blocks);
        let chosen = &candidates[self.index];
        chosen.available_prefix(query, chosen.held_blocks().max(fetched))
    }

    /// Chooses one of the candidates, like [`pick`]. `waiting_here` is the number of requests that
    /// wait for any worker, besides those that wait on the workers. False if there are no
    /// candidates.
    pub fn decide(
        &mut self,
        policy: &Policy,
        candidates: &[Candidate],
        sources: &[Source],
        query: &Query,
        waiting_here: usize,
    ) -> bool {
        self.sift(candidates, query);
        if self.eligible.is_empty() {
            return false;
        }
        self.compute_costs(policy, candidates, sources, query, waiting_here);
        let (eligible, costs) = (&self.eligible, &self.costs);
        self.index = match policy {
            Policy::RoundRobin {} => eligible[(query.turn % eligible.len() as u64) as usize],
            Policy::KvOverlap { temperature, .. } | Policy::PredictedTtft { temperature, .. }
                if *temperature > 0.0 =>
            {
                softmax(eligible, costs, *temperature, query.draw)
            }
            _ => cheapest(eligible, candidates, costs, query.draw),
        };
        self.runner_up = cheapest_but(eligible, costs, self.index);
        self.margin = self.runner_up.map_or(0.0, |other| costs[other] - costs[self.index]);
        true
    }

    /// For how many milliseconds it is worth to wait for the chosen candidate, instead of taking one of
    /// those that are `idle`: until the cost, with the wait, is that of the cheapest of these. It is at
    /// least the predicted wait. `None` if none is idle.
    pub(crate) fn price_of_waiting_ms(
        &self,
        idle: impl Iterator<Item = CandidateIndex>,
    ) -> Option<f64> {
        let chosen = self.terms.get(self.index.0).copied().unwrap_or_default();
        let soonest_ms = idle.map(|index| self.costs[index]).min_by(f64::total_cmp)?;
        Some(soonest_ms - (self.costs[self.index] - chosen.wait_ms))
    }

    /// Corrects the vetoes of a choice among idle candidates, for which all others counted as down.
    pub(crate) fn veto_occupied(&mut self, candidates: &[Candidate]) {
        for (veto, candidate) in self.vetoes.iter_mut().zip(candidates) {
            if *veto == Some(Veto::Down) && candidate.up {
                *veto = Some(Veto::Occupied);
            }
        }
    }

    /// Determines which candidates can be chosen.
    fn sift(&mut self, candidates: &[Candidate], query: &Query) {
        self.vetoes.clear();
        self.eligible.clear();
        self.load = Load::default();
        self.best_overlap_blocks = 0;
        let (mut least, mut largest) = (f64::INFINITY, 0.0f64);
        // If all candidates are saturated, saturation is ignored.
        let all_busy = candidates.iter().all(|candidate| candidate.busy || !candidate.up);
        for (i, candidate) in CandidateIndex::all(candidates.len()).zip(candidates) {
            let is_passed_over = candidate.busy && !all_busy;
            if candidate.up && !is_passed_over {
                self.eligible.push(i);
                least = least.min(candidate.share);
                largest = largest.max(candidate.share);
                self.load.add(candidate);
                // Candidates with an overlap are not excluded by their slow start below.
                self.best_overlap_blocks = self.best_overlap_blocks.max(candidate.overlap_blocks);
            }
            self.vetoes.push(match (candidate.up, is_passed_over) {
                (false, _) => Some(Veto::Down),
                (true, true) => Some(Veto::Busy),
                (true, false) => None,
            });
        }
        if self.eligible.is_empty() {
            self.vetoes.fill(None);
            self.eligible.extend(CandidateIndex::all(candidates.len()));
            let overlaps = candidates.iter().map(|candidate| candidate.overlap_blocks);
            self.best_overlap_blocks = overlaps.max().unwrap_or(0);
        } else if least < largest {
            spare_the_slow(&mut self.eligible, candidates, largest, query.draw);
            self.veto_the_others(Veto::SlowStart);
        }
        if candidates.iter().any(|candidate| candidate.is_outgoing) {
            spare_the_outgoing(&mut self.eligible, candidates, query);
            self.veto_the_others(Veto::Outgoing);
        }
    }

    /// Notes why candidates are no longer eligible.
    fn veto_the_others(&mut self, reason: Veto) {
        let mut eligible = self.eligible.iter().copied().peekable();
        for (i, veto) in CandidateIndex::all(self.vetoes.len()).zip(&mut self.vetoes) {
            match eligible.next_if_eq(&i) {
                Some(_) => {}
                None => _ = veto.get_or_insert(reason),
            }
        }
    }

    /// Computes the cost of each candidate.
    fn compute_costs(
        &mut self,
        policy: &Policy,
        candidates: &[Candidate],
        sources: &[Source],
        query: &Query,
        waiting_here: usize,
    ) {
        self.costs.clear();
        self.terms.clear();
        self.fetches.clear();
        self.extra_work_price = 0.0;
        let Policy::PredictedTtft { extra_work_weight, .. } = policy else {
            self.costs.extend(candidates.iter().map(|c| cost(policy, c, query)));
            return;
        };
        let price = extra_work_weight.unwrap_or_else(|| self.load.price(waiting_here));
        self.extra_work_price = price;
        let usual = Coefficients::usual(self.eligible.iter().map(|i| &candidates[*i].coefficients));
        let held = self.eligible.iter().map(|i| candidates[*i].held_blocks());
        let common = match query.leg {
            Leg::Decode => Common::alone(usual),
            Leg::Prefill | Leg::Aggregated => Common::of(query, usual, held),
        };
        self.terms.extend(candidates.iter().map(|candidate| terms(candidate, query, &common)));
        if !sources.is_empty() && query.leg != Leg::Decode {
            self.plan_fetches(candidates, sources, query, &common);
        }
        let works = self.eligible.iter().map(|i| self.terms[*i].extra_work_ms);
        let least = works.fold(f64::INFINITY, f64::min);
        for term in &mut self.terms {
            // A candidate that cannot be chosen may hold most and so have less work than the
            // minimum.
            term.extra_work_ms = price * (term.extra_work_ms - least).max(0.0);
            term.resume_credit_ms *= 1.0 + price;
            self.costs.push(term.total_ms());
        }
    }
}

impl Choice {
    /// Finds out which candidates would better fetch a prefix than compute it, and replaces their
    /// terms.
    fn plan_fetches(
        &mut self,
        candidates: &[Candidate],
        sources: &[Source],
        query: &Query,
        common: &Common,
    ) {
        self.sources.select(sources);
        let price = self.extra_work_price;
        for (terms, candidate) in self.terms.iter_mut().zip(candidates) {
            let best = self.sources.plan(candidate, query, terms, common, price);
            self.fetches.push(best.map(|(plan, with_fetch)| {
                *terms = with_fetch;
                plan
            }));
        }
    }
}

/// Excludes candidates whose share is less than the largest share, with a probability that
/// corresponds to the difference. Candidates that hold some of the prompt are not excluded.
fn spare_the_slow(
    eligible: &mut Vec<CandidateIndex>,
    candidates: &[Candidate],
    largest: f64,
    draw: u64,
) {
    eligible.retain(|i| {
        let Candidate { share, worker, overlap_blocks, .. } = candidates[*i];
        share >= largest || overlap_blocks > 0 || even(draw, worker) * largest < share
    });
}

/// Excludes outgoing candidates that would have to compute half of the prompt or more, if an incoming
/// one has no more to compute before it than the prompt is long: what an outgoing one computes is lost
/// soon and computed once more, so that a wait for as long is no loss. Under load nothing is excluded,
/// because new workers alone may be too few.
fn spare_the_outgoing(eligible: &mut Vec<CandidateIndex>, candidates: &[Candidate], query: &Query) {
    let has_time =
        |candidate: &Candidate| candidate.up && candidate.prefill_tokens <= query.prompt_tokens;
    let mut incoming = eligible.iter().map(|i| &candidates[*i]).filter(|one| !one.is_outgoing);
    if query.leg == Leg::Decode || !incoming.any(has_time) {
        return;
    }
    eligible.retain(|i| {
        let candidate = &candidates[*i];
        !candidate.is_outgoing || candidate.held_blocks().saturating_mul(2) > query.prompt_blocks
    });
}

/// A uniformly distributed fraction in [0, 1) for each draw and worker.
fn even(draw: u64, worker: WorkerIndex) -> f64 {
    let bits = mix(draw ^ (u64::from(worker.0) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Keeps the candidates that are up and hold at least `blocks` blocks. If none holds as many, those
/// that hold most are kept.
pub fn holders(candidates: &mut Vec<Candidate>, blocks: u32) {
    let up = |candidate: &&Candidate| candidate.up;
    let most = candidates.iter().filter(up).map(Candidate::believed_blocks).max();
    let least = most.unwrap_or(0).min(blocks);
    let any_up = most.is_some();
    candidates
        .retain(|candidate| (candidate.up || !any_up) && candidate.believed_blocks() >= least);
}

/// A candidate's cost in blocks (`kv_overlap`) or tokens (`least_loaded`).
fn cost(policy: &Policy, candidate: &Candidate, query: &Query) -> f64 {
    let queued_tokens = |prefill_tokens: u64| match query.leg {
        Leg::Prefill => prefill_tokens,
        Leg::Decode => candidate.active_tokens,
        Leg::Aggregated => prefill_tokens.saturating_add(candidate.active_tokens),
    } as f64;
    match policy {
        Policy::KvOverlap { overlap_weight, load_weight, .. } => {
            let missing = query.prompt_blocks.saturating_sub(candidate.held_blocks());
            let credit = RESUME_CREDIT * f64::from(candidate.unresumable_blocks().min(missing));
            // Blocks that another request with the same prefix is about to compute are computed
            // only once. Waiting for them costs no more than computing them elsewhere.
            let shared = u64::from(candidate.underway_blocks) * u64::from(query.block_size);
            let queued_tokens = queued_tokens(candidate.prefill_tokens.saturating_sub(shared));
            let loaded = blocks_to_load(candidate, query);
            overlap_weight * (f64::from(missing) - credit + loaded)
                + load_weight * queued_tokens / f64::from(query.block_size.max(1))
        }
        Policy::LeastLoaded {} => queued_tokens(candidate.prefill_tokens),
        Policy::RoundRobin {} | Policy::PredictedTtft { .. } => 0.0,
    }
}

/// The candidate with the lowest cost. Ties are decided by the fewest requests, then by the emptiest
/// cache, and further ties by the draw.
fn cheapest(
    eligible: &[CandidateIndex],
    candidates: &[Candidate],
    costs: &[f64],
    draw: u64,
) -> CandidateIndex {
    let against = |one: CandidateIndex, other: CandidateIndex| {
        let requests = || candidates[one].requests.cmp(&candidates[other].requests);
        let fill = || candidates[one].cache_fill.total_cmp(&candidates[other].cache_fill);
        costs[one].total_cmp(&costs[other]).then_with(requests).then_with(fill)
    };
    let mut best = eligible[0];
    let mut tied = 1;
    for i in eligible[1..].iter().copied() {
        match against(i, best) {
            Ordering::Less => (best, tied) = (i, 1),
            Ordering::Equal => tied += 1,
            Ordering::Greater => {}
        }
    }
    if tied == 1 {
        return best;
    }
    let mut equals = eligible.iter().copied().filter(|i| against(*i, best) == Ordering::Equal);
    equals.nth((draw % tied) as usize).unwrap_or(best)
}

/// The cheapest of the other candidates.
fn cheapest_but(
    eligible: &[CandidateIndex],
    costs: &[f64],
    chosen: CandidateIndex,
) -> Option<CandidateIndex> {
    let others = eligible.iter().copied().filter(|i| *i != chosen);
    others.reduce(|best, i| if costs[i] < costs[best] { i } else { best })
}

/// Draws a candidate with a probability proportional to `exp(-cost / temperature)`.
fn softmax(
    eligible: &[CandidateIndex],
    costs: &[f64],
    temperature: f64,
    draw: u64,
) -> CandidateIndex {
    let least = eligible.iter().map(|i| costs[*i]).fold(f64::INFINITY, f64::min);
    let weight = |i: CandidateIndex| (-(costs[i] - least) / temperature).exp();
    let total: f64 = eligible.iter().map(|i| weight(*i)).sum();
    // The upper 53 bits make a uniformly distributed fraction in [0, 1).
    let mut left = (draw >> 11) as f64 / (1u64 << 53) as f64 * total;
    for i in eligible {
        left -= weight(*i);
        if left < 0.0 {
            return *i;
        }
    }
    eligible[eligible.len() - 1]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
