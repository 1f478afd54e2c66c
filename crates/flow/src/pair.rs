//! Runs both legs at once, for connectors whose legs wait for each other.
//!
//! The two legs find each other by a random name that the router makes for this pair. When one leg
//! fails, the other is cancelled at once: otherwise the other leg would keep its blocks for minutes.
//! Where cancelling is not enough, `repair` frees the blocks.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_engine::mooncake::TransferId;
use splitrail_engine::sglang::Room;

use super::account::Account;
use super::attempts::DecodeAttempts;
use super::context::{
    Context, PromptContext, attempt, carried_threshold, expected, nothing_handed_over,
    preemption_guard, traced,
};
use super::first::{First, ask, take_hand_off};
use super::generate::{Generation, conclude, mark};
use super::hand_off::{DecodeParams, PrefillParams, RoomMembers, excluded_from_decode};
use super::place::{LegRules, PlacedLeg, computed, place, sent};
use super::plan::LocalReason;
use super::prefill::{self, PrefillAttempts, PrefillReply, without_prefill};
use super::push::{PushPair, within_lease};
use super::repair::{Registration, Repair};
use super::reply_leg::ReplyLeg;
use splitrail_api::error::{Error, ErrorKind, Fault};
use splitrail_config::model::Connector;
use splitrail_engine_client::{LegHeaders, RevocableBody};
use splitrail_fleet::Worker;
use splitrail_fleet::bootstrap::{Bootstrap, EngineIdentity};
use splitrail_ledger::leg::{LegFacts, LegKind};
use splitrail_policy::Leg;

/// How long to wait for the prefill engine's count of cached tokens after the reply has begun. The
/// reply needs nothing else from the prefill engine then.
const COUNT_PATIENCE: Duration = Duration::from_secs(1);

/// How long the decode leg is waited for after the prefill leg has failed: an engine that refuses the
/// same request says so at once.
const REFUSAL_PATIENCE: Duration = Duration::from_secs(1);

/// The result of a pair of legs.
pub(super) enum PairResult {
    /// The decode leg was answered, or rejected for a threshold.
    Answered(Generation, Arc<Worker>),
    /// The pair failed, and another attempt is allowed.
    Again,
    /// The decode worker is to compute the prompt.
    Local,
}

/// Why a pair failed.
enum PairFailure {
    /// The prefill leg failed.
    Prefill(Error),
    /// The decode leg failed.
    Decode(Error),
    /// The prefill worker's engine is another one than the router knew, so the legs could not find
    /// each other.
    EngineReplaced(Error),
    /// The reply ended with the one token of the prefill leg, so there was no hand-off.
    PrefillEnded,
}

impl PairFailure {
    /// Whether the cause may also make the decode engine refuse its leg.
    fn may_refuse_decode(&self) -> bool {
        match self {
            Self::Prefill(error) => error.fault() == Fault::Client,
            Self::EngineReplaced(_) => true,
            Self::Decode(_) | Self::PrefillEnded => false,
        }
    }
}

/// Sends pairs of legs until a decode leg answers or fails.
///
/// # Errors
/// The error of the last attempt, if no further attempt is allowed or useful.
pub(super) async fn pair_or_local(
    prompt: PromptContext<'_>,
    attempts: &mut DecodeAttempts,
) -> Result<PairResult, Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let mut tries =
        PrefillAttempts::new(context, attempts.failed(), LegRules::any(Leg::Prefill, &[]));
    let last = loop {
        let prefill = match tries.place(prompt).await {
            Ok(placed) => placed,
            // If the queue refused the prefill, do not fall back to a costlier local prefill.
            Err(error) if error.is_busy() => return Err(error),
            Err(error) => break error,
        };
        let mut excluded = attempts.failed().to_vec();
        excluded.extend(excluded_from_decode(&context.served, &prefill.worker));
        let decode = place(prompt, LegRules::any(Leg::Decode, &excluded))?;
        let leg_headers = attempt(context, decision);
        let guard = preemption_guard(prompt);
        let sending = ReplyLeg {
            prompt,
            leg_headers: &leg_headers,
            placed: &decode,
            threshold: carried_threshold(context, &decode.worker, guard),
        };
        sent(context, unit, &prefill);
        sent(context, unit, &decode);
        let error = match pair(&sending, &prefill).await {
            Ok(generated) => {
                computed(context, unit, &prefill);
                computed(context, unit, &decode);
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
                nothing_handed_over(prompt, LocalReason::PrefillEnded);
                return Ok(PairResult::Local);
            }
            Err(PairFailure::Prefill(error)) => error,
        };
        prefill.worker.record(Leg::Prefill, Some(&error));
        if error.fault() == Fault::Client {
            return Err(error);
        }
        if let Err(error) = tries.retry_elsewhere(context, &prefill.worker, error) {
            break error;
        }
    };
    without_prefill(prompt, &last)?;
    Ok(PairResult::Local)
}

