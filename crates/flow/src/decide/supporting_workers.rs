//! Which workers support an endpoint that generates no text, and what its replies say of a worker.

use std::sync::Arc;
use std::time::Instant;

use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_fleet::{Exclusion, Pool, ServedModel, Worker, excluded};
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::Leg;
use splitrail_workload::endpoint_support::{BASIC_ENDPOINTS, TOKENIZER};

/// Exclusions for the workers whose engines lack an endpoint.
///
/// Every engine that generates has chats and completions. So if all lack them, they may have said it of one
/// request, or have been repaired, and none is excluded.
///
/// # Errors
/// If all workers that are up lack another endpoint.
pub(crate) fn lacking_endpoint(
    served: &ServedModel,
    endpoint: Endpoint,
    now: Instant,
) -> Result<Vec<Exclusion>, Error> {
    let roster = served.pool.roster();
    let lacks = |worker: &Worker| worker.engine.endpoint_support.is_lacking(endpoint, now);
    let lacking = roster.iter().filter(|worker| lacks(worker));
    let lacking = lacking.map(|worker| Exclusion::new(worker.index, VetoReason::LacksEndpoint));
    let lacking: Vec<Exclusion> = lacking.collect();
    let replies = |worker: &Worker| !endpoint.generates() || worker.serves(Leg::Decode);
    let may_have = |worker: &Arc<Worker>| worker.is_up() && replies(worker) && !lacks(worker);
    if !lacking.is_empty() && !roster.iter().any(may_have) {
        if BASIC_ENDPOINTS.contains(&endpoint) {
            return Ok(Vec::new());
        }
        let message = format!("no worker of model {} offers {}", served.name(), endpoint.path());
        return Err(Error::new(ErrorKind::NotOffered, message));
    }
    Ok(lacking)
}

/// The leg for which a worker is chosen, and the workers to exclude besides those in `failed`:
/// workers that lack the endpoint, and workers whose circuit breaker for it is open.
///
/// # Errors
/// If all workers that are up lack the endpoint.
pub(crate) fn leg_for_endpoint(
    served: &ServedModel,
    endpoint: Endpoint,
    failed: &[Exclusion],
    now: Instant,
) -> Result<(Leg, Vec<Exclusion>), Error> {
    let roster = served.pool.roster();
    let left = |worker: &&Arc<Worker>| excluded(failed, worker.index).is_none();
    let mut lacking = lacking_endpoint(served, endpoint, now)?;
    lacking.retain(|one| excluded(failed, one.worker).is_none());
    let may_have =
        |worker: &Arc<Worker>| worker.is_up() && excluded(&lacking, worker.index).is_none();
    let veto = |reason| move |worker: &Arc<Worker>| Exclusion::new(worker.index, reason);
    // As with legs: if the breakers of all workers are open, all workers are tried nevertheless.
    let shut = |worker: &Worker| {
        !endpoint.computes() && !worker.engine.endpoint_support.breaker.allows(now)
    };
    let open = |worker: &Arc<Worker>| may_have(worker) && left(&worker) && !shut(worker);
    if roster.iter().any(open) {
        let shut = roster.iter().filter(|worker| shut(worker));
        lacking.extend(shut.map(veto(VetoReason::BreakerOpen)));
    }
    Ok((next_leg(&served.pool, &[failed, &lacking].concat()), lacking))
}

/// The role of the workers that serve auxiliary endpoints: workers for both legs or for decode, or
/// prefill workers if no other worker is up.
pub(crate) fn next_leg(pool: &Pool, exclusions: &[Exclusion]) -> Leg {
    let can = |leg| {
        let roster = pool.roster();
        roster
            .iter()
            .any(|worker| worker.serves(leg) && excluded(exclusions, worker.index).is_none())
    };
    let others = pool.any_up(Leg::Aggregated, exclusions);
    if others || (can(Leg::Aggregated) && !pool.any_up(Leg::Prefill, exclusions)) {
        Leg::Aggregated
    } else {
        Leg::Prefill
    }
}

/// An endpoint that the model computes uses the circuit breaker of the leg. Other endpoints have a
/// breaker of their own, because their failures say nothing about the model.
pub(crate) fn begin(worker: &Worker, leg: Leg, endpoint: Endpoint) {
    match endpoint.computes() {
        true => worker.breaker(leg).begin(Instant::now()),
        false => worker.engine.endpoint_support.breaker.begin(Instant::now()),
    }
}

/// Ends what [`begin`] has begun.
pub(crate) fn end(worker: &Worker, leg: Leg, endpoint: Endpoint, failed: Option<&Error>) {
    if endpoint.computes() {
        worker.record(leg, failed);
        return;
    }
    let breaker = &worker.engine.endpoint_support.breaker;
    let (model, worker, leg) = (worker.model(), worker.id(), TOKENIZER);
    // These requests compute nothing, so a late reply is a fault of the engine's server.
    let is_late = |error: &Error| error.kind() == ErrorKind::EngineTimeout;
    let failed = failed.is_some_and(|error| error.speaks_against_its_worker() || is_late(error));
    if failed && breaker.fail(Instant::now()) {
        tracing::warn!(model, worker, leg, "breaker opened: too many failures in a row");
    } else if !failed && breaker.succeed() {
        tracing::info!(model, worker, leg, "breaker closed");
    }
}
