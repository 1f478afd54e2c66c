//! The leg that answers the client.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use splitrail_engine::usage::EngineUsage;

use super::client::Envelope;
use super::context::{Context, uncached_tokens, within};
use super::first::{First, first_events};
use super::legs;
use super::place::Placed;
use super::prefill::Prefilled;
use crate::api::JsonObject;
use crate::core::Served;
use crate::error::{Error, Kind};
use crate::fleet::{Booking, Worker};
use crate::ledger::decisions::DecisionHandle;
use crate::prepare::Unit;
use crate::reply::choices::turned_away;
use crate::reply::relay::{Account, UnitStream, whole};
use crate::reply::usage::UsageRule;

/// An answer that has begun: nothing of it has reached the client yet.
pub enum Begun {
    /// A whole reply.
    Whole(JsonObject),
    /// A stream whose first events are there.
    Stream(Box<UnitStream>),
    /// Events that the router makes itself.
    Made(Vec<Bytes>),
}

/// What became of the leg that was to answer.
pub(super) enum Answer {
    /// It answers.
    Begun(Begun),
    /// The engine holds less of the prompt than its threshold asks for, and has run
    /// nothing. With what it says of its tokens.
    Below(Option<EngineUsage>),
}

/// A leg that answers the client, as it is sent.
pub(super) struct Sending<'a> {
    pub(super) context: &'a Context,
    pub(super) unit: &'a Unit,
    pub(super) decision: &'a DecisionHandle,
    pub(super) envelope: &'a Envelope,
    pub(super) placed: &'a Placed,
    /// What its body carries as `cache_hit_threshold`.
    pub(super) threshold: Option<f64>,
}

impl Sending<'_> {
    /// Whether the worker may turn it away: what shows no output is then held back.
    fn is_gated(&self) -> bool {
        self.envelope.gate.is_some() || self.threshold.is_some_and(|threshold| threshold > 0.0)
    }

    /// The leg's body, with its hand-off spent on it.
    fn body(&self, prefilled: Option<Prefilled>) -> Result<Bytes, Error> {
        let mut body = self.unit.body.clone();
        if let Some(threshold) = self.threshold {
            body.set("cache_hit_threshold", threshold.to_string());
        }
        let asked = self.context.options;
        match prefilled {
            Some(Prefilled { hand_off, .. }) => legs::decode(&body, asked, hand_off),
            None => legs::aggregated(&body, asked),
        }
    }
}

/// Sends the leg that answers the client, and waits until its answer begins.
///
/// # Errors
/// Why it did not; nothing has reached the client then.
pub(super) async fn generate(
    sending: &Sending<'_>,
    mut prefilled: Option<Prefilled>,
) -> Result<Answer, Error> {
    let Sending { context, placed, decision, .. } = *sending;
    let started = Instant::now();
    let mut account = account(sending, prefilled.as_mut());
    let body = sending.body(prefilled)?;
    let begun = if context.options.stream {
        first_events(context, &placed.worker, body, sending.envelope, sending.is_gated()).await
    } else {
        whole_reply(context, &placed.worker, body, sending.envelope).await
    };
    context.stages.mark("first_token", started);
    let error = match begun {
        Ok(First::Whole(reply)) => match whole(&mut account, reply) {
            Ok(reply) => return Ok(Answer::Begun(Begun::Whole(reply))),
            Err(error) => error,
        },
        Ok(First::Events(reader, held)) => {
            account.foretell();
            return Ok(Answer::Begun(Begun::Stream(Box::new(UnitStream {
                account,
                reader,
                held,
                tells_usage: context.options.include_usage,
                gaps: context.inter_token(decision),
                last_event: Instant::now(),
            }))));
        }
        Ok(First::Below(usage)) => {
            account.fail(&Error::new(Kind::BelowThreshold, ""));
            return Ok(Answer::Below(usage));
        }
        Err(error) => error,
    };
    account.fail(&error);
    match error.kind() {
        // llm-d's way of saying the same.
        Kind::EngineRejected(412) => Ok(Answer::Below(None)),
        _ => Err(error),
    }
}

/// What the answer owns until it has ended.
fn account(sending: &Sending<'_>, mut prefilled: Option<&mut Prefilled>) -> Account {
    let Sending { context, unit, decision, placed, .. } = *sending;
    let Served { config, pool, .. } = context.served.as_ref();
    let worker = &placed.worker;
    let to_compute = match prefilled {
        Some(_) => 0,
        None => uncached_tokens(context, unit, placed.overlap_blocks),
    };
    let spent = prefilled.as_mut().and_then(|prefilled| prefilled.spent.take());
    let prefilled = prefilled.as_deref();
    Account {
        core: Arc::clone(&context.core),
        served: Arc::clone(&context.served),
        decision: decision.clone(),
        booking: Booking::new(&worker.booked, to_compute, unit.weight_tokens),
        worker: Arc::clone(worker),
        rule: UsageRule {
            prefill_cached_tokens: prefilled.and_then(|prefilled| prefilled.cached_tokens),
            handed_over: prefilled.is_some(),
            overlap_blocks: prefilled.map_or(placed.overlap_blocks, |p| p.overlap_blocks),
            block_size: pool.block_size(),
            bypasses_cache: context.options.bypasses_cache.is_some(),
            fallback: config.cached_tokens_fallback,
        },
        decode_overlap_blocks: placed.overlap_blocks,
        prompt_tokens: unit.prompt_tokens,
        settled: None,
        spent,
    }
}

/// Sends a leg that is not streamed, and reads its reply.
async fn whole_reply(
    context: &Context,
    worker: &Arc<Worker>,
    body: Bytes,
    envelope: &Envelope,
) -> Result<First, Error> {
    let Served { config, client, .. } = context.served.as_ref();
    let call = async {
        let response = client.post(worker, context.endpoint.path(), body, envelope).await?;
        client.whole(worker, response.into_body()).await
    };
    let reply = within(config.timeouts.answer, worker, "timeouts.answer", call).await?;
    if turned_away(&reply) {
        return Ok(First::Below(usage_of(&reply)));
    }
    Ok(First::Whole(reply))
}

/// What a reply or an event says of its tokens, where that makes sense.
pub(super) fn usage_of(reply: &Bytes) -> Option<EngineUsage> {
    let reply = JsonObject::parse(reply.clone()).ok()?;
    EngineUsage::parse(serde_json::from_str(reply.raw("usage")?).ok()?).ok()
}
