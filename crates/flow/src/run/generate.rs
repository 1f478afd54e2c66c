//! Sends the leg that generates the client's reply, and waits until the reply begins.

use std::time::{Duration, Instant};

use bytes::Bytes;
use splitrail_engine::usage::EngineUsage;

use crate::context::PromptContext;
use crate::reply::relay::{UnitStream, whole};
use crate::run::account::Account;
use crate::run::beginning::SentLeg;
use crate::run::boxed::boxed_future;
use crate::run::first::{First, ask, take_hand_off};
use crate::run::leg_headers::traced_headers;
use crate::run::reply_leg::ReplyLeg;
use splitrail_api::JsonObject;
use splitrail_api::error::Error;
use splitrail_engine_client::{LegHeaders, RevocableBody};
use splitrail_ledger::leg::LegKind;
use splitrail_ledger::timeline::Stage;
use splitrail_policy::Leg;
use splitrail_transfer::params::DecodeParams;
use splitrail_transfer::staged::{HandOffSend, PrefillResult, Staged};
use splitrail_workload::costs::RankScope;

/// A reply that has begun. Nothing of it has reached the client yet.
pub enum StartedReply {
    /// A whole reply.
    Whole(JsonObject),
    /// A whole reply of JSON, unchanged from the engine.
    Verbatim(Bytes),
    /// A whole reply that is a plain text, unchanged from the engine.
    Text(Bytes),
    /// A stream whose first events have arrived.
    Stream(Box<UnitStream>),
    /// Events that the router itself made.
    RouterEvents(Vec<Bytes>),
}

/// The result of the leg that generates the reply.
pub(crate) enum Generation {
    /// The reply has begun.
    Started(StartedReply),
    /// The engine holds less of the prompt than its threshold requires and has run nothing. With
    /// the usage that the engine reported, if any.
    BelowThreshold(Option<EngineUsage>),
}

/// Sends the leg that generates the client's reply, and waits until the reply begins. The hand-off is taken
/// out of `staged`, and is put back if no byte of it was sent.
///
/// # Errors
/// The reason why the reply did not begin; nothing has reached the client then.
pub(crate) async fn generate(
    sending: &ReplyLeg<'_>,
    staged: &mut Option<PrefillResult>,
) -> Result<Generation, Error> {
    let ReplyLeg { prompt, placed, .. } = *sending;
    let decision = prompt.decision;
    let started = Instant::now();
    let ahead = placed.worker.waiting(started);
    let mut prefilled = staged.take();
    let lease = prefilled.as_ref().and_then(PrefillResult::lease);
    placed.worker.breaker(Leg::Decode).begin(started);
    let handed_over = prefilled.is_some();
    let to_compute = to_compute(sending, handed_over);
    let leg = prompt.leg(LegKind::Decode, &placed.worker);
    let leg_headers = traced_headers(sending.leg_headers.clone(), &leg);
    let leg_headers = &LegHeaders { prefill_tokens: Some(to_compute), ..leg_headers };
    let sending = &ReplyLeg { leg_headers, ..*sending };
    let account = Account::open(sending, started, handed_over, leg);
    account.await_reply(prompt.context.options.stream);
    let staged_now = prefilled.as_mut().and_then(|prefilled| prefilled.staged.as_mut());
    let hand_off = staged_now.and_then(Staged::spend);
    let carried = hand_off.as_deref().map_or(DecodeParams::Nothing, DecodeParams::Params);
    let takes_first = hand_off.is_some() && sending.takes_hand_off_first();
    let body = if takes_first { sending.take_body(carried)? } else { sending.body(carried)? };
    let (body, send_state) = RevocableBody::new(body);
    let body = if hand_off.is_some() { body.once() } else { body };
    let mut under_way = HandOffSend::new(prefilled, hand_off, send_state);
    let (body, lease) = if takes_first {
        match boxed_future(|| take_hand_off(sending, body, lease)).await {
            Ok(()) => (Ok(sending.body(DecodeParams::Nothing)?.into()), None),
            Err(error) => (Err(error), None),
        }
    } else {
        (Ok(body), lease)
    };
    let sent = SentLeg::new(prompt, placed, LegKind::Decode);
    let begun = match body {
        Ok(body) => ask(sending, &account, body, lease).await,
        Err(error) => Err(error),
    };
    sent.ended();
    let now = mark(prompt, &begun);
    if matches!(begun, Ok(First::Events(..))) {
        sending.observe_first_event(now.duration_since(started));
        placed.worker.health.outcomes.began(started.elapsed());
        // With a leg that takes the hand-off first, `started` is the start of that one.
        if !takes_first {
            placed.worker.load.pace.observe(started.elapsed(), ahead);
            if handed_over && ahead == 0 {
                learn_hand_off(sending, started.elapsed());
            }
        }
    }
    let error = match conclude(sending, account, begun) {
        Ok(generated) => return Ok(generated),
        Err(error) => error,
    };
    let now = tokio::time::Instant::now();
    let good = |prefilled: &PrefillResult| prefilled.lease().is_none_or(|l| !l.left(now).is_zero());
    *staged = under_way.take_back().filter(good);
    if staged.is_none() {
        // The prefill leg cannot serve another attempt either, so it is discarded as well.
        decision.enter(|entry| entry.discard(error.outcome()));
    }
    Err(error)
}

