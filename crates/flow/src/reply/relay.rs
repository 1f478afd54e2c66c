//! Relays one prompt's reply to the client.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use prometheus::Histogram;
use splitrail_engine::dialect::Dialect;
use splitrail_engine::usage::EngineUsage;

use crate::context::PromptContext;
use crate::prepare::Preparer;
use crate::reply::detail::Detail;
use crate::reply::event_reader::{EventReader, NextRead};
use crate::reply::migrate::Migration;
use crate::reply::text_tokens::TextTokens;
use crate::run::account::Account;
use crate::run::read_back;
use crate::run::reply_leg::ReplyLeg;
use splitrail_api::JsonObject;
use splitrail_api::error::{Error, ErrorKind, Fault};
use splitrail_api::usage::rewrite;
use splitrail_ledger::leg::LegKind;
use splitrail_policy::Leg;
use splitrail_reply::choices::{Failure, is_below_threshold};
use splitrail_reply::dialect::{self, Chunk, data_of};
use splitrail_reply::event_template::EventTemplate;
use splitrail_reply::merge::{Events, Place};
use splitrail_reply::openai_chunk::OpenAiChunk;
use splitrail_reply::output_text::each_text;
use splitrail_transfer::pinned::release_pinned;
use splitrail_workload::progress::Awaited;

/// A whole reply, which began to arrive at `begun`: the engine's reply with the client's usage.
pub(crate) fn whole(
    sending: &ReplyLeg<'_>,
    account: &mut Account,
    mut reply: JsonObject,
    begun: Instant,
) -> JsonObject {
    account.decision.enter(|entry| entry.worked(LegKind::Decode));
    let usage = reply.raw("usage").filter(|raw| *raw != "null");
    if let Some(usage) = usage.and_then(|raw| EngineUsage::parse(account.dialect, raw).ok()) {
        account.learn_whole(begun, sending.prompt.context.options.samples, usage);
    }
    if let Some(told) = usage.map(|raw| account.settle(raw, None, true)) {
        reply.set("usage", told);
    }
    read_back::keep(sending, &mut reply, begun);
    hide_hand_off(&mut reply);
    account.finish();
    reply
}

/// Adds `usage.splitrail` to the usage chunk of a stream. Long events are read off the reactor. The
/// stream ends for its reader with the first error.
pub fn detailed(events: Events, detail: Detail, preparer: &Arc<Preparer>) -> Events {
    let (detail, preparer) = (Arc::new(detail), Arc::clone(preparer));
    Box::pin(events.then(move |event| {
        let (detail, preparer) = (Arc::clone(&detail), Arc::clone(&preparer));
        async move {
            let event = event?;
            preparer.cores.run_sized(event.len(), move || detail.with(event)).await
        }
    }))
}

/// Clients must not see where KV blocks are.
fn hide_hand_off(reply: &mut JsonObject) {
    if !matches!(reply.raw("kv_transfer_params"), None | Some("null")) {
        reply.set("kv_transfer_params", "null");
    }
}

/// Removes from the end of a stream what the engine keeps pinned, and releases it: the tokens of a
/// streamed reply are not known.
fn withdraw_hand_off(account: &Account, holder: &mut JsonObject) {
    if !matches!(holder.raw("kv_transfer_params"), None | Some("null")) {
        let Account { served, metrics, worker, dialect, .. } = account;
        release_pinned(served, metrics, worker, *dialect, holder);
    }
    hide_hand_off(holder);
}

/// Whether a client asked for usage in each event.
fn asks_for_totals(prompt: &PromptContext<'_>) -> bool {
    let options = prompt.unit.body.raw("stream_options").map(JsonObject::parse_str);
    let totals = |options: JsonObject| options.raw("continuous_usage_stats") == Some("true");
    let of_form = prompt.unit.body.raw("stream_continuous_usage_stats") == Some("true");
    prompt.context.options.include_usage
        && (of_form || options.is_some_and(|read| read.is_ok_and(totals)))
}

