//! The reverse proxy before the engine, with its gate.
//!
//! Listed paths go through byte by byte, both ways unbuffered. A request that carries
//! [`X_GATE`] is answered at once, as an engine that honours `cache_hit_threshold` would,
//! unless the engine holds the blocks that it asks for. What runs is counted in [`Traffic`].

mod bodies;
mod forward;
mod gate;
mod handoff;
mod headers;
mod listen;
mod metrics;
mod miss;
mod paths;
mod refusal;
mod traffic;
mod upstream;
mod wakes;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;
use http::uri::Authority;
use http::{Request, Response};
use prometheus::Registry;
use splitrail_proto::v1::Capabilities;
use tokio::sync::{Semaphore, watch};

pub use self::gate::{Ask, Malformed, Residency, X_GATE};
pub use self::headers::X_PREFILL_TOKENS;
pub use self::listen::serve;
pub use self::paths::ExtraPath;
pub use self::traffic::Traffic;

use self::metrics::Outcomes;
use self::miss::Misses;
use self::upstream::Upstream;

/// Where the proxy leads, and its bounds.
#[derive(Clone, Debug)]
pub struct Config {
    /// The engine's host and port; it speaks plain HTTP.
    pub engine: Authority,
    /// Paths that are forwarded besides the usual ones.
    pub extra_paths: Vec<ExtraPath>,
    /// How long a connection to the engine may take.
    pub connect_timeout: Duration,
    /// How long the engine keeps the blocks of a hand-off, where it does not say.
    pub lease: Duration,
    /// Bounds.
    pub limits: Limits,
}

/// Bounds of the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once; further ones wait to be accepted.
    pub connections_max: usize,
    /// Requests to the engine at once; further ones get status 503.
    pub requests_max: usize,
    /// Bytes of a request's or a reply's head, and of each buffer of a connection; at
    /// least 8192.
    pub head_max_bytes: usize,
    /// Bytes of a body that is read to turn its request away. Longer ones are turned away
    /// by status 412.
    pub miss_body_max_bytes: usize,
    /// The same of all such bodies that are read at once.
    pub miss_bodies_max_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            requests_max: 4096,
            head_max_bytes: 64 << 10,
            miss_body_max_bytes: 16 << 20,
            miss_bodies_max_bytes: 32 << 20,
        }
    }
}

impl Config {
    /// The usual settings before an engine.
    pub fn new(engine: Authority) -> Self {
        Self {
            engine,
            extra_paths: Vec::new(),
            connect_timeout: Duration::from_secs(2),
            lease: Duration::from_secs(30),
            limits: Limits::default(),
        }
    }
}

/// Answers requests under `/splitrail/`, which never reach the engine; `None` is a 404.
pub type LocalRoutes = Arc<dyn Fn(&Request<()>) -> Option<Response<Bytes>> + Send + Sync>;

/// The proxy. Cheap to clone.
#[derive(Clone)]
pub struct Proxy(Arc<Inner>);

struct Inner {
    config: Config,
    engine: Upstream,
    residency: Arc<dyn Residency>,
    capabilities: watch::Receiver<Capabilities>,
    local: LocalRoutes,
    traffic: Arc<Traffic>,
    outcomes: Outcomes,
    misses: Misses,
    /// One place for each request to the engine.
    places: Arc<Semaphore>,
    /// Whether the last connection to the engine came about, for the log.
    reachable: AtomicBool,
}

impl Proxy {
    /// A proxy that asks `residency` what the engine holds, and `capabilities` how to pin a
    /// rank. Its metrics are in `registry`.
    ///
    /// # Errors
    /// If the registry has metrics of these names.
    pub fn new(
        config: Config,
        residency: Arc<dyn Residency>,
        capabilities: watch::Receiver<Capabilities>,
        local: LocalRoutes,
        registry: &Registry,
    ) -> prometheus::Result<Self> {
        let limits = config.limits;
        Ok(Self(Arc::new(Inner {
            engine: Upstream::new(
                &config.engine,
                config.connect_timeout,
                limits.head_max_bytes,
                limits.requests_max,
            ),
            residency,
            capabilities,
            local,
            traffic: Traffic::new(registry)?,
            outcomes: Outcomes::new(registry)?,
            misses: Misses::new(limits.miss_body_max_bytes, limits.miss_bodies_max_bytes),
            places: Arc::new(Semaphore::new(limits.requests_max)),
            config,
            reachable: AtomicBool::new(true),
        })))
    }

    /// What runs on the engine.
    pub fn traffic(&self) -> Arc<Traffic> {
        Arc::clone(&self.0.traffic)
    }
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Proxy").field("config", &self.0.config).finish_non_exhaustive()
    }
}
