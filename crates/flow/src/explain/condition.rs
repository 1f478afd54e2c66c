//! The reasons for which a worker cannot take a leg, and how reliable the index is for a worker.

use std::time::Instant;

use serde::Serialize;

use crate::decide::place::LegRules;
use splitrail_fleet::veto_by_health;
use splitrail_fleet::{Roster, Worker};
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::Candidate;
use splitrail_telemetry::clock::unix_ms;

/// A worker that could not take a leg.
#[derive(Clone, Debug, Serialize)]
pub struct Veto {
    /// The id of the worker.
    pub worker: String,
    /// All reasons against this worker.
    pub reasons: Vec<VetoReason>,
}

/// How reliable the router's index of a worker's blocks is.
#[derive(Clone, Debug, Serialize)]
pub struct Condition {
    /// The id of the worker.
    pub worker: String,
    /// Whether the worker's KV events arrive, so that the index is up to date.
    pub events_current: bool,
    /// Milliseconds since the last KV event or resynchronisation; `None` if there was none.
    pub index_age_ms: Option<u64>,
    /// Whether the index lacks blocks of this worker because its size limit was reached.
    pub index_truncated: bool,
    /// Whether the worker and the router agree on tokens and blocks: `agrees`, `unknown`, ...
    pub parity: &'static str,
    /// Moving average of the number of blocks by which the index said more than the engine
    /// reported.
    pub drift_over_blocks: f64,
    /// Moving average of the number of blocks by which the index said less than the engine
    /// reported.
    pub drift_under_blocks: f64,
    /// The share of the worker's overlap, from 0 to 1, that does not count because of this drift.
    pub overlap_discount: f64,
}

/// The workers of a roster that are no candidates for a leg, with all reasons.
pub(super) fn vetoed(
    roster: &Roster,
    rules: LegRules<'_>,
    seen: &[Candidate],
    now: Instant,
) -> Vec<Veto> {
    let LegRules { leg, excluded, .. } = rules;
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

/// The reliability of the index for each worker among the candidates.
pub(super) fn of(roster: &Roster, seen: &[Candidate]) -> Vec<Condition> {
    // The ranks of one worker are adjacent.
    let ranks = seen.chunk_by(|one, next| one.worker == next.worker);
    let workers = ranks.filter_map(|ranks| roster.get(ranks.first()?.worker));
    let conditions = workers.map(|worker| {
        let audit = worker.kv.usage_stats.view();
        Condition {
            worker: worker.id().to_owned(),
            events_current: worker.events_are_current(),
            index_age_ms: worker.kv.event_stats.index_age_ms(unix_ms()),
            index_truncated: worker.index_is_truncated(),
            parity: worker.kv.parity.parity().name(),
            drift_over_blocks: audit.drift_over_blocks,
            drift_under_blocks: audit.drift_under_blocks,
            overlap_discount: worker.kv.drift.discount(),
        }
    });
    conditions.collect()
}
