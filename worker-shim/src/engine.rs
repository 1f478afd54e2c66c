//! What is known of the engine: whether it lives, what it can do, how busy it is.
//!
//! [`Engine`] holds what is known, as it changes; [`Watcher`] finds it out: `poll` asks for
//! health and figures again and again, and notices that the engine is another process than
//! before; `learn` asks each process once for what it is; `load` tells how busy it is, the
//! shim's own counts included.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use splitrail_engine::vllm::identity::EventSource;
use splitrail_engine::zmtp::Endpoint;
use splitrail_proto::v1::{Capabilities, Load};
use tokio::sync::watch;

mod client;
mod learn;
mod load;
mod poll;

pub use poll::Polled;

use crate::telemetry::Metrics;
use client::EngineClient;

/// Which engine, and what an operator says of it. What is said is not asked.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `http://HOST:PORT`.
    pub url: String,
    /// `HOST` of that address, where its event publishers are too unless they say otherwise.
    pub host: String,
    /// Its credential, as an `authorization` header has it.
    pub authorization: Option<HeaderValue>,
    /// Between two questions for its figures.
    pub load_interval: Duration,
    /// The model's name; else the first that it lists.
    pub model: Option<String>,
    /// Where rank 0 publishes KV events; else it is asked.
    pub kv_events: Option<Endpoint>,
    /// Where they can be had again.
    pub kv_replay: Option<Endpoint>,
    /// How it hands KV over, where it says nothing that tells it.
    pub connector: Option<String>,
    /// Its name towards other engines.
    pub connector_engine_id: Option<String>,
    /// Where decode workers meet it.
    pub bootstrap: Option<String>,
    /// How long it keeps the blocks of a hand-off.
    pub lease: Option<Duration>,
}

/// What an engine is: enough to follow its events and to attach it to a router. An engine
/// that comes back with another identity is another worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The model's name, as requests to the engine give it.
    pub model: String,
    /// Where its ranks publish KV events; none if they do not.
    pub sources: Vec<EventSource>,
}

/// What is known of an engine.
#[derive(Clone, Debug)]
pub struct Engine {
    /// What it is; `None` until it was reached.
    pub identity: watch::Receiver<Option<Arc<Identity>>>,
    /// What it can do.
    pub capabilities: watch::Receiver<Capabilities>,
    /// How busy it is.
    pub load: watch::Receiver<Load>,
    /// Its own figures, as they were last had.
    pub polled: watch::Receiver<Polled>,
}

/// How busy the shim knows the engine to be by what passes through it.
pub trait Busy: Send + Sync + 'static {
    /// Requests under way.
    fn requests(&self) -> u64;
    /// Prompt tokens of those whose answer has not begun.
    fn prefill_tokens_queued(&self) -> u64;
    /// Is marked as changed whenever one of the two has.
    fn changed(&self) -> watch::Receiver<()>;
}

/// Finds out what is known of an engine.
#[derive(Debug)]
pub struct Watcher {
    settings: Settings,
    identity: watch::Sender<Option<Arc<Identity>>>,
    capabilities: watch::Sender<Capabilities>,
    load: watch::Sender<Load>,
    polled: watch::Sender<Polled>,
}

impl Engine {
    /// An engine of which nothing is known, and who is to change that.
    #[must_use]
    pub fn new(settings: Settings) -> (Self, Watcher) {
        let watcher = Watcher {
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

impl Watcher {
    /// Watches the engine until dropped.
    pub async fn run(self, busy: Arc<impl Busy>, metrics: Arc<Metrics>) {
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
        let polling = poll::run(&client, interval, &polled, &metrics);
        let telling = load::run(polled.subscribe(), busy.as_ref(), &load);
        tokio::join!(polling, learner.run(), telling);
    }
}
