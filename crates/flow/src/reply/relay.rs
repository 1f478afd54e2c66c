//! Relays one prompt's answer to the client.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use prometheus::{Histogram, IntCounterVec};
use splitrail_engine::dialect::Dialect;
use splitrail_engine::usage::{EngineUsage, UsageError};

use super::alike::Alike;
use super::choices::turned_away;
use super::dialect::{self, Chunk, data_of};
use super::sse::{Piece, Splitter, Uncut};
use super::usage::rewrite;
use crate::migrate::Migration;
use splitrail_api::JsonObject;
use splitrail_api::error::{Error, Kind};
use splitrail_api::memory_budget::{Charge, shed};
use splitrail_engine_client::{
    Broken, EngineBody, EngineClient, Proof, Response, Timer, too_large,
};
use splitrail_fleet::Served;
use splitrail_fleet::reply_audit::audit_reply;
use splitrail_fleet::{Booking, Worker};
use splitrail_ledger::decisions::{Decision, DecisionHandle, UsageReport};
use splitrail_policy::Leg;
use splitrail_telemetry::Metrics;

/// An engine may send comments without any event for this many times the idle time-out. Comments
/// keep the connection open but are no progress.
const COMMENTS_PATIENCE: u32 = 10;

/// Reads the events of a streamed reply of an engine.
pub struct EventReader {
    body: Option<EngineBody>,
    /// The proof that the reply belongs to the request, checked with the first event; `None` after
    /// the check.
    proof: Option<Proof>,
    /// The memory of a long event that has not arrived completely.
    charge: Charge,
    memory_max_bytes: usize,
    shed: IntCounterVec,
    /// When bytes that are no event began to arrive since the last event.
    waits_since: Option<Instant>,
    splitter: Splitter,
    dialect: Dialect,
    worker: Arc<Worker>,
    patience: Timer,
    done: bool,
}

impl EventReader {
    /// Reads events of at most the size that the client allows for a reply, at most `idle` apart.
    pub fn new(
        client: &EngineClient,
        response: Response,
        worker: Arc<Worker>,
        idle: Duration,
    ) -> Self {
        let splitter = Splitter::new(client.reply_max_bytes());
        let patience = client.timers().of(idle);
        let dialect = Dialect::Chunks;
        let Response { body, proof, .. } = response;
        let (body, proof) = (Some(body), Some(proof));
        let memory = client.memory();
        let (charge, memory_max_bytes) = (memory.budget.charge(), memory.max_bytes);
        Self {
            body,
            proof,
            charge,
            memory_max_bytes,
            shed: memory.shed.clone(),
            waits_since: None,
            splitter,
            dialect,
            worker,
            patience,
            done: false,
        }
    }

    /// The same reader for another dialect. If its events have names, they are returned unchanged
    /// with all their lines.
    pub fn of_dialect(mut self, dialect: Dialect, max_bytes: usize) -> Self {
        if dialect.names_events() {
            self.splitter = Splitter::of_whole_events(max_bytes);
        }
        Self { dialect, ..self }
    }

    /// The same reader with another maximum time between two pieces of the stream.
    pub fn with_idle(mut self, idle: Duration) -> Self {
        self.patience.set_limit(idle);
        self
    }

    /// Makes the connection available again, once the engine has ended its body.
    pub fn give_back(&mut self, client: &EngineClient) {
        if let Some(body) = self.body.take() {
            client.finish(body);
        }
    }

