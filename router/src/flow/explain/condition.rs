//! What speaks against a worker, and how good the router's word about it is.

use std::time::Instant;

use serde::Serialize;

use crate::core::unix_ms;
use crate::fleet::{Roster, Worker};
use crate::flow::place::Wish;
use crate::pick::Candidate;

/// A worker that could not take a leg.
#[derive(Clone, Debug, Serialize)]
pub struct Veto {
    /// Its name.
    pub worker: String,
    /// `role`, `excluded`, `no_hand_off`, `too_few_blocks`, `breaker_open`, or its state where that takes no
    /// work: `down`, `draining`, `ejected`, `left`.
    pub reasons: Vec<&'static str>,
}

/// How good the router's word about a worker's blocks is.
#[derive(Clone, Debug, Serialize)]
pub struct Condition {
    /// Its name.
    pub worker: String,
    /// Whether its KV events come in, so that the index is what it holds.
    pub events_current: bool,
    /// Milliseconds since the last of them; `None` if none came.
    pub index_age_ms: Option<u64>,
    /// Whether the index lacks blocks that were beyond its bound.
    pub index_truncated: bool,
    /// Whether it agrees with the router on tokens and blocks: `agrees`, `unknown`, ...
    pub parity: &'static str,
    /// Blocks by which the index promised more than the engine reported, as a moving average.
    pub drift_over_blocks: f64,
    /// Blocks by which it promised less.
    pub drift_under_blocks: f64,
    /// The share of its overlap that does not count because of that.
    pub overlap_discount: f64,
}

/// The workers of a roster that cannot take a leg, or may not; `missing` hand nothing over.
pub(super) fn vetoed(
    roster: &Roster,
    wish: Wish<'_>,
    seen: &[Candidate],
    missing: &[usize],
    now: Instant,
) -> Vec<Veto> {
    let Wish { leg, excluded, .. } = wish;
    let is_candidate = |worker: &Worker| seen.iter().any(|seen| seen.worker == worker.index);
    let vetoes = roster.iter().map(|worker| {
        let mut reasons = Vec::new();
        let able = worker.serves(leg);
        let left_out = excluded.contains(&worker.index);
        if !able {
            reasons.push("role");
        }
        if left_out && missing.contains(&worker.index) {
            reasons.push("no_hand_off");
        } else if left_out {
            reasons.push("excluded");
        }
        if !worker.state().takes_work() {
            reasons.push(worker.state().name());
        }
        if able && !worker.breaker(leg).allows(now) {
            reasons.push("breaker_open");
        }
        if reasons.is_empty() && !is_candidate(worker) {
            reasons.push("too_few_blocks");
        }
        Veto { worker: worker.id().to_owned(), reasons }
    });
    vetoes.filter(|veto| !veto.reasons.is_empty()).collect()
}

/// The conditions of candidates.
pub(super) fn of(roster: &Roster, seen: &[Candidate]) -> Vec<Condition> {
    // Ranks of one worker follow one another.
    let ranks = seen.chunk_by(|one, next| one.worker == next.worker);
    let workers = ranks.filter_map(|ranks| roster.get(ranks.first()?.worker));
    let conditions = workers.map(|worker| {
        let audit = worker.audit.view();
        Condition {
            worker: worker.id().to_owned(),
            events_current: worker.events_are_current(),
            index_age_ms: worker.witness.heard_unix_ms().map(|ms| unix_ms().saturating_sub(ms)),
            index_truncated: worker.index_is_truncated(),
            parity: worker.parity.parity().name(),
            drift_over_blocks: audit.drift_over_blocks,
            drift_under_blocks: audit.drift_under_blocks,
            overlap_discount: worker.drift.discount(),
        }
    });
    conditions.collect()
}
