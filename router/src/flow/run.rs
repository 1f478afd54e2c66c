//! One prompt's way through its legs: placed, sent, retried, until an answer has
//! begun or an error is final.

use super::answer::{Answer, Begun, Sending, generate};
use super::attempts::Attempts;
use super::below;
use super::context::{Context, attempt, carried_threshold, count_local};
use super::decode_try::{Tried, decode_try};
use super::place::{Wish, place};
use super::plan::{Facts, LocalReason, Plan, Then, plan};
use super::prefill::{Prefilled, prefill_or_local};
use crate::config::model::OnNoPrefill;
use crate::error::{Error, Kind};
use crate::ledger::decisions::DecisionHandle;
use crate::pick::Leg;
use crate::prepare::Unit;

/// Runs a prompt until its answer begins.
///
/// # Errors
/// The last attempt's, once no further one is allowed or makes sense.
pub async fn begin(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
) -> Result<Begun, Error> {
    let facts = Facts {
        flow: context.flow,
        threshold: context.threshold,
        remote_pays: None,
        prompt_tokens: unit.prompt_tokens,
        options: context.options,
        context_tokens: context.served.pool.context_tokens(),
    };
    let plan = plan(&context.served.config, facts);
    let mut attempts = Attempts::new(context);
    if plan.gate.is_some() {
        match decode_try(context, unit, decision, &plan, &mut attempts).await? {
            Tried::Answered(begun) => return Ok(begun),
            Tried::Below(usage) if plan.then == Then::Tell => {
                return below::tell(context, unit, decision, usage);
            }
            Tried::Below(_) | Tried::Failed => {}
        }
    }
    loop {
        decision.begin_attempt(plan.name());
        let prefilled = prefilled(context, unit, decision, &plan, &attempts).await?;
        let leg = if prefilled.is_some() { Leg::Decode } else { Leg::Aggregated };
        if let Some(begun) = answer(context, unit, decision, prefilled, &mut attempts, leg).await? {
            return Ok(begun);
        }
    }
}

/// The prefill leg, if the plan has one and it can be had.
async fn prefilled(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
    plan: &Plan,
    attempts: &Attempts,
) -> Result<Option<Prefilled>, Error> {
    let config = &context.served.config;
    match plan.then {
        Then::Aggregated(reason) => {
            if let Some(reason) = reason {
                count_local(context, decision, reason);
            }
            Ok(None)
        }
        Then::PrefillFirst if context.served.pool.any_up(Leg::Decode, attempts.failed()) => {
            prefill_or_local(context, unit, decision, attempts.failed()).await
        }
        Then::PrefillFirst if config.on_no_prefill == OnNoPrefill::Fail => {
            let message = format!("model {} has no decode worker that is up", config.name);
            Err(Error::new(Kind::NoWorker, message))
        }
        // A prefill now would stage blocks for nobody. An attempt without one
        // finds out what is wrong, or that it no longer is.
        Then::PrefillFirst | Then::Tell => {
            count_local(context, decision, LocalReason::NoDecode);
            Ok(None)
        }
    }
}

/// The leg that answers; `None` if it did not, and another attempt is allowed.
async fn answer(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
    prefilled: Option<Prefilled>,
    attempts: &mut Attempts,
    leg: Leg,
) -> Result<Option<Begun>, Error> {
    // Both legs of an attempt carry one id.
    let envelope = match &prefilled {
        Some(prefilled) => prefilled.envelope.clone(),
        None => attempt(context, decision),
    };
    let mut excluded = attempts.failed().to_vec();
    // An engine cannot pull from itself.
    excluded.extend(prefilled.as_ref().map(|prefilled| prefilled.worker));
    let placed = place(context, unit, decision, Wish::any(leg, &excluded))?;
    let guard = match prefilled {
        Some(_) => context.served.config.gate.preemption_guard,
        None => 0.0,
    };
    let threshold = carried_threshold(context, &placed.worker, guard);
    let sending =
        Sending { context, unit, decision, envelope: &envelope, placed: &placed, threshold };
    // The hand-off may be received: whatever comes after a failure needs a new one.
    match generate(&sending, prefilled).await {
        Ok(Answer::Begun(begun)) => Ok(Some(begun)),
        Ok(Answer::Below(_)) => {
            let message = format!(
                "worker {} turned the request away by a threshold ({})",
                placed.worker.id(),
                if leg == Leg::Decode { "it was preempted" } else { "its own" }
            );
            let error = Error::new(Kind::BelowThreshold, message);
            attempts.again(context, &placed.worker, error)?;
            Ok(None)
        }
        Err(error) => {
            attempts.again_elsewhere(context, leg, &placed.worker, error)?;
            Ok(None)
        }
    }
}
