//! Records a choice: the candidates, those that were excluded and why, and the other inputs.

use std::iter;
use std::sync::Arc;
use std::time::Instant;

use super::Wish;
use crate::context::Context;
use crate::prepare::Unit;
use splitrail_fleet::veto_by_health;
use splitrail_fleet::{Roster, Worker, excluded};
use splitrail_ledger::decisions::{
    CandidateRecord, DecisionHandle, Figures, Placement, ShadowRecord, VetoRecord,
};
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::{Candidate, CandidateIndex, Choice, Leg, Policy, Query, Veto, pick};
use splitrail_telemetry::clock::unix_ms;

/// Candidates in a decision record beside the chosen one, the cheapest first: a
/// fleet of hundreds must not fill memory with records.
const OTHERS_RECORDED: usize = 31;

/// Workers in a decision record that were no candidates for a leg, at most.
const VETOED_RECORDED: usize = 32;

/// Writes a choice down: before the engine is called.
pub(super) fn record(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
    (query, wish): (Query, Wish<'_>),
    (roster, candidates): (&Roster, &[Candidate]),
    choice: &Choice,
) {
    let leg = query.leg;
    let (now, now_unix_ms) = (Instant::now(), unix_ms());
    let pool = &context.served.pool;
    let chosen = &candidates[choice.index];
    let name = |index| roster.get(index).map_or("", |worker| worker.id());
    let record = |i: CandidateIndex| {
        let (name, is_chosen) = (name(candidates[i].worker), i == choice.index);
        let worker = roster.get(candidates[i].worker);
        let figures = figures(choice, i, (worker, leg), (now, now_unix_ms));
        CandidateRecord::new(leg.name(), name, &candidates[i], figures, is_chosen)
    };
    // Of a prompt with media, what is known has an end before the prompt's.
    let known = (unit.hashes.len() as u32).saturating_mul(pool.block_size()).saturating_add(1);
    let prompt_tokens = unit.prompt_tokens.or((!unit.hashes.is_empty()).then_some(known));
    let estimate = prompt_tokens.map(|prompt_tokens| {
        let overlap =
            if context.options.bypasses_cache.is_some() { 0 } else { chosen.overlap_blocks };
        splitrail_kv::estimate_cached_tokens(overlap, prompt_tokens, pool.block_size())
    });
    note_vetoed(decision, roster, wish, candidates, (now, now_unix_ms));
    let placement = Placement {
        leg,
        worker: name(chosen.worker).into(),
        overlap_blocks: chosen.overlap_blocks,
        best_overlap_blocks: choice.best_overlap_blocks,
        estimated_cached_tokens: estimate,
        turn: query.turn,
        draw: query.draw,
    };
    let recorded = iter::once(choice.index).chain(others(choice));
    decision.placed(placement, recorded.map(record));
}

/// Writes down which workers are no candidates for a leg, and why.
pub(in super::super) fn note_vetoed(
    decision: &DecisionHandle,
    roster: &Roster,
    wish: Wish<'_>,
    candidates: &[Candidate],
    (now, now_unix_ms): (Instant, u64),
) {
    let vetoed = vetoed(roster, wish, candidates, now).take(VETOED_RECORDED);
    let record = |(worker, reason): (&Worker, VetoReason)| VetoRecord {
        leg: wish.leg.name(),
        worker: worker.id().into(),
        reason,
        index_age_ms: worker.event_stats.index_age_ms(now_unix_ms),
    };
    decision.vetoed(wish.leg, vetoed.map(record));
}

/// The candidates beside the chosen one, the cheapest first, `OTHERS_RECORDED` at most.
fn others(choice: &Choice) -> impl Iterator<Item = CandidateIndex> {
    let chosen = choice.index.0;
    let count = choice.costs.len().saturating_sub(1);
    let nth = move |n| CandidateIndex(if n < chosen { n } else { n + 1 });
    let mut order: Vec<CandidateIndex> = Vec::new();
    // Where all cost the same, as with policies that have no costs, they are in order already.
    if !choice.costs.is_sorted() {
        order.extend((0..count).map(nth));
        order.sort_by(|a, b| choice.costs[*a].total_cmp(&choice.costs[*b]));
    }
    (0..count.min(OTHERS_RECORDED)).map(move |n| order.get(n).copied().unwrap_or(nth(n)))
}

/// What a choice and the fleet say of one candidate, whose worker is given.
pub(in super::super) fn figures(
    choice: &Choice,
    i: CandidateIndex,
    (worker, leg): (Option<&Arc<Worker>>, Leg),
    (now, now_unix_ms): (Instant, u64),
) -> Figures {
    let veto = choice.vetoes.get(i.0).copied().flatten().map(|veto| match veto {
        Veto::Down => {
            worker.and_then(|worker| veto_by_health(worker, leg, now)).unwrap_or(VetoReason::Down)
        }
        Veto::Busy => VetoReason::Busy,
        Veto::SlowStart => VetoReason::SlowStart,
    });
    Figures {
        cost: choice.costs[i],
        terms: choice.terms.get(i.0).copied(),
        veto,
        index_age_ms: worker.and_then(|worker| worker.event_stats.index_age_ms(now_unix_ms)),
    }
}

/// The workers of a roster that have the role for a leg and are no candidates for it, with the
/// reason. Where no blocks are asked for, only what is excluded is no candidate: nothing else is
/// looked at then.
fn vetoed<'a>(
    roster: &'a Roster,
    wish: Wish<'a>,
    candidates: &'a [Candidate],
    now: Instant,
) -> impl Iterator<Item = (&'a Worker, VetoReason)> {
    let named = wish.excluded.iter().filter_map(|one| Some((roster.get(one.worker)?, one.reason)));
    let named = named.map(|(worker, reason)| (&**worker, reason));
    let named = named.filter(move |(worker, _)| worker.serves(wish.leg));
    // Candidates are in the roster's order, the ranks of one worker side by side.
    let mut candidates = candidates.iter().map(|seen| seen.worker).peekable();
    let all = if wish.blocks.is_some() { roster.len() } else { 0 };
    let dropped = roster.iter().take(all).filter_map(move |worker| {
        let mut is_candidate = false;
        while candidates.next_if_eq(&worker.index).is_some() {
            is_candidate = true;
        }
        let left_out = is_candidate || excluded(wish.excluded, worker.index).is_some();
        if left_out || !worker.serves(wish.leg) {
            return None;
        }
        let health = veto_by_health(worker, wish.leg, now);
        Some((&**worker, health.unwrap_or(VetoReason::TooFewBlocks)))
    });
    named.chain(dropped)
}

