//! Stores snapshots in the object store, periodically and on request.

use std::time::Duration;

use splitrail_event_plane::async_nats::jetstream::object_store::ObjectMetadata;
use splitrail_event_plane::names;
use splitrail_event_plane::snapshot::{Label, StoredParts};
use splitrail_settings::log_throttle::KeyedLogThrottle;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::session::PlaneSession;
use crate::mirror::{ChangePosition, SnapshotParts};

/// Minimum time between two snapshots, however many are requested.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(500);
/// Interval of snapshots without a request. The store deletes old objects.
const REFRESH_INTERVAL: Duration = Duration::from_secs(3600);
/// Timeout for storing one snapshot.
const STORE_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a shared snapshot may turn out to be older than the published changes.
const STALE_SNAPSHOTS_MAX: usize = 8;

/// Stores snapshots. Never ends.
pub(super) async fn run(plane: &PlaneSession) {
    let mut snapshot_requests = plane.snapshot_requests.subscribe();
    let mut log_throttle = KeyedLogThrottle::default();
    let mut refresh_at = Instant::now() + REFRESH_INTERVAL;
    loop {
        let _requested = timeout_at(refresh_at, snapshot_requests.changed()).await;
        plane.broker.until_connected().await;
        snapshot_requests.mark_unchanged();
        let next = Instant::now() + SNAPSHOT_INTERVAL;
        match plane.store_snapshot().await {
            Ok(_) => refresh_at = Instant::now() + REFRESH_INTERVAL,
            Err(error) => {
                plane.record_failure("snapshot", &error);
                if log_throttle.may_log("snapshot") {
                    tracing::warn!(%error, "a snapshot cannot be stored: retrying");
                }
                plane.request_snapshot();
            }
        }
        sleep_until(next).await;
    }
}

impl PlaneSession {
    /// Stores a snapshot. Returns its position and the id of its mirror.
    ///
    /// # Errors
    /// If the broker fails, or only outdated snapshots are available.
    pub(super) async fn store_snapshot(&self) -> Result<(ChangePosition, String), String> {
        let _one_at_a_time = self.storing.lock().await;
        let (model, worker) = self.model_and_worker();
        let context = &self.broker.context;
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let known = self.published.borrow().stream_sequence;
        // If this process has published nothing yet, its first message comes after all others.
        let stream_sequence = match known {
            0 => {
                let stream = context.get_stream(names::stream(model)).await;
                stream.map_err(|error| text(&error))?.cached_info().state.last_sequence
            }
            known => known,
        };
        let published = self.published.borrow().position;
        let mut snapshot = self.mirror.snapshot().await;
        for _ in 0..STALE_SNAPSHOTS_MAX {
            // A shared snapshot may be older.
            if published.is_none_or(|published| snapshot.position >= published) {
                break;
            }
            drop(snapshot);
            snapshot = self.mirror.snapshot().await;
        }
        let position = snapshot.position;
        if published.is_some_and(|published| position < published) {
            return Err("the snapshot is older than the published changes".to_owned());
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
        let mut stored = StoredParts::new(parts);
        let putting = timeout(STORE_TIMEOUT, bucket.put(about, &mut stored)).await;
        putting.map_err(|_| "it takes too long".to_owned())?.map_err(|error| text(&error))?;
        self.config.status.update(|status| status.snapshots += 1);
        self.stored.send_replace(Some(position));
        Ok((position, mirror_id))
    }
}
