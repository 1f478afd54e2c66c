//! Runs one prompt through its legs: places, sends and retries them until a reply has begun or an error is final.
//!
//! The futures of the legs are boxed: a future is as large as the largest future inside it, and the
//! whole of it is moved before it is first polled.

use std::sync::Arc;
use std::time::Instant;

use super::attempts::DecodeAttempts;
use super::auxiliary;
use super::context::{
    Context, PromptContext, attempt, carried_threshold, preemption_guard, prefill_made_local,
};
use super::decode_try::{DecodeTryResult, decode_try};
use super::generate::{Generation, StartedReply, generate};
use super::hand_off::{excluded_from_decode, none_comes};
use super::pair::{PairResult, pair_or_local};
use super::peer_fetch::fetch_planned;
use super::place::{LegRules, Moment, computed, note_vetoed, place, place_in_turn, sent};
use super::plan::{Facts, LocalReason, NextLegs, Plan, plan};
use super::prefill::{no_prefill_worker, prefill_or_local, without_prefill};
use super::prewarm::recent::remember;
use super::reply_leg::ReplyLeg;
use super::staged::PrefillResult;
use super::threshold_reply;
use super::weigh::{is_open, learned_ratio, prefill_rules, weigh};
use crate::boxed::boxed_future;
use crate::prepare::Unit;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_config::model::{OnNoPrefill, RequestFlow};
use splitrail_fleet::ServedModel;
use splitrail_fleet::Worker;
use splitrail_ledger::decisions::DecisionHandle;
use splitrail_policy::Leg;

/// Runs a prompt until its reply begins. `position` is the prompt's position among the units of
/// the request.
///
/// # Errors
/// The error of the last attempt, if no further attempt is allowed or useful.
pub async fn begin(
    context: &Arc<Context>,
    unit: &Unit,
    decision: &DecisionHandle,
    position: usize,
) -> Result<StartedReply, Error> {
    let clock = &context.timeline.prompt(position);
    let prompt = PromptContext { context, unit, decision, clock };
    if !context.endpoint.generates() {
        return boxed_future(|| auxiliary::run(prompt)).await;
    }
    let served = &context.served;
    let open = is_open(served, context.flow, context.threshold);
    let remote = || prefill_rules(served, context.endpoint, unit, context.options);
    let weighed = open.then(|| weigh(served, unit, remote(), true));
    if let Some(weighed) = &weighed {
        decision.weighed(weighed.record(served));
    }
    let facts = Facts {
        flow: context.flow,
        threshold: context.threshold,
        learned: open.then(|| learned_ratio(served)),
        remote_pays: weighed.and_then(|weighed| weighed.remote_pays()),
        prompt_tokens: unit.prompt_tokens,
        options: context.options,
        context_tokens: context.served.pool.context_tokens(),
        no_hand_off: none_comes(served, context.endpoint, Instant::now()),
    };
    let plan = plan(&served.config, facts);
    served.retry_budget.deposit();
    let begun = go(prompt, &plan).await?;
    // The time of the first token is known only for a stream.
    if let (Some(weighed), StartedReply::Stream(_)) = (weighed, &begun) {
        weighed.begun(served, decision);
    }
    Ok(begun)
}

