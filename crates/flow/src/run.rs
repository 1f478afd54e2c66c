//! Runs one prompt through its legs: places, sends and retries them until a reply has begun or an error is final.
//!
//! The futures of the legs are boxed: a future is as large as the largest future inside it, and the
//! whole of it is moved before it is first polled.

pub(crate) mod account;
mod auxiliary;
mod beginning;
pub mod boxed;
pub(crate) mod decode_try;
pub(crate) mod first;
pub mod generate;
mod kv_read;
pub(crate) mod leg_headers;
mod local_prefill;
mod pair;
mod peer_fetch;
mod prefill;
pub(crate) mod read_back;
mod recent_prefixes;
pub(crate) mod reply_leg;
mod threshold_reply;

use std::sync::Arc;
use std::time::Instant;

use crate::context::{Context, PromptContext};
use crate::decide::adapter_holders::error_for_client;
use crate::decide::attempts::DecodeAttempts;
use crate::decide::place::{
    LegRules, Moment, note_vetoed, place, place_in_turn, record_computed_prompt, record_sent_prompt,
};
use crate::decide::plan::{Facts, LocalReason, NextLegs, Plan, plan};
use crate::decide::supporting_workers::lacking_endpoint;
use crate::decide::threshold::{carried_threshold, preemption_guard};
use crate::decide::weigh::{is_open, learned_ratio, prefill_rules, weigh};
use crate::prepare::Unit;
use crate::run::boxed::boxed_future;
use crate::run::decode_try::{DecodeTryResult, decode_try};
use crate::run::generate::{Generation, StartedReply, generate};
use crate::run::leg_headers::begin_attempt;
use crate::run::local_prefill::record_local_prefill;
use crate::run::pair::{PairResult, pair_or_local};
use crate::run::peer_fetch::fetch_planned;
use crate::run::prefill::{no_prefill_worker, prefill_or_local, without_prefill};
use crate::run::recent_prefixes::remember_prefix;
use crate::run::reply_leg::ReplyLeg;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_config::model::{OnNoPrefill, RequestFlow};
use splitrail_fleet::{Exclusion, ServedModel, Worker};
use splitrail_ledger::decisions::DecisionHandle;
use splitrail_policy::Leg;
use splitrail_transfer::participants::{excluded_from_decode, none_hands_over};
use splitrail_transfer::staged::PrefillResult;
use splitrail_workload::endpoint_support::BASIC_ENDPOINTS;

/// Runs a prompt until its reply begins. `position` is the prompt's position among the units of
/// the request.
///
/// # Errors
/// The error of the last attempt, if no further attempt is allowed or useful.
pub async fn run_prompt(
    context: &Arc<Context>,
    unit: &Unit,
    decision: &DecisionHandle,
    position: usize,
) -> Result<StartedReply, Error> {
    let clock = &context.timeline.prompt(position);
    let prompt = PromptContext { context, unit, decision, clock };
    let begun = match context.endpoint.generates() {
        true => generated(prompt).await,
        false => boxed_future(|| auxiliary::run(prompt)).await,
    };
    begun.map_err(|error| match error.kind() {
        ErrorKind::EngineLacksPath if BASIC_ENDPOINTS.contains(&context.endpoint) => {
            let path = context.endpoint.path();
            let message = format!("the engines do not offer {path}: are their addresses right?");
            Error::new(ErrorKind::EngineFailed, message)
        }
        _ => error_for_client(&context.served, &unit.body, error),
    })
}

/// Runs a prompt of an endpoint that generates until its reply begins.
async fn generated(prompt: PromptContext<'_>) -> Result<StartedReply, Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let served = &context.served;
    served.pool.conversations.record(Instant::now(), &unit.hashes);
    let lacking = lacking_endpoint(served, context.endpoint, Instant::now())?;
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
        no_hand_off: none_hands_over(served, context.endpoint, Instant::now()),
    };
    let plan = plan(&served.config, facts);
    served.retry_budget.deposit();
    let begun = run_plan(prompt, &plan, lacking).await?;
    // The time of the first token is known only for a stream.
    if let (Some(weighed), StartedReply::Stream(_)) = (weighed, &begun) {
        weighed.begun(served, decision);
    }
    Ok(begun)
}

