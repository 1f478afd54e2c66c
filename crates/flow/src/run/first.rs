//! Sends the leg that generates the client's reply, and reads how the reply begins: the whole of a
//! reply that is not streamed, or the first events, which prove that the engine runs the leg.

use std::collections::{BTreeSet, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use splitrail_engine::dialect::Dialect;
use splitrail_engine::usage::EngineUsage;

use crate::context::Context;
use crate::reply::event_reader::{EventReader, NextRead};
use crate::run::account::Account;
use crate::run::reply_leg::ReplyLeg;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::{Endpoint, JsonObject};
use splitrail_engine_client::{RevocableBody, Shape, refusal_event};
use splitrail_fleet::{LegRequest, ServedModel, Worker};
use splitrail_ledger::leg::LegKind;
use splitrail_reply::choices::{Failure, begun, is_below_threshold};
use splitrail_reply::dialect::{Chunk, data_of, failure_of, usage_of};
use splitrail_reply::merge;
use splitrail_transfer::lease::{Lease, in_lease, lease_expired, queued_past};
use splitrail_transfer::pinned::release_pinned_of;
use splitrail_workload::progress::PATIENCE;

/// How a leg's reply begins.
pub(crate) enum First {
    /// The whole reply has arrived. The time is that at which it began to.
    Whole(JsonObject, Instant),
    /// A stream, with its first events.
    Events(Box<EventReader>, VecDeque<Bytes>),
    /// There is no reply: the engine rejected the leg for its threshold.
    BelowThreshold(Option<EngineUsage>),
}

/// The number of events per sample that are held back at most until every sample of a gated leg has
/// output.
const HELD_PER_SAMPLE: usize = 16;

/// The number of events that are held back at most while they only open the reply.
const OPENING_MAX: usize = 16;

/// Sends the leg that generates the reply.
pub(crate) async fn ask(
    sending: &ReplyLeg<'_>,
    account: &Account,
    body: RevocableBody,
    lease: Option<Lease>,
) -> Result<First, Error> {
    below_if_412(if sending.prompt.context.options.stream {
        let events = Box::pin(first_events(sending, sending.prompt.context.endpoint, body));
        in_lease(lease, &sending.placed.worker, events).await
    } else {
        whole_reply(sending, account, body, lease).await
    })
}

/// Some engines reject a request below its threshold with status 412.
fn below_if_412(begun: Result<First, Error>) -> Result<First, Error> {
    begun.or_else(|error| match error.kind() {
        ErrorKind::EngineRejected(412) => Ok(First::BelowThreshold(None)),
        _ => Err(error),
    })
}

/// Sends the leg that takes a hand-off and generates nothing for the client.
pub(crate) async fn take_hand_off(
    sending: &ReplyLeg<'_>,
    body: RevocableBody,
    lease: Option<Lease>,
) -> Result<(), Error> {
    let ReplyLeg { prompt, leg_headers, placed, .. } = *sending;
    let context = prompt.context;
    let (worker, leg_headers) = (&placed.worker, &placed.pinned(leg_headers));
    let client = &context.served.client;
    let call = pin!(async {
        let shape = Shape::whole(context.endpoint);
        let leg = LegRequest { client, worker, shape, headers: leg_headers };
        let reply = leg.whole(body).await?;
        let dialect = context.endpoint.dialect();
        release_pinned_of(&context.served, &context.metrics, worker, dialect, reply.body);
        Ok(())
    });
    let call = pin!(sending.wait(context.first_token_limit(predicted(sending))).until_output(call));
    in_lease(lease, worker, call).await
}

/// Sends a leg that is not streamed, and reads its reply.
async fn whole_reply(
    sending: &ReplyLeg<'_>,
    account: &Account,
    body: RevocableBody,
    lease: Option<Lease>,
) -> Result<First, Error> {
    let ReplyLeg { prompt, leg_headers, placed, .. } = *sending;
    let context = prompt.context;
    let (worker, leg_headers) = (&placed.worker, &placed.pinned(leg_headers));
    let client = &context.served.client;
    let sent = Instant::now();
    let call = pin!(async {
        let shape = Shape::whole(context.endpoint);
        let leg = LegRequest { client, worker, shape, headers: leg_headers };
        let response = leg.begin(body).await?;
        let begun = Instant::now();
        // Engines send the status of a whole reply when the reply is complete. If the leg may be
        // rejected, only the body shows whether it is a reply.
        if !sending.is_gated() {
            account.decision.enter(|entry| entry.worked(LegKind::Decode));
        }
        Ok((client.whole(&**worker, response, Some(&context.unread)).await?, begun))
    });
    let queued = async {
        match lease {
            Some(lease) => queued_past(lease, worker, sent).await,
            None => std::future::pending().await,
        }
    };
    let (reply, begun) = tokio::select! {
        reply = sending.wait(context.reply_limit()).until_whole(&context.unread, call) => reply?,
        () = queued => return Err(lease_expired(worker)),
    };
    let (dialect, bytes) = (context.endpoint.dialect(), reply.len());
    let of_batch = context.unread.unread.is_joint().then_some(context.options.n);
    let engine = Arc::clone(worker);
    let read = move || {
        if is_below_threshold(dialect, &reply) {
            return Ok(First::BelowThreshold(usage_of(dialect, &reply)));
        }
        let failed = |what| Error::engine(engine.id(), what);
        let object = JsonObject::parse(reply.clone());
        let object = object.map_err(|_| failed("sent a reply that is not JSON"))?;
        match failure_of(dialect, &object) {
            None => {}
            Some(Failure::Error) => return Err(refusal_event(&*engine, &reply)),
            Some(Failure::Abort) => return Err(aborted(&engine)),
        }
        of_batch.map_or(Ok(()), |n| merge::check(&object, n)).map_err(failed)?;
        Ok(First::Whole(object, begun))
    };
    context.preparer.cores.run_sized(bytes, read).await?
}

/// The error for a leg that its engine has aborted: it was paused or put to sleep.
fn aborted(worker: &Worker) -> Error {
    Error::engine(worker.id(), "aborted the request")
}

/// Sends a streamed leg to an endpoint and waits for its first events.
pub(crate) async fn first_events(
    sending: &ReplyLeg<'_>,
    endpoint: Endpoint,
    body: RevocableBody,
) -> Result<First, Error> {
    let ReplyLeg { prompt, leg_headers, placed, .. } = *sending;
    let context = prompt.context;
    let (worker, leg_headers) = (&placed.worker, &placed.pinned(leg_headers));
    let ServedModel { config, client, .. } = context.served.as_ref();
    let limit = context.first_token_limit(predicted(sending));
    let idle = config.timeouts.stream_idle;
    let call = pin!(async {
        let shape = Shape::streamed(endpoint);
        let leg = LegRequest { client, worker, shape, headers: leg_headers };
        let response = leg.begin(body).await?;
        if !sending.is_gated() {
            prompt.decision.enter(|entry| entry.begun(LegKind::Decode));
        }
        // Until the first event, the timeout of the leg applies instead of the idle timeout.
        let patience = limit.duration.saturating_mul(PATIENCE).max(idle);
        let (dialect, memory) = (endpoint.dialect(), &context.unread.memory);
        let reader = EventReader::new(client, response, Arc::clone(worker), patience, memory)
            .of_dialect(dialect, client.reply_max_bytes);
        let samples = if sending.is_gated() { context.options.samples } else { 0 };
        match hold(reader, context, dialect, samples as usize).await? {
            FirstEvents::Events(reader, events) => {
                Ok(First::Events(Box::new(reader.with_idle(idle)), events))
            }
            FirstEvents::BelowThreshold(reader, event) => {
                below(reader, dialect, event, context).await
            }
            // The reader is dropped with its connection, which cancels the samples that run.
            FirstEvents::Partly => Ok(First::BelowThreshold(None)),
        }
    });
    sending.wait(limit).until_output(call).await
}

/// The predicted time until a leg's first output.
fn predicted(sending: &ReplyLeg<'_>) -> Duration {
    let ReplyLeg { prompt, leg_headers, placed, .. } = *sending;
    placed.predicted_time(prompt.unit, leg_headers.prefill_tokens.unwrap_or(0))
}

/// What the first events of a streamed reply show.
enum FirstEvents {
    /// The leg runs. The events have been read and not passed on yet.
    Events(EventReader, VecDeque<Bytes>),
    /// The leg was rejected, with the event that says so.
    BelowThreshold(EventReader, Bytes),
    /// One sample was rejected while other samples run.
    Partly,
}

/// What one of the first events shows.
enum EventMeaning {
    /// The event is no chunk.
    NoChunk,
    /// The engine gave the leg up.
    Failure(Failure),
    /// The event only keeps the connection open.
    Ping,
    /// The leg, or one of its samples, was rejected.
    BelowThreshold,
    /// The leg goes on.
    Output {
        /// Whether the event only opens the reply.
        only_opens: bool,
        /// The samples that have output in the event, or 0 for a reply without samples.
        begun: Vec<u64>,
    },
}

impl EventMeaning {
    fn by(event: &Bytes, dialect: Dialect, samples: usize) -> Self {
        let data = data_of(dialect, event);
        let only_opens = match Chunk::read(dialect, &data) {
            None => return Self::NoChunk,
            Some(Chunk { failure: Some(failure), .. }) => return Self::Failure(failure),
            Some(chunk) if chunk.lacks_reason => return Self::Failure(Failure::Abort),
            Some(chunk) if chunk.is_ping => return Self::Ping,
            Some(chunk) => chunk.only_opens,
        };
        if is_below_threshold(dialect, &data) {
            return Self::BelowThreshold;
        }
        let begun = match dialect {
            _ if samples == 0 || only_opens => Vec::new(),
            Dialect::Chunks => begun(&data, samples),
            _ => vec![0],
        };
        Self::Output { only_opens, begun }
    }
}

/// Reads until it is clear that the engine runs all `samples`, which their first output shows. An
/// ungated leg has 0 samples: for it, the function returns after the first event that does more
/// than open the reply.
async fn hold(
    mut reader: EventReader,
    context: &Context,
    dialect: Dialect,
    samples: usize,
) -> Result<FirstEvents, Error> {
    let mut events = VecDeque::new();
    let mut running = BTreeSet::new();
    // The first one keeps its place among the events; any number may follow.
    let mut holds_ping = false;
    loop {
        let event = match reader.next().await? {
            Some(NextRead::Event(event)) => event,
            Some(NextRead::Comment(comment)) => {
                context.activity.iter().for_each(|activity| activity.note_comment(comment.clone()));
                continue;
            }
            None if events.is_empty() => {
                return Err(Error::engine(reader.worker().id(), "answered with an empty stream"));
            }
            // The stream ended without any output, which is a valid reply.
            None => return Ok(FirstEvents::Events(reader, events)),
        };
        let (bytes, read) = (event.len(), event.clone());
        let show = move || EventMeaning::by(&read, dialect, samples);
        let only_opens = match context.preparer.cores.run_sized(bytes, show).await? {
            EventMeaning::NoChunk => {
                return Err(Error::engine(reader.worker().id(), "answered with no chunk"));
            }
            EventMeaning::Failure(Failure::Error) => {
                let error = refusal_event(reader.worker(), &data_of(dialect, &event));
                reader.worker().record_refusal(&error, Some(context.endpoint));
                return Err(error);
            }
            EventMeaning::Failure(Failure::Abort) => return Err(aborted(reader.worker())),
            EventMeaning::Ping => {
                context.activity.iter().for_each(|activity| activity.note_comment(event.clone()));
                if std::mem::replace(&mut holds_ping, true) {
                    continue;
                }
                true
            }
            EventMeaning::BelowThreshold if running.is_empty() => {
                return Ok(FirstEvents::BelowThreshold(reader, event));
            }
            EventMeaning::BelowThreshold => return Ok(FirstEvents::Partly),
            EventMeaning::Output { only_opens, begun } => {
                running.extend(begun);
                only_opens
            }
        };
        reader.hold_back(&event);
        events.push_back(event);
        if only_opens && events.len() < OPENING_MAX {
            continue;
        }
        if running.len() >= samples || events.len() >= HELD_PER_SAMPLE * samples {
            return Ok(FirstEvents::Events(reader, events));
        }
    }
}

/// Reads a rejected stream to its end, to get its usage and to keep its connection.
async fn below(
    mut reader: EventReader,
    dialect: Dialect,
    mut last: Bytes,
    context: &Context,
) -> Result<First, Error> {
    const EVENTS_MAX: usize = 4096;
    for _ in 0..EVENTS_MAX {
        match reader.next_event().await {
            Ok(Some(event)) => last = event,
            Ok(None) => {
                reader.give_back(&context.served.client);
                break;
            }
            // The remaining events are not needed.
            Err(_) => break,
        }
    }
    let (bytes, read) = (last.len(), move || usage_of(dialect, &last));
    Ok(First::BelowThreshold(context.preparer.cores.run_sized(bytes, read).await?))
}
