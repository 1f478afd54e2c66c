//! Predicts the time of local and of remote prefill.

use super::{ComparisonInput, PredictedParts, PredictedWay, Threshold, trust};
use crate::candidate::{Candidate, Leg, Query};
use crate::fetch::{BestSources, FetchPlan, MARGIN_RATIO, copy_ms};
use crate::index::CandidateIndex;
use crate::load::load_seconds;
use crate::predicted::{Common, CostTerms, extra_work_price, ms, terms};
use crate::queue::FETCH_LEAD_NS;

/// Steps up to this share of the goal cost no budget; the rest is a margin for prediction errors.
const FREE_SHARE: f64 = 0.9;

/// The prediction for a local prefill.
struct LocalEstimate {
    /// The longer parts of its steps and of the steps before it, plus its wait, its fetch and its
    /// first decode step.
    longer_ms: f64,
    /// The shorter parts of these steps, which count in proportion to the interference.
    shorter_ms: f64,
    /// The part of both that belongs to this prompt.
    own_longer_ms: f64,
    own_shorter_ms: f64,
    /// The time by which fetched blocks arrive later than the worker could begin this prompt.
    fetch_ms: f64,
    excess_ms: f64,
}

/// The sums of the longer and of the shorter parts of some steps that mix prefill and decode.
#[derive(Clone, Copy, Default)]
struct MixedSteps {
    longer_ms: f64,
    /// Multiplied by the configured interference.
    shorter_ms: f64,
}

/// The duration of a decode step on a worker with its present load.
pub(super) fn step_ms(candidate: &Candidate) -> f64 {
    let requests = u64::from(candidate.requests);
    candidate.coefficients.step_seconds(requests, candidate.active_tokens) * 1e3
}

impl Threshold {
    /// The best prefill worker, with the time until the first token.
    pub(super) fn at_prefill(
        &self,
        now_ns: u64,
        input: &ComparisonInput<'_>,
        sources: &BestSources,
    ) -> Option<PredictedWay> {
        let [scale, _] = self.remote.scales(trust(now_ns, self.remote_ns), &[1.0; 2]);
        let after = decode_ms(input)?;
        let price = extra_work_price(input.prefill, input.waiting);
        let query = Query { leg: Leg::Prefill, ..input.query };
        let way = |(index, candidate): (CandidateIndex, &Candidate)| {
            let (terms, fetch) = remote(candidate, &query, input.ahead_ms, sources, price);
            // The hand-off and the first step are those of the decode leg.
            let raw_ms = CostTerms { hand_off_ms: 0.0, ..terms }.ttft_ms() + after;
            let ttft_ms = raw_ms * scale;
            let cost_ms = ttft_ms + price * terms.extra_work_ms * scale + terms.copy_ms;
            let (instead_ms, excess_ms) = (0.0, 0.0);
            PredictedWay {
                index,
                ttft_ms,
                cost_ms,
                parts: PredictedParts { longer_ms: raw_ms, shorter_ms: 0.0 },
                instead_ms,
                excess_ms,
                fetch,
            }
        };
        let up = CandidateIndex::all(input.prefill.len())
            .zip(input.prefill)
            .filter(|(_, candidate)| candidate.up);
        up.map(way).min_by(|a, b| a.cost_ms.total_cmp(&b.cost_ms))
    }

    /// The best decode worker that has enough budget for a local prefill.
    pub(super) fn at_decode(
        &self,
        now_ns: u64,
        input: &ComparisonInput<'_>,
        sources: &BestSources,
    ) -> Option<PredictedWay> {
        let [scale, interference] = self.local.scales(trust(now_ns, self.local_ns), &[1.0; 2]);
        let price = extra_work_price(input.decode, 0);
        let query = &input.query;
        let way = |index, candidate: &Candidate, fetch: Option<FetchPlan>| {
            let local = self.local(candidate, query, fetch, scale, interference);
            // A worker that never got a local prefill has not used any budget.
            let guard = self.guards.get(&candidate.worker).copied().unwrap_or_default();
            let budget_ms = guard.budget_ms(now_ns, self.config.tbt_goal_ms, step_ms(candidate));
            if local.excess_ms > budget_ms {
                return None;
            }
            let ttft_ms = local.longer_ms * scale + local.shorter_ms * interference;
            let own_ms = local.own_longer_ms * scale + local.own_shorter_ms * interference;
            let cost_ms = ttft_ms + price * (own_ms + local.fetch_ms * scale);
            let parts = PredictedParts { longer_ms: local.longer_ms, shorter_ms: local.shorter_ms };
            let (instead_ms, excess_ms) = (0.0, local.excess_ms);
            let way = PredictedWay { index, ttft_ms, cost_ms, parts, instead_ms, excess_ms, fetch };
            Some((way, own_ms))
        };
        let best = |(index, candidate): (CandidateIndex, &Candidate)| {
            let mut best = way(index, candidate, None).map(|(way, _)| (way.cost_ms, way));
            for (_, plan) in sources.whole(candidate, query) {
                let Some((mut with, own_ms)) = way(index, candidate, Some(plan)) else { continue };
                let all = self.local(candidate, query, None, scale, interference);
                let all_ms = all.own_longer_ms * scale + all.own_shorter_ms * interference;
                let replaced_ms = (all_ms - own_ms).max(0.0);
                with.cost_ms += copy_ms(candidate, &plan, replaced_ms);
                // A prediction is not more exact than the margin.
                let compared_ms = with.cost_ms + MARGIN_RATIO * (1.0 + price) * replaced_ms;
                if best.is_none_or(|(least_ms, _)| compared_ms < least_ms) {
                    best = Some((compared_ms, with));
                }
            }
            best.map(|(_, way)| way)
        };
        let up = CandidateIndex::all(input.decode.len())
            .zip(input.decode)
            .filter(|(_, candidate)| candidate.up);
        up.filter_map(best).min_by(|a, b| a.cost_ms.total_cmp(&b.cost_ms))
    }

