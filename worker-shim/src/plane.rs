//! The event plane: one connection to a broker in place of a stream to each router.
//!
//! The routers of a cluster say how blocks are hashed. Then changes go into the model's
//! stream, each message acknowledged before the next, so that none can be missing between two
//! that are there; a snapshot goes into the model's store now and then, when the way from the
//! last one has become long, when changes were lost on this side, and when a router asks. A
//! sign of life with the engine's load goes to whoever listens.

mod listen;
mod publish;
mod report;
mod snapshots;
mod status;
mod terms;

use std::time::Duration;

use splitrail_event_plane::Broker;
use splitrail_event_plane::config::BrokerConfig;
use splitrail_proto::v1::{Capabilities, Hello, Load, Welcome, WorkerRole};
use tokio::sync::{Mutex, Notify, watch};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

pub use self::status::{PlaneStatus, Status};

use crate::attach::PROTOCOL;
use crate::mirror::{ChangePosition, Mirror};

/// Between two attempts to use a configuration that cannot be used.
const UNUSABLE_RETRY: Duration = Duration::from_secs(30);

/// To which broker, and as whom.
#[derive(Clone, Debug)]
pub struct Config {
    /// The broker.
    pub broker: BrokerConfig,
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
    /// Where it is shown how it stands.
    pub status: Status,
}

/// Up to where changes are in the stream.
#[derive(Clone, Debug, Default)]
struct Published {
    /// In the mirror of this generation; none at the beginning, and after a loss.
    position: Option<ChangePosition>,
    /// That mirror.
    mirror_id: String,
    /// The stream's number of the last message; 0 before the first.
    stream_sequence: u64,
    /// Bytes since the last snapshot was wanted.
    bytes: usize,
    /// Since when the broker takes nothing.
    stuck_since: Option<tokio::time::Instant>,
}

/// What all parts of the plane share while the terms are the same.
struct Plane {
    config: Config,
    broker: Broker,
    instance_id: String,
    mirror: Mirror,
    capabilities: watch::Receiver<Capabilities>,
    load: watch::Receiver<Load>,
    leaving: CancellationToken,
    /// How routers hash, with the engine's block size.
    terms: Welcome,
    published: watch::Sender<Published>,
    /// The sequence of the snapshot that was stored last.
    stored: watch::Sender<Option<ChangePosition>>,
    storing: Mutex<()>,
    /// Raised with each wish for a snapshot.
    wishes: watch::Sender<u64>,
    /// Somebody wants to know who is there.
    asked: Notify,
}

/// Publishes until it is dropped. When `leaving` fires, routers are asked for no more work.
pub async fn run(
    config: Config,
    mirror: Mirror,
    capabilities: watch::Receiver<Capabilities>,
    load: watch::Receiver<Load>,
    leaving: CancellationToken,
) {
    let broker = connect(&config).await;
    let instance_id = format!("{:032x}", rand::random::<u128>());
    let mut known: Option<Welcome> = None;
    loop {
        let terms = terms::ask_until_known(&config, &broker, &capabilities, known.as_ref()).await;
        let agreement = match mirror.agree(terms::of(&terms)) {
            Ok(agreement) => agreement,
            Err(error) => {
                tracing::error!(%error, "routers hash in a way that cannot be followed");
                config.status.update(|status| status.last_error = Some(error.to_string()));
                sleep(UNUSABLE_RETRY).await;
                continue;
            }
        };
        tracing::info!(
            model = terms.model,
            block_size = terms.block_size,
            "routers have said how blocks are hashed"
        );
        let plane = Plane {
            config: config.clone(),
            broker: broker.clone(),
            instance_id: instance_id.clone(),
            mirror: mirror.clone(),
            capabilities: capabilities.clone(),
            load: load.clone(),
            leaving: leaving.clone(),
            terms: terms.clone(),
            published: watch::Sender::default(),
            stored: watch::Sender::default(),
            storing: Mutex::default(),
            wishes: watch::Sender::default(),
            asked: Notify::new(),
        };
        known = Some(terms);
        // All are parts of this future: leaving the branch ends them.
        tokio::select! {
            () = publish::run(&plane) => {}
            () = snapshots::run(&plane) => {}
            () = report::run(&plane) => {}
            () = listen::run(&plane) => {}
            () = terms::until_others(&plane) => {
                tracing::warn!("routers hash in another way now: the mirror begins anew");
            }
        }
        drop(agreement);
    }
}

async fn connect(config: &Config) -> Broker {
    loop {
        match Broker::connect(&config.broker, &format!("splitrail-shim {}", config.worker_id)).await
        {
            Ok(broker) => {
                config.status.connected(broker.connected.clone());
                return broker;
            }
            Err(error) => {
                tracing::error!(%error, "no event plane");
                config.status.update(|status| status.last_error = Some(error.to_string()));
                sleep(UNUSABLE_RETRY).await;
            }
        }
    }
}

impl Plane {
    fn hello(&self) -> Hello {
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
            // Whoever reads the subject would know it.
            instance_secret: Vec::new(),
        }
    }

    /// The worker's name and the model's, as subjects have them.
    fn names(&self) -> (&str, &str) {
        (&self.terms.model, &self.config.worker_id)
    }

    fn wish_for_snapshot(&self) {
        self.wishes.send_modify(|wishes| *wishes += 1);
    }

    fn failed(&self, what: &str, error: &dyn std::fmt::Display) {
        tracing::debug!(what, %error, "the broker");
        self.config.status.update(|status| {
            status.failures += 1;
            status.last_error = Some(format!("{what}: {error}"));
        });
    }
}