    /// The next event; `None` once the engine has reported the end. A stream that ends without that
    /// report has broken off.
    ///
    /// # Errors
    /// If the connection breaks, an event is too long, no event arrives in time, or the first event
    /// is for another request.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        let mut has_read = false;
        while !self.done {
            match self.splitter.next_piece() {
                Ok(Some(Piece::Data(event))) => {
                    self.waits_since = None;
                    self.prove(&event)?;
                    self.done = dialect::is_last(self.dialect, &event);
                    return Ok(Some(event));
                }
                Ok(Some(Piece::Done)) => {
                    self.done = true;
                    break;
                }
                // Only after a read can bytes have arrived that are no event.
                Ok(None) if has_read => self.wait_on()?,
                Ok(None) => {}
                Err(Uncut::TooLong) => return Err(too_large("limits.engine_reply_max_bytes")),
                Err(Uncut::Comments) => return Err(self.only_comments()),
            }
            let Some(body) = &mut self.body else { return Ok(None) };
            match self.patience.bound(body.frame()).await {
                Err(_) => {
                    let message = format!("worker {} fell silent in mid-stream", self.worker.id());
                    return Err(Error::new(Kind::EngineTimeout, message));
                }
                Ok(Some(Ok(frame))) => {
                    if let Some(data) = frame.data_ref() {
                        self.splitter.push(data);
                        has_read = true;
                        self.charge_for_long()?;
                    }
                }
                Ok(Some(Err(Broken::Malformed(malformed)))) => {
                    return Err(Error::engine(self.worker.id(), &malformed.to_string()));
                }
                Ok(Some(Err(Broken::Closed)) | None) => {
                    return Err(Error::engine(self.worker.id(), "broke off in mid-stream"));
                }
            }
        }
        Ok(None)
    }

    /// Checks with the first event that the reply belongs to the request.
    fn prove(&mut self, event: &Bytes) -> Result<(), Error> {
        if let Some(proof) = self.proof.take() {
            proof.check(&self.worker, &data_of(self.dialect, event))?;
            if let Some(body) = &mut self.body {
                body.prove();
            }
        }
        Ok(())
    }

    /// Charges the memory of a long event that has not arrived completely, in steps as it grows.
    fn charge_for_long(&mut self) -> Result<(), Error> {
        const FREE_BYTES: usize = 64 << 10;
        let (held, charged) = (self.splitter.held_bytes(), self.charge.bytes());
        if held <= FREE_BYTES {
            self.charge.shrink(charged);
        } else if held > charged
            && !self.charge.grow(held.next_power_of_two() - charged, self.memory_max_bytes)
        {
            return Err(shed(&self.shed));
        }
        Ok(())
    }

    fn wait_on(&mut self) -> Result<(), Error> {
        let since = *self.waits_since.get_or_insert_with(Instant::now);
        let over = since.elapsed() > self.patience.limit() * COMMENTS_PATIENCE;
        if over { Err(self.only_comments()) } else { Ok(()) }
    }

    fn only_comments(&self) -> Error {
        Error::engine(self.worker.id(), "sends comments and no event")
    }
}

/// The data that one prompt's answer owns until it ends in any way: its booking, and its decision
/// record with the ledger's entry.
pub struct Account {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) served: Arc<Served>,
    pub(crate) decision: DecisionHandle,
    pub(crate) booking: Booking,
    pub(crate) worker: Arc<Worker>,
    /// The dialect of the engine's answer.
    pub(crate) dialect: Dialect,
    /// The prompt's length by the router's tokenizer.
    pub(crate) prompt_tokens: Option<u32>,
    /// Whether the engine has reported its usage.
    pub(crate) settled: bool,
}

impl Account {
    /// Evaluates the engine's usage object and returns the one for the client, who gets it if
    /// `tells` is true. `whole` is the usage of the whole answer if the engine reported only that
    /// of its last part.
    pub fn settle(&mut self, raw: &str, whole: Option<&str>, tells: bool) -> Option<String> {
        let leg = self.read(raw)?;
        let (raw, usage) = match whole {
            Some(whole) => (whole, self.read(whole)?),
            None => (raw, leg),
        };
        self.compare(usage.prompt_tokens);
        self.settled = true;
        let fallback = self.served.config.cached_tokens_fallback;
        let report = UsageReport { leg, whole: usage, fallback, is_shown: tells };
        rewrite(self.dialect, raw, self.decision.usage_reported(report))
    }

    /// The usage for an event that precedes the final usage, from the cached tokens that are
    /// certain at that time.
    fn foretold(&self, raw: &str) -> Option<String> {
        let told = self.decision.with(Decision::told_cached_tokens)?;
        rewrite(self.dialect, raw, Some(told))
    }

    fn read(&self, raw: &str) -> Option<EngineUsage> {
        let worker = self.worker.id();
        match EngineUsage::parse_in(self.dialect, serde_json::from_str(raw).ok()?) {
            Ok(usage) => Some(usage),
            Err(UsageError::CachedExceedsPrompt { prompt_tokens, .. }) => {
                tracing::warn!(worker, "an engine reports more cached tokens than the prompt has");
                let completion = JsonObject::parse_str(raw).ok()?;
                let key = match self.dialect {
                    Dialect::Chunks => "completion_tokens",
                    Dialect::Responses | Dialect::Messages => "output_tokens",
                };
                let completion_tokens = completion.get(key, "a count").ok()?;
                let completion_tokens = completion_tokens.unwrap_or(0);
                Some(EngineUsage { prompt_tokens, completion_tokens, cached_tokens: None })
            }
            Err(error) => {
                tracing::warn!(worker, %error, "an engine's usage is passed on as it is");
                None
            }
        }
    }

