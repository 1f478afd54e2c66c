//! Snapshots into the store: now and then, and when somebody wishes for one.

use std::time::Duration;

use splitrail_event_plane::async_nats::jetstream::object_store::ObjectMetadata;
use splitrail_event_plane::names;
use splitrail_event_plane::snapshot::{Label, Stored};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::Plane;
use crate::mirror::{ChangePosition, KeyedLogThrottle, SnapshotParts};

/// Between two snapshots, however many wish for one.
const BETWEEN: Duration = Duration::from_millis(500);
/// After which time there is a new one in any case: the store forgets old ones.
const REFRESH: Duration = Duration::from_secs(3600);
/// How long storing one may take.
const STORED: Duration = Duration::from_secs(60);
/// How often a copy may turn out to be older than what was published.
const OLD_MAX: usize = 8;

/// Stores them. Never ends.
pub(super) async fn run(plane: &Plane) {
    let mut wishes = plane.wishes.subscribe();
    let mut log_throttle = KeyedLogThrottle::default();
    let mut refresh_at = Instant::now() + REFRESH;
    loop {
        let _wished = timeout_at(refresh_at, wishes.changed()).await;
        plane.broker.until_connected().await;
        wishes.mark_unchanged();
        let next = Instant::now() + BETWEEN;
        match plane.store_snapshot().await {
            Ok(_) => refresh_at = Instant::now() + REFRESH,
            Err(error) => {
                plane.failed("snapshot", &error);
                if log_throttle.may_log("snapshot") {
                    tracing::warn!(%error, "a snapshot cannot be stored: trying again");
                }
                plane.wish_for_snapshot();
            }
        }
        sleep_until(next).await;
    }
}

impl Plane {
    /// Stores everything that is held now; up to where that is, and in which mirror.
    pub(super) async fn store_snapshot(&self) -> Result<(ChangePosition, String), String> {
        let _one_at_a_time = self.storing.lock().await;
        let (model, worker) = self.names();
        let context = &self.broker.context;
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let known = self.published.borrow().stream_sequence;
        // What this process has not published yet comes behind all that is there.
        let stream_sequence = match known {
            0 => {
                let stream = context.get_stream(names::stream(model)).await;
                stream.map_err(|error| text(&error))?.cached_info().state.last_sequence
            }
            known => known,
        };
        let published = self.published.borrow().position;
        let mut snapshot = self.mirror.snapshot().await;
        for _ in 0..OLD_MAX {
            // A copy that others share may be from before.
            if published.is_none_or(|published| snapshot.position >= published) {
                break;
            }
            drop(snapshot);
            snapshot = self.mirror.snapshot().await;
        }
        let position = snapshot.position;
        if published.is_some_and(|published| position < published) {
            return Err("the copy is older than what was published".to_owned());
        }
        let parts = SnapshotParts::new(snapshot);
        let mirror_id = parts.mirror_id().to_owned();
        let label =
            Label { mirror_id: mirror_id.clone(), sequence: position.sequence, stream_sequence };
        let bucket = context.get_object_store(names::bucket(model)).await;
        let bucket = bucket.map_err(|error| text(&error))?;
        let about = ObjectMetadata {
            name: names::token(worker),
            metadata: label.to_metadata(),
            ..ObjectMetadata::default()
        };
        let mut stored = Stored::new(parts);
        let putting = timeout(STORED, bucket.put(about, &mut stored)).await;
        putting.map_err(|_| "it takes too long".to_owned())?.map_err(|error| text(&error))?;
        self.config.status.update(|status| status.snapshots += 1);
        self.stored.send_replace(Some(position));
        Ok((position, mirror_id))
    }
}