/// Records the stage that ends when a leg's reply begins or the leg fails. Returns the present time.
pub(crate) fn mark(prompt: PromptContext<'_>, begun: &Result<First, Error>) -> Instant {
    prompt.mark(match begun {
        Ok(First::Whole(..) | First::Events(..)) => Stage::FirstToken,
        Ok(First::BelowThreshold(_)) => Stage::DecodeTry,
        Err(_) => Stage::Failed,
    })
}

/// Trains the cost model with a hand-off. Without requests ahead of it in the queue, the first
/// event of a leg comes after the transfer of its KV and one decode step.
fn learn_hand_off(sending: &ReplyLeg<'_>, took: Duration) {
    let ReplyLeg { prompt, placed, .. } = *sending;
    let PromptContext { context, unit, .. } = prompt;
    let (worker, costs) = (&placed.worker, &placed.worker.load.costs);
    let (requests, context_tokens) =
        (worker.load.booked.requests(), worker.load.booked.active_tokens());
    let now = Instant::now();
    let step = costs.seen(now, RankScope::Rank(None), 0).coefficients;
    let step_seconds = step.step_seconds(u64::from(requests), context_tokens);
    let held = u64::from(placed.believed_blocks) * u64::from(context.served.pool.block_size());
    let took_seconds = took.as_secs_f64();
    // If the step's duration is not learned yet, its prediction may exceed the measured time; at
    // least a tenth of the measured time is then taken for the hand-off.
    let seconds = (took_seconds - step_seconds).max(took_seconds / 10.0);
    let tokens = unit.weight_tokens.saturating_sub(held);
    let (pool, distance) = (&context.served.pool, placed.distance);
    pool.learn_link(distance, seconds, step.hand_off_seconds(tokens));
    costs.learn_hand_off(now, tokens, seconds / pool.link_scale(distance));
}

/// Evaluates how the reply of a leg has begun. After an error, its prefill leg is not discarded
/// here, since the hand-off may serve another attempt.
pub(crate) fn conclude(
    sending: &ReplyLeg<'_>,
    mut account: Account,
    begun: Result<First, Error>,
) -> Result<Generation, Error> {
    let ReplyLeg { prompt, placed, .. } = *sending;
    let decision = prompt.decision;
    let error = match begun {
        Ok(First::Whole(reply, since)) => {
            let reply = whole(sending, &mut account, reply, since);
            return Ok(Generation::Started(StartedReply::Whole(reply)));
        }
        Ok(First::Events(reader, held)) => {
            account.decision.enter(|entry| entry.worked(LegKind::Decode));
            // The events are read when all prompts of a batch have begun, which may be much later, or
            // never if one of them waits for this prompt.
            account.booking.prefill_done(None);
            if placed.worker.breaker(Leg::Decode).answers() {
                let (model, worker) = (placed.worker.model(), placed.worker.id());
                tracing::info!(model, worker, leg = "decode", "breaker closed");
            }
            decision.announce_cached_tokens();
            let stream = UnitStream::new(prompt, account, *reader, held);
            return Ok(Generation::Started(StartedReply::Stream(Box::new(stream))));
        }
        Ok(First::BelowThreshold(usage)) => {
            account.end_below_threshold(usage);
            return Ok(Generation::BelowThreshold(usage));
        }
        Err(error) => error,
    };
    account.fail_leg(&error);
    Err(error)
}

/// The number of prompt tokens that the worker has to compute before it answers.
fn to_compute(sending: &ReplyLeg<'_>, handed_over: bool) -> u64 {
    match handed_over {
        true => 0,
        false => {
            let PromptContext { context, unit, .. } = sending.prompt;
            sending.placed.uncached_tokens(context, unit)
        }
    }
}
