//! Records a choice: the candidates, those that were excluded and why, and the other inputs.

use std::iter;
use std::time::{Duration, Instant};

use super::{LegRules, Moment, Pick};
use crate::context::PromptContext;
use splitrail_fleet::veto_by_health;
use splitrail_fleet::{Roster, Worker, excluded};
use splitrail_ledger::decisions::{
    CandidateRecord, DecisionHandle, FetchChoice, Placement, VetoRecord,
};
use splitrail_ledger::timeline::{self, ScoredCandidate};
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::{Candidate, CandidateIndex, Choice, FetchPlan, Leg, Query, Veto};

/// Maximum number of candidates in a decision record besides the chosen one, the cheapest first.
/// The bound keeps the records of a fleet of hundreds of workers small.
const OTHERS_RECORDED: usize = 31;

/// Maximum number of workers in a decision record that were no candidates for a leg.
const VETOED_RECORDED: usize = 32;

/// Records a choice before the engine is called.
pub(crate) fn record(prompt: PromptContext<'_>, query: Query, rules: LegRules<'_>, pick: Pick<'_>) {
    let PromptContext { context, unit, decision, .. } = prompt;
    let Pick { roster, candidates, choice } = pick;
    let (leg, now) = (query.leg, Moment::now());
    let pool = &context.served.pool;
    let chosen = &candidates[choice.index];
    // For a prompt with media, only the tokens before the first medium are known; at least one
    // token follows.
    let known = (unit.hashes.len() as u32).saturating_mul(pool.block_size()).saturating_add(1);
    let prompt_tokens = unit.prompt_tokens.or((!unit.hashes.is_empty()).then_some(known));
    let estimate = prompt_tokens.map(|prompt_tokens| {
        let overlap =
            if context.options.bypasses_cache.is_some() { 0 } else { chosen.overlap_blocks };
        splitrail_kv::estimate_cached_tokens(overlap, prompt_tokens, pool.block_size())
    });
    note_vetoed(decision, roster, rules, candidates, now);
    let placement = Placement {
        leg,
        worker: pick.worker_id(choice.index).into(),
        overlap_blocks: chosen.overlap_blocks,
        best_overlap_blocks: choice.best_overlap_blocks,
        estimated_cached_tokens: estimate,
        turn: query.turn,
        draw: query.draw,
    };
    prompt.clock.picked(|prompt, begin| pick.traced_headers(leg, prompt, begin));
    let recorded = iter::once(choice.index).chain(others(choice));
    decision.placed(placement, recorded.map(|candidate| pick.record(leg, candidate, now)));
}

/// Records which workers are no candidates for a leg, and why.
pub(crate) fn note_vetoed(
    decision: &DecisionHandle,
    roster: &Roster,
    rules: LegRules<'_>,
    candidates: &[Candidate],
    now: Moment,
) {
    let vetoed = vetoed(roster, rules, candidates, now.instant).take(VETOED_RECORDED);
    let record = |(worker, reason): (&Worker, VetoReason)| VetoRecord {
        leg: rules.leg.name(),
        worker: worker.id().into(),
        reason,
        index_age_ms: worker.kv.event_stats.index_age_ms(now.unix_ms),
    };
    decision.vetoed(rules.leg, vetoed.map(record));
}

/// The candidates besides the chosen one, the cheapest first, at most `OTHERS_RECORDED`.
fn others(choice: &Choice) -> impl Iterator<Item = CandidateIndex> {
    let chosen = choice.index.0;
    let count = choice.costs.len().saturating_sub(1);
    let nth = move |n| CandidateIndex(if n < chosen { n } else { n + 1 });
    let mut order: Vec<CandidateIndex> = Vec::new();
    // If all costs are equal, as with policies that have no costs, the order is right already.
    if !choice.costs.is_sorted() {
        order.extend((0..count).map(nth));
        order.sort_by(|a, b| choice.costs[*a].total_cmp(&choice.costs[*b]));
    }
    (0..count.min(OTHERS_RECORDED)).map(move |n| order.get(n).copied().unwrap_or(nth(n)))
}

/// The record of a fetch.
pub(crate) fn fetch_choice(roster: &Roster, plan: FetchPlan) -> FetchChoice {
    let source = roster.get(plan.source);
    FetchChoice {
        source: source.map_or("", |worker| worker.id()).into(),
        rank: plan.rank,
        blocks: plan.blocks,
        tokens: plan.tokens,
        predicted_ms: plan.ready_ms,
        way: plan.way(),
    }
}

