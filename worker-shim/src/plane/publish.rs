//! Publishes changes to the stream. Each message is acknowledged before the next one is sent.
//! Unpublished changes stay in the mirror's ring, whose size is limited. If the ring loses
//! changes that were not published, a snapshot replaces them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use splitrail_event_plane::names;
use splitrail_proto::v1::{Events, PlaneEvents};
use splitrail_settings::log_throttle::KeyedLogThrottle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::session::PlaneSession;
use crate::mirror::ChangePosition;

/// Size in bytes from which a message gets no further change. The last change may exceed it.
const MESSAGE_BYTES: usize = 256 << 10;
/// Published bytes after which a snapshot is stored, so that routers have less to replay.
const SNAPSHOT_AFTER_BYTES: usize = 4 << 20;
/// Timeout for the broker's acknowledgement of a message.
const ACKNOWLEDGE_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay after the first failure. It doubles with each failure,
const RETRY_MIN: Duration = Duration::from_millis(50);
/// up to this limit.
const RETRY_MAX: Duration = Duration::from_secs(1);
/// Maximum time for which the first snapshot waits until the mirror has caught up with the
/// engine.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// Publishes changes. Never ends.
pub(super) async fn run(plane: &PlaneSession) {
    if plane.capabilities.borrow().publishes_kv_events.unwrap_or(true) {
        let mut caught_up = plane.mirror.caught_up();
        let _in_step = timeout(CATCH_UP_TIMEOUT, caught_up.wait_for(|yes| *yes)).await;
    }
    let mut publisher = Publisher {
        plane,
        subject: names::kv(plane.model_and_worker().0, plane.model_and_worker().1),
        position: plane.mirror.position(),
        stored: plane.stored.subscribe(),
        log_throttle: KeyedLogThrottle::default(),
    };
    loop {
        let at = publisher.store_first_snapshot().await;
        publisher.publish_changes(at).await;
        plane.config.status.update(|status| status.losses += 1);
        if publisher.log_throttle.may_log("lost") {
            tracing::warn!("changes were lost before they were published: storing a snapshot");
        }
    }
}

/// Publishes the changes of one worker.
struct Publisher<'p> {
    plane: &'p PlaneSession,
    subject: String,
    position: watch::Receiver<ChangePosition>,
    stored: watch::Receiver<Option<ChangePosition>>,
    log_throttle: KeyedLogThrottle,
}

impl Publisher<'_> {
    /// Stores a snapshot and records its mirror. Returns its position.
    async fn store_first_snapshot(&mut self) -> ChangePosition {
        self.plane.published.send_modify(|published| published.position = None);
        let mut delay = RETRY_MIN;
        loop {
            self.plane.broker.until_connected().await;
            match self.plane.store_snapshot().await {
                Ok((at, mirror_id)) => {
                    self.plane.published.send_modify(|published| published.mirror_id = mirror_id);
                    return at;
                }
                Err(error) => self.report_failure("snapshot", &error),
            }
            sleep(delay).await;
            delay = (delay * 2).min(RETRY_MAX);
        }
    }

    /// Publishes the changes after `at` until changes are lost.
    async fn publish_changes(&mut self, mut at: ChangePosition) {
        loop {
            self.position.mark_unchanged();
            let Some(events) = self.next_changes(at) else { return };
            let snapshot = *self.stored.borrow_and_update();
            let snapshot = snapshot.filter(|stored| stored.generation == at.generation);
            let (last, mirror_id) = {
                let published = self.plane.published.borrow();
                let last = events.last().map_or(at.sequence, |events| events.sequence);
                (last, published.mirror_id.clone())
            };
            let message = PlaneEvents {
                worker_id: self.plane.config.worker_id.clone(),
                instance_id: self.plane.instance_id.clone(),
                mirror_id,
                events: events.into_iter().map(Arc::unwrap_or_clone).collect(),
                snapshot_sequence: snapshot.map(|stored| stored.sequence),
            };
            if !self.publish(message.encode_to_vec().into(), at.generation).await {
                return;
            }
            at.sequence = last;
            self.record_published(at);
            tokio::select! {
                _ = self.position.wait_for(|position| *position > at) => {}
                _ = self.stored.changed() => self.stored.mark_changed(),
            }
        }
    }

    /// Returns the next changes that fit into a message, or `None` if they are lost.
    fn next_changes(&self, at: ChangePosition) -> Option<Vec<Arc<Events>>> {
        let (mut events, mut bytes, mut from) = (Vec::new(), 0, at.sequence);
        while bytes < MESSAGE_BYTES {
            let more = self.plane.mirror.after(at.generation, from).ok()?;
            if more.is_empty() {
                break;
            }
            for change in more {
                if bytes >= MESSAGE_BYTES {
                    break;
                }
                bytes += change.encoded_len();
                from = change.sequence;
                events.push(change);
            }
        }
        Some(events)
    }

    /// Publishes one message, and retries until it succeeds. Returns `false` if a new mirror has
    /// replaced the one that the message belongs to.
    async fn publish(&mut self, payload: Bytes, generation: u64) -> bool {
        let length = payload.len();
        let mut delay = RETRY_MIN;
        loop {
            self.plane.broker.until_connected().await;
            let sending = async {
                let context = &self.plane.broker.context;
                let sent = context.publish(self.subject.clone(), payload.clone()).await;
                sent.map_err(|error| error.to_string())?.await.map_err(|error| error.to_string())
            };
            let error = match timeout(ACKNOWLEDGE_TIMEOUT, sending).await {
                Ok(Ok(acknowledged)) => {
                    self.plane.published.send_modify(|published| {
                        published.stream_sequence = acknowledged.sequence;
                        published.bytes += length;
                        published.stuck_since = None;
                    });
                    return true;
                }
                Ok(Err(error)) => error,
                Err(_) => "no acknowledgement in time".to_owned(),
            };
            self.report_failure("publish", &error);
            if self.plane.mirror.id().0 != generation {
                return false;
            }
            self.plane.published.send_modify(|published| {
                published.stuck_since.get_or_insert_with(Instant::now);
            });
            sleep(delay).await;
            delay = (delay * 2).min(RETRY_MAX);
        }
    }

    fn record_published(&mut self, at: ChangePosition) {
        let mut is_long = false;
        let mut is_first = false;
        self.plane.published.send_modify(|published| {
            is_first = published.position.replace(at).is_none();
            is_long = published.bytes >= SNAPSHOT_AFTER_BYTES;
            if is_long {
                published.bytes = 0;
            }
        });
        if is_long {
            self.plane.request_snapshot();
        }
        if is_first {
            self.plane.hello_requested.notify_one();
        }
        let lag = self.position.borrow().sequence.saturating_sub(at.sequence);
        self.plane.config.status.update(|status| {
            (status.published_sequence, status.lag) = (at.sequence, lag);
        });
    }

    fn report_failure(&mut self, what: &'static str, error: &dyn std::fmt::Display) {
        self.plane.record_failure(what, error);
        if self.log_throttle.may_log(what) {
            tracing::warn!(what, %error, "an operation at the broker failed: retrying");
        }
    }
}
