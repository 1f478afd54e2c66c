//! The life of a subscription: connect, follow, connect again.

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use super::super::events::Decoder;
use super::super::sequence::{Action, Numbered, ReplayEnd, Sequencer};
use super::message::{self, Replayed};
use super::replay::{ReplayClient, ReplayFailed};
use super::{ResetReason, Subscription, Update};
use crate::zmtp::{Connection, Role, WireError};

/// Room in a message for what is not payload: a topic and a number.
const ENVELOPE_BYTES: usize = 4 << 10;

/// Nobody listens any more.
#[derive(Debug)]
pub(super) struct SinkClosed;

/// Whether to stay with a connection.
#[derive(PartialEq)]
enum Next {
    Stay,
    Reconnect,
}

/// A subscription at work.
pub(super) struct Session {
    subscription: Subscription,
    sink: mpsc::Sender<Update>,
    sequencer: Sequencer,
    decoder: Decoder,
    replay: ReplayClient,
    max_message_bytes: usize,
    /// When the stream will have been idle for long.
    idle_at: Option<Instant>,
    /// Whether the engine has said anything on this connection.
    heard: bool,
    /// What is there is to be delivered at once, and this then to be said.
    ask: Option<u64>,
}

impl Session {
    pub(super) fn new(subscription: Subscription, sink: mpsc::Sender<Update>) -> Self {
        let max_message_bytes =
            subscription.limits.max_payload_bytes.saturating_add(ENVELOPE_BYTES);
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
            heard: false,
            ask: None,
            sink,
            subscription,
        }
    }

    /// Never returns while somebody listens.
    pub(super) async fn run(mut self) -> Result<(), SinkClosed> {
        let mut pause = self.subscription.timing.retry_min;
        let mut outage_said = false;
        loop {
            let error = match self.connect().await {
                Ok(connection) => {
                    outage_said = false;
                    self.heard = false;
                    let error = self.follow(connection).await?;
                    // One that accepts and closes again is not worth a quick return.
                    if self.heard {
                        pause = self.subscription.timing.retry_min;
                    }
                    error
                }
                Err(error) => error,
            };
            if !outage_said {
                outage_said = true;
                self.say(Update::Disconnected { error }).await?;
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
            if self.execute(&mut actions).await? == Next::Reconnect {
                break WireError::TimedOut;
            }
            if let Some(ask) = self.ask {
                match live.receive_now() {
                    Ok(Some(frames)) => self.live(frames, &mut actions).await?,
                    Ok(None) => {
                        self.ask = None;
                        self.say(Update::Fresh { ask }).await?;
                    }
                    Err(error) => break error,
                }
                continue;
            }
            // What was read at once is dealt with at once, before it is looked who else has news.
            match live.message() {
                Ok(Some(frames)) => {
                    self.live(frames, &mut actions).await?;
                    continue;
                }
                Ok(None) => {}
                Err(error) => break error,
            }
            let idle_at = self.idle_at;
            let asks = self.subscription.pacing.as_mut().map(|pacing| &mut pacing.asks);
            tokio::select! {
                message = live.receive() => match message {
                    Ok(frames) => self.live(frames, &mut actions).await?,
                    Err(error) => break error,
                },
                ask = asked(asks) => self.ask = Some(ask),
                replayed = self.replay.next() => {
                    self.heard |= replayed.is_ok();
                    match replayed {
                    Ok(Replayed::Batch(batch)) => self.sequencer.replayed(batch, &mut actions),
                    Ok(Replayed::End) => {
                        self.sequencer.replay_ended(ReplayEnd::Complete, &mut actions);
                    }
                    Err(ReplayFailed) => {
                        self.sequencer.replay_ended(ReplayEnd::Failed, &mut actions);
                    }
                }},
                () = idle(idle_at) => {
                    self.sequencer.check(&mut actions);
                    self.restart_idle_timer();
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
        frames: Vec<bytes::Bytes>,
        actions: &mut Vec<Action>,
    ) -> Result<(), SinkClosed> {
        match message::live(frames) {
            Ok(batch) => {
                self.heard = true;
                let expected = self.sequencer.expected();
                let sequence = batch.sequence;
                self.sequencer.live(batch, actions);
                self.restart_idle_timer();
                match expected {
                    Some(expected) if sequence > expected => {
                        self.say(Update::Gap { expected, sequence }).await
                    }
                    _ => Ok(()),
                }
            }
            // If it was a batch, the next one's number will show that it is missing.
            Err(error) => self.say(Update::Garbage { sequence: None, error }).await,
        }
    }

    async fn execute(&mut self, actions: &mut Vec<Action>) -> Result<Next, SinkClosed> {
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
                        self.say(Update::Reset { reason }).await?;
                    }
                    Action::Replay { from } => {
                        if let Some(endpoint) = &self.subscription.replay_endpoint {
                            self.replay.start(endpoint, from);
                        }
                    }
                    Action::Synced(outcome) => {
                        self.restart_idle_timer();
                        self.say(Update::Synced { outcome }).await?;
                    }
                    Action::Reconnect => return Ok(Next::Reconnect),
                }
            }
            if let Some(sequence) = undecodable {
                self.sequencer.undecodable(sequence, actions);
            }
        }
        Ok(Next::Stay)
    }

    /// Decodes a batch and hands it on; says whether that could be done. What
    /// cannot be decoded is knowledge lost.
    async fn deliver(&mut self, batch: Numbered) -> Result<bool, SinkClosed> {
        let Numbered { sequence, payload } = batch;
        match self.decoder.decode(&payload) {
            Ok(batch) => {
                self.say(Update::Batch { sequence, batch }).await?;
                Ok(true)
            }
            Err(error) => {
                let sequence = Some(sequence);
                self.say(Update::Garbage { sequence, error: error.into() }).await?;
                self.say(Update::Reset { reason: ResetReason::Garbage }).await?;
                Ok(false)
            }
        }
    }

    async fn say(&mut self, update: Update) -> Result<(), SinkClosed> {
        self.sink.send(update).await.map_err(|_| SinkClosed)
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
    // Nobody is there to ask.
    std::future::pending().await
}

async fn idle(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
