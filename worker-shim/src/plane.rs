//! The event plane: one connection to a broker instead of a stream to each router.
//!
//! First, the shim asks the routers how they hash blocks. Then it publishes changes to the
//! model's stream. Each message is acknowledged before the next one is sent, so that no message
//! can be missing between two others. A snapshot is stored in the model's object store
//! periodically, when many changes have been published since the last one, when changes were
//! lost before they were published, and when a router asks for one. The shim also publishes
//! regular reports with the engine's load.

mod hash_terms;
mod publish;
mod report;
mod requests;
mod snapshots;
mod status;

use std::time::Duration;

use splitrail_event_plane::Broker;
use splitrail_event_plane::config::BrokerConfig;
use splitrail_proto::v1::{Capabilities, Hello, Load, Welcome, WorkerRole};
use tokio::sync::{Mutex, Notify, watch};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

pub use self::status::{PlaneStatus, SharedPlaneStatus};

use crate::attach::PROTOCOL;
use crate::mirror::{ChangePosition, Mirror};

/// Delay before the next attempt with a configuration that cannot be used.
const UNUSABLE_RETRY: Duration = Duration::from_secs(30);

/// The broker to connect to, and the worker that publishes.
#[derive(Clone, Debug)]
pub struct Config {
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

/// Progress of publishing to the stream.
#[derive(Clone, Debug, Default)]
struct PublishProgress {
    /// The last published change. `None` at the start and after changes were lost.
    position: Option<ChangePosition>,
    /// The id of the mirror to which `position` belongs.
    mirror_id: String,
    /// The stream's sequence number of the last message; 0 before the first.
    stream_sequence: u64,
    /// Bytes published since a snapshot was last requested because of their number.
    bytes: usize,
    /// When the broker first failed to accept the current message.
    stuck_since: Option<tokio::time::Instant>,
}

/// The state that all tasks of the event plane share while the hash settings stay the same.
struct PlaneSession {
    config: Config,
    broker: Broker,
    instance_id: String,
    mirror: Mirror,
    capabilities: watch::Receiver<Capabilities>,
    load: watch::Receiver<Load>,
    leaving: CancellationToken,
    /// The routers' hash settings, with the engine's block size.
    terms: Welcome,
    published: watch::Sender<PublishProgress>,
    /// The position of the last stored snapshot.
    stored: watch::Sender<Option<ChangePosition>>,
    storing: Mutex<()>,
    /// Incremented by each request for a snapshot.
    snapshot_requests: watch::Sender<u64>,
    /// Notified when a router asks the workers to introduce themselves.
    hello_requested: Notify,
}

/// Publishes until the future is dropped. When `leaving` fires, the routers are asked to send
/// no more work.
pub async fn run(
    config: Config,
    mirror: Mirror,
    capabilities: watch::Receiver<Capabilities>,
    load: watch::Receiver<Load>,
    leaving: CancellationToken,
) {
    let broker = connect(&config).await;
    let instance_id = format!("{:032x}", rand::random::<u128>());
    let mut last_terms: Option<Welcome> = None;
    loop {
        let terms =
            hash_terms::wait_for_terms(&config, &broker, &capabilities, last_terms.as_ref()).await;
        let agreement = match mirror.agree(hash_terms::to_mirror_terms(&terms)) {
            Ok(agreement) => agreement,
            Err(error) => {
                tracing::error!(%error, "the routers' hash settings cannot be used");
                config.status.update(|status| status.last_error = Some(error.to_string()));
                sleep(UNUSABLE_RETRY).await;
                continue;
            }
        };
        tracing::info!(
            model = terms.model,
            block_size = terms.block_size,
            "received the routers' hash settings"
        );
        let plane = PlaneSession {
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
            snapshot_requests: watch::Sender::default(),
            hello_requested: Notify::new(),
        };
        last_terms = Some(terms);
        // All tasks belong to this future and end when one branch completes.
        tokio::select! {
            () = publish::run(&plane) => {}
            () = snapshots::run(&plane) => {}
            () = report::run(&plane) => {}
            () = requests::run(&plane) => {}
            () = hash_terms::wait_for_change(&plane) => {
                tracing::warn!("the routers' hash settings have changed: starting a new mirror");
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
                tracing::error!(%error, "cannot connect to the broker");
                config.status.update(|status| status.last_error = Some(error.to_string()));
                sleep(UNUSABLE_RETRY).await;
            }
        }
    }
}

impl PlaneSession {
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
            // Every subscriber of the subject would learn the secret.
            instance_secret: Vec::new(),
        }
    }

    /// The model's name and the worker's id, as used in subjects.
    fn model_and_worker(&self) -> (&str, &str) {
        (&self.terms.model, &self.config.worker_id)
    }

    fn request_snapshot(&self) {
        self.snapshot_requests.send_modify(|snapshot_requests| *snapshot_requests += 1);
    }

    fn record_failure(&self, what: &str, error: &dyn std::fmt::Display) {
        tracing::debug!(what, %error, "an operation at the broker failed");
        self.config.status.update(|status| {
            status.failures += 1;
            status.last_error = Some(format!("{what}: {error}"));
        });
    }
}