    /// Compares the engine's count of the prompt's tokens with the count of the router's tokenizer.
    fn compare(&self, engine: u32) {
        let Some(router) = self.prompt_tokens.filter(|router| *router != engine) else { return };
        let model = self.served.name();
        self.metrics.prompt_length_mismatches.with_label_values(&[model]).inc();
        if self.served.mismatch.may_log() {
            let worker = self.worker.id();
            tracing::error!(
                model,
                worker,
                router,
                engine,
                "router and engine disagree on the prompt's token count: is the tokenizer the \
                 engine's, and was the engine started with flags that change prompts?"
            );
        }
    }

    /// Records that the answer has begun, so the engine has the whole prompt in its cache.
    pub fn began(&self) {
        self.decision.decode_worked();
    }

    /// Records that the answer is complete. Its figures are counted when the whole request ends.
    pub fn finish(&mut self) {
        self.worker.record(Leg::Decode, None);
        if let Some(leg) = self.decision.answer_completed() {
            audit_reply(&self.metrics, &self.served, &self.worker, &leg, self.settled);
        }
    }

    /// Records that the engine rejected the leg because it holds too little of the prompt. The
    /// cached tokens that it reports are checked against the index like those of any other reply.
    pub fn turned_away(&mut self, usage: Option<EngineUsage>) {
        let error = Error::new(Kind::BelowThreshold, "");
        self.worker.record(Leg::Decode, Some(&error));
        let leg = self.decision.threshold_rejected(usage, error.outcome());
        if let (Some(leg), Some(_)) = (leg, usage) {
            audit_reply(&self.metrics, &self.served, &self.worker, &leg, true);
        }
    }

    /// Records that the leg that answers failed. Its prefill leg may serve another attempt.
    pub fn fail_leg(&mut self, error: &Error) {
        self.worker.record(Leg::Decode, Some(error));
        self.decision.decode_failed(error.outcome());
    }

    /// Records that the answer broke off.
    pub fn fail(&mut self, error: &Error) {
        self.worker.record(Leg::Decode, Some(error));
        self.decision.answer_lost(error.outcome());
    }

    /// Records that there is no answer, without a fault of the worker.
    pub fn give_up(&mut self, outcome: &'static str) {
        self.decision.given_up(outcome);
    }
}

/// A whole answer: the engine's reply with the client's usage.
///
/// # Errors
/// If the reply is no JSON object.
pub fn whole(account: &mut Account, reply: Bytes) -> Result<JsonObject, Error> {
    let nonsense = |_| Error::engine(account.worker.id(), "sent a reply that is not JSON");
    let mut reply = JsonObject::parse(reply).map_err(nonsense)?;
    account.began();
    let usage = reply.raw("usage").filter(|raw| *raw != "null");
    if let Some(told) = usage.and_then(|raw| account.settle(raw, None, true)) {
        reply.set("usage", told);
    }
    hide_hand_off(&mut reply);
    account.finish();
    Ok(reply)
}

/// Clients must not see where KV blocks are.
fn hide_hand_off(reply: &mut JsonObject) {
    if !matches!(reply.raw("kv_transfer_params"), None | Some("null")) {
        reply.set("kv_transfer_params", "null");
    }
}

/// A streamed answer, event by event.
pub struct UnitStream {
    pub(crate) account: Account,
    pub(crate) reader: EventReader,
    /// The first events, which proved that the engine runs the request.
    pub(crate) held: VecDeque<Bytes>,
    /// The state for resuming the answer when its worker is lost; `None` if it cannot be resumed.
    pub(crate) migration: Option<Migration>,
    /// Whether the client asked for usage.
    pub(crate) tells_usage: bool,
    /// The histogram of the time between events.
    pub(crate) gaps: Histogram,
    pub(crate) pace: Pace,
    /// Recognises events that need not be parsed.
    pub(crate) alike: Alike,
}

/// The times of a stream's events.
pub(crate) struct Pace {
    first: Instant,
    last: Instant,
    /// The number of events after the first.
    events: u32,
}

