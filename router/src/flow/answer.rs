//! The leg that answers the client.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;

use super::client::{Envelope, refusal_event};
use super::context::{Context, expected, uncached_tokens, within};
use super::legs;
use super::place::Placed;
use super::prefill::Prefilled;
use crate::api::JsonObject;
use crate::core::Served;
use crate::error::Error;
use crate::fleet::{Booking, Worker};
use crate::ledger::decisions::DecisionHandle;
use crate::ledger::leg::{LegFacts, LegKind};
use crate::prepare::Unit;
use crate::reply::relay::{Account, Chunk, EventReader, UnitStream, whole};

/// An answer that has begun: nothing of it has reached the client yet.
pub enum Begun {
    /// A whole reply.
    Whole(JsonObject),
    /// A stream whose first event is there.
    Stream(Box<UnitStream>),
}

/// Sends the leg that answers the client, and waits until its answer begins.
///
/// # Errors
/// Why it did not; nothing has reached the client then.
pub(super) async fn generate(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
    envelope: &Envelope,
    placed: &Placed,
    prefilled: Option<Prefilled>,
) -> Result<Begun, Error> {
    let started = Instant::now();
    let mut account = account(context, unit, decision, placed, prefilled.is_some());
    let asked = context.options;
    let body = match prefilled {
        Some(Prefilled { hand_off, .. }) => legs::decode(&unit.body, asked, hand_off)?,
        None => legs::aggregated(&unit.body, asked)?,
    };
    let begun = if context.options.stream {
        let first = first_event(context, &placed.worker, body, envelope).await;
        first.map(|(reader, first)| (Some(reader), first))
    } else {
        whole_reply(context, &account, body, envelope).await.map(|reply| (None, reply))
    };
    context.stages.mark("first_token", started);
    match begun {
        Ok((None, reply)) => {
            let reply = whole(&mut account, reply);
            reply.inspect_err(|error| account.fail(error)).map(Begun::Whole)
        }
        Ok((Some(reader), first)) => {
            account.began();
            account.foretell();
            Ok(Begun::Stream(Box::new(UnitStream {
                account,
                reader,
                first: Some(first),
                tells_usage: context.options.include_usage,
                gaps: context.inter_token(decision),
                last_event: Instant::now(),
            })))
        }
        Err(error) => {
            account.fail(&error);
            Err(error)
        }
    }
}

/// What the answer owns until it has ended; its leg is entered in the ledger.
fn account(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
    placed: &Placed,
    handed_over: bool,
) -> Account {
    let worker = &placed.worker;
    let to_compute = match handed_over {
        true => 0,
        false => uncached_tokens(context, unit, placed.overlap_blocks),
    };
    let leg = LegFacts::new(LegKind::Decode, worker.id(), expected(context, unit, placed));
    decision.update(|decision| decision.ledger.decode_sent(leg));
    Account {
        core: Arc::clone(&context.core),
        served: Arc::clone(&context.served),
        decision: decision.clone(),
        booking: Booking::new(&worker.booked, to_compute, unit.weight_tokens),
        worker: Arc::clone(worker),
        prompt_tokens: unit.prompt_tokens,
        settled: false,
    }
}

/// Sends a leg that is not streamed, and reads its reply.
async fn whole_reply(
    context: &Context,
    account: &Account,
    body: Bytes,
    envelope: &Envelope,
) -> Result<Bytes, Error> {
    let Served { config, client, .. } = context.served.as_ref();
    let worker = &account.worker;
    let call = async {
        let response = client.post(worker, context.endpoint.path(), body, envelope).await?;
        // Engines send a whole reply's status once the answer is there.
        account.began();
        client.whole(worker, response.into_body()).await
    };
    within(config.timeouts.answer, worker, "timeouts.answer", call).await
}

/// Sends a streamed leg and waits for its first event, which proves it good.
async fn first_event(
    context: &Context,
    worker: &Arc<Worker>,
    body: Bytes,
    envelope: &Envelope,
) -> Result<(EventReader, Bytes), Error> {
    let Served { config, client, .. } = context.served.as_ref();
    let limit = config.timeouts.first_token;
    let idle = config.timeouts.stream_idle;
    let call = async {
        let response = client.post(worker, context.endpoint.path(), body, envelope).await?;
        // Until the first event, the leg's own time-out counts.
        let patience = limit.max(idle);
        let max_bytes = client.reply_max_bytes();
        let body = response.into_body();
        let mut reader = EventReader::new(body, max_bytes, Arc::clone(worker), patience);
        let Some(first) = reader.next().await? else {
            return Err(Error::engine(worker.id(), "answered with an empty stream"));
        };
        match Chunk::read(&first).map(|chunk| chunk.error.is_some()) {
            None => Err(Error::engine(worker.id(), "answered with no chunk")),
            Some(true) => Err(refusal_event(worker, &first)),
            Some(false) => Ok((reader.with_idle(idle), first)),
        }
    };
    within(limit, worker, "timeouts.first_token", call).await
}