impl Pick<'_> {
    /// The id of a candidate's worker.
    pub(crate) fn worker_id(&self, candidate: CandidateIndex) -> &str {
        let worker = self.roster.get(self.candidates[candidate].worker);
        worker.map_or("", |worker| worker.id())
    }

    /// The choice as traces have it.
    fn traced_headers(&self, leg: Leg, prompt: u32, begin: Duration) -> timeline::Pick {
        let scored = |candidate| ScoredCandidate {
            worker: self.worker_id(candidate).into(),
            cost: self.choice.costs[candidate],
            overlap_blocks: self.candidates[candidate].overlap_blocks,
        };
        timeline::Pick {
            prompt,
            begin,
            leg: leg.name(),
            chosen: scored(self.choice.index),
            runner_up: others(self.choice).next().map(scored),
            candidates: self.candidates.len(),
        }
    }

    /// The record of a candidate for a leg.
    pub(crate) fn record(
        &self,
        leg: Leg,
        candidate: CandidateIndex,
        now: Moment,
    ) -> CandidateRecord {
        let (seen, choice) = (&self.candidates[candidate], self.choice);
        let worker = self.roster.get(seen.worker);
        let veto = choice.vetoes.get(candidate.0).copied().flatten().map(|veto| match veto {
            Veto::Down => {
                let health = worker.and_then(|worker| veto_by_health(worker, leg, now.instant));
                health.unwrap_or(VetoReason::Down)
            }
            Veto::Busy => VetoReason::Busy,
            Veto::SlowStart => VetoReason::SlowStart,
            Veto::Outgoing => VetoReason::Outgoing,
            Veto::Occupied => VetoReason::Occupied,
        });
        let terms = choice.terms.get(candidate.0).copied();
        let reads = terms.is_some_and(|terms| terms.read_ms > 0.0);
        let fetch = choice.fetches.get(candidate.0).copied().flatten();
        CandidateRecord {
            leg: leg.name(),
            worker: worker.map_or("", |worker| worker.id()).into(),
            rank: seen.rank,
            up: seen.up,
            overlap_blocks: seen.overlap_blocks,
            spine_blocks: Some(seen.spine_blocks).filter(|spine| *spine > seen.overlap_blocks),
            overlap_by_tier: seen.overlap_by_tier,
            overlap_discount: seen.overlap_discount,
            speculative_blocks: seen.speculative_blocks,
            underway_blocks: seen.underway_blocks,
            requests: seen.requests,
            prefill_tokens: seen.prefill_tokens,
            active_tokens: seen.active_tokens,
            cost: choice.costs[candidate],
            terms,
            veto,
            index_age_ms: worker.and_then(|worker| worker.kv.event_stats.index_age_ms(now.unix_ms)),
            fetch: fetch.map(|fetch| fetch_choice(self.roster, fetch)),
            read_back_blocks: if reads { seen.readable_blocks } else { 0 },
            chosen: candidate == choice.index,
        }
    }
}

/// The workers that have the role for a leg and are no candidates for it, with the reason. If the
/// leg requires no blocks, only excluded workers are no candidates, so no other workers are
/// examined.
fn vetoed<'a>(
    roster: &'a Roster,
    rules: LegRules<'a>,
    candidates: &'a [Candidate],
    now: Instant,
) -> impl Iterator<Item = (&'a Worker, VetoReason)> {
    let named = rules.excluded.iter().filter_map(|one| Some((roster.get(one.worker)?, one.reason)));
    let named = named.map(|(worker, reason)| (&**worker, reason));
    let named = named.filter(move |(worker, _)| worker.serves(rules.leg));
    // Candidates are in the order of the roster, and the ranks of one worker are adjacent.
    let mut candidates = candidates.iter().map(|seen| seen.worker).peekable();
    let all = if rules.blocks.is_some() { roster.len() } else { 0 };
    let dropped = roster.iter().take(all).filter_map(move |worker| {
        let mut is_candidate = false;
        while candidates.next_if_eq(&worker.index).is_some() {
            is_candidate = true;
        }
        let left_out = is_candidate || excluded(rules.excluded, worker.index).is_some();
        if left_out || !worker.serves(rules.leg) {
            return None;
        }
        let health = veto_by_health(worker, rules.leg, now);
        Some((&**worker, health.unwrap_or(VetoReason::TooFewBlocks)))
    });
    named.chain(dropped)
}
