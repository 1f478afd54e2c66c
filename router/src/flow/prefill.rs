//! The prefill leg, on one worker after the other until one has done it.

use std::time::Instant;

use serde_json::value::RawValue;
use splitrail_engine::nixl::HandOff;
use splitrail_engine::usage::EngineUsage;

use super::client::Envelope;
use super::context::{
    Context, attempt, carried_threshold, count_local, expected, may_retry, uncached_tokens, within,
};
use super::lease::{Lease, left_by_engine};
use super::legs;
use super::place::{Placed, Wish, computed, place, sent};
use super::plan::LocalReason;
use super::staged::Staged;
use crate::api::JsonObject;
use crate::config::model::OnNoPrefill;
use crate::core::{Served, unix_ms};
use crate::error::{Error, Fault, Kind};
use crate::fleet::{Booking, Worker};
use crate::ledger::audit;
use crate::ledger::decisions::DecisionHandle;
use crate::ledger::leg::{LegFacts, LegKind};
use crate::pick::Leg;
use crate::prepare::Unit;

/// What the prefill leg left for the decode leg.
pub(super) struct Prefilled {
    /// Its worker's place.
    pub(super) worker: usize,
    /// The attempt's id, which the decode leg carries as well.
    pub(super) envelope: Envelope,
    pub(super) staged: Staged,
}

/// The prefill leg; `None` if it could not be had and the model's configuration
/// has the decode worker compute the prompt.
pub(super) async fn prefill_or_local(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
    failed_decode: &[usize],
) -> Result<Option<Prefilled>, Error> {
    let model = &context.served.config;
    let mut excluded = Vec::new();
    // An engine does not hand over to itself: the last one that can decode is kept for it.
    excluded.extend(context.served.pool.last_up(Leg::Decode, failed_decode));
    let mut retries_left = model.retries.prefill;
    let last = loop {
        if !context.served.pool.any_up(Leg::Prefill, &excluded) {
            let message = format!("model {} has no prefill worker that is up", model.name);
            break Error::new(Kind::NoWorker, message);
        }
        let placed = match place(context, unit, decision, Wish::any(Leg::Prefill, &excluded)) {
            Ok(placed) => placed,
            Err(error) => break error,
        };
        sent(context, unit, &placed);
        let envelope = attempt(context, decision);
        let expected = expected(context, unit, &placed);
        let leg = LegFacts::new(LegKind::Prefill, placed.worker.id(), expected);
        decision.update(|decision| decision.ledger.prefill_sent(leg));
        let prefilled = prefill(context, unit, decision, envelope, &placed).await;
        placed.worker.record(Leg::Prefill, prefilled.as_ref().err());
        let error = match prefilled {
            Ok(prefilled) => {
                computed(context, unit, &placed.worker);
                return Ok(Some(prefilled));
            }
            Err(error) => error,
        };
        decision.update(|decision| decision.ledger.discard(error.outcome()));
        if error.fault() == Fault::Client {
            return Err(error);
        }
        excluded.push(placed.worker.index);
        let others = context.served.pool.any_up(Leg::Prefill, &excluded);
        let worth = retries_left > 0 && others && error.worth_another_worker();
        if !worth || !may_retry(context, "prefill", &placed.worker, &error) {
            break error;
        }
        retries_left -= 1;
    };
    if model.on_no_prefill == OnNoPrefill::Fail {
        let message = format!("no prefill worker did its part; the last error: {}", last.message());
        return Err(Error::new(Kind::NoWorker, message));
    }
    if context.served.no_prefill.may_say() {
        tracing::warn!(
            model = context.served.name(),
            request_id = context.request_id,
            error = %last,
            "no prefill worker did its part: decode workers compute prompts \
             (said at most twice a minute; local_prefills_total counts)"
        );
    }
    count_local(context, decision, LocalReason::NoPrefill);
    decision.update(|decision| decision.prefill_worker = None);
    Ok(None)
}

async fn prefill(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
    envelope: Envelope,
    placed: &Placed,
) -> Result<Prefilled, Error> {
    let started = Instant::now();
    let Served { config, client, .. } = context.served.as_ref();
    let worker = &placed.worker;
    let uncached = uncached_tokens(context, unit, placed.assumed_blocks);
    worker.breaker(Leg::Prefill).begin(started);
    let _booking = Booking::new(&worker.booked, uncached, unit.weight_tokens);
    let mut body = unit.body.clone();
    if let Some(threshold) = carried_threshold(context, worker, 0.0) {
        body.set("cache_hit_threshold", threshold.to_string());
    }
    let body = legs::prefill(&body, context.endpoint);
    let call = async {
        let response = client.post(worker, context.endpoint.path(), body, &envelope).await?;
        // The engine has done the prompt and staged its blocks by now.
        decision.update(|decision| decision.ledger.prefill_worked());
        let begun = tokio::time::Instant::now();
        Ok((begun, client.whole(worker, response.into_body()).await?))
    };
    let (begun, reply) = within(config.timeouts.prefill, worker, "timeouts.prefill", call).await?;
    let nonsense = |_| Error::engine(worker.id(), "sent a prefill reply that cannot be understood");
    let reply = JsonObject::parse(reply).map_err(nonsense)?;
    // Usage that makes no sense is usage that was not reported.
    let usage = reply.raw("usage").and_then(|raw| serde_json::from_str(raw).ok());
    let usage: Option<EngineUsage> = usage.and_then(|raw| EngineUsage::parse(raw).ok());
    let raw = reply.raw("kv_transfer_params").unwrap_or("null");
    let raw: &RawValue =
        serde_json::from_str(raw).map_err(|_| Error::engine(worker.id(), "sent nonsense"))?;
    let hand_off = HandOff::from_reply(raw);
    let carried = hand_off.as_ref().ok().and_then(HandOff::remote_prefill_cached_tokens);
    report(context, decision, worker, usage, carried);
    let hand_off = hand_off
        .map_err(|error| Error::engine(worker.id(), &format!("gave no hand-off: {error}")))?;
    context.stages.mark("prefill", started);
    let now_unix_s = unix_ms() as f64 / 1e3;
    let said = hand_off.remote_blocks_expiry_s().and_then(|at| left_by_engine(at, now_unix_s));
    let lease = Lease::new(begun, config.lease, said, tokio::time::Instant::now());
    Ok(Prefilled {
        worker: worker.index,
        staged: Staged::new(context, unit, (worker.index, &envelope), hand_off, lease),
        envelope,
    })
}

/// Enters what a prefill engine said; `carried` is the cached tokens that its hand-off
/// names, where its usage does not.
fn report(
    context: &Context,
    decision: &DecisionHandle,
    worker: &Worker,
    usage: Option<EngineUsage>,
    carried: Option<u32>,
) {
    let prompt_tokens = usage.map(|usage| usage.prompt_tokens);
    let cached_tokens = usage.and_then(|usage| usage.cached_tokens).or(carried);
    let mut leg = None;
    decision.update(|decision| {
        decision.ledger.prefill_reported(prompt_tokens, cached_tokens);
        leg = decision.ledger.prefill().cloned();
    });
    if let Some(leg) = leg {
        audit::observe(&context.core, &context.served, worker, &leg, usage.is_some());
    }
}
