//! Which workers may take part in a hand-off.

use std::time::Instant;

use splitrail_api::Endpoint;
use splitrail_fleet::exclusion::{of_other_formats, without_taker};
use splitrail_fleet::{Exclusion, Pool, ServedModel, Worker};
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::Leg;

/// Exclusions for the workers that return no hand-offs for an endpoint, as past replies showed, and for
/// those on whose hand-offs decode workers fail. Empty if the connector's replies never carry hand-offs.
pub fn without_hand_offs(served: &ServedModel, endpoint: Endpoint, now: Instant) -> Vec<Exclusion> {
    if !served.config.connector.is_pulled() {
        return Vec::new();
    }
    let dialect = endpoint.dialect();
    let roster = served.pool.roster();
    let exclude = |misses: &dyn Fn(&Worker) -> bool| -> Vec<Exclusion> {
        let missing = roster.iter().filter(|worker| misses(worker));
        missing.map(|worker| Exclusion::new(worker.index, VetoReason::NoHandOff)).collect()
    };
    let missing = exclude(&|worker| !worker.transfer.missing_hand_offs.may_come(dialect, now));
    let failed = exclude(&|worker| !worker.transfer.failed_hand_offs.may_hand_over(now));
    // A fault that all hand-offs share is none of the workers that hand over.
    let all = [&missing[..], &failed].concat();
    let others = failed.is_empty() || served.pool.any_up(Leg::Prefill, &all);
    if others { all } else { missing }
}

/// The exclusion of the last worker that can decode, if only one is left. It does not get the
/// prefill leg, since an engine cannot hand over to itself.
fn kept_for_decode(pool: &Pool, failed: &[Exclusion]) -> Vec<Exclusion> {
    let last = pool.last_up(Leg::Decode, failed);
    last.map(|worker| Exclusion::new(worker, VetoReason::KeptForDecode)).into_iter().collect()
}

/// Exclusions for workers that must not get the prefill leg: that one, and those whose KV no decode
/// worker can take.
pub fn excluded_from_prefill(served: &ServedModel, failed: &[Exclusion]) -> Vec<Exclusion> {
    let ServedModel { pool, config, .. } = served;
    let mut excluded = kept_for_decode(pool, failed);
    excluded.extend(without_taker(&pool.roster(), failed, config.connector, Instant::now()));
    excluded
}

/// Exclusions for workers that must not get the decode leg of a prompt that this one has computed.
pub fn excluded_from_decode(served: &ServedModel, prefill: &Worker) -> Vec<Exclusion> {
    let itself = Exclusion::new(prefill.index, VetoReason::SameWorker);
    let roster = served.pool.roster();
    let others = of_other_formats(&roster, prefill, served.config.connector);
    [itself].into_iter().chain(others).collect()
}

/// Whether every prefill worker that is up returns no hand-offs for an endpoint.
pub fn none_hands_over(served: &ServedModel, endpoint: Endpoint, now: Instant) -> bool {
    let missing = without_hand_offs(served, endpoint, now);
    if missing.is_empty() {
        return false;
    }
    let excluded = excluded_from_prefill(served, &[]);
    let others = served.pool.any_up(Leg::Prefill, &[&excluded[..], &missing].concat());
    !others && served.pool.any_up(Leg::Prefill, &excluded)
}