/// What is wrong with an event that cannot be read.
const NO_CHUNK: &str = "sent an event that is not a chunk";

/// A streamed reply, event by event.
pub struct UnitStream {
    account: Account,
    /// Runs the reading of long events off the reactor.
    preparer: Arc<Preparer>,
    reader: EventReader,
    /// The first events, which proved that the engine runs the request.
    held: VecDeque<Bytes>,
    /// The state for resuming the reply when its worker is lost; `None` if it cannot be resumed.
    migration: Option<Migration>,
    /// Whether the client asked for usage.
    tells_usage: bool,
    /// Whether the client asked for running totals.
    tells_totals: bool,
    /// The choices that have ended, and their number when all have.
    ended: BTreeSet<u64>,
    choices: usize,
    /// The last event of this worker with a running total.
    last_total: Option<Bytes>,
    /// Whether events are passed on as messages of gRPC.
    converts_events: bool,
    /// The histogram of the time between events.
    gaps: Histogram,
    pace: Pace,
    /// Whether the times of events are observed: the events of several samples come between each
    /// other.
    observes_pace: bool,
    /// Recognises events that need not be parsed.
    template: EventTemplate,
    /// Counts tokens that the engine does not name.
    text_tokens: TextTokens,
    /// The place of the stream in that of its batch.
    place: Option<Place>,
    /// Whether the reply has ended, or is lost.
    is_over: bool,
}

/// The event for the client, `None` if there is none for it, or what is wrong with the engine's
/// event.
type Relayed = Result<Option<Bytes>, &'static str>;

/// The times of a stream's events.
struct Pace {
    first: Instant,
    last: Instant,
    /// The number of events after the first.
    events: u32,
}

impl Pace {
    fn begin(now: Instant) -> Self {
        Self { first: now, last: now, events: 0 }
    }

    /// The mean time between two events in seconds; `None` if there were too few events.
    fn mean_seconds(&self) -> Option<f64> {
        const FEW: u32 = 8;
        let seconds = self.last.duration_since(self.first).as_secs_f64();
        (self.events >= FEW).then(|| seconds / f64::from(self.events))
    }
}

impl UnitStream {
    /// A reply whose first events have arrived.
    pub(crate) fn new(
        prompt: PromptContext<'_>,
        account: Account,
        reader: EventReader,
        held: VecDeque<Bytes>,
    ) -> Self {
        let options = &prompt.context.options;
        let of_sample = options.output.upper_bound_tokens.map(u64::from);
        let most = of_sample.map_or(u64::MAX, |tokens| tokens * u64::from(options.samples));
        Self {
            account,
            preparer: Arc::clone(&prompt.context.preparer),
            reader,
            held,
            migration: Migration::new(prompt),
            tells_usage: prompt.context.options.include_usage,
            tells_totals: asks_for_totals(&prompt),
            ended: BTreeSet::new(),
            // Of an engine that takes turns, the end of a choice is not that of the reply.
            choices: match options.engine_takes_turns {
                true => usize::MAX,
                false => options.samples as usize,
            },
            last_total: None,
            converts_events: prompt.context.converts_events,
            gaps: prompt.context.inter_token(prompt.decision),
            pace: Pace::begin(Instant::now()),
            observes_pace: prompt.context.options.samples == 1,
            template: EventTemplate::default(),
            text_tokens: TextTokens::new(prompt.context.served.prompt.clone(), most),
            place: None,
            is_over: false,
        }
    }

    /// The events for the client; `place` is that of a prompt of a batch.
    pub fn into_events(mut self: Box<Self>, place: Option<Place>) -> Events {
        self.place = place;
        Box::pin(stream::unfold(Some(self), |unit| async move { unit?.next().await }))
    }

