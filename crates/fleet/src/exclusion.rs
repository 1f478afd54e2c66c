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

/// Why KV that may not move between two workers may not.
fn why_not(one: &Worker, other: &Worker) -> VetoReason {
    match one.is_of_group_of(other) {
        true => VetoReason::OtherKvFormat,
        false => VetoReason::OtherTransferGroup,
    }
}

/// Exclusions for the workers that cannot take KV from a worker, because they are of another transfer
/// group or store it otherwise.
pub fn of_other_formats(
    roster: &Roster,
    from: &Worker,
    connector: Connector,
) -> impl Iterator<Item = Exclusion> {
    let others = roster.iter().filter(move |worker| !worker.can_take_from(from, connector));
    others.map(|worker| Exclusion::new(worker.index, why_not(worker, from)))
}

/// Exclusions for the workers whose KV no other available decode worker can take, while there is one at
/// all.
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
    let has_taker = |worker: &Worker| {
        let mut others = takers.iter().filter(|taker| taker.index != worker.index);
        others.any(|taker| taker.can_take_from(worker, connector))
    };
    if takers.is_empty() {
        return Vec::new();
    }
    let alone = roster.iter().filter(|worker| worker.serves(Leg::Prefill) && !has_taker(worker));
    let reason = |worker: &Worker| {
        let is_of_a_group =
            takers.iter().any(|taker| taker.index != worker.index && taker.is_of_group_of(worker));
        if is_of_a_group { VetoReason::OtherKvFormat } else { VetoReason::OtherTransferGroup }
    };
    alone.map(|worker| Exclusion::new(worker.index, reason(worker))).collect()
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;
    use splitrail_kv::{HashSeed, IndexConfig};

    use super::*;
    use crate::Pool;

    /// A pool of workers with these roles and transfer groups; the empty group is none.
    fn pool(workers: &[(&str, &str)]) -> Pool {
        let index = IndexConfig {
            model: "m".into(),
            block_size: 16,
            seed: HashSeed(1),
            max_blocks_per_worker: 8,
        };
        let pool = Pool::new(index, None);
        for (at, (role, group)) in workers.iter().enumerate() {
            let mut config = serde_json::json!({
                "id": format!("w{at}"), "role": role, "url": format!("http://w{at}:1"),
            });
            if !group.is_empty() {
                config["transfer_group"] = (*group).into();
            }
            let config = serde_json::from_value(config).unwrap();
            let authority = format!("w{at}:1").parse().unwrap();
            pool.enter(|number| Worker::new(number, config, authority));
        }
        pool
    }

    fn connectors() -> impl Strategy<Value = Connector> {
        prop::sample::select(vec![
            Connector::Nixl,
            Connector::NixlPush,
            Connector::SharedStorage,
            Connector::Mooncake,
            Connector::Sglang,
        ])
    }

    proptest! {
        #[test]
        fn no_pair_is_of_two_transfer_groups_and_each_prefill_worker_has_a_partner(
            workers in prop::collection::vec(
                (prop::sample::select(vec!["prefill", "decode", "both"]),
                 prop::sample::select(vec!["", "a", "b"])),
                0..8,
            ),
            failed in prop::collection::vec(0u32..8, 0..3),
            connector in connectors(),
        ) {
            let failed = failed.into_iter().map(WorkerIndex);
            let failed: Vec<_> =
                failed.map(|worker| Exclusion::new(worker, VetoReason::Failed)).collect();
            let roster = pool(&workers).roster();
            let without = without_taker(&roster, &failed, connector, Instant::now());
            let takes = |worker: &&Arc<Worker>| worker.serves(Leg::Decode);
            let left = |worker: &&Arc<Worker>| excluded(&failed, worker.index).is_none();
            let any_takes = roster.iter().filter(takes).any(|worker| left(&worker));
            for prefill in roster.iter().filter(|worker| worker.serves(Leg::Prefill)) {
                let others: Vec<_> = of_other_formats(&roster, prefill, connector).collect();
                let mut partners = roster.iter().filter(takes).filter(|worker| {
                    worker.index != prefill.index && excluded(&others, worker.index).is_none()
                });
                let group = &prefill.config.transfer_group;
                prop_assert!(partners.clone().all(|other| other.config.transfer_group == *group));
                let has_partner = partners.any(|worker| left(&worker));
                let is_left_out = excluded(&without, prefill.index).is_some();
                prop_assert_eq!(is_left_out, any_takes && !has_partner);
            }
        }
    }

    #[test]
    fn a_reason_tells_groups_from_formats() {
        let pool = pool(&[("prefill", "a"), ("decode", "b"), ("prefill", "b")]);
        let roster = pool.roster();
        let reason = |of: &[Exclusion]| of.iter().map(|one| one.reason).collect::<Vec<_>>();
        let without = without_taker(&roster, &[], Connector::Nixl, Instant::now());
        assert_eq!(reason(&without), [VetoReason::OtherTransferGroup]);
        let workers: Vec<_> = roster.iter().collect();
        let dtype =
            |name: &str| crate::engine_facts::KvNames { dtype: Some(name.into()), layout: None };
        workers[1].engine.facts.set_kv_names(dtype("fp8"));
        workers[2].engine.facts.set_kv_names(dtype("auto"));
        let others: Vec<_> = of_other_formats(&roster, workers[2], Connector::Nixl).collect();
        let expected = [VetoReason::OtherTransferGroup, VetoReason::OtherKvFormat];
        assert_eq!(reason(&others), expected);
    }
}
