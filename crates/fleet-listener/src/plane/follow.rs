//! Follows a model's stream with a durable consumer, whose position the broker stores.
//!
//! The index is in memory, so a router that starts moves its position back to that of the stored
//! snapshots; afterwards the position is never moved back, not even after a lost connection.

use std::time::Duration;

use futures_util::StreamExt as _;
use splitrail_event_plane::async_nats::jetstream::consumer::{
    AckPolicy, DeliverPolicy, PullConsumer, pull,
};
use splitrail_event_plane::async_nats::jetstream::stream::{
    Config as StreamConfig, DiscardPolicy, State, StorageType,
};
use splitrail_event_plane::async_nats::jetstream::{self, object_store};
use splitrail_event_plane::names;
use tokio::time::sleep;

use super::model::PlaneModel;
use super::waiting::MessageHead;
use splitrail_config::model::Storage;

/// Number of messages requested from the broker together.
const BATCH: usize = 128;
/// Maximum number of delivered messages without an acknowledgement.
const UNACKNOWLEDGED_MAX: i64 = 1024;
/// Number of messages after which an acknowledgement is sent although more are waiting.
const ACKNOWLEDGE_EVERY: usize = 64;
/// Interval of the broker's heartbeats while it has no messages.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// How long a request for messages stays open.
const EXPIRES: Duration = Duration::from_secs(10);
/// How long the broker keeps the position of a router that is gone.
const POSITION_KEPT: Duration = Duration::from_secs(24 * 3600);
/// How long the broker keeps a snapshot that is not renewed.
const SNAPSHOTS_KEPT: Duration = Duration::from_secs(6 * 3600);
/// Maximum number of messages that a starting router reads again. A worker with more changes since
/// its snapshot needs a new snapshot.
const TAIL_MAX: u64 = 20_000;
/// Pause before trying again.
const PAUSE: Duration = Duration::from_millis(200);

/// Why the consumer must be opened again.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Follows the stream of a model, and starts again after each failure. Never ends.
pub(super) async fn run(model: &PlaneModel) {
    let mut follower = Follower { model, seen: None, unacknowledged: 0 };
    loop {
        model.broker.until_connected().await;
        let ended = follower.follow().await;
        follower.forget_pending();
        if let Err(error) = ended {
            // A lost connection is logged by the connection itself.
            match model.broker.is_connected() {
                true => {
                    tracing::warn!(model = model.name, %error, "the event stream is interrupted")
                }
                false => {
                    tracing::debug!(model = model.name, %error, "the event stream is interrupted")
                }
            }
        }
        sleep(PAUSE).await;
    }
}

struct Follower<'m> {
    model: &'m PlaneModel,
    /// The stream's number of the last message received; `None` before the consumer is first
    /// opened.
    seen: Option<u64>,
    unacknowledged: usize,
}