/// Runs the planned legs until a reply begins.
async fn go(prompt: PromptContext<'_>, plan: &Plan) -> Result<StartedReply, Error> {
    let mut attempts = DecodeAttempts::new(prompt);
    if plan.gate.is_some() {
        match Box::pin(decode_try(prompt, plan, &mut attempts)).await? {
            DecodeTryResult::Answered(begun) => return Ok(begun),
            DecodeTryResult::BelowThreshold(usage) if plan.then == NextLegs::ThresholdReply => {
                return threshold_reply::reply(prompt, usage);
            }
            DecodeTryResult::BelowThreshold(_) | DecodeTryResult::Failed => {}
        }
    }
    let mut staged = None;
    loop {
        let mut leg = Leg::Decode;
        // A hand-off that was not sent to any decode worker is used by the next attempt.
        let is_used_again = staged.is_some();
        if !is_used_again {
            prompt.decision.flow_begun(plan.name());
            match first_leg(prompt, plan, &mut attempts).await? {
                FirstLeg::Prefilled(prefilled) => staged = Some(*prefilled),
                FirstLeg::None(alone) => leg = alone,
                FirstLeg::Answered(begun) => return Ok(begun),
                FirstLeg::Again => continue,
            }
        }
        let begun = last_leg(prompt, leg, &mut staged, is_used_again, &mut attempts).await?;
        if let Some(begun) = begun {
            return Ok(begun);
        }
    }
}

/// The result of the step before the leg that generates the reply.
enum FirstLeg {
    /// A prefill leg has succeeded.
    Prefilled(Box<PrefillResult>),
    /// There is no leg before; one worker, chosen for this leg, does all the work.
    None(Leg),
    /// Both legs were sent at the same time, and the reply has begun.
    Answered(StartedReply),
    /// Both legs were sent at the same time and failed; another attempt is allowed.
    Again,
}

/// Runs the leg before the leg that generates the reply, if the plan has one and a worker can take
/// it.
async fn first_leg(
    prompt: PromptContext<'_>,
    plan: &Plan,
    attempts: &mut DecodeAttempts,
) -> Result<FirstLeg, Error> {
    let context = prompt.context;
    let ServedModel { config, pool, .. } = context.served.as_ref();
    let alone = FirstLeg::None(Leg::Aggregated);
    match plan.then {
        NextLegs::Aggregated(reason) => {
            if let Some(reason) = reason {
                prefill_made_local(prompt, reason);
            }
            Ok(alone)
        }
        NextLegs::OnPrefill => {
            if pool.any_up(Leg::Prefill, attempts.failed()) {
                prefill_made_local(prompt, LocalReason::OneToken);
                return Ok(FirstLeg::None(Leg::Prefill));
            }
            without_prefill(prompt, &no_prefill_worker(context))?;
            Ok(alone)
        }
        NextLegs::PrefillFirst if pool.any_up(Leg::Decode, attempts.failed()) => {
            if config.connector.is_concurrent() {
                return Box::pin(both_legs(prompt, attempts)).await;
            }
            let failed = attempts.failed();
            let prefilled = boxed_future(|| prefill_or_local(prompt, failed)).await?;
            Ok(prefilled.map_or(alone, |prefilled| FirstLeg::Prefilled(Box::new(prefilled))))
        }
        NextLegs::PrefillFirst if config.on_no_prefill == OnNoPrefill::Fail => {
            let message = format!("model {} has no decode worker that is up", config.name);
            Err(Error::new(ErrorKind::NoWorker, message))
        }
        // A prefill now would stage blocks that no decode worker fetches. An attempt without a
        // prefill shows what is wrong, or that a decode worker is up again.
        NextLegs::PrefillFirst | NextLegs::ThresholdReply => {
            prefill_made_local(prompt, LocalReason::NoDecode);
            Ok(alone)
        }
    }
}

async fn both_legs(
    prompt: PromptContext<'_>,
    attempts: &mut DecodeAttempts,
) -> Result<FirstLeg, Error> {
    match pair_or_local(prompt, attempts).await? {
        PairResult::Answered(generated, worker) => {
            let concluded =
                conclude(prompt.context, attempts, Leg::Decode, &worker, Ok(generated))?;
            Ok(concluded.map_or(FirstLeg::Again, FirstLeg::Answered))
        }
        PairResult::Again => Ok(FirstLeg::Again),
        PairResult::Local => Ok(FirstLeg::None(Leg::Aggregated)),
    }
}

