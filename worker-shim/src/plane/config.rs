//! The configuration of the event plane.

use std::time::Duration;

use splitrail_event_plane::config::BrokerConfig;
use splitrail_proto::v1::WorkerRole;

use super::status::SharedPlaneStatus;

/// The broker to connect to, and the worker that publishes.
#[derive(Clone, Debug)]
pub struct PlaneConfig {
    /// The broker.
    pub broker: BrokerConfig,
    /// The worker's id, unique in its model.
    pub worker_id: String,
    /// The worker's role.
    pub role: WorkerRole,
    /// The address to which routers send requests: `http://HOST:PORT`.
    pub url: String,
    /// The model's name as the engine serves it.
    pub model: String,
    /// Maximum time for which the worker keeps running after it has announced that it leaves.
    pub grace: Duration,
    /// Receives the state of the event plane.
    pub status: SharedPlaneStatus,
}
