//! Workers that are in service, but take part in no hand-off.

use std::sync::Arc;

use splitrail_config::model::{RequestFlow, Role};
use splitrail_fleet::{ServedModel, Worker};
use splitrail_policy::Leg;
use splitrail_settings::natural_order::compare;

/// The ids of the prefill workers whose KV no decode worker in service can take, and those of the decode
/// workers that can take that of no prefill worker; each with what that means.
pub(super) fn without_partner(served: &ServedModel) -> Vec<(Vec<String>, &'static str)> {
    if !served.config.flows().any(RequestFlow::hands_over) {
        return Vec::new();
    }
    let roster = served.pool.roster();
    let in_service = |leg| {
        let able = roster.iter().filter(move |worker| worker.serves(leg));
        able.filter(|worker| worker.state().takes_work()).collect::<Vec<_>>()
    };
    let (sources, takers) = (in_service(Leg::Prefill), in_service(Leg::Decode));
    let is_pair = |source: &Worker, taker: &Worker| {
        source.index != taker.index && taker.can_take_from(source, served.config.connector)
    };
    let has_taker = |source: &Worker| takers.iter().any(|taker| is_pair(source, taker));
    let has_source = |taker: &Worker| sources.iter().any(|source| is_pair(source, taker));
    let about = |role, all: &[&Arc<Worker>], has_other: &dyn Fn(&Worker) -> bool, message| {
        let alone = all.iter().filter(|worker| worker.config.role == role && !has_other(worker));
        let mut workers: Vec<_> = alone.map(|worker| worker.id().to_owned()).collect();
        workers.sort_by(|one, other| compare(one, other));
        (!workers.is_empty()).then_some((workers, message))
    };
    // Without any worker of the other role, that is what is to be said.
    let prefill = (!takers.is_empty()).then(|| {
        let message = "not used: no decode worker in service can take its KV";
        about(Role::Prefill, &sources, &has_taker, message)
    });
    let decode = (!sources.is_empty()).then(|| {
        let message = "gets no hand-off: it can take the KV of no prefill worker in service";
        about(Role::Decode, &takers, &has_source, message)
    });
    [prefill, decode].into_iter().flatten().flatten().collect()
}
