//! Changes into the stream: one message after another, each acknowledged before the next.
//! What waits meanwhile waits in the mirror's ring, which has a bound; where that was not
//! enough, a snapshot leads on.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use splitrail_event_plane::names;
use splitrail_proto::v1::{Events, PlaneEvents};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::Plane;
use crate::mirror::{ChangePosition, KeyedLogThrottle};

/// Bytes of changes after which a message is full; the last of them may be as long again.
const MESSAGE_BYTES: usize = 256 << 10;
/// Bytes in the stream after which a snapshot shortens the way.
const SNAPSHOT_BYTES: usize = 4 << 20;
/// How long the broker may take to acknowledge a message.
const ACKNOWLEDGED: Duration = Duration::from_secs(2);
/// Backoff after a failure; it doubles with each ...
const RETRY_MIN: Duration = Duration::from_millis(50);
/// ... up to this.
const RETRY_MAX: Duration = Duration::from_secs(1);
/// How long the first snapshot waits for the mirror to be in step with the engine.
const IN_STEP: Duration = Duration::from_secs(5);

/// Publishes. Never ends.
pub(super) async fn run(plane: &Plane) {
    if plane.capabilities.borrow().publishes_kv_events.unwrap_or(true) {
        let mut caught_up = plane.mirror.caught_up();
        let _in_step = timeout(IN_STEP, caught_up.wait_for(|yes| *yes)).await;
    }
    let mut publisher = Publisher {
        plane,
        subject: names::kv(plane.names().0, plane.names().1),
        position: plane.mirror.position(),
        stored: plane.stored.subscribe(),
        log_throttle: KeyedLogThrottle::default(),
    };
    loop {
        let at = publisher.begin().await;
        publisher.go_on(at).await;
        plane.config.status.update(|status| status.losses += 1);
        if publisher.log_throttle.may_log("lost") {
            tracing::warn!("changes are lost to the event plane: routers get a snapshot");
        }
    }
}

struct Publisher<'p> {
    plane: &'p Plane,
    subject: String,
    position: watch::Receiver<ChangePosition>,
    stored: watch::Receiver<Option<ChangePosition>>,
    log_throttle: KeyedLogThrottle,
}

impl Publisher<'_> {
    /// Stores everything that is held now, and says so.
    async fn begin(&mut self) -> ChangePosition {
        self.plane.published.send_modify(|published| published.position = None);
        let mut pause = RETRY_MIN;
        loop {
            self.plane.broker.until_connected().await;
            match self.plane.store_snapshot().await {
                Ok((at, mirror_id)) => {
                    self.plane.published.send_modify(|published| published.mirror_id = mirror_id);
                    return at;
                }
                Err(error) => self.failed("snapshot", &error),
            }
            sleep(pause).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    /// Publishes what follows, until that is not there any more.
    async fn go_on(&mut self, mut at: ChangePosition) {
        loop {
            self.position.mark_unchanged();
            let Some(events) = self.next(at) else { return };
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
            self.published(at);
            tokio::select! {
                _ = self.position.wait_for(|position| *position > at) => {}
                _ = self.stored.changed() => self.stored.mark_changed(),
            }
        }
    }

    /// The next changes, as many as fit into a message; none if they are lost.
    fn next(&self, at: ChangePosition) -> Option<Vec<Arc<Events>>> {
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

    /// Publishes one message, however often that takes; not, if the mirror is another now.
    async fn publish(&mut self, payload: Bytes, generation: u64) -> bool {
        let length = payload.len();
        let mut pause = RETRY_MIN;
        loop {
            self.plane.broker.until_connected().await;
            let sending = async {
                let context = &self.plane.broker.context;
                let sent = context.publish(self.subject.clone(), payload.clone()).await;
                sent.map_err(|error| error.to_string())?.await.map_err(|error| error.to_string())
            };
            let error = match timeout(ACKNOWLEDGED, sending).await {
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
            self.failed("publish", &error);
            if self.plane.mirror.id().0 != generation {
                return false;
            }
            self.plane.published.send_modify(|published| {
                published.stuck_since.get_or_insert_with(Instant::now);
            });
            sleep(pause).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    fn published(&mut self, at: ChangePosition) {
        let mut is_long = false;
        let mut is_first = false;
        self.plane.published.send_modify(|published| {
            is_first = published.position.replace(at).is_none();
            is_long = published.bytes >= SNAPSHOT_BYTES;
            if is_long {
                published.bytes = 0;
            }
        });
        if is_long {
            self.plane.wish_for_snapshot();
        }
        if is_first {
            self.plane.asked.notify_one();
        }
        let lag = self.position.borrow().sequence.saturating_sub(at.sequence);
        self.plane.config.status.update(|status| {
            (status.published_sequence, status.lag) = (at.sequence, lag);
        });
    }

    fn failed(&mut self, what: &'static str, error: &dyn std::fmt::Display) {
        self.plane.failed(what, error);
        if self.log_throttle.may_log(what) {
            tracing::warn!(what, %error, "the broker does not take it: trying again");
        }
    }
}
