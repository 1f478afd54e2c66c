//! Workers that a leg must not be placed on, and why.

use std::time::Instant;

use super::state::State;
use super::worker::Worker;
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

/// Why a worker may not get a leg because of its state or circuit breaker; `None` if it may.
pub fn veto_by_health(worker: &Worker, leg: Leg, now: Instant) -> Option<VetoReason> {
    match worker.state() {
        State::Ejected => Some(VetoReason::Ejected),
        State::Down => Some(VetoReason::Down),
        State::Draining if worker.is_quarantined() => Some(VetoReason::Quarantined),
        State::Draining => Some(VetoReason::Draining),
        State::Left => Some(VetoReason::Left),
        State::Joining | State::Warming | State::Serving => {
            let shut = worker.serves(leg) && !worker.breaker(leg).allows(now);
            shut.then_some(VetoReason::BreakerOpen)
        }
    }
}