/// Runs the leg that generates the reply; `None` if it failed and another attempt is allowed.
/// `is_used_again` says whether the hand-off is that of an earlier attempt.
async fn last_leg(
    prompt: PromptContext<'_>,
    leg: Leg,
    staged: &mut Option<PrefillResult>,
    is_used_again: bool,
    attempts: &mut DecodeAttempts,
) -> Result<Option<StartedReply>, Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let pool = &context.served.pool;
    let mut excluded = attempts.failed().to_vec();
    if let Some(prefilled) = &staged {
        excluded.extend(excluded_from_decode(&context.served, &prefilled.worker));
        let left = prefilled.lease().map(|lease| lease.left(tokio::time::Instant::now()));
        let late = left.map(|left| pool.workers_too_late(left, Instant::now())).unwrap_or_default();
        excluded.extend(&late);
        let over = left.is_some_and(|left| left.is_zero());
        if over || (!late.is_empty() && !pool.any_up(leg, &excluded)) {
            let rules = LegRules::any(leg, &excluded);
            note_vetoed(decision, &pool.roster(), rules, &[], Moment::now());
            let prefill = Arc::clone(&prefilled.worker);
            let message =
                format!("no decode worker can take worker {}'s hand-off in time", prefill.id());
            let error = Error::new(ErrorKind::LeaseExpired, message);
            decision.attempt_discarded(error.outcome());
            attempts.retry(context, &prefill, error)?;
            *staged = None;
            return Ok(None);
        }
    }
    let rules = LegRules::any(leg, &excluded);
    let placed = match leg {
        Leg::Decode => place(prompt, rules)?,
        Leg::Prefill | Leg::Aggregated => {
            let observes_prefill_end = context.options.stream;
            let rules = LegRules { may_fetch: attempts.may_fetch, ..rules };
            let mut placed = place_in_turn(prompt, rules, observes_prefill_end).await?;
            fetch_planned(prompt, &mut placed, &mut attempts.may_fetch).await;
            placed
        }
    };
    // Both legs of an attempt carry the same id.
    let leg_headers = match &staged {
        Some(prefilled) => {
            if is_used_again {
                decision.attempt_begun();
            }
            prefilled.leg_headers.clone()
        }
        None => attempt(context, decision),
    };
    sent(context, unit, &placed);
    let guard = match leg {
        Leg::Decode => preemption_guard(prompt),
        Leg::Prefill | Leg::Aggregated => 0.0,
    };
    let threshold = carried_threshold(context, &placed.worker, guard);
    let sending = ReplyLeg { prompt, leg_headers: &leg_headers, placed: &placed, threshold };
    // The engine may have received the hand-off, so an attempt after a failure needs a new one.
    let generated = boxed_future(|| generate(&sending, staged)).await;
    if matches!(generated, Ok(Generation::Started(_))) {
        computed(context, unit, &placed);
        if context.flow == RequestFlow::Aggregated {
            remember(prompt);
        }
    }
    conclude(context, attempts, leg, &placed.worker, generated)
}

/// Evaluates the result of the leg that generates the reply; `None` if another attempt is allowed.
fn conclude(
    context: &Context,
    attempts: &mut DecodeAttempts,
    leg: Leg,
    worker: &Worker,
    generated: Result<Generation, Error>,
) -> Result<Option<StartedReply>, Error> {
    match generated {
        Ok(Generation::Started(begun)) => Ok(Some(begun)),
        Ok(Generation::BelowThreshold(_)) => {
            let message = format!(
                "worker {} turned the request away by a threshold ({})",
                worker.id(),
                if leg == Leg::Decode { "it was preempted" } else { "its own" }
            );
            attempts.retry(context, worker, Error::new(ErrorKind::BelowThreshold, message))?;
            Ok(None)
        }
        Err(error) => {
            // A decode worker can also serve a request that was planned for a prefill worker alone.
            let leg = if leg == Leg::Prefill { Leg::Aggregated } else { leg };
            attempts.retry_elsewhere(context, leg, worker, error)?;
            Ok(None)
        }
    }
}