/// Runs the planned legs until a reply begins.
async fn run_plan(
    prompt: PromptContext<'_>,
    plan: &Plan,
    lacking: Vec<Exclusion>,
) -> Result<StartedReply, Error> {
    let mut attempts = DecodeAttempts::new(prompt);
    attempts.exclude(lacking);
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
            match run_prefill_step(prompt, plan, &mut attempts).await? {
                PrefillStep::Prefilled(prefilled) => staged = Some(*prefilled),
                PrefillStep::None(alone) => leg = alone,
                PrefillStep::Answered(begun) => return Ok(begun),
                PrefillStep::Again => continue,
            }
        }
        let begun = run_reply_leg(prompt, leg, &mut staged, is_used_again, &mut attempts).await?;
        if let Some(begun) = begun {
            return Ok(begun);
        }
    }
}

/// The result of the step before the leg that generates the reply.
enum PrefillStep {
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
async fn run_prefill_step(
    prompt: PromptContext<'_>,
    plan: &Plan,
    attempts: &mut DecodeAttempts,
) -> Result<PrefillStep, Error> {
    let context = prompt.context;
    let ServedModel { config, pool, .. } = context.served.as_ref();
    let alone = PrefillStep::None(Leg::Aggregated);
    match plan.then {
        NextLegs::Aggregated(reason) => {
            if let Some(reason) = reason {
                record_local_prefill(prompt, reason);
            }
            Ok(alone)
        }
        NextLegs::OnPrefill => {
            if pool.any_up(Leg::Prefill, attempts.failed()) {
                record_local_prefill(prompt, LocalReason::OneToken);
                return Ok(PrefillStep::None(Leg::Prefill));
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
            Ok(prefilled.map_or(alone, PrefillStep::Prefilled))
        }
        NextLegs::PrefillFirst if config.on_no_prefill == OnNoPrefill::Fail => {
            let message = format!("model {} has no decode worker that is up", config.name);
            Err(Error::new(ErrorKind::NoWorker, message))
        }
        // A prefill now would stage blocks that no decode worker fetches. An attempt without a
        // prefill shows what is wrong, or that a decode worker is up again.
        NextLegs::PrefillFirst | NextLegs::ThresholdReply => {
            record_local_prefill(prompt, LocalReason::NoDecode);
            Ok(alone)
        }
    }
}

async fn both_legs(
    prompt: PromptContext<'_>,
    attempts: &mut DecodeAttempts,
) -> Result<PrefillStep, Error> {
    match pair_or_local(prompt, attempts).await? {
        PairResult::Answered(generated, worker) => {
            let concluded =
                conclude(prompt.context, attempts, Leg::Decode, &worker, Ok(generated))?;
            Ok(concluded.map_or(PrefillStep::Again, PrefillStep::Answered))
        }
        PairResult::Again => Ok(PrefillStep::Again),
        PairResult::Local => Ok(PrefillStep::None(Leg::Aggregated)),
    }
}

/// Runs the leg that generates the reply; `None` if it failed and another attempt is allowed.
/// `is_used_again` says whether the hand-off is that of an earlier attempt.
async fn run_reply_leg(
    prompt: PromptContext<'_>,
    leg: Leg,
    staged: &mut Option<PrefillResult>,
    is_used_again: bool,
    attempts: &mut DecodeAttempts,
) -> Result<Option<StartedReply>, Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let pool = &context.served.pool;
    let mut excluded = attempts.failed().to_vec();
    if let Some(prefilled) = &staged
        && let Some(error) = exclude_for_hand_off(context, prefilled, leg, attempts, &mut excluded)
    {
        let rules = LegRules::any(leg, &excluded);
        note_vetoed(decision, &pool.roster(), rules, &[], Moment::now());
        decision.enter(|entry| entry.discard(error.outcome()));
        attempts.retry(context, &prefilled.worker, error)?;
        *staged = None;
        return Ok(None);
    }
    let rules = match &staged {
        Some(prefilled) => LegRules::decode(&prefilled.worker, &excluded),
        None => LegRules::any(leg, &excluded),
    };
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
        None => begin_attempt(context, decision),
    };
    record_sent_prompt(context, unit, &placed);
    let guard = match leg {
        // A request that is preempted in its last attempt is better computed again than refused.
        Leg::Decode if !attempts.is_last() => preemption_guard(prompt),
        Leg::Decode | Leg::Prefill | Leg::Aggregated => 0.0,
    };
    let threshold = carried_threshold(context, &placed.worker, guard);
    let sending = ReplyLeg { prompt, leg_headers: &leg_headers, placed: &placed, threshold };
    let prefill = staged.as_ref().map(|prefilled| Arc::clone(&prefilled.worker));
    // The engine may have received the hand-off, so an attempt after a failure needs a new one.
    let generated = boxed_future(|| generate(&sending, staged)).await;
    if let Some(prefill) = prefill.filter(|_| staged.is_none())
        && judge_hand_off(&context.served, &prefill, &placed.worker, &generated)
    {
        attempts.use_another_prefill_worker(&context.served, &prefill);
    }
    if matches!(generated, Ok(Generation::Started(_))) {
        record_computed_prompt(context, unit, &placed);
        if context.flow == RequestFlow::Aggregated {
            remember_prefix(prompt);
        }
    }
    conclude(context, attempts, leg, &placed.worker, generated)
}

