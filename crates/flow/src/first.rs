//! The first events of a streamed leg: they prove that the engine runs it.

use std::collections::{BTreeSet, VecDeque};
use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use splitrail_engine::dialect::Dialect;
use splitrail_engine::usage::EngineUsage;

use super::answer::{Sending, usage_of};
use super::context::within;
use crate::reply::choices::{begun, turned_away};
use crate::reply::dialect::{Chunk, data_of};
use crate::reply::relay::EventReader;
use splitrail_api::Endpoint;
use splitrail_api::error::Error;
use splitrail_engine_client::{EngineClient, Parcel, Shape, refusal_event};
use splitrail_fleet::Served;
use splitrail_fleet::Worker;

/// How a leg's answer begins.
pub(super) enum First {
    /// With all of it.
    Whole(Bytes),
    /// With these events.
    Events(Box<EventReader>, VecDeque<Bytes>),
    /// Not at all: the engine turned it away for its threshold.
    Below(Option<EngineUsage>),
}

/// Events that are held back until every sample of a gated leg runs: so many for each.
const HELD_PER_SAMPLE: usize = 16;

/// Events that only open an answer: so many at most are held back.
const OPENING_MAX: usize = 16;

/// Sends a streamed leg to an endpoint and waits for its first events.
pub(super) async fn first_events(
    sending: &Sending<'_>,
    endpoint: Endpoint,
    body: Parcel,
) -> Result<First, Error> {
    let Sending { prompt, envelope, placed, .. } = *sending;
    let context = prompt.context;
    let (worker, envelope) = (&placed.worker, &placed.pinned(envelope));
    let Served { config, client, .. } = context.served.as_ref();
    let limit = config.timeouts.first_token;
    let idle = config.timeouts.stream_idle;
    let call = pin!(async {
        let response = client.post(worker, Shape::streamed(endpoint), body, envelope).await?;
        // Until the first event, the leg's own time-out counts.
        let patience = limit.max(idle);
        let dialect = endpoint.dialect();
        let reader = EventReader::new(client, response, Arc::clone(worker), patience)
            .of_dialect(dialect, client.reply_max_bytes());
        let samples = if sending.is_gated() { context.options.samples } else { 0 };
        match hold(reader, dialect, worker, samples as usize).await? {
            Held::Events(reader, events) => {
                Ok(First::Events(Box::new(reader.with_idle(idle)), events))
            }
            Held::Below(reader, event) => below(reader, dialect, event, client).await,
            // Dropped with its connection: what runs of it is cancelled.
            Held::Partly => Ok(First::Below(None)),
        }
    });
    within(client, limit, worker, "timeouts.first_token", call).await
}

enum Held {
    Events(EventReader, VecDeque<Bytes>),
    /// Turned away, with the event that says so.
    Below(EventReader, Bytes),
    /// Turned away while other samples run.
    Partly,
}

/// Reads until it is clear whether the engine runs all `samples`, which their first output
/// shows; of an ungated leg, which has 0, until the first event that does more than open the
/// answer. Then nothing waits.
async fn hold(
    mut reader: EventReader,
    dialect: Dialect,
    worker: &Worker,
    samples: usize,
) -> Result<Held, Error> {
    let mut events = VecDeque::new();
    let mut running = BTreeSet::new();
    loop {
        let Some(event) = reader.next().await? else {
            if events.is_empty() {
                return Err(Error::engine(worker.id(), "answered with an empty stream"));
            }
            // It ended without a word of output: so be it.
            return Ok(Held::Events(reader, events));
        };
        let data = data_of(dialect, &event);
        let only_opens = match Chunk::read(dialect, &data) {
            None => return Err(Error::engine(worker.id(), "answered with no chunk")),
            Some(chunk) if chunk.is_error => return Err(refusal_event(worker, &data)),
            Some(chunk) => chunk.only_opens,
        };
        if turned_away(dialect, &data) {
            let only = running.is_empty();
            drop(data);
            return Ok(if only { Held::Below(reader, event) } else { Held::Partly });
        }
        match dialect {
            Dialect::Chunks => running.extend(begun(&data)),
            _ if only_opens => {}
            _ => running.extend([0]),
        }
        drop(data);
        events.push_back(event);
        if only_opens && events.len() < OPENING_MAX {
            continue;
        }
        if running.len() >= samples || events.len() >= HELD_PER_SAMPLE * samples {
            return Ok(Held::Events(reader, events));
        }
    }
}

/// Reads a stream that was turned away to its end, for its usage and its connection.
async fn below(
    mut reader: EventReader,
    dialect: Dialect,
    mut last: Bytes,
    client: &EngineClient,
) -> Result<First, Error> {
    const EVENTS_MAX: usize = 4096;
    for _ in 0..EVENTS_MAX {
        match reader.next().await {
            Ok(Some(event)) => last = event,
            Ok(None) => {
                reader.give_back(client);
                break;
            }
            // What it would have said is not needed.
            Err(_) => break,
        }
    }
    Ok(First::Below(usage_of(dialect, &last)))
}
