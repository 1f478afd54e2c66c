//! The state that the tasks of the event plane share.

use splitrail_event_plane::Broker;
use splitrail_proto::v1::{Capabilities, Hello, Load, Welcome};
use tokio::sync::{Mutex, Notify, watch};
use tokio_util::sync::CancellationToken;

use super::config::PlaneConfig;
use crate::attach::PROTOCOL;
use crate::mirror::{ChangePosition, Mirror};

/// Progress of publishing to the stream.
#[derive(Clone, Debug, Default)]
pub(super) struct PublishProgress {
    /// The last published change. `None` at the start and after changes were lost.
    pub(super) position: Option<ChangePosition>,
    /// The id of the mirror to which `position` belongs.
    pub(super) mirror_id: String,
    /// The stream's sequence number of the last message; 0 before the first.
    pub(super) stream_sequence: u64,
    /// Bytes published since a snapshot was last requested because of their number.
    pub(super) bytes: usize,
    /// When the broker first failed to accept the current message.
    pub(super) stuck_since: Option<tokio::time::Instant>,
}

/// The state that all tasks of the event plane share while the hash settings stay the same.
pub(super) struct PlaneSession {
    pub(super) config: PlaneConfig,
    pub(super) broker: Broker,
    pub(super) instance_id: String,
    pub(super) mirror: Mirror,
    pub(super) capabilities: watch::Receiver<Capabilities>,
    pub(super) load: watch::Receiver<Load>,
    pub(super) leaving: CancellationToken,
    /// The routers' hash settings, with the engine's block size.
    pub(super) terms: Welcome,
    pub(super) published: watch::Sender<PublishProgress>,
    /// The position of the last stored snapshot.
    pub(super) stored: watch::Sender<Option<ChangePosition>>,
    pub(super) storing: Mutex<()>,
    /// Incremented by each request for a snapshot.
    pub(super) snapshot_requests: watch::Sender<u64>,
    /// Notified when a router asks the workers to introduce themselves.
    pub(super) hello_requested: Notify,
}

impl PlaneSession {
    pub(super) fn hello(&self) -> Hello {
        let published = self.published.borrow();
        Hello {
            protocol: PROTOCOL,
            worker_id: self.config.worker_id.clone(),
            instance_id: self.instance_id.clone(),
            role: self.config.role.into(),
            url: self.config.url.clone(),
            model: self.config.model.clone(),
            capabilities: Some(self.capabilities.borrow().clone()),
            mirror_id: published.mirror_id.clone(),
            // Every subscriber of the subject would learn the secret.
            instance_secret: Vec::new(),
        }
    }

    /// The model's name and the worker's id, as used in subjects.
    pub(super) fn model_and_worker(&self) -> (&str, &str) {
        (&self.terms.model, &self.config.worker_id)
    }

    pub(super) fn request_snapshot(&self) {
        self.snapshot_requests.send_modify(|snapshot_requests| *snapshot_requests += 1);
    }

    pub(super) fn record_failure(&self, what: &str, error: &dyn std::fmt::Display) {
        tracing::debug!(what, %error, "an operation at the broker failed");
        self.config.status.update(|status| {
            status.failures += 1;
            status.last_error = Some(format!("{what}: {error}"));
        });
    }
}