/// The data by which both legs of one pair find each other.
enum PairParams {
    /// Mooncake: the transfer parameters of both legs, as raw JSON.
    Transfer { prefill: String, decode: String, engine: Arc<EngineIdentity>, rank: Option<u32> },
    /// SGLang.
    Room(RoomMembers),
    /// NIXL in push mode.
    Push(PushPair),
}

impl PairParams {
    /// Makes the parameters of a new pair. They name no other pair, before or after.
    ///
    /// # Errors
    /// The prefill worker's engine, or the rank that the leg is placed on, is not known.
    async fn make(
        context: &Context,
        placed: &PlacedLeg,
        leg_headers: &LegHeaders,
    ) -> Result<Self, Error> {
        match context.served.config.connector {
            Connector::NixlPush => {
                Ok(Self::Push(PushPair::make(context, placed, leg_headers).await?))
            }
            Connector::Sglang => {
                let bootstrap = bootstrap(&placed.worker)?;
                Ok(Self::Room(room().into_members(bootstrap.host(), bootstrap.port())))
            }
            Connector::Mooncake => Self::make_transfer(context, placed).await,
            Connector::Nixl | Connector::SharedStorage | Connector::None => {
                let message = "the legs of this connector are not sent at once";
                Err(Error::new(ErrorKind::Internal, message))
            }
        }
    }

    /// Makes the parameters of a pair of Mooncake.
    async fn make_transfer(context: &Context, placed: &PlacedLeg) -> Result<Self, Error> {
        let worker = &placed.worker;
        let bootstrap = bootstrap(worker)?;
        let engine = bootstrap.engine(&context.served.client, worker).await?;
        let Some((id, rank)) = engine.of_rank(placed.rank) else {
            bootstrap.forget(&engine);
            let what = "cannot hand over, its bootstrap server does not know its rank";
            return Err(Error::engine(worker.id(), what));
        };
        let transfer = transfer();
        let prefill = transfer.prefill_params_json();
        let decode = transfer.into_decode_params_json(&bootstrap.url(), id);
        Ok(Self::Transfer { prefill, decode, engine, rank })
    }

    /// What the body of the prefill leg says.
    fn prefill_params(&self) -> PrefillParams<'_> {
        match self {
            Self::Transfer { prefill, .. } => PrefillParams::Pushed(prefill),
            Self::Room(members) => PrefillParams::Room(members),
            Self::Push(pair) => PrefillParams::Matched(pair.prefill_params()),
        }
    }

    /// What the body of the decode leg says.
    fn decode_params(&self) -> DecodeParams<'_> {
        match self {
            Self::Transfer { decode, .. } => DecodeParams::Params(decode),
            Self::Room(members) => DecodeParams::Room(members),
            Self::Push(pair) => DecodeParams::Matched(pair.decode_params()),
        }
    }

    /// Whether the prefill engine hands over only replies that were cut off by their length limit.
    fn hands_over_only_cut_off_replies(&self) -> bool {
        matches!(self, Self::Transfer { .. })
    }

    /// Whether a decode engine keeps blocks for a leg that was cancelled, until its prefill leg ends.
    fn decode_waits_for_prefill(&self) -> bool {
        matches!(self, Self::Transfer { .. } | Self::Push(_))
    }

    /// The headers of the prefill leg, pinned to the rank of the engine whose id the decode leg
    /// carries.
    fn leg_headers(&self, leg_headers: &LegHeaders) -> LegHeaders {
        let rank = match self {
            Self::Transfer { rank, .. } => *rank,
            Self::Room(_) => None,
            Self::Push(pair) => pair.rank,
        };
        LegHeaders { rank, ..leg_headers.clone() }
    }
}