impl Pace {
    pub(crate) fn begin(now: Instant) -> Self {
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
    /// The next event for the client; `None` at the regular end.
    pub async fn next(&mut self) -> Option<Result<Bytes, Error>> {
        loop {
            let data = match self.held.pop_front() {
                Some(held) => held,
                None => match self.reader.next().await {
                    Ok(Some(data)) => {
                        self.observe_gap();
                        data
                    }
                    Ok(None) => {
                        self.learn_step();
                        self.account.finish();
                        self.reader.give_back(&self.account.served.client);
                        return None;
                    }
                    Err(error) => match self.go_on(error).await {
                        Ok(()) => continue,
                        Err(lost) => return Some(Err(lost)),
                    },
                },
            };
            self.account.booking.prefill_done(None);
            match self.relay(data) {
                Ok(None) => {}
                Ok(Some(data)) => return Some(Ok(data)),
                Err(what) => {
                    let error = Error::engine(self.account.worker.id(), what);
                    if let Err(lost) = self.go_on(error).await {
                        return Some(Err(lost));
                    }
                }
            }
        }
    }

    fn observe_gap(&mut self) {
        let now = Instant::now();
        let gap = now.duration_since(std::mem::replace(&mut self.pace.last, now));
        self.pace.events = self.pace.events.saturating_add(1);
        self.gaps.observe(gap.as_secs_f64());
    }

    /// Trains the cost model with the duration of a decode step among the requests that the worker
    /// has now.
    fn learn_step(&self) {
        let worker = &self.account.worker;
        let requests = u64::from(worker.booked.requests());
        if let Some(seconds) = self.pace.mean_seconds() {
            worker.costs.stepped(requests, worker.booked.active_tokens(), seconds);
        }
    }

    /// The worker is lost: resumes the answer on another worker, or ends it with an error.
    async fn go_on(&mut self, error: Error) -> Result<(), Error> {
        let migration = self.migration.take().filter(|_| error.worth_another_worker());
        let Some(mut migration) = migration else { return Err(self.lost(&error)) };
        let Some(resumed) = migration.resume(&error, &self.account.worker).await else {
            return Err(self.lost(&error));
        };
        self.account.worker.record(Leg::Decode, Some(&error));
        (self.account.worker, self.account.booking) = (resumed.worker, resumed.booking);
        (self.reader, self.held) = (resumed.reader, resumed.held);
        self.migration = Some(migration);
        Ok(())
    }

    /// An error after the first event; the client always gets it.
    fn lost(&mut self, error: &Error) -> Error {
        let message = format!("the answer broke off: {}", error.message());
        let lost = Error::new(Kind::DecodeLost, message);
        self.account.worker.record(Leg::Decode, Some(error));
        self.account.decision.answer_lost(lost.outcome());
        lost
    }

    /// Reads what the router needs to know about an event.
    fn read<'a>(&mut self, dialect: Dialect, data: &'a [u8]) -> Option<Chunk<'a>> {
        // The name of an event is a text too, and it decides what is read, so `alike` cannot be
        // used.
        if dialect.names_events() {
            return Chunk::read(dialect, data);
        }
        if self.alike.covers(data) {
            return Some(Chunk::default());
        }
        let chunk = Chunk::read(dialect, data)?;
        if !chunk.is_error && chunk.usage.is_none() {
            self.alike.learn(data);
        }
        Some(chunk)
    }

    /// The event for the client; `None` if it is only usage that the client did not ask for.
    fn relay(&mut self, event: Bytes) -> Result<Option<Bytes>, &'static str> {
        const NO_CHUNK: &str = "sent an event that is no chunk";
        let dialect = self.account.dialect;
        let data = data_of(dialect, &event);
        let chunk = self.read(dialect, &data).ok_or(NO_CHUNK)?;
        if chunk.is_error {
            return Err("reported an error in mid-stream");
        }
        if turned_away(dialect, &data) {
            return Err("turned a part of the request away in mid-stream");
        }
        let Some(usage) = &chunk.usage else {
            if dialect == Dialect::Responses && chunk.is_last {
                return dialect::edit(dialect, &event, hide_hand_off).map(Some).ok_or(NO_CHUNK);
            }
            let Some(migration) = &mut self.migration else { return Ok(Some(event)) };
            return match migration.note(&event) {
                Some(told) => Ok(Some(told)),
                None if migration.is_converted() => Err("does not go on with an answer"),
                None => {
                    self.migration = None;
                    Ok(Some(event))
                }
            };
        };
        let told = match usage.is_final {
            false => match self.account.foretold(usage.raw) {
                None => return Ok(Some(event)),
                told => told,
            },
            true => {
                let whole = self.migration.as_ref();
                let whole = whole.and_then(|migration| migration.usage(usage.raw));
                self.account.settle(usage.raw, whole.as_deref(), self.tells_usage)
            }
        };
        if !self.tells_usage {
            return Ok(None);
        }
        let migration = self.migration.as_ref();
        let edited = dialect::edit(dialect, &event, |holder| {
            if let Some(told) = told {
                holder.set("usage", told);
            }
            hide_hand_off(holder);
            if let Some(migration) = migration {
                migration.unify(holder);
            }
        });
        edited.map(Some).ok_or(NO_CHUNK)
    }
}