    /// The next event for the client, with the rest of the reply; `None` at the regular end. Nothing
    /// follows an error.
    async fn next(mut self: Box<Self>) -> Option<(Result<Bytes, Error>, Option<Box<Self>>)> {
        loop {
            let data = match self.held.pop_front() {
                Some(held) => {
                    self.reader.pass_on(&held);
                    held
                }
                None => match self.next_of_engine().await {
                    Ok(Some(NextRead::Event(data))) => {
                        self.observe_gap();
                        data
                    }
                    // Messages of gRPC have no comments: its connections are kept open by others.
                    Ok(Some(NextRead::Comment(_))) if self.converts_events => continue,
                    Ok(Some(NextRead::Comment(comment))) => return Some((Ok(comment), Some(self))),
                    Ok(None) => match self.usage_at_end() {
                        Some(event) => event,
                        None => {
                            self.learn_step();
                            self.is_over = true;
                            self.account.finish();
                            self.reader.give_back(&self.account.served.client);
                            return None;
                        }
                    },
                    Err(error) => match self.go_on(error).await {
                        Ok(()) => continue,
                        Err(lost) => return Some((Err(lost), None)),
                    },
                },
            };
            self.account.booking.prefill_done(None);
            let relayed;
            (relayed, self) = match self.relay_sized(data).await {
                Ok(relayed) => relayed,
                Err(error) => return Some((Err(error), None)),
            };
            match relayed {
                Ok(None) => {}
                Ok(Some(data)) => return Some((Ok(data), Some(self))),
                Err(what) => {
                    let error = Error::engine(self.account.worker.id(), what);
                    if let Err(lost) = self.go_on(error).await {
                        return Some((Err(lost), None));
                    }
                }
            }
        }
    }

    /// [`relay_in_place`](Self::relay_in_place), off the reactor if the event is long. The reply
    /// moves there and back.
    async fn relay_sized(mut self: Box<Self>, event: Bytes) -> Result<(Relayed, Box<Self>), Error> {
        let (preparer, bytes) = (Arc::clone(&self.preparer), event.len());
        preparer.cores.run_sized(bytes, move || (self.relay_in_place(event), self)).await
    }

    async fn next_of_engine(&mut self) -> Result<Option<NextRead>, Error> {
        self.account.booking.set_awaited(Awaited::NextOutput);
        self.reader.next().await
    }

    fn observe_gap(&mut self) {
        let now = Instant::now();
        let gap = now.duration_since(std::mem::replace(&mut self.pace.last, now));
        self.pace.events = self.pace.events.saturating_add(1);
        if self.observes_pace {
            self.gaps.observe(gap.as_secs_f64());
        }
    }

    /// Trains the cost model with the duration of a decode step among the requests that the worker
    /// has now.
    fn learn_step(&self) {
        let worker = &self.account.worker;
        let requests = u64::from(worker.load.booked.requests());
        if let Some(seconds) = self.pace.mean_seconds().filter(|_| self.observes_pace) {
            let context_tokens = worker.load.booked.active_tokens();
            worker.load.costs.learn_step(self.pace.last, requests, context_tokens, seconds);
        }
    }

    /// The worker is lost: resumes the reply on another worker, or ends it with an error.
    async fn go_on(&mut self, error: Error) -> Result<(), Error> {
        // At once: to resume takes a while, in which the client may leave.
        self.account.leg.end(Instant::now(), error.outcome());
        self.account.worker.record(Leg::Decode, Some(&error));
        self.account.booking.end();
        let migration = self.migration.take().filter(|_| error.worth_another_worker());
        let Some(mut migration) = migration else { return Err(self.lost(&error)) };
        let Some(resumed) = migration.resume(&error, &self.account.worker).await else {
            return Err(self.lost(&error));
        };
        self.account.leg = resumed.leg;
        (self.account.worker, self.account.booking) = (resumed.worker, resumed.booking);
        (self.reader, self.held) = (resumed.reader, resumed.held);
        self.last_total = None;
        self.text_tokens.restart();
        self.migration = Some(migration);
        Ok(())
    }

