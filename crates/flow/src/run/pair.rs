//! Runs both legs at once, for connectors whose legs wait for each other.
//!
//! The two legs find each other by a random name that the router makes for this pair. When one leg
//! fails, the other is cancelled at once: otherwise the other leg would keep its blocks for minutes.
//! Where cancelling is not enough, `repair` frees the blocks.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::context::PromptContext;
use crate::decide::attempts::DecodeAttempts;
use crate::decide::context_length::fits_elsewhere;
use crate::decide::place::{
    LegRules, PlacedLeg, place, record_computed_prompt, record_sent_prompt,
};
use crate::decide::plan::LocalReason;
use crate::decide::threshold::{carried_threshold, preemption_guard};
use crate::run::account::Account;
use crate::run::first::{First, ask, take_hand_off};
use crate::run::generate::{Generation, conclude, mark};
use crate::run::leg_headers::{begin_attempt, traced_headers};
use crate::run::local_prefill::record_local_prefill;
use crate::run::prefill::{self, PrefillAttempts, PrefillReply, without_prefill};
use crate::run::reply_leg::ReplyLeg;
use splitrail_api::Parts;
use splitrail_api::error::{Error, ErrorKind, Fault};
use splitrail_engine_client::{LegHeaders, RevocableBody};
use splitrail_fleet::Worker;
use splitrail_ledger::leg::{LegFacts, LegKind};
use splitrail_policy::Leg;
use splitrail_transfer::pair::{Pair, PairFailure};
use splitrail_transfer::params::DecodeParams;
use splitrail_transfer::participants::excluded_from_decode;
use splitrail_transfer::repair::{PrefillLeg, Registration, Repair};

/// How long to wait for the prefill engine's count of cached tokens after the reply has begun. The
/// reply needs nothing else from the prefill engine then.
const COUNT_PATIENCE: Duration = Duration::from_secs(1);

/// How long the decode leg is waited for after the prefill leg has failed: an engine that refuses the
/// same request says so at once.
const REFUSAL_PATIENCE: Duration = Duration::from_secs(1);

/// The result of a pair of legs.
pub(crate) enum PairResult {
    /// The decode leg was answered, or rejected for a threshold.
    Answered(Generation, Arc<Worker>),
    /// The pair failed, and another attempt is allowed.
    Again,
    /// The decode worker is to compute the prompt.
    Local,
}

/// Sends pairs of legs until a decode leg answers or fails.
///
/// # Errors
/// The error of the last attempt, if no further attempt is allowed or useful.
pub(crate) async fn pair_or_local(
    prompt: PromptContext<'_>,
    attempts: &mut DecodeAttempts,
) -> Result<PairResult, Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let mut tries =
        PrefillAttempts::new(prompt, attempts.failed(), LegRules::any(Leg::Prefill, &[]));
    let last = loop {
        let prefill = match tries.place(prompt).await {
            Ok(placed) => placed,
            // If the queue refused the prefill, do not fall back to a costlier local prefill.
            Err(error) if error.is_busy() => return Err(error),
            Err(error) => break error,
        };
        let mut excluded = attempts.failed().to_vec();
        excluded.extend(excluded_from_decode(&context.served, &prefill.worker));
        let decode = place(prompt, LegRules::decode(&prefill.worker, &excluded))?;
        let leg_headers = begin_attempt(context, decision);
        let guard = if attempts.is_last() { 0.0 } else { preemption_guard(prompt) };
        let sending = ReplyLeg {
            prompt,
            leg_headers: &leg_headers,
            placed: &decode,
            threshold: carried_threshold(context, &decode.worker, guard),
        };
        record_sent_prompt(context, unit, &prefill);
        record_sent_prompt(context, unit, &decode);
        let error = match run_pair(&sending, &prefill).await {
            Ok(generated) => {
                record_computed_prompt(context, unit, &prefill);
                record_computed_prompt(context, unit, &decode);
                return Ok(PairResult::Answered(generated, decode.worker));
            }
            Err(PairFailure::Decode(error)) => {
                attempts.retry_elsewhere(context, Leg::Decode, &decode.worker, error)?;
                return Ok(PairResult::Again);
            }
            Err(PairFailure::EngineReplaced(error)) => {
                attempts.retry(context, &prefill.worker, error)?;
                return Ok(PairResult::Again);
            }
            Err(PairFailure::PrefillEnded) => {
                let reason = LocalReason::PrefillEnded;
                record_local_prefill(prompt, reason);
                prompt.decision.enter(|entry| entry.discard(reason.name()));
                return Ok(PairResult::Local);
            }
            Err(PairFailure::Prefill(error)) => error,
        };
        prefill.worker.record(Leg::Prefill, Some(&error));
        let fits_elsewhere = fits_elsewhere(&context.served, &prefill.worker, &error);
        if error.fault() == Fault::Client && !fits_elsewhere {
            return Err(error);
        }
        if let Err(error) = tries.retry_elsewhere(context, &prefill.worker, error) {
            break error;
        }
    };
    without_prefill(prompt, &last)?;
    Ok(PairResult::Local)
}