/// What the policy beside the first would have chosen, and what that is predicted to be worth.
pub(super) fn shadow(
    context: &Context,
    decision: &DecisionHandle,
    query: Query,
    (roster, candidates): (&Roster, &[Candidate]),
    choice: &Choice,
) {
    let config = &context.served.config;
    let Some(policy) = config.shadow.as_ref().map(|shadow| &shadow.policy) else { return };
    let Some(other) = pick(policy, candidates, query) else { return };
    let agrees = other.index == choice.index;
    // In the one unit that means something to a client.
    let gain_ms = match agrees {
        true => 0.0,
        false => pick(&Policy::predicted_ttft(), candidates, query)
            .map_or(0.0, |told| told.costs[choice.index] - told.costs[other.index]),
    };
    let metrics = &context.metrics;
    let (model, leg) = (config.name.as_str(), query.leg.name());
    let said = if agrees { "same" } else { "other" };
    metrics.shadow_decisions.with_label_values(&[model, leg, said]).inc();
    if gain_ms != 0.0 {
        let better = if gain_ms > 0.0 { "shadow" } else { "live" };
        let seconds = metrics.shadow_seconds.with_label_values(&[model, leg, better]);
        seconds.inc_by(gain_ms.abs() / 1e3);
    }
    let worker = roster.get(candidates[other.index].worker).map_or("", |worker| worker.id());
    decision.shadowed(ShadowRecord {
        leg,
        policy: policy.name(),
        worker: worker.into(),
        agrees,
        predicted_gain_ms: gain_ms,
    });
}
