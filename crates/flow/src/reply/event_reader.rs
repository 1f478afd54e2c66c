//! Reads the events of a streamed reply of an engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use prometheus::IntCounterVec;
use splitrail_engine::dialect::Dialect;

use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::memory_budget::{Charge, MemoryBudget, shed};
use splitrail_engine::sse::{Piece, Splitter, SseError};
use splitrail_engine_client::{
    EngineBody, EngineClient, Proof, ReplyError, Response, Timer, too_large,
};
use splitrail_fleet::Worker;
use splitrail_fleet::state::WorkerState;
use splitrail_reply::dialect::data_of;
use tokio::sync::watch;

/// An engine may send comments without any event for this many times the idle timeout. Comments
/// keep the connection open but are no progress.
const COMMENTS_PATIENCE: u32 = 10;

/// How long a stream of a worker that has left service may be silent before it counts as lost: what
/// another request has found may be a fault of its connection alone.
const SILENCE_MAX: Duration = Duration::from_secs(1);

/// Completes when a worker has left service since it was `gone` so often, and its stream, from which
/// nothing is read meanwhile, has been silent for a moment.
async fn has_gone(departures: &mut watch::Receiver<u32>, gone: u32, worker: &Worker) {
    let is_gone = |now: &u32| *now != gone;
    // The worker, and with it the sender, is kept by the reader.
    while departures.wait_for(is_gone).await.is_ok() {
        tokio::time::sleep(SILENCE_MAX).await;
        if matches!(worker.state(), WorkerState::Down | WorkerState::Unready) {
            return;
        }
    }
}

/// What comes next in a streamed reply.
pub(crate) enum NextRead {
    /// An event.
    Event(Bytes),
    /// A comment, which keeps the connection open: one line that begins with `:`.
    Comment(Bytes),
}

/// Reads the events of a streamed reply of an engine.
pub(crate) struct EventReader {
    body: Option<EngineBody>,
    /// The proof that the reply belongs to the request, checked with the first event; `None` after
    /// the check.
    proof: Option<Proof>,
    /// The memory of a long event that has not arrived completely, and of the events that are held
    /// back.
    charge: Charge,
    /// The bytes of events that were read and are not passed on yet.
    held_back_bytes: usize,
    memory_max_bytes: usize,
    shed: IntCounterVec,
    /// When bytes that are no event began to arrive since the last event.
    waits_since: Option<Instant>,
    splitter: Splitter,
    dialect: Dialect,
    worker: Arc<Worker>,
    patience: Timer,
    /// Follows how often the worker leaves service.
    departures: watch::Receiver<u32>,
    /// How often the worker had left service when the reply began.
    gone: u32,
    done: bool,
    /// Whether the reply is complete if its body ends, although the engine has not said so.
    may_end: bool,
    /// Whether the body has ended.
    has_ended: bool,
}

impl EventReader {
    /// Reads events of at most the size that the client allows for a reply, at most `idle` apart. A
    /// long event is charged to `budget` while it arrives.
    pub(crate) fn new(
        client: &EngineClient,
        response: Response,
        worker: Arc<Worker>,
        idle: Duration,
        budget: &Arc<MemoryBudget>,
    ) -> Self {
        let splitter = Splitter::new(client.reply_max_bytes);
        let departures = worker.health.lifecycle.departures();
        let gone = *departures.borrow();
        let patience = client.timers.of(idle);
        let dialect = Dialect::Chunks;
        let Response { body, proof, .. } = response;
        let (body, proof) = (Some(body), Some(proof));
        let memory = &client.memory;
        let (charge, memory_max_bytes) = (budget.charge(), memory.max_bytes);
        Self {
            body,
            proof,
            charge,
            held_back_bytes: 0,
            memory_max_bytes,
            shed: memory.shed.clone(),
            waits_since: None,
            splitter,
            dialect,
            worker,
            patience,
            gone,
            departures,
            done: false,
            may_end: false,
            has_ended: false,
        }
    }

    /// The same reader for another dialect. If its events have names, they are returned unchanged
    /// with all their lines.
    pub(crate) fn of_dialect(mut self, dialect: Dialect, max_bytes: usize) -> Self {
        if dialect.names_events() {
            self.splitter = Splitter::of_whole_events(max_bytes);
        }
        Self { dialect, ..self }
    }

    /// The same reader with another maximum time between two pieces of the stream.
    pub(crate) fn with_idle(mut self, idle: Duration) -> Self {
        self.patience.set_limit(idle);
        self
    }