async fn run_pair(sending: &ReplyLeg<'_>, prefill: &PlacedLeg) -> Result<Generation, PairFailure> {
    let PromptContext { context, unit, decision, .. } = sending.prompt;
    let served = &context.served;
    let pair = Pair::make(served, context.endpoint, prefill.target(), sending.leg_headers).await;
    let pair = pair.map_err(PairFailure::Prefill)?;
    let decode = &sending.placed.worker;
    decode.breaker(Leg::Decode).begin(Instant::now());
    if let Err(error) = pair.check_decode(served, sending.placed.target()).await {
        decode.record(Leg::Decode, Some(&error));
        return Err(PairFailure::Decode(error));
    }
    let expected = prefill.expectation(context, unit);
    let facts = LegFacts::new(LegKind::Prefill, prefill.worker.id(), expected);
    decision.enter(|entry| entry.prefill_sent(facts));
    let leg = sending.prompt.leg(LegKind::Decode, &sending.placed.worker);
    let sending =
        &ReplyLeg { leg_headers: &traced_headers(sending.leg_headers.clone(), &leg), ..*sending };
    let started = Instant::now();
    let mut account = Account::open(sending, started, true, leg);
    let begun = run_both_legs(sending, &account, prefill, &pair).await;
    if matches!(begun, Ok(First::Events(..))) {
        sending.observe_first_event(started.elapsed());
    }
    let failed = match begun {
        Ok(begun) => match conclude(sending, account, Ok(begun)) {
            Ok(generated) => return Ok(generated),
            Err(error) => {
                decision.enter(|entry| entry.discard(error.outcome()));
                return Err(PairFailure::Decode(error));
            }
        },
        Err(failed) => pair.recheck_engine(served, &prefill.worker, failed).await,
    };
    match &failed {
        PairFailure::Decode(error) => account.fail(error),
        PairFailure::Prefill(error) | PairFailure::EngineReplaced(error) => {
            account.give_up(error.outcome())
        }
        PairFailure::PrefillEnded => account.give_up(LocalReason::PrefillEnded.name()),
    }
    Err(failed)
}

/// Sends both legs and waits until the decode leg answers. When one leg fails, the other is
/// cancelled by dropping its connection.
async fn run_both_legs(
    sending: &ReplyLeg<'_>,
    account: &Account,
    prefill: &PlacedLeg,
    pair: &Pair,
) -> Result<First, PairFailure> {
    let PromptContext { context, unit, .. } = sending.prompt;
    let body = prefill::body(context, unit, &prefill.worker, pair.prefill_params());
    let body = body.map_err(PairFailure::Prefill)?;
    let leg_headers = pair.prefill_headers(sending.leg_headers);
    let carried = pair.decode_params();
    let decode_body = match sending.takes_hand_off_first() {
        true => sending.take_body(carried),
        false => sending.body(carried),
    };
    let (decode_body, send_state) = RevocableBody::new(decode_body.map_err(PairFailure::Decode)?);
    let registration = Registration::new(send_state);
    let mut repair = pair
        .decode_waits_for_prefill()
        .then(|| repair_of(sending, prefill, pair, body.clone(), &leg_headers, &registration));
    // The name of the pair may be used only once, so no body must be sent twice.
    let body = RevocableBody::new(body).0.once();
    let prefilling = prefill::send(sending.prompt, &leg_headers, prefill, body, repair.as_mut());
    let mut prefilling = pin!(prefilling);
    // Dropped before the prefill leg, which then sees how far this one has come.
    let mut decoding = pin!(decode(sending, account, decode_body.once(), &registration));
    let begun = tokio::select! {
        begun = &mut decoding => begun.map_err(|error| classify_decode_failure(&prefill.worker, error))?,
        prefilled = &mut prefilling => {
            let handed_over = prefilled.map_err(PairFailure::Prefill).and_then(|prefilled| {
                record_prefill(sending, &prefill.worker, pair, &prefilled)?;
                account.await_reply(context.options.stream);
                Ok(prefilled)
            });
            let prefilled = match handed_over {
                Ok(prefilled) => prefilled,
                Err(failed) => {
                    if pair.decode_waits_for_prefill() && failed.may_refuse_decode() {
                        // A decode engine that refuses the request holds nothing.
                        let _ = tokio::time::timeout(REFUSAL_PATIENCE, decoding).await;
                    }
                    return Err(failed);
                }
            };
            if pair.hands_over_only_cut_off_replies() && prefilled.ended() {
                return Err(PairFailure::PrefillEnded);
            }
            let (decode, is_streamed) = (&sending.placed.worker, context.options.stream);
            let lease = prefilled.lease(context);
            let begun = pair.await_decode(decode, is_streamed, lease, &registration, decoding).await;
            return begun.map_err(PairFailure::Decode);
        }
    };
    match tokio::time::timeout(COUNT_PATIENCE, prefilling).await {
        Ok(Ok(prefilled)) => {
            // The decode worker has the KV, so it does not matter what else the reply says.
            let _ = record_prefill(sending, &prefill.worker, pair, &prefilled);
        }
        // The decode worker has the KV and answers; a failure of the prefill reply does not matter.
        Ok(Err(error)) => {
            let (model, worker) = (prefill.worker.model(), prefill.worker.id());
            tracing::warn!(model, worker, %error, "a prefill failed after it had handed over");
        }
        Err(_) => tracing::debug!(worker = prefill.worker.id(), "a prefill's count is late"),
    }
    Ok(begun)
}

