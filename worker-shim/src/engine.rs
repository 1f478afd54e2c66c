//! What is known of the engine: whether it lives, what it can do, how busy it is.
//!
//! [`watch`] gives what is known, as it changes, and a future that finds it out: `poll` asks
//! for health and figures again and again, and notices that the engine is another process
//! than before; `learn` asks each process once for what it is; `load` tells routers how busy
//! it is, the side-car's own counts included.

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

/// How busy the side-car knows the engine to be by what passes through it.
pub trait Busy: Send + Sync + 'static {
    /// Requests under way.
    fn requests(&self) -> u64;
    /// Prompt tokens of those whose answer has not begun.
    fn prefill_tokens_queued(&self) -> u64;
    /// Is marked as changed whenever one of the two has.
    fn changed(&self) -> watch::Receiver<()>;
}

/// What is known of an engine, and the future that keeps it so until it is dropped.
pub fn watch(
    settings: Settings,
    busy: Arc<impl Busy>,
    metrics: Arc<Metrics>,
) -> (Engine, impl Future<Output = ()> + Send) {
    let (identity, identity_seen) = watch::channel(None);
    let (capabilities, capabilities_seen) = watch::channel(Capabilities::default());
    let (load, load_seen) = watch::channel(Load::default());
    let (polled, polled_seen) = watch::channel(Polled::default());
    let engine = Engine {
        identity: identity_seen,
        capabilities: capabilities_seen,
        load: load_seen,
        polled: polled_seen.clone(),
    };
    let client = EngineClient::new(&settings.url, settings.authorization.clone());
    let interval = settings.load_interval;
    let following = async move {
        let polling = poll::run(&client, interval, &polled, &metrics);
        let learning = learn::Learner {
            client: &client,
            settings: &settings,
            polled: polled_seen.clone(),
            identity,
            capabilities,
            metrics: &metrics,
        };
        let telling = load::run(polled_seen, busy.as_ref(), interval, &load);
        tokio::join!(polling, learning.run(), telling);
    };
    (engine, following)
}
