//! Workers that a leg must not be placed on, and why.

use std::sync::Arc;
use std::time::Instant;

use super::roster::Roster;
use super::state::WorkerState;
use super::worker::Worker;
use splitrail_config::model::Connector;
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::{Leg, WorkerIndex};

/// A worker that a leg must not be placed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exclusion {
    /// The worker's number in its model's fleet.
    pub worker: WorkerIndex,
    /// Why the leg must not be placed there.
    pub reason: VetoReason,
}

impl Exclusion {
    /// Excludes a worker, by its number, for a reason.
    pub fn new(worker: WorkerIndex, reason: VetoReason) -> Self {
        Self { worker, reason }
    }
}

/// Why a worker is excluded; `None` if it is not.
pub fn excluded(exclusions: &[Exclusion], worker: WorkerIndex) -> Option<VetoReason> {
    exclusions.iter().find(|one| one.worker == worker).map(|one| one.reason)
}

/// Exclusions for the workers that cannot take KV from a worker, because they store it otherwise.
pub fn of_other_formats(
    roster: &Roster,
    from: &Worker,
    connector: Connector,
) -> impl Iterator<Item = Exclusion> {
    let others = roster.iter().filter(move |worker| !worker.can_take_from(from, connector));
    others.map(|worker| Exclusion::new(worker.index, VetoReason::OtherKvFormat))
}

/// Exclusions for the workers whose KV no available decode worker can take, while there is one for
/// others.
pub fn without_taker(
    roster: &Roster,
    failed: &[Exclusion],
    connector: Connector,
    now: Instant,
) -> Vec<Exclusion> {
    let takes = |worker: &&Arc<Worker>| {
        let is_able = worker.serves(Leg::Decode) && worker.is_available(Leg::Decode, now);
        is_able && excluded(failed, worker.index).is_none()
    };
    let takers: Vec<_> = roster.iter().filter(takes).collect();
    let has_taker =
        |worker: &Worker| takers.iter().any(|taker| taker.can_take_from(worker, connector));
    if takers.is_empty() {
        return Vec::new();
    }
    let alone = roster.iter().filter(|worker| worker.serves(Leg::Prefill) && !has_taker(worker));
    alone.map(|worker| Exclusion::new(worker.index, VetoReason::OtherKvFormat)).collect()
}

/// Why a worker may not get a leg because of its state or circuit breaker; `None` if it may.
pub fn veto_by_health(worker: &Worker, leg: Leg, now: Instant) -> Option<VetoReason> {
    match worker.state() {
        WorkerState::Ejected => Some(VetoReason::Ejected),
        WorkerState::Down => Some(VetoReason::Down),
        WorkerState::Draining if worker.is_quarantined() => Some(VetoReason::Quarantined),
        WorkerState::Draining => Some(VetoReason::Draining),
        WorkerState::Stuck => Some(VetoReason::Stuck),
        WorkerState::Unready => Some(VetoReason::Unready),
        WorkerState::Left => Some(VetoReason::Left),
        WorkerState::Joining | WorkerState::Warming | WorkerState::Serving => {
            let shut = worker.serves(leg) && !worker.breaker(leg).allows(now);
            let full = worker.health.rest.lasts(now).then_some(VetoReason::Full);
            shut.then_some(VetoReason::BreakerOpen).or(full)
        }
    }
}
