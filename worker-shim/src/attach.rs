//! The streams to routers. Each stream reports the shim's identity, the KV blocks that the
//! engine holds, and the engine's load.
//!
//! Each router has its own task, which reads changes from the mirror as fast as the router
//! accepts them. A slow router therefore delays no other router. It receives the changes that
//! it missed from the ring of recent changes, or a snapshot if the ring does not reach back
//! far enough.

mod call;
mod claims;
mod link;
mod load_reporter;
mod outgoing;
mod routers;
mod status;
mod stream_end;
mod tls;
mod token;

#[cfg(test)]
mod tests;

use std::time::Duration;

use http::uri::Authority;
use splitrail_proto::v1::{Capabilities, Load, WorkerRole};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use self::status::{RouterStatus, RouterStatuses, Stage};
pub use self::stream_end::IncompatibleRouter;
pub(crate) use self::tls::read_tls;
pub use self::token::Token;

use crate::config::Tls;
use crate::mirror::Mirror;

/// The routers to attach to, and the worker that attaches.
#[derive(Clone, Debug)]
pub struct AttachConfig {
    /// `HOST:PORT` of each router's `listen.fleet`. A name can resolve to several routers, as that
    /// of a headless Kubernetes service does: it is resolved periodically, and the shim attaches to
    /// all its addresses.
    pub routers: Vec<Authority>,
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
    /// The token that authenticates the shim, if it does not rely on its certificate alone.
    pub token: Option<Token>,
    /// TLS towards routers; `None` for plain text.
    pub tls: Option<Tls>,
    /// Timeouts and intervals.
    pub timing: Timing,
    /// Receives the state of each attachment.
    pub status: RouterStatuses,
}

/// Timeouts and intervals of an attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Timeout for connecting, including the TLS handshake.
    pub connect_timeout: Duration,
    /// Timeout for the router's welcome message.
    pub welcome_timeout: Duration,
    /// Interval between pings. The connection is closed if a ping is not answered within
    /// `ping_timeout`.
    pub ping_interval: Duration,
    /// Timeout for the reply to a ping.
    pub ping_timeout: Duration,
    /// Time without any progress after which the stream is closed. Must be longer than ten
    /// seconds, the longest interval between two load reports.
    pub stall_timeout: Duration,
    /// Delay before the first reconnection. It doubles with each failure,
    pub retry_min: Duration,
    /// up to this limit.
    pub retry_max: Duration,
    /// Delay before the next attempt if the router is unlikely to accept the shim soon.
    pub refused_retry: Duration,
    /// Interval between two resolutions of the routers' names.
    pub resolve_interval: Duration,
    /// Maximum time for which the first snapshot waits until the mirror has caught up with the
    /// engine.
    pub in_step_timeout: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            welcome_timeout: Duration::from_secs(5),
            ping_interval: Duration::from_secs(2),
            ping_timeout: Duration::from_secs(3),
            stall_timeout: Duration::from_secs(30),
            retry_min: Duration::from_millis(100),
            retry_max: Duration::from_secs(5),
            refused_retry: Duration::from_secs(30),
            resolve_interval: Duration::from_secs(10),
            in_step_timeout: Duration::from_secs(5),
        }
    }
}

/// Keeps the shim attached to all routers until the future is dropped. When `leaving` fires,
/// the routers are asked to send no more work.
pub async fn run(
    config: AttachConfig,
    mirror: Mirror,
    capabilities: watch::Receiver<Capabilities>,
    load: watch::Receiver<Load>,
    leaving: CancellationToken,
) {
    let instance_id = format!("{:032x}", rand::random::<u128>());
    let secret = link::InstanceSecret(rand::random());
    let shim = link::ShimState { instance_id, secret, mirror, capabilities, load, leaving };
    routers::attach_to_all(config, shim).await;
}
