//! Which engines have a context that is long enough for a prompt.

use crate::prepare::Unit;
use splitrail_api::error::Error;
use splitrail_fleet::{Exclusion, ServedModel, Worker, excluded};
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::Leg;

/// Number of output tokens of a prefill leg.
pub(crate) const PREFILL_OUTPUT_TOKENS: u32 = 1;

/// Exclusions for the workers of a leg whose engine refuses the prompt because its context has no
/// room for the prompt and `output_tokens`. Empty if that holds for all of them, so that an engine
/// tells the client.
pub(crate) fn too_short(
    served: &ServedModel,
    leg: Leg,
    unit: &Unit,
    output_tokens: u32,
) -> Vec<Exclusion> {
    let Some(prompt_tokens) = unit.prompt_tokens else { return Vec::new() };
    let tokens = u64::from(prompt_tokens) + u64::from(output_tokens);
    let roster = served.pool.roster();
    let serving = || roster.iter().filter(|worker| worker.serves(leg));
    let is_short = |worker: &Worker| {
        let context = worker.engine.facts.context_tokens();
        context.is_some_and(|context_tokens| tokens > context_tokens.into())
    };
    // A worker that has not reported its context and is down may never report it.
    let may_fit = |worker: &Worker| match worker.engine.facts.context_tokens() {
        Some(_) => !is_short(worker),
        None => worker.is_up(),
    };
    if !serving().any(|worker| is_short(worker)) || !serving().any(|worker| may_fit(worker)) {
        return Vec::new();
    }
    serving().filter(|worker| is_short(worker)).map(|worker| exclusion(worker)).collect()
}

/// Exclusions for a worker whose engine has refused a prompt as too long, and for all others of which
/// no longer context is known, besides those in `failed`.
pub(crate) fn not_longer(
    served: &ServedModel,
    refusing: &Worker,
    failed: &[Exclusion],
) -> Vec<Exclusion> {
    let roster = served.pool.roster();
    let is_new =
        |worker: &Worker| !is_longer(worker, refusing) && excluded(failed, worker.index).is_none();
    roster.iter().filter(|worker| is_new(worker)).map(|worker| exclusion(worker)).collect()
}

/// Whether an engine has refused a prompt as too long for it, and another worker has a longer context, or
/// its engine has not reported its context yet.
pub(crate) fn fits_elsewhere(served: &ServedModel, refusing: &Worker, error: &Error) -> bool {
    let takes = |worker: &Worker| worker.is_up() && is_longer(worker, refusing);
    error.is_too_long() && served.pool.roster().iter().any(|worker| takes(worker))
}

fn is_longer(worker: &Worker, than: &Worker) -> bool {
    match (worker.engine.facts.context_tokens(), than.engine.facts.context_tokens()) {
        (Some(own), Some(refusing)) => own > refusing,
        (None, Some(_)) => worker.is_up(),
        (_, None) => false,
    }
}

fn exclusion(worker: &Worker) -> Exclusion {
    Exclusion::new(worker.index, VetoReason::ContextTooShort)
}