    /// Predicts a local prefill of what a worker neither holds nor fetches of a prompt, among the
    /// worker's decode steps.
    fn local(
        &self,
        at: &Candidate,
        query: &Query,
        fetch: Option<FetchPlan>,
        scale: f64,
        interference: f64,
    ) -> LocalEstimate {
        let fetched_blocks = fetch.map_or(0, |fetch| fetch.blocks);
        let cached = query.cached_tokens(at.held_blocks().max(fetched_blocks));
        let new = query.prompt_tokens.saturating_sub(cached);
        let step_ms = step_ms(at);
        // The context of the prefills before this one is not known; no context is the best
        // estimate.
        let ahead = self.mixed(at, at.prefill_tokens, 0);
        let own = self.mixed(at, new, cached);
        let base_ms = at.coefficients.prefill_base_seconds * 1e3;
        let context = at.active_tokens.saturating_add(query.prompt_tokens);
        let first_ms = at.coefficients.step_seconds(u64::from(at.requests) + 1, context) * 1e3;

        // On average, half of the running step is left when the request arrives. The worker's wait
        // is for the same prompts as those ahead.
        let queue_ms = (at.wait_ns as f64 / 1e6).max(ahead.longer_ms);
        let wait_ms = queue_ms + step_ms / 2.0 + ms(load_seconds(at, query));
        let fetch_ms = fetch.map_or(0.0, |fetch| (fetch.ready_ms - wait_ms).max(0.0));

        // The last chunk attends to all tokens before it and takes the longest.
        let last = self.chunk_tokens(new);
        let last_ms = at.coefficients.span_seconds(last, query.prompt_tokens - last) * 1e3;
        let longest_ms = step_ms.max(last_ms) * scale
            + step_ms.min(last_ms) * self.config.interference * interference;
        let free = longest_ms <= self.config.tbt_goal_ms * FREE_SHARE;
        let taken_ms = own.longer_ms * scale + own.shorter_ms * interference;
        let quiet_ms = self.steps(new) * step_ms;
        LocalEstimate {
            longer_ms: wait_ms + fetch_ms + base_ms + own.longer_ms + first_ms,
            shorter_ms: ahead.shorter_ms + own.shorter_ms,
            own_longer_ms: base_ms + own.longer_ms,
            own_shorter_ms: own.shorter_ms,
            fetch_ms,
            excess_ms: if free { 0.0 } else { (taken_ms - quiet_ms).max(0.0) },
        }
    }

    /// The steps that `tokens` tokens take after `context` tokens.
    fn mixed(&self, at: &Candidate, tokens: u64, context: u64) -> MixedSteps {
        let steps = self.steps(tokens);
        if steps == 0.0 {
            return MixedSteps::default();
        }
        let chunk_ms = at.coefficients.span_seconds(tokens, context) * 1e3 / steps;
        let step_ms = step_ms(at);
        let shorter = chunk_ms.min(step_ms) * self.config.interference;
        MixedSteps { longer_ms: steps * chunk_ms.max(step_ms), shorter_ms: steps * shorter }
    }

    fn steps(&self, tokens: u64) -> f64 {
        if tokens == 0 { 0.0 } else { tokens.div_ceil(self.chunk_tokens(tokens).max(1)) as f64 }
    }

    fn chunk_tokens(&self, tokens: u64) -> u64 {
        match self.config.chunk_tokens {
            0 => tokens,
            chunk => tokens.min(u64::from(chunk)),
        }
    }
}

/// The terms of a remote prefill that waits for others for `ahead_ms` before it waits for its worker,
/// and the fetch with which it is cheaper than without.
fn remote(
    candidate: &Candidate,
    query: &Query,
    ahead_ms: f64,
    sources: &BestSources,
    price: f64,
) -> (CostTerms, Option<FetchPlan>) {
    let common = Common::alone(candidate.coefficients);
    let mut terms = terms(candidate, query, &common);
    let wait_ms = terms.wait_ms + ahead_ms;
    // A fetch begins when the request is released, so no more of the common wait hides it.
    terms.wait_ms = terms.wait_ms.max(wait_ms.min(FETCH_LEAD_NS as f64 / 1e6));
    let plan = sources.plan(candidate, query, &terms, &common, price);
    let (terms, fetch) = plan.map_or((terms, None), |(plan, with)| (with, Some(plan)));
    (CostTerms { wait_ms, ..terms }, fetch)
}

/// The time from the end of a remote prefill to the first token, on the best decode worker.
fn decode_ms(input: &ComparisonInput<'_>) -> Option<f64> {
    let query = Query { leg: Leg::Decode, ..input.query };
    let up = input.decode.iter().filter(|candidate| candidate.up);
    let after = |candidate: &Candidate| {
        terms(candidate, &query, &Common::alone(candidate.coefficients)).ttft_ms()
            + step_ms(candidate) / 2.0
    };
    up.map(after).min_by(f64::total_cmp)
}
