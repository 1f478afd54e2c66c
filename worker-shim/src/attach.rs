//! One stream per router: who this is, what the engine holds, how busy it is.
//!
//! Each router is served by a task of its own, which takes from the mirror what it has room
//! for: a slow router is behind, and holds up nobody. What it missed it gets from the ring
//! of the last changes, or as a copy of everything.

mod address;
mod call;
mod claims;
mod link;
mod load;
mod outgoing;
mod refusal;
mod routers;
mod status;
mod tls;
mod token;

#[cfg(test)]
mod tests;

use std::time::Duration;

use splitrail_proto::v1::{Capabilities, Load, WorkerRole};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use self::address::{Address, AddressError};
pub(crate) use self::load::LoadTeller;
pub(crate) use self::refusal::PROTOCOL;
pub use self::refusal::Refusal;
pub use self::status::{RouterStatus, Stage, Status};
pub use self::tls::Tls;
pub use self::token::Token;

use crate::mirror::Mirror;

/// To which routers, and as whom.
#[derive(Clone, Debug)]
pub struct Config {
    /// The routers. Each name is resolved again and again, and all its addresses are
    /// attached to.
    pub routers: Vec<Address>,
    /// The worker's name, unique in its model.
    pub worker_id: String,
    /// What the worker does.
    pub role: WorkerRole,
    /// Where routers send requests: `http://HOST:PORT`.
    pub url: String,
    /// The model as the engine serves it.
    pub model: String,
    /// How long the worker goes on after it asked for no more work, at most.
    pub grace: Duration,
    /// What proves who it is, if anything but its certificate does.
    pub token: Option<Token>,
    /// TLS towards routers; plain text without.
    pub tls: Option<Tls>,
    /// How long to wait for what.
    pub timing: Timing,
    /// Where it is shown how each router stands.
    pub status: Status,
}

/// Times of an attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// To connect, TLS included.
    pub connect_timeout: Duration,
    /// For the router's welcome.
    pub welcome_timeout: Duration,
    /// Between two pings; a router that does not answer one is given up after
    /// `ping_timeout`.
    pub ping_interval: Duration,
    /// For the answer to a ping.
    pub ping_timeout: Duration,
    /// How long a router may take nothing before it is given up. Longer than ten seconds,
    /// the longest pause between two reports of load.
    pub stall_timeout: Duration,
    /// Pause before connecting again; it doubles with each failure ...
    pub retry_min: Duration,
    /// ... up to this.
    pub retry_max: Duration,
    /// Pause where the router said no for good.
    pub refused_retry: Duration,
    /// Between two looks at who a name stands for.
    pub resolve_interval: Duration,
    /// How long a first copy waits for the mirror to be in step with the engine.
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

/// Stays attached to all routers until it is dropped. When `leaving` fires they are asked
/// for no more work.
pub async fn run(
    config: Config,
    mirror: Mirror,
    capabilities: watch::Receiver<Capabilities>,
    load: watch::Receiver<Load>,
    leaving: CancellationToken,
) {
    let instance_id = format!("{:032x}", rand::random::<u128>());
    let secret = link::Secret(rand::random());
    let told = link::Told { instance_id, secret, mirror, capabilities, load, leaving };
    routers::attach_all(config, told).await;
}