    /// An error after the first event; the client always gets it. It keeps its kind if no engine is
    /// at fault: it counts as shed, or as the client's own error.
    fn lost(&mut self, error: &Error) -> Error {
        let message = format!("the reply broke off: {}", error.message());
        let is_of_engine = error.fault() == Fault::Engine;
        if !is_of_engine {
            self.count_arrived();
        }
        self.is_over = true;
        let kind = if is_of_engine { ErrorKind::DecodeLost } else { error.kind() };
        let lost = Error::new(kind, message);
        match is_of_engine {
            true => self.account.decision.reply_lost(lost.outcome()),
            // What has arrived was generated for the client.
            false => self.account.decision.reply_cut(lost.outcome()),
        }
        lost
    }

    /// Reads what the router needs to know about an event.
    fn read<'a>(&mut self, dialect: Dialect, data: &'a [u8]) -> Option<Chunk<'a>> {
        // The name of an event is a text too, and it decides what is read, so `template` cannot be
        // used.
        if dialect.names_events() {
            return Chunk::read(dialect, data);
        }
        if self.template.covers(data) {
            return Some(Chunk { tokens: self.template.tokens, ..Chunk::default() });
        }
        let chunk = Chunk::read(dialect, data)?;
        // What `template` covers has the same types.
        if self.converts_events && chunk.failure.is_none() {
            OpenAiChunk::has_readable_choices(data).then_some(())?;
        }
        let is_plain = chunk.usage.is_none() && chunk.running_total.is_none();
        let ends = chunk.failure.is_some() || !chunk.ended.is_empty();
        // An event without tokens could cover events with some. Events that name their tokens differ
        // in more than their text.
        let is_plain = is_plain && !chunk.has_hand_off && !chunk.has_ids;
        if !ends && is_plain && chunk.tokens > 0 {
            self.template.learn(data, chunk.tokens);
        }
        Some(chunk)
    }

    /// The event for the client, as an event of its batch if there is one.
    fn relay_in_place(&mut self, event: Bytes) -> Relayed {
        let relayed = self.relay(event)?;
        match (&self.place, relayed) {
            (Some(place), Some(event)) => {
                let merged = place.merge(event);
                if merged.is_err() {
                    // The usage of the event may have been booked: another worker must not go on.
                    self.migration = None;
                }
                merged
            }
            (_, relayed) => Ok(relayed),
        }
    }

    /// An event with the last running total by itself, if the engine has reported no other usage.
    fn usage_at_end(&mut self) -> Option<Bytes> {
        let last = self.last_total.take().filter(|_| !self.account.settled)?;
        let mut event = JsonObject::parse(last).ok()?;
        event.set("choices", "[]");
        Some(event.to_bytes())
    }

    /// Notes which choices have ended. When all have, the engine may say no more.
    fn note_ended(&mut self, ended: &[u64]) {
        for index in ended {
            if self.ended.len() < self.choices {
                self.ended.insert(*index);
            }
        }
        if !ended.is_empty() && self.ended.len() == self.choices {
            self.reader.allow_end();
        }
    }

    /// Keeps an event with a running total, and returns it for the client: without the total, unless
    /// the client asked for totals. Only the final usage has cached tokens.
    fn take_total(&mut self, event: Bytes) -> Result<Bytes, &'static str> {
        let mut rest = JsonObject::parse(event.clone()).map_err(|_| NO_CHUNK)?;
        let told = rest.raw("usage").filter(|_| self.tells_totals);
        match told.and_then(|raw| rewrite(Dialect::Chunks, raw, None)) {
            Some(told) => rest.set("usage", told),
            None => {
                rest.remove("usage");
            }
        }
        self.last_total = Some(event).filter(|_| self.observes_pace);
        Ok(rest.to_bytes())
    }

    /// Notes the text of an event whose engine does not name the tokens.
    fn note_text(&mut self, dialect: Dialect, data: &[u8], chunk: &Chunk<'_>, is_total: bool) {
        if is_total {
            // The engine's total has all of them.
            self.text_tokens.restart();
        } else if chunk.tokens > 0 && !chunk.has_ids {
            self.text_tokens.event(chunk.tokens);
            match self.template.text_of(data).filter(|_| !dialect.names_events()) {
                Some(text) => self.text_tokens.push(text),
                None => each_text(dialect, data, |text| self.text_tokens.push(text)),
            }
        }
    }

    /// Counts what has arrived and was not passed on, and the tokens that the engine has not named: of
    /// a reply that ends before its usage. Nothing of it reaches the client.
    fn count_arrived(&mut self) {
        while let Some(event) = self.held.pop_front().or_else(|| self.reader.arrived()) {
            if self.relay(event).is_err() {
                break;
            }
        }
        if !self.account.settled {
            let more = self.text_tokens.more();
            self.account.decision.received(more, None);
        }
    }

    /// The event for the client; `None` if it is only usage that the client did not ask for.
    fn relay(&mut self, event: Bytes) -> Relayed {
        let dialect = self.account.dialect;
        let data = data_of(dialect, &event);
        let chunk = self.read(dialect, &data).ok_or(NO_CHUNK)?;
        match chunk.failure {
            None => {}
            Some(Failure::Error) => return Err("reported an error in mid-stream"),
            Some(Failure::Abort) => return Err("aborted the request in mid-stream"),
        }
        if is_below_threshold(dialect, &data) {
            return Err("turned a part of the request away in mid-stream");
        }
        if chunk.is_last {
            self.reader.end();
        }
        self.note_ended(&chunk.ended);
        // With several samples, a total is that of one of them.
        let total = chunk.running_total.filter(|_| self.observes_pace);
        let so_far = total.and_then(|raw| EngineUsage::parse(dialect, raw).ok());
        self.account.decision.received(chunk.tokens, so_far);
        self.note_text(dialect, &data, &chunk, so_far.is_some());
        let hidden = match chunk.has_hand_off {
            true => {
                let withdraw = |holder: &mut JsonObject| withdraw_hand_off(&self.account, holder);
                Some(dialect::edit_all(dialect, &event, withdraw).ok_or(NO_CHUNK)?)
            }
            false => None,
        };
        let Some(usage) = &chunk.usage else {
            let has_total = chunk.running_total.is_some();
            let shown = hidden.unwrap_or(event);
            let event = if has_total { self.take_total(shown)? } else { shown };
            let Some(migration) = &mut self.migration else { return Ok(Some(event)) };
            return match migration.note(&event) {
                Some(told) => Ok(Some(told)),
                None if migration.is_converted() => Err("does not continue the reply"),
                None if migration.has_moved() => {
                    migration.give_up();
                    Ok(Some(event))
                }
                None => {
                    self.migration = None;
                    Ok(Some(event))
                }
            };
        };
        let told = match usage.is_final {
            false => match self.account.foretold(usage.raw) {
                None => return Ok(Some(hidden.unwrap_or(event))),
                Some(told) => told,
            },
            true => {
                let moved = self.migration.as_ref().filter(|migration| migration.has_moved());
                let whole = moved.map(|moved| moved.usage(usage.raw).unwrap_or_default());
                self.account.settle(usage.raw, whole.as_deref(), self.tells_usage)
            }
        };
        // A usage that cannot be evaluated gives way to the last running total.
        let gives_way = usage.is_final && !self.account.settled && self.last_total.is_some();
        if !self.tells_usage || gives_way {
            return Ok(None);
        }
        let migration = self.migration.as_ref();
        let edited = dialect::edit(dialect, hidden.as_ref().unwrap_or(&event), |holder| {
            holder.set("usage", told);
            withdraw_hand_off(&self.account, holder);
            if let Some(migration) = migration {
                migration.unify(holder);
            }
        });
        edited.map(Some).ok_or(NO_CHUNK)
    }
}

impl Drop for UnitStream {
    /// The client has left, or the router stops.
    fn drop(&mut self) {
        if !self.is_over {
            self.count_arrived();
        }
    }
}