impl Follower<'_> {
    /// Follows the stream until a failure.
    async fn follow(&mut self) -> Result<(), Failure> {
        let state = self.ensure_stream().await?;
        let consumer = self.consumer(&state).await?;
        self.set_pending(consumer.cached_info().num_pending);
        let mut messages = consumer
            .stream()
            .max_messages_per_batch(BATCH)
            .expires(EXPIRES)
            .heartbeat(HEARTBEAT)
            .messages()
            .await?;
        let mut connected = self.model.broker.connected.clone();
        loop {
            let message = tokio::select! {
                message = messages.next() => message,
                _ = connected.wait_for(|connected| !*connected) => return Ok(()),
            };
            match message {
                Some(message) => self.take(message?).await?,
                None => return Ok(()),
            }
        }
    }

    /// Creates the stream and the snapshot store if they do not exist. Returns the state of the
    /// stream.
    async fn ensure_stream(&self) -> Result<State, Failure> {
        let (context, config) = (&self.model.broker.context, &self.model.config);
        let storage = match config.storage {
            Storage::File => StorageType::File,
            Storage::Memory => StorageType::Memory,
        };
        let wanted = StreamConfig {
            name: names::stream(&self.model.name),
            description: Some(format!("KV events of {}", self.model.name)),
            subjects: vec![names::kv_of_all(&self.model.name)],
            max_bytes: i64::try_from(config.stream_max_bytes).unwrap_or(i64::MAX),
            max_age: config.stream_max_age,
            discard: DiscardPolicy::Old,
            storage,
            num_replicas: config.stream_replicas,
            ..StreamConfig::default()
        };
        let stream = match context.get_stream(&wanted.name).await {
            Ok(stream) => {
                let found = &stream.cached_info().config;
                let limits = |config: &StreamConfig| (config.max_bytes, config.max_age);
                if limits(found) != limits(&wanted) {
                    let (max_bytes, max_age) = limits(&wanted);
                    context
                        .update_stream(StreamConfig { max_bytes, max_age, ..found.clone() })
                        .await?;
                }
                stream
            }
            Err(_) => context.create_stream(wanted).await?,
        };
        let bucket = names::bucket(&self.model.name);
        if context.get_object_store(&bucket).await.is_err() {
            let made = context.create_object_store(object_store::Config {
                bucket,
                max_age: SNAPSHOTS_KEPT,
                storage,
                num_replicas: config.stream_replicas,
                ..object_store::Config::default()
            });
            made.await?;
        }
        Ok(stream.cached_info().state.clone())
    }

    async fn consumer(&mut self, state: &State) -> Result<PullConsumer, Failure> {
        let (context, durable) = (&self.model.broker.context, &self.model.durable);
        let stream = context.get_stream(names::stream(&self.model.name)).await?;
        let kept = stream.get_consumer::<pull::Config>(durable).await;
        let start = match self.seen {
            // A stream that ends before the last message seen was created again, or has lost
            // messages.
            Some(seen) if seen <= state.last_sequence => {
                if let Ok(consumer) = kept {
                    return Ok(consumer);
                }
                seen + 1
            }
            Some(_) => state.first_sequence,
            None => {
                let oldest = self.model.oldest_snapshot().await;
                let oldest =
                    oldest.map_or(state.last_sequence, |oldest| oldest.min(state.last_sequence));
                (oldest + 1).max((state.last_sequence + 1).saturating_sub(TAIL_MAX))
            }
        };
        if kept.is_ok() {
            stream.delete_consumer(durable).await?;
        }
        let start_sequence = start.max(1);
        let consumer = stream
            .create_consumer(pull::Config {
                durable_name: Some(durable.clone()),
                deliver_policy: DeliverPolicy::ByStartSequence { start_sequence },
                ack_policy: AckPolicy::All,
                max_ack_pending: UNACKNOWLEDGED_MAX,
                filter_subject: names::kv_of_all(&self.model.name),
                inactive_threshold: POSITION_KEPT,
                ..pull::Config::default()
            })
            .await?;
        tracing::info!(model = self.model.name, start_sequence, "following the event stream");
        self.seen = Some(start_sequence - 1);
        Ok(consumer)
    }

    async fn take(&mut self, message: jetstream::Message) -> Result<(), Failure> {
        let info = message.info()?;
        let (number, pending) = (info.stream_sequence, info.pending);
        self.set_pending(pending);
        self.dispatch(&message);
        self.seen = Some(number.max(self.seen.unwrap_or_default()));
        self.unacknowledged += 1;
        if pending == 0 || self.unacknowledged >= ACKNOWLEDGE_EVERY {
            message.ack().await?;
            self.unacknowledged = 0;
        }
        self.model.slots.room().await;
        Ok(())
    }

    /// Shows how many messages of the stream are still to be read.
    fn set_pending(&self, messages: u64) {
        let gauge = &self.model.context.cluster.metrics.event_plane_pending;
        let messages = i64::try_from(messages).unwrap_or(i64::MAX);
        gauge.with_label_values(&[self.model.name.as_str()]).set(messages);
    }

    /// Shows no number while the stream is not followed: the last one would look like the present
    /// one.
    fn forget_pending(&self) {
        let gauge = &self.model.context.cluster.metrics.event_plane_pending;
        // No message may have arrived yet.
        let _absent = gauge.remove_label_values(&[self.model.name.as_str()]);
    }

    /// Puts a message into the slot of its worker, if subject and content name the same worker.
    fn dispatch(&self, message: &jetstream::Message) {
        let token = names::last(&message.subject);
        let Some(head) = MessageHead::read(&message.payload) else {
            self.model.count_refused("nonsense");
            return;
        };
        if names::token(&head.worker_id) != token {
            self.model.count_refused("spoofed");
            return;
        }
        let Some(slot) = self.model.slots.slot(token) else {
            self.model.count_refused("full");
            return;
        };
        self.model.count_message("events");
        if slot.push(head.into_waiting(&message.payload)) {
            self.model.count_refused("full");
        }
    }
}
