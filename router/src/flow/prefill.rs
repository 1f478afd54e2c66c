//! The prefill leg, on one worker after the other until one has done it.

use std::time::Instant;

use hyper_util::client::legacy::connect::HttpInfo;
use serde_json::value::RawValue;
use splitrail_engine::nixl;
use splitrail_engine::usage::EngineUsage;

use super::client::Envelope;
use super::context::{
    Context, attempt, carried_threshold, count_local, count_retry, uncached_tokens, within,
};
use super::hand_off::{HandOff, Lead};
use super::legs;
use super::place::{Placed, Wish, place};
use super::plan::LocalReason;
use crate::api::JsonObject;
use crate::config::model::OnNoPrefill;
use crate::core::Served;
use crate::error::{Error, Fault, Kind};
use crate::fleet::Booking;
use crate::ledger::decisions::DecisionHandle;
use crate::ledger::spent::Spent;
use crate::pick::Leg;
use crate::prepare::Unit;

/// What the prefill leg left for the decode leg.
pub(super) struct Prefilled {
    /// Its worker's place.
    pub(super) worker: usize,
    /// The attempt's id, which the decode leg carries as well.
    pub(super) envelope: Envelope,
    pub(super) hand_off: HandOff,
    pub(super) cached_tokens: Option<u32>,
    /// Counts its tokens as wasted unless an answer comes of them.
    pub(super) spent: Option<Spent>,
    pub(super) overlap_blocks: u32,
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
        let envelope = attempt(context, decision);
        let error = match prefill(context, unit, envelope, &placed).await {
            Ok(prefilled) => return Ok(Some(prefilled)),
            Err(error) => error,
        };
        if error.fault() == Fault::Client {
            return Err(error);
        }
        excluded.push(placed.worker.index);
        let others = context.served.pool.any_up(Leg::Prefill, &excluded);
        if retries_left == 0 || !others || !error.worth_another_worker() {
            break error;
        }
        retries_left -= 1;
        count_retry(context, "prefill", &placed.worker, &error);
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
    envelope: Envelope,
    placed: &Placed,
) -> Result<Prefilled, Error> {
    let started = Instant::now();
    let Served { config, client, .. } = context.served.as_ref();
    let worker = &placed.worker;
    let uncached = uncached_tokens(context, unit, placed.overlap_blocks);
    let _booking = Booking::new(&worker.booked, uncached, unit.weight_tokens);
    let mut body = unit.body.clone();
    if let Some(threshold) = carried_threshold(context, worker, 0.0) {
        body.set("cache_hit_threshold", threshold.to_string());
    }
    let body = legs::prefill(&body, context.endpoint, Lead::Pulled)?;
    let call = async {
        let response = client.post(worker, context.endpoint.path(), body, &envelope).await?;
        let peer = response.extensions().get::<HttpInfo>().map(|info| info.remote_addr().ip());
        Ok((client.whole(worker, response.into_body()).await?, peer))
    };
    let (reply, peer) = within(config.timeouts.prefill, worker, "timeouts.prefill", call).await?;
    let nonsense = |_| Error::engine(worker.id(), "sent a prefill reply that cannot be understood");
    let reply = JsonObject::parse(reply).map_err(nonsense)?;
    // Usage that makes no sense is usage that was not reported.
    let usage = reply.raw("usage").and_then(|raw| serde_json::from_str(raw).ok());
    let usage: Option<EngineUsage> = usage.and_then(|raw| EngineUsage::parse(raw).ok());
    let raw = reply.raw("kv_transfer_params").unwrap_or("null");
    let raw: &RawValue =
        serde_json::from_str(raw).map_err(|_| Error::engine(worker.id(), "sent nonsense"))?;
    let hand_off = nixl::HandOff::from_reply(raw)
        .map_err(|error| Error::engine(worker.id(), &format!("gave no hand-off: {error}")))?;
    if !context.served.hosts.admit(hand_off.remote_host(), peer) {
        let message = format!(
            "worker {} handed over from a host outside the fleet (see hand_off_networks)",
            worker.id()
        );
        return Err(Error::new(Kind::ForeignHandOff, message));
    }
    let told = usage.as_ref().and_then(|usage| usage.cached_tokens);
    let tokens = usage.map_or(unit.prompt_tokens.unwrap_or(0), |usage| usage.prompt_tokens);
    context.stages.mark("prefill", started);
    Ok(Prefilled {
        worker: worker.index,
        cached_tokens: told.or(hand_off.remote_prefill_cached_tokens()),
        spent: Some(Spent::new(&context.core, &context.served, tokens)),
        overlap_blocks: placed.overlap_blocks,
        hand_off: HandOff::Pulled(hand_off),
        envelope,
    })
}
