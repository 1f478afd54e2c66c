//! The reasons against a worker, and how reliable the index is for this worker.

use std::time::Instant;

use serde::Serialize;

use crate::place::Wish;
use splitrail_fleet::veto_by_health;
use splitrail_fleet::{Roster, Worker};
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::Candidate;
use splitrail_telemetry::clock::unix_ms;

/// A worker that could not take a leg.
#[derive(Clone, Debug, Serialize)]
pub struct Veto {
    /// Its name.
    pub worker: String,
    /// Everything that speaks against it.
    pub reasons: Vec<VetoReason>,
}

/// How good the router's word about a worker's blocks is.
#[derive(Clone, Debug, Serialize)]
pub struct Condition {
    /// Its name.
    pub worker: String,
    /// Whether its KV events come in, so that the index is what it holds.
    pub events_current: bool,
    /// Milliseconds since the last of them, or since an index synchronisation; `None` if there
    /// was none.
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

/// The workers of a roster that cannot take a leg, or may not.
pub(super) fn vetoed(
    roster: &Roster,
    wish: Wish<'_>,
    seen: &[Candidate],
    now: Instant,
) -> Vec<Veto> {
    let Wish { leg, excluded, .. } = wish;
    let is_candidate = |worker: &Worker| seen.iter().any(|seen| seen.worker == worker.index);
    let vetoes = roster.iter().map(|worker| {
        let mut reasons = Vec::new();
        if !worker.serves(leg) {
            reasons.push(VetoReason::Role);
        }
        let named = excluded.iter().filter(|one| one.worker == worker.index);
        reasons.extend(named.map(|one| one.reason));
        let health = veto_by_health(worker, leg, now);
        reasons.extend(health.filter(|health| !reasons.contains(health)));
        if reasons.is_empty() && !is_candidate(worker) {
            reasons.push(VetoReason::TooFewBlocks);
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
            index_age_ms: worker.event_stats.index_age_ms(unix_ms()),
            index_truncated: worker.index_is_truncated(),
            parity: worker.parity.parity().name(),
            drift_over_blocks: audit.drift_over_blocks,
            drift_under_blocks: audit.drift_under_blocks,
            overlap_discount: worker.drift.discount(),
        }
    });
    conditions.collect()
}
