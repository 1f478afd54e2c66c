//! The connection cycle of a subscription: connect, follow, reconnect.

use bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until};

use super::super::decode::{DecodeError, DecodeLimits, Decoder, EventBatch};
use super::super::sequence::{Action, NumberedBatch, ReplayEnd, Sequencer};
use super::message::{self, ReplayMessage};
use super::replay::{ReplayClient, ReplayFailed};
use super::{ResetReason, Subscription, Update};
use crate::zmtp::{Connection, Role, WireError};

/// Maximum number of bytes of a message besides its payload: a topic and a number.
const ENVELOPE_BYTES: usize = 4 << 10;

/// Maximum size in bytes of a payload that is decoded at once; longer ones are decoded on another
/// thread.
const SHORT_PAYLOAD_BYTES: usize = 96 << 10;

/// Memory in bytes from which a decoded batch waits until all batches before it have been taken.
const LARGE_BATCH_BYTES: usize = 64 << 10;

/// Maximum size in bytes of a message with a payload within these limits.
pub(super) fn message_max_bytes(limits: &DecodeLimits) -> usize {
    limits.max_payload_bytes.saturating_add(ENVELOPE_BYTES)
}

/// The receiver of updates was dropped.
#[derive(Debug)]
pub(super) struct SinkClosed;

/// Whether to keep the connection.
#[derive(PartialEq)]
enum NextStep {
    Stay,
    Reconnect,
}

/// A running subscription.
pub(super) struct Session {
    subscription: Subscription,
    sink: mpsc::Sender<Update>,
    sequencer: Sequencer,
    decoder: Decoder,
    replay: ReplayClient,
    max_message_bytes: usize,
    /// When the stream counts as idle.
    idle_at: Option<Instant>,
    /// When a failed replay is repeated.
    retry_at: Option<Instant>,
    /// Whether the engine has sent anything on this connection.
    received_any: bool,
    /// The number of the request to deliver everything immediately, if there is one.
    ask: Option<u64>,
}

impl Session {
    pub(super) fn new(subscription: Subscription, sink: mpsc::Sender<Update>) -> Self {
        let max_message_bytes = message_max_bytes(&subscription.limits);
        let has_replay = subscription.replay_endpoint.is_some();
        Self {
            sequencer: Sequencer::new(has_replay, subscription.buffer.clone()),
            decoder: Decoder::new(subscription.limits.clone()),
            replay: ReplayClient::new(
                subscription.timing.replay_timeout,
                max_message_bytes,
                subscription.admits.clone(),
            ),
            max_message_bytes,
            idle_at: None,
            retry_at: None,
            received_any: false,
            ask: None,
            sink,
            subscription,
        }
    }

    /// Returns only when the receiver of updates was dropped.
    pub(super) async fn run(mut self) -> Result<(), SinkClosed> {
        let mut pause = self.subscription.timing.retry_min;
        let mut outage_reported = false;
        loop {
            let error = match self.connect().await {
                Ok(connection) => {
                    outage_reported = false;
                    self.received_any = false;
                    let error = self.follow(connection).await?;
                    // An engine that accepts connections and closes them does not shorten the
                    // pause.
                    if self.received_any {
                        pause = self.subscription.timing.retry_min;
                    }
                    error
                }
                Err(error) => error,
            };
            if !outage_reported {
                outage_reported = true;
                self.send(Update::Disconnected { error }).await?;
            }
            tokio::select! {
                () = sleep(pause) => {}
                () = self.sink.closed() => return Err(SinkClosed),
            }
            pause = (pause * 2).min(self.subscription.timing.retry_max);
        }
    }

    async fn connect(&mut self) -> Result<Connection, WireError> {
        let Subscription { events_endpoint, admits, topic, timing, .. } = &self.subscription;
        let (admits, timeout) = (admits.as_ref(), timing.connect_timeout);
        let (role, max_bytes) = (Role::Sub, self.max_message_bytes);
        let mut connection =
            Connection::open(events_endpoint, admits, role, max_bytes, timeout).await?;
        if let Some(connected) = &self.subscription.connected {
            connected.send_replace(true);
        }
        connection.subscribe(topic).await?;
        if let Some(pacing) = &self.subscription.pacing {
            connection.set_pace(pacing.pace);
        }
        Ok(connection)
    }

    /// Follows the stream until the connection ends; returns why it did.
    async fn follow(&mut self, mut live: Connection) -> Result<WireError, SinkClosed> {
        let mut actions = Vec::new();
        self.sequencer.connected(&mut actions);
        let ended = loop {
            if self.execute(&mut actions).await? == NextStep::Reconnect {
                break WireError::TimedOut;
            }
            if let Some(ask) = self.ask {
                match live.receive_now() {
                    Ok(Some(frames)) => self.live(frames, &mut actions).await?,
                    Ok(None) => {
                        self.ask = None;
                        self.send(Update::Fresh { ask }).await?;
                    }
                    Err(error) => break error,
                }
                continue;
            }
            // Messages that were read together are handled together, before other events are
            // polled.
            match live.message() {
                Ok(Some(frames)) => {
                    self.live(frames, &mut actions).await?;
                    continue;
                }
                Ok(None) => {}
                Err(error) => break error,
            }
            self.plan_retry();
            let (idle_at, retry_at) = (self.idle_at, self.retry_at);
            let asks = self.subscription.pacing.as_mut().map(|pacing| &mut pacing.asks);
            tokio::select! {
                message = live.receive() => match message {
                    Ok(frames) => self.live(frames, &mut actions).await?,
                    Err(error) => break error,
                },
                ask = asked(asks) => self.ask = Some(ask),
                replayed = self.replay.next() => {
                    self.received_any |= replayed.is_ok();
                    match replayed {
                    Ok(ReplayMessage::Batch(batch)) => self.sequencer.replayed(batch, &mut actions),
                    Ok(ReplayMessage::End) => {
                        self.sequencer.replay_ended(ReplayEnd::Complete, &mut actions);
                    }
                    Err(ReplayFailed) => {
                        self.sequencer.replay_ended(ReplayEnd::Failed, &mut actions);
                    }
                }},
                () = at(idle_at) => {
                    self.sequencer.check(&mut actions);
                    self.restart_idle_timer();
                }
                () = at(retry_at) => {
                    self.retry_at = None;
                    self.sequencer.retry(&mut actions);
                }
                () = self.sink.closed() => return Err(SinkClosed),
            }
        };
        self.replay.stop();
        self.sequencer.disconnected();
        Ok(ended)
    }

