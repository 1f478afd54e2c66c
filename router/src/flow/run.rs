//! One prompt's way through its legs: placed, sent, retried, until an answer has
//! begun or an error is final.

use super::answer::{Begun, generate};
use super::context::{Context, attempt, count_local, count_retry, flow_name};
use super::place::place;
use super::plan::{Facts, LocalReason, Plan, plan};
use super::prefill::prefill_or_local;
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
    let model = &context.served.config;
    let facts = Facts {
        prompt_tokens: unit.prompt_tokens,
        options: context.options,
        context_tokens: context.served.pool.context_tokens(),
    };
    let plan = plan(model, facts);
    let mut failed = Vec::new();
    loop {
        decision.begin_attempt(flow_name(context));
        let mut prefilled = None;
        if let Plan::Aggregated(Some(reason)) = plan {
            count_local(context, decision, reason);
        } else if plan == Plan::PrefillFirst {
            if context.served.pool.any_up(Leg::Decode, &failed) {
                prefilled = prefill_or_local(context, unit, decision, &failed).await?;
            } else if model.on_no_prefill == OnNoPrefill::Fail {
                let message = format!("model {} has no decode worker that is up", model.name);
                return Err(Error::new(Kind::NoWorker, message));
            } else {
                // A prefill now would stage blocks for nobody. An attempt without one
                // finds out what is wrong, or that it no longer is.
                count_local(context, decision, LocalReason::NoDecode);
            }
        }
        // Both legs of an attempt carry one id.
        let envelope = match &prefilled {
            Some(prefilled) => prefilled.envelope.clone(),
            None => attempt(context, decision),
        };
        let leg = if prefilled.is_some() { Leg::Decode } else { Leg::Aggregated };
        let mut excluded = failed.clone();
        // An engine cannot pull from itself.
        excluded.extend(prefilled.as_ref().map(|prefilled| prefilled.worker));
        let placed = place(context, unit, decision, leg, &excluded)?;
        // The hand-off may be received: whatever comes after a failure needs a new one.
        let error = match generate(context, unit, decision, &envelope, &placed, prefilled).await {
            Ok(begun) => return Ok(begun),
            Err(error) => error,
        };
        failed.push(placed.worker.index);
        let allowed = failed.len() <= model.retries.decode as usize;
        let others = context.served.pool.any_up(leg, &failed);
        if !(allowed && others && error.worth_another_worker()) {
            return Err(error);
        }
        count_retry(context, "decode", &placed.worker, &error);
    }
}