/// A random transfer id of 128 bits: unique, and not guessable.
fn transfer() -> TransferId {
    TransferId::from_random(rand::random())
}

fn room() -> Room {
    Room::from_random(rand::random())
}

fn bootstrap(worker: &Worker) -> Result<&Bootstrap, Error> {
    let malformed = || Error::new(ErrorKind::Internal, "a bootstrap server's address is malformed");
    worker.bootstrap.as_ref().ok_or_else(malformed)
}

async fn pair(sending: &ReplyLeg<'_>, prefill: &PlacedLeg) -> Result<Generation, PairFailure> {
    let PromptContext { context, unit, decision, .. } = sending.prompt;
    let params = PairParams::make(context, prefill, sending.leg_headers).await;
    let params = params.map_err(PairFailure::Prefill)?;
    let decode = &sending.placed.worker;
    decode.breaker(Leg::Decode).begin(Instant::now());
    if let PairParams::Push(_) = &params
        && let Err(error) = PushPair::check_decode(context, sending.placed).await
    {
        decode.record(Leg::Decode, Some(&error));
        return Err(PairFailure::Decode(error));
    }
    let expected = expected(context, unit, prefill);
    let facts = LegFacts::new(LegKind::Prefill, prefill.worker.id(), expected);
    decision.prefill_sent(facts);
    let leg = sending.prompt.leg(LegKind::Decode, &sending.placed.worker);
    let sending = &ReplyLeg { leg_headers: &traced(sending.leg_headers.clone(), &leg), ..*sending };
    let started = Instant::now();
    let mut account = Account::open(sending, started, true, leg);
    let begun = run_both_legs(sending, &account, prefill, &params).await;
    if matches!(begun, Ok(First::Events(..))) {
        sending.observe_first_event(started.elapsed());
    }
    let failed = match begun {
        Ok(begun) => match conclude(sending, account, Ok(begun)) {
            Ok(generated) => return Ok(generated),
            Err(error) => {
                decision.attempt_discarded(error.outcome());
                return Err(PairFailure::Decode(error));
            }
        },
        Err(failed) => recheck_engine(context, &prefill.worker, &params, failed).await,
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
    params: &PairParams,
) -> Result<First, PairFailure> {
    let PromptContext { context, unit, .. } = sending.prompt;
    let body = prefill::body(context, unit, &prefill.worker, params.prefill_params());
    let body = body.map_err(PairFailure::Prefill)?;
    let leg_headers = params.leg_headers(sending.leg_headers);
    let carried = params.decode_params();
    let decode_body = match sending.takes_hand_off_first() {
        true => sending.take_body(carried),
        false => sending.body(carried),
    };
    let (decode_body, send_state) = RevocableBody::new(decode_body.map_err(PairFailure::Decode)?);
    let registration = Registration::new(send_state);
    let mut repair = params.decode_waits_for_prefill().then(|| {
        let (body, registration) = (body.clone(), registration.clone());
        let repair = Repair::new(sending, prefill, registration, body, &leg_headers);
        match params {
            PairParams::Push(pair) => repair.of_push(pair.engine()),
            PairParams::Transfer { .. } | PairParams::Room(_) => repair,
        }
    });
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
                record_prefill(sending, &prefill.worker, params, &prefilled)?;
                account.await_reply(context.options.stream);
                Ok(prefilled)
            });
            let prefilled = match handed_over {
                Ok(prefilled) => prefilled,
                Err(failed) => {
                    if params.decode_waits_for_prefill() && failed.may_refuse_decode() {
                        // A decode engine that refuses the request holds nothing.
                        let _ = tokio::time::timeout(REFUSAL_PATIENCE, decoding).await;
                    }
                    return Err(failed);
                }
            };
            if params.hands_over_only_cut_off_replies() && prefilled.ended() {
                return Err(PairFailure::PrefillEnded);
            }
            let begun = match params {
                PairParams::Push(_) => {
                    let lease = prefilled.lease(context);
                    within_lease(sending, lease, &registration, decoding).await
                }
                PairParams::Transfer { .. } | PairParams::Room(_) => decoding.await,
            };
            return begun.map_err(PairFailure::Decode);
        }
    };
    match tokio::time::timeout(COUNT_PATIENCE, prefilling).await {
        Ok(Ok(prefilled)) => {
            // The decode worker has the KV, so it does not matter what else the reply says.
            let _ = record_prefill(sending, &prefill.worker, params, &prefilled);
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

/// Records the success of the prefill leg and enters its usage in the ledger.
///
/// # Errors
/// The reply is not that of the engine from which decode expects the KV.
fn record_prefill(
    sending: &ReplyLeg<'_>,
    worker: &Worker,
    params: &PairParams,
    prefilled: &PrefillReply,
) -> Result<(), PairFailure> {
    let PromptContext { context, decision, .. } = sending.prompt;
    let mut carried = None;
    if let PairParams::Push(pair) = params {
        let reply = prefilled.pushed(worker).map_err(PairFailure::Prefill)?;
        let same = pair.learn(&context.served, worker, &reply, prefilled.peer);
        carried = reply.cached_tokens;
        if !same.map_err(PairFailure::Prefill)? {
            let what = "is another engine than the one with which decode has registered";
            return Err(PairFailure::EngineReplaced(Error::engine(worker.id(), what)));
        }
    }
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

/// Forgets the engine with which a pair failed, and asks the prefill worker for its engine after a
/// failure of the decode leg. If that is another engine now, the change was the cause of the failure.
async fn recheck_engine(
    context: &Context,
    worker: &Worker,
    params: &PairParams,
    failed: PairFailure,
) -> PairFailure {
    if let PairParams::Push(pair) = params {
        return match failed {
            PairFailure::Decode(error) if error.fault() == Fault::Engine => {
                match pair.is_of_another_engine(context, worker).await {
                    Ok(true) => PairFailure::EngineReplaced(error),
                    Ok(false) => PairFailure::Decode(error),
                    Err(prefill) => PairFailure::Prefill(prefill),
                }
            }
            PairFailure::Prefill(error) if error.fault() == Fault::Engine => {
                pair.forget(worker);
                PairFailure::Prefill(error)
            }
            other => other,
        };
    }
    let PairParams::Transfer { engine, .. } = params else { return failed };
    let Ok(bootstrap) = bootstrap(worker) else { return failed };
    match failed {
        PairFailure::Decode(error) if error.fault() == Fault::Engine => {
            bootstrap.forget(engine);
            match bootstrap.engine(&context.served.client, worker).await {
                Ok(now) if now != *engine => PairFailure::EngineReplaced(error),
                _ => PairFailure::Decode(error),
            }
        }
        PairFailure::Prefill(error) if error.fault() == Fault::Engine => {
            bootstrap.forget(engine);
            PairFailure::Prefill(error)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_million_pairs_have_a_million_different_names() {
        const PAIRS: usize = 1_000_000;
        let transfers: HashSet<String> =
            (0..PAIRS).map(|_| transfer().as_str().to_owned()).collect();
        assert_eq!(transfers.len(), PAIRS);
        let rooms: HashSet<u64> = (0..PAIRS).map(|_| room().number()).collect();
        assert_eq!(rooms.len(), PAIRS);
    }
}
