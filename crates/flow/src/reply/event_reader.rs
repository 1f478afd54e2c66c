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
use splitrail_fleet::lifecycle::Departures;
use splitrail_fleet::state::WorkerState;
use splitrail_reply::dialect::data_of;
use tokio::sync::watch;

/// An engine may send comments without any event for this many times the idle timeout. Comments
/// keep the connection open but are no progress.
const COMMENTS_PATIENCE: u32 = 10;

/// How long a stream of a worker that has left service may be silent before it counts as lost: what
/// another request has found may be a fault of its connection alone.
const SILENCE_MAX: Duration = Duration::from_secs(1);

/// Completes when a worker is down or withdrawn and the stream, from which nothing is read meanwhile,
/// has been silent for a moment.
async fn has_gone(departures: &mut watch::Receiver<Departures>, worker: &Worker) {
    let before = departures.borrow_and_update().gone;
    let is_gone = |now: &Departures| now.gone != before;
    let is_out = || matches!(worker.state(), WorkerState::Down | WorkerState::Unready);
    if !is_out() && departures.wait_for(is_gone).await.is_err() {
        // The worker, and with it the sender, is kept by the reader.
        std::future::pending::<()>().await;
    }
    loop {
        tokio::time::sleep(SILENCE_MAX).await;
        if is_out() {
            return;
        }
        // It is back.
        if departures.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
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
    departures: watch::Receiver<Departures>,
    done: bool,
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
        let splitter = Splitter::new(client.reply_max_bytes());
        let departures = worker.health.lifecycle.departures();
        let patience = client.timers().of(idle);
        let dialect = Dialect::Chunks;
        let Response { body, proof, .. } = response;
        let (body, proof) = (Some(body), Some(proof));
        let memory = client.memory();
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
            departures,
            done: false,
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

    /// The next event; `None` once the engine has reported the end. A stream that ends without that
    /// report has broken off.
    ///
    /// # Errors
    /// If the connection breaks, an event is too long, no event arrives in time, or the first event
    /// is for another request.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        let mut has_read = false;
        while !self.done {
            match self.splitter.next_piece() {
                Ok(Some(Piece::Data(event))) => {
                    self.waits_since = None;
                    self.prove(&event)?;
                    return Ok(Some(event));
                }
                Ok(Some(Piece::Done)) => {
                    self.done = true;
                    break;
                }
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
            let Some(body) = &mut self.body else { return Ok(None) };
            let frame = async {
                tokio::select! {
                    biased;
                    frame = body.frame() => Some(frame),
                    () = has_gone(&mut self.departures, &self.worker) => None,
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
                    return Err(Error::new(ErrorKind::EngineTimeout, message));
                }
                Ok(Some(Ok(frame))) => {
                    if let Some(data) = frame.data_ref() {
                        self.splitter.push(data);
                        has_read = true;
                        self.charge_for_long()?;
                    }
                }
                Ok(Some(Err(ReplyError::Malformed(malformed)))) => {
                    return Err(Error::engine(self.worker.id(), &malformed.to_string()));
                }
                Ok(Some(Err(ReplyError::Closed)) | None) => {
                    return Err(Error::engine(self.worker.id(), "broke off in mid-stream"));
                }
            }
        }
        Ok(None)
    }

    /// The error for a stream whose worker is out of service.
    fn lost(&self) -> Error {
        let why = self.worker.health.lifecycle.since().why;
        let message = format!("worker {} left service in mid-stream: {why}", self.worker.id());
        Error::new(ErrorKind::EngineLost, message)
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