/// Excludes the workers that cannot take a hand-off, and those that may be late for it if another one is
/// up. Returns why it cannot be used any more, if it cannot.
fn exclude_for_hand_off(
    context: &Context,
    prefilled: &PrefillResult,
    leg: Leg,
    attempts: &DecodeAttempts,
    excluded: &mut Vec<Exclusion>,
) -> Option<Error> {
    let (pool, prefill) = (&context.served.pool, &prefilled.worker);
    excluded.extend(excluded_from_decode(&context.served, prefill));
    let left = prefilled.lease().map(|lease| lease.left(tokio::time::Instant::now()));
    let late = left.map(|left| pool.workers_too_late(left, Instant::now())).unwrap_or_default();
    // If all are predicted to be late, a new prefill would be late as well, and one may be in time.
    if pool.any_up(leg, &[&excluded[..], &late].concat()) {
        excluded.extend(&late);
    }
    let because = |kind, when| {
        let message =
            format!("no decode worker can take worker {}'s hand-off {when}", prefill.id());
        Some(Error::new(kind, message))
    };
    if left.is_some_and(|left| left.is_zero()) {
        return because(ErrorKind::LeaseExpired, "in time");
    }
    // Those that could take the hand-off have left, and others can take another worker's.
    let is_stranded = !pool.any_left(leg, excluded) && pool.any_up(leg, attempts.failed());
    is_stranded.then(|| because(ErrorKind::NoWorker, "any more")).flatten()
}

/// Records how a decode leg has fared with the hand-off of a prefill worker. Returns whether it has failed:
/// the engine that pulls reports it, but either may be at fault.
fn judge_hand_off(
    served: &ServedModel,
    prefill: &Worker,
    decode: &Worker,
    generated: &Result<Generation, Error>,
) -> bool {
    let (model, worker) = (served.name(), prefill.id());
    let hand_offs = &prefill.transfer.failed_hand_offs;
    match generated {
        Ok(Generation::Started(_)) => {
            if hand_offs.record_success() {
                tracing::info!(model, worker, "decode workers take its hand-offs again");
            }
            false
        }
        Err(error) if error.kind() == ErrorKind::EngineFailed => {
            let counts = served.config.breaker.failures > 0;
            if counts && hand_offs.record_failure(decode.index, Instant::now()) {
                let what =
                    "decode workers fail on its hand-offs: it hands nothing over for a while";
                tracing::warn!(model, worker, %error, "{what}");
            }
            true
        }
        Ok(Generation::BelowThreshold(_)) | Err(_) => false,
    }
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
        Ok(Generation::Started(begun)) => {
            attempts.succeeded(&context.served);
            Ok(Some(begun))
        }
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
