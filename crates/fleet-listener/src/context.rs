//! The state that the listener for shims and all sessions share.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::registry::SessionRegistry;
use splitrail_config::model::FleetConfig;
use splitrail_fleet::Cluster;
use splitrail_fleet::Fleet;
use splitrail_settings::log_throttle::LogThrottle;

/// The state that all sessions share.
pub(super) struct AttachContext {
    pub(super) cluster: Arc<Cluster>,
    pub(super) fleet: Arc<Fleet>,
    pub(super) config: FleetConfig,
    pub(super) router_id: String,
    pub(super) registry: Arc<SessionRegistry>,
    pub(super) stop: CancellationToken,
    /// Limits the log lines about refused streams.
    pub(super) refused: LogThrottle,
}

impl AttachContext {
    /// Counts a refused stream by its status.
    pub(super) fn count(&self, code: Code) {
        let result = match code {
            Code::Unauthenticated => "unauthenticated",
            Code::PermissionDenied => "permission_denied",
            Code::NotFound => "not_found",
            Code::AlreadyExists => "already_exists",
            Code::FailedPrecondition => "failed_precondition",
            Code::InvalidArgument => "invalid_argument",
            Code::ResourceExhausted => "resource_exhausted",
            Code::Unavailable => "unavailable",
            _ => "failed",
        };
        self.cluster.metrics.attach_calls.with_label_values(&[result]).inc();
    }

    /// Counts a stream that attached its worker; `resumed` if no snapshot is needed.
    pub(super) fn count_attached(&self, resumed: bool) {
        let result = if resumed { "resumed" } else { "attached" };
        self.cluster.metrics.attach_calls.with_label_values(&[result]).inc();
    }
}