    async fn live(
        &mut self,
        frames: Vec<Bytes>,
        actions: &mut Vec<Action>,
    ) -> Result<(), SinkClosed> {
        match message::live(frames) {
            Ok(batch) => {
                self.received_any = true;
                let expected = self.sequencer.expected();
                let sequence = batch.sequence;
                self.sequencer.live(batch, actions);
                self.restart_idle_timer();
                match expected {
                    Some(expected) if sequence > expected => {
                        self.send(Update::Gap { expected, sequence }).await
                    }
                    _ => Ok(()),
                }
            }
            // If it was a batch, the next batch's number will show that it is missing.
            Err(error) => self.send(Update::Garbage { sequence: None, error }).await,
        }
    }

    async fn execute(&mut self, actions: &mut Vec<Action>) -> Result<NextStep, SinkClosed> {
        while !actions.is_empty() {
            let mut undecodable = None;
            for action in actions.drain(..) {
                match action {
                    Action::Deliver(batch) => {
                        let sequence = batch.sequence;
                        if !self.deliver(batch).await? {
                            undecodable = Some(sequence);
                        }
                    }
                    Action::Reset(reason) => {
                        if reason == ResetReason::EngineRestarted {
                            self.decoder.forget_groups();
                        }
                        self.send(Update::Reset { reason }).await?;
                    }
                    Action::Replay { from } => {
                        if let Some(endpoint) = &self.subscription.replay_endpoint {
                            self.replay.start(endpoint, from);
                        }
                    }
                    Action::Synced(outcome) => {
                        self.restart_idle_timer();
                        self.send(Update::Synced { outcome }).await?;
                    }
                    Action::Reconnect => return Ok(NextStep::Reconnect),
                }
            }
            if let Some(sequence) = undecodable {
                self.sequencer.undecodable(sequence, actions);
            }
        }
        Ok(NextStep::Stay)
    }

    /// Decodes and delivers a batch; returns whether that was possible. The changes of a batch that
    /// cannot be decoded are lost.
    async fn deliver(&mut self, batch: NumberedBatch) -> Result<bool, SinkClosed> {
        let NumberedBatch { sequence, payload } = batch;
        let decoded = match payload.len() <= SHORT_PAYLOAD_BYTES {
            true => self.decoder.decode(&payload),
            false => self.decode_elsewhere(payload).await?,
        };
        match decoded {
            Ok(batch) => {
                self.send_batch(sequence, batch).await?;
                Ok(true)
            }
            Err(error) => {
                let sequence = Some(sequence);
                self.send(Update::Garbage { sequence, error: error.into() }).await?;
                self.send(Update::Reset { reason: ResetReason::Garbage }).await?;
                Ok(false)
            }
        }
    }

    /// Decodes a payload on a thread for blocking work.
    async fn decode_elsewhere(
        &mut self,
        payload: Bytes,
    ) -> Result<Result<EventBatch, DecodeError>, SinkClosed> {
        let mut decoder = std::mem::take(&mut self.decoder);
        let decoding = spawn_blocking(move || {
            let decoded = decoder.decode(&payload);
            (decoder, decoded)
        });
        // It fails only if the decoder panics or the process ends; either ends the subscription.
        let (decoder, decoded) = decoding.await.map_err(|_| SinkClosed)?;
        self.decoder = decoder;
        Ok(decoded)
    }

    /// Delivers a batch. The sink counts batches, so that a large one is delivered only when no
    /// other batch waits there.
    async fn send_batch(&mut self, sequence: u64, batch: EventBatch) -> Result<(), SinkClosed> {
        let places = match batch.memory_bytes() < LARGE_BATCH_BYTES {
            true => 1,
            false => self.sink.max_capacity(),
        };
        let mut places = self.sink.reserve_many(places).await.map_err(|_| SinkClosed)?;
        let place = places.next().ok_or(SinkClosed)?;
        place.send(Update::Batch { sequence, batch });
        Ok(())
    }

    async fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        self.sink.send(update).await.map_err(|_| SinkClosed)
    }

    /// Sets the time of the next attempt while a failed replay has to be repeated.
    fn plan_retry(&mut self) {
        match self.sequencer.is_incomplete() {
            true => {
                let after = self.subscription.timing.replay_retry;
                self.retry_at.get_or_insert_with(|| Instant::now() + after);
            }
            false => self.retry_at = None,
        }
    }

    fn restart_idle_timer(&mut self) {
        self.idle_at = self.subscription.timing.idle_check.map(|after| Instant::now() + after);
    }
}

async fn asked(asks: Option<&mut watch::Receiver<u64>>) -> u64 {
    if let Some(asks) = asks
        && asks.changed().await.is_ok()
    {
        return *asks.borrow_and_update();
    }
    // All senders were dropped.
    std::future::pending().await
}

/// Waits for a time; forever if there is none.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}