/// What frees the blocks of the decode engine if the pair is given up.
fn repair_of(
    sending: &ReplyLeg<'_>,
    prefill: &PlacedLeg,
    pair: &Pair,
    body: Parts,
    leg_headers: &LegHeaders,
    registration: &Registration,
) -> Repair {
    let PromptContext { context, unit, .. } = sending.prompt;
    let leg = PrefillLeg {
        served: Arc::clone(&context.served),
        metrics: Arc::clone(&context.metrics),
        endpoint: context.endpoint,
        body,
        memory: Arc::clone(&context.memory),
        prefill: Arc::clone(&prefill.worker),
        prefill_rank: prefill.rank,
        decode: Arc::clone(&sending.placed.worker),
        decode_rank: sending.placed.rank,
        pushes: pair.pushing_engine(),
        uncached_tokens: prefill.uncached_tokens(context, unit),
        prompt_tokens: unit.weight_tokens,
    };
    let cluster = Arc::clone(&context.preparer.cluster);
    Repair::new(cluster, leg, registration.clone(), prefill.pinned(leg_headers))
}

/// Records the success of the prefill leg and enters its usage in the ledger.
///
/// # Errors
/// The reply is not that of the engine from which decode expects the KV.
fn record_prefill(
    sending: &ReplyLeg<'_>,
    worker: &Worker,
    pair: &Pair,
    prefilled: &PrefillReply,
) -> Result<(), PairFailure> {
    let PromptContext { context, decision, .. } = sending.prompt;
    let (served, reply) = (&context.served, prefilled.reply());
    let carried = pair.read_prefill_reply(served, worker, reply, prefilled.peer)?;
    worker.record(Leg::Prefill, None);
    prefilled.report(context, decision, worker, carried);
    Ok(())
}

/// Classifies a decode leg that failed before the prefill leg was answered: a timeout counts
/// against the prefill worker, because the decode engine was waiting for its KV.
fn classify_decode_failure(prefill: &Worker, error: Error) -> PairFailure {
    if error.kind() != ErrorKind::EngineTimeout {
        return PairFailure::Decode(error);
    }
    let message = format!("worker {} did not hand over: {}", prefill.id(), error.message());
    PairFailure::Prefill(Error::new(ErrorKind::EngineTimeout, message))
}

/// Sends the decode leg with the body that carries the hand-off. For several samples, that is a leg
/// that only takes the hand-off, and the leg that generates the reply follows it.
async fn decode(
    sending: &ReplyLeg<'_>,
    account: &Account,
    body: RevocableBody,
    registration: &Registration,
) -> Result<First, Error> {
    let begun = async {
        if !sending.takes_hand_off_first() {
            let begun = ask(sending, account, body, None).await;
            registration.ended(&begun);
            return begun;
        }
        let taken = take_hand_off(sending, body, None).await;
        registration.ended(&taken);
        taken?;
        ask(sending, account, sending.body(DecodeParams::Nothing)?.into(), None).await
    };
    let begun = begun.await;
    mark(sending.prompt, &begun);
    begun
}
