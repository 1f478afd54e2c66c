//! Observes the engine: its health, identity, capabilities and load.
//!
//! [`Engine`] holds the current state, and [`EngineWatcher`] updates it. `poll` reads health and
//! metrics periodically and detects a restarted engine. `learn` asks each engine process once
//! for its identity and capabilities. `load` combines the engine's metrics with the shim's own
//! counts.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use splitrail_engine::EngineKind;
use splitrail_engine::identity::EventSource;
use splitrail_engine::kv_events::OtherGroups;
use splitrail_engine::zmtp::Endpoint;
use splitrail_proto::v1::{Capabilities, Load};
use tokio::sync::watch;

mod client;
mod learn;
mod load;
mod poll;

pub use poll::EnginePoll;

use crate::proxy::Traffic;
use crate::telemetry::Metrics;
use client::EngineClient;

/// The engine's address, and what an operator has configured about it. The shim does not ask
/// the engine for configured values.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Which engine it is.
    pub kind: EngineKind,
    /// `http://HOST:PORT`.
    pub url: String,
    /// The host of that address. It is also the default host of the engine's event publishers.
    pub host: String,
    /// The engine's credential, as the value of the header `authorization`.
    pub authorization: Option<HeaderValue>,
    /// Interval between two reads of the engine's metrics.
    pub load_interval: Duration,
    /// The model's name. `None` for the first that the engine lists.
    pub model: Option<String>,
    /// Where rank 0 publishes KV events. `None` to ask the engine.
    pub kv_events: Option<Endpoint>,
    /// Where rank 0 answers requests for earlier KV events.
    pub kv_replay: Option<Endpoint>,
    /// The engine's connector. `None` to derive it from the engine's metrics.
    pub connector: Option<String>,
    /// The engine's name towards other engines.
    pub connector_engine_id: Option<String>,
    /// The address of the engine's bootstrap server.
    pub bootstrap: Option<String>,
    /// How long the engine keeps the blocks of a hand-off.
    pub lease: Option<Duration>,
}

/// The identity of an engine: what is needed to follow its events and to attach to a router.
/// An engine that restarts with another identity is another worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineIdentity {
    /// The model's name in requests to the engine.
    pub model: String,
    /// Where the engine's ranks publish KV events. Empty if they publish none.
    pub sources: Vec<EventSource>,
}

/// The current state of an engine.
#[derive(Clone, Debug)]
pub struct Engine {
    /// The engine's identity; `None` before the engine was first reached.
    pub identity: watch::Receiver<Option<Arc<EngineIdentity>>>,
    /// The engine's capabilities.
    pub capabilities: watch::Receiver<Capabilities>,
    /// The engine's load.
    pub load: watch::Receiver<Load>,
    /// The result of the last poll.
    pub polled: watch::Receiver<EnginePoll>,
}

/// Keeps the state of an engine up to date.
#[derive(Debug)]
pub struct EngineWatcher {
    settings: EngineConfig,
    identity: watch::Sender<Option<Arc<EngineIdentity>>>,
    capabilities: watch::Sender<Capabilities>,
    load: watch::Sender<Load>,
    polled: watch::Sender<EnginePoll>,
}

impl Engine {
    /// Creates the state of an engine of which nothing is known yet, and its watcher.
    #[must_use]
    pub fn new(settings: EngineConfig) -> (Self, EngineWatcher) {
        let watcher = EngineWatcher {
            settings,
            identity: watch::Sender::new(None),
            capabilities: watch::Sender::default(),
            load: watch::Sender::default(),
            polled: watch::Sender::default(),
        };
        let engine = Self {
            identity: watcher.identity.subscribe(),
            capabilities: watcher.capabilities.subscribe(),
            load: watcher.load.subscribe(),
            polled: watcher.polled.subscribe(),
        };
        (engine, watcher)
    }
}

impl EngineWatcher {
    /// Adds to the capabilities which cache groups the mirror does not follow, whenever they change.
    pub(crate) fn report_groups(
        &self,
        mut groups: watch::Receiver<OtherGroups>,
    ) -> impl Future<Output = ()> + Send + use<> {
        let capabilities = self.capabilities.clone();
        async move {
            loop {
                let names: Vec<_> = groups.borrow_and_update().names().collect();
                capabilities.send_if_modified(|known| {
                    let is_news = known.unfollowed_cache_groups != names;
                    known.unfollowed_cache_groups = names;
                    is_news
                });
                if groups.changed().await.is_err() {
                    // The mirror lives as long as the shim.
                    std::future::pending::<()>().await;
                }
            }
        }
    }

    /// Watches the engine until dropped.
    pub async fn run(self, traffic: Arc<Traffic>, metrics: Arc<Metrics>) {
        let Self { settings, identity, capabilities, load, polled } = self;
        let client = EngineClient::new(&settings.url, settings.authorization.clone());
        let interval = settings.load_interval;
        let learner = learn::Learner {
            client: &client,
            settings: &settings,
            polled: polled.subscribe(),
            identity,
            capabilities,
            metrics: &metrics,
        };
        let polling = poll::run(&client, settings.kind, interval, &polled, &metrics);
        let reporting = load::run(polled.subscribe(), &traffic, &load);
        tokio::join!(polling, learner.run(), reporting);
    }
}
