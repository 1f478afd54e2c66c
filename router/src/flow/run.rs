//! One prompt's way through its legs: placed, sent, retried, until an answer has
//! begun or an error is final.

use super::answer::{Begun, generate};
use super::context::{Context, attempt, count_local, count_retry};
use super::place::place;
use super::plan::{Facts, Plan, plan};
use super::prefill::prefill_or_local;
use crate::error::Error;
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
    if let Plan::Aggregated(Some(reason)) = plan {
        count_local(context, decision, reason);
    }
    let mut failed = Vec::new();
    loop {
        let prefilled = match plan {
            Plan::Aggregated(_) => None,
            Plan::PrefillFirst => prefill_or_local(context, unit, decision).await?,
        };
        // Both legs of an attempt carry one id.
        let envelope = match &prefilled {
            Some(prefilled) => prefilled.envelope.clone(),
            None => attempt(context, decision),
        };
        let leg = if prefilled.is_some() { Leg::Decode } else { Leg::Aggregated };
        let spent_tokens = prefilled.as_ref().map_or(0, |prefilled| prefilled.prompt_tokens);
        let mut excluded = failed.clone();
        // An engine cannot pull from itself.
        excluded.extend(prefilled.as_ref().map(|prefilled| prefilled.worker));
        let placed = place(context, unit, decision, leg, &excluded)?;
        let error = match generate(context, unit, decision, &envelope, &placed, prefilled).await {
            Ok(begun) => return Ok(begun),
            Err(error) => error,
        };
        // The hand-off may have been received: whatever comes next needs a new one.
        if spent_tokens > 0 {
            let labels = [context.served.name(), error.outcome()];
            let wasted = context.core.metrics.wasted_prompt_tokens.with_label_values(&labels);
            wasted.inc_by(spent_tokens.into());
        }
        failed.push(placed.worker.index);
        let allowed = failed.len() <= model.retries.decode as usize;
        let others = context.served.pool.has_other(leg, &failed);
        if !(allowed && others && error.worth_another_worker()) {
            return Err(error);
        }
        count_retry(context, "decode", &placed.worker, &error);
    }
}