    /// The worker whose reply it is.
    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }

    /// Makes the connection available again, once the engine has ended its body.
    pub(crate) fn give_back(&mut self, client: &EngineClient) {
        if let Some(body) = self.body.take() {
            client.finish(body);
        }
    }

    /// Notes that the event that was read last is the end of the reply: no further one is read.
    pub(crate) fn end(&mut self) {
        self.done = true;
    }

    /// Notes that all choices have ended: some engines say no more, and end the body.
    pub(crate) fn allow_end(&mut self) {
        self.may_end = true;
    }

    /// The next event, as by [`next`](Self::next); comments are skipped.
    pub(crate) async fn next_event(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            match self.next().await? {
                Some(NextRead::Comment(_)) => {}
                Some(NextRead::Event(event)) => return Ok(Some(event)),
                None => return Ok(None),
            }
        }
    }

    /// The next event or comment; `None` once the engine has reported the end. A stream that ends
    /// without that report has broken off, unless it [may end](Self::allow_end) and its body is
    /// complete.
    ///
    /// # Errors
    /// If the connection breaks, an event is too long, no event arrives in time, or the first event
    /// is for another request.
    pub(crate) async fn next(&mut self) -> Result<Option<NextRead>, Error> {
        let mut has_read = false;
        while !self.done {
            match self.splitter.next_piece() {
                Ok(Some(Piece::Data(event))) => {
                    self.waits_since = None;
                    self.prove(&event)?;
                    return Ok(Some(NextRead::Event(event)));
                }
                Ok(Some(Piece::Comment(comment))) => {
                    self.wait_on()?;
                    return Ok(Some(NextRead::Comment(comment)));
                }
                Ok(Some(Piece::Done)) => {
                    self.done = true;
                    break;
                }
                Ok(None) if self.has_ended => return self.end_of_body(),
                // Only after a read can bytes have arrived that are no event.
                Ok(None) if has_read => self.wait_on()?,
                Ok(None) => {}
                Err(SseError::TooLong) => return Err(too_large("limits.engine_reply_size_max")),
                Err(SseError::Comments) => return Err(self.only_comments()),
                Err(SseError::CarriageReturn) => {
                    let what = "sent an event with a carriage return that ends no line";
                    return Err(Error::engine(self.worker.id(), what));
                }
            }
            has_read |= self.read_piece().await?;
        }
        Ok(None)
    }

    /// The next event of what has arrived already; `None` if there is none, or it is for another
    /// request.
    pub(crate) fn arrived(&mut self) -> Option<Bytes> {
        while !self.done {
            match self.splitter.next_piece() {
                Ok(Some(Piece::Data(event))) => {
                    let is_own = self.prove(&event).is_ok();
                    self.done = !is_own;
                    return Some(event).filter(|_| is_own);
                }
                Ok(Some(Piece::Comment(_))) => {}
                Ok(Some(Piece::Done) | None) | Err(_) => self.done = true,
            }
        }
        None
    }

    /// The error for a stream whose worker is out of service.
    fn lost(&self) -> Error {
        let why = self.worker.health.lifecycle.since().why;
        let message = format!("worker {} left service in mid-stream: {why}", self.worker.id());
        Error::new(ErrorKind::EngineLost, message)
    }

    /// What it means that the body has ended as HTTP ends it, without a report of the engine.
    fn end_of_body(&self) -> Result<Option<NextRead>, Error> {
        if self.may_end { Ok(None) } else { Err(self.broken_off()) }
    }

    fn broken_off(&self) -> Error {
        Error::engine(self.worker.id(), "broke off in mid-stream")
    }

    /// Reads the next piece of the body. Returns whether bytes have arrived.
    async fn read_piece(&mut self) -> Result<bool, Error> {
        let Some(body) = &mut self.body else {
            self.done = true;
            return Ok(false);
        };
        let (departures, gone, worker) = (&mut self.departures, self.gone, &self.worker);
        let frame = async {
            tokio::select! {
                biased;
                frame = body.frame() => Some(frame),
                () = has_gone(departures, gone, worker) => None,
            }
        };
        let frame = match self.patience.bound(frame).await {
            Ok(None) => return Err(self.lost()),
            Ok(Some(frame)) => Ok(frame),
            Err(late) => Err(late),
        };
        match frame {
            Err(_) => {
                let message = format!("worker {} fell silent in mid-stream", self.worker.id());
                Err(Error::new(ErrorKind::EngineTimeout, message).of_silent_stream())
            }
            Ok(Some(Ok(frame))) => {
                let Some(data) = frame.data_ref() else { return Ok(false) };
                self.splitter.push(data);
                self.charge_for_long()?;
                Ok(true)
            }
            Ok(Some(Err(ReplyError::Malformed(malformed)))) => {
                Err(Error::engine(self.worker.id(), &malformed.to_string()))
            }
            Ok(Some(Err(ReplyError::Closed))) => Err(self.broken_off()),
            Ok(None) => {
                self.splitter.end();
                self.has_ended = true;
                Ok(false)
            }
        }
    }

    /// Checks with the first event that the reply belongs to the request.
    fn prove(&mut self, event: &Bytes) -> Result<(), Error> {
        if let Some(proof) = self.proof.take() {
            proof.check(&*self.worker, &data_of(self.dialect, event))?;
            if let Some(body) = &mut self.body {
                body.prove();
            }
        }
        Ok(())
    }

    /// Notes that an event that was read is not passed on yet: its memory stays charged.
    pub(crate) fn hold_back(&mut self, event: &Bytes) {
        self.held_back_bytes += event.len();
    }

    /// Notes that an event that was held back is passed on.
    pub(crate) fn pass_on(&mut self, event: &Bytes) {
        self.held_back_bytes = self.held_back_bytes.saturating_sub(event.len());
    }

    /// Charges the memory of a long event that has not arrived completely, in steps as it grows, and
    /// of the events that are held back.
    fn charge_for_long(&mut self) -> Result<(), Error> {
        const FREE_BYTES: usize = 64 << 10;
        let held = self.splitter.held_bytes() + self.held_back_bytes;
        let charged = self.charge.bytes();
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
