//! The reverse proxy in front of the engine, with its gate.
//!
//! Requests for listed paths and their replies are forwarded unchanged and unbuffered. A request
//! with the header [`X_GATE`] is answered by the shim at once, in the form of an engine that
//! supports `cache_hit_threshold`, unless the engine holds the required blocks. [`Traffic`]
//! counts the requests in flight.

mod bodies;
mod body_pace;
mod client;
mod engine_connections;
mod forward;
mod gate;
mod hand_off_scan;
mod headers;
mod listen;
mod metrics;
mod miss;
mod paths;
mod refusal;
mod scoped_waker;
mod traffic;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;
use http::uri::Authority;
use http::{Method, Response};
use prometheus::{IntCounter, Registry};
use splitrail_proto::v1::Capabilities;
use splitrail_settings::address_shares::AddressShares;
use tokio::sync::watch;

pub use self::gate::{GateRequirement, MalformedGate, Residency, X_GATE};
pub use self::headers::X_PREFILL_TOKENS;
pub use self::listen::serve;
pub use self::traffic::Traffic;

use self::engine_connections::EngineConnections;
use self::metrics::{OutcomeCounters, refused_connections, unsolicited_data_connections};
use self::miss::MissResponder;
use crate::telemetry::Registrar;

/// Settings of the proxy.
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    /// The engine's host and port. The connection uses plain HTTP.
    pub engine: Authority,
    /// Timeout for connecting to the engine.
    pub connect_timeout: Duration,
    /// How long the engine keeps the blocks of a hand-off, if its capabilities do not tell.
    pub lease: Duration,
    /// Limits.
    pub limits: ProxyLimits,
}

/// Limits of the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyLimits {
    /// Maximum number of connections. Further ones wait to be accepted. One address may hold no
    /// more than eight times as many as are free.
    pub connections_max: usize,
    /// Maximum number of requests to the engine in flight. Further ones get status 503. One address
    /// may hold no more than eight times as many as are free.
    pub requests_max: usize,
    /// Maximum time until a connection has sent the head of its first or next request. Longer than
    /// clients keep idle connections. A connection without an open request is closed after once to
    /// twice this time.
    pub idle_timeout: Duration,
    /// Maximum time for which a request's body may be waited for, besides the time that its bytes
    /// allow at 1 KiB per second. Afterwards the request gets status 408.
    pub body_grace: Duration,
    /// Maximum size in bytes of the head of a request or a reply, and of each buffer of a
    /// connection. At least 8192.
    pub head_max_bytes: usize,
    /// Maximum size in bytes of a body that the shim reads to answer a miss. A miss with a longer
    /// body is answered with status 412.
    pub miss_body_max_bytes: usize,
    /// Maximum total size in bytes of all such bodies that are read at the same time, and of the
    /// replies that clients have not read.
    pub miss_bodies_max_bytes: usize,
}

impl Default for ProxyLimits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            requests_max: 4096,
            idle_timeout: Duration::from_secs(60),
            body_grace: Duration::from_secs(30),
            head_max_bytes: 64 << 10,
            miss_body_max_bytes: 16 << 20,
            miss_bodies_max_bytes: 32 << 20,
        }
    }
}

impl ProxyConfig {
    /// The default settings for an engine.
    pub fn new(engine: Authority) -> Self {
        Self {
            engine,
            connect_timeout: Duration::from_secs(2),
            lease: Duration::from_secs(30),
            limits: ProxyLimits::default(),
        }
    }
}

/// Answers requests under `/splitrail/`, which never reach the engine, by method and path. `None`
/// leads to status 404.
pub type LocalRoutes = Arc<dyn Fn(&Method, &str) -> Option<Response<Bytes>> + Send + Sync>;

/// The proxy. Cheap to clone.
#[derive(Clone)]
pub struct Proxy(Arc<ProxyInner>);

struct ProxyInner {
    config: ProxyConfig,
    engine: EngineConnections,
    residency: Arc<dyn Residency>,
    capabilities: watch::Receiver<Capabilities>,
    local: LocalRoutes,
    traffic: Arc<Traffic>,
    outcomes: OutcomeCounters,
    misses: MissResponder,
    /// The places of requests to the engine, by client address.
    request_places: Arc<AddressShares>,
    /// Counts connections that were refused because their address holds its share.
    refused_connections: IntCounter,
    /// Whether the last attempt to reach the engine succeeded, to log changes once.
    reachable: AtomicBool,
}

impl Proxy {
    /// Creates a proxy. `residency` tells which blocks the engine holds, `capabilities` how a
    /// request can be pinned to a rank. Registers its metrics in `registry`.
    ///
    /// # Errors
    /// If the registry already has metrics of these names.
    pub fn new(
        config: ProxyConfig,
        residency: Arc<dyn Residency>,
        capabilities: watch::Receiver<Capabilities>,
        local: LocalRoutes,
        registry: &Registry,
    ) -> prometheus::Result<Self> {
        let (limits, new) = (config.limits, Registrar(registry));
        Ok(Self(Arc::new(ProxyInner {
            engine: EngineConnections::new(
                &config.engine,
                config.connect_timeout,
                limits.head_max_bytes,
                limits.requests_max,
                unsolicited_data_connections(&new)?,
            ),
            residency,
            capabilities,
            local,
            traffic: Traffic::new(&new)?,
            outcomes: OutcomeCounters::new(&new)?,
            misses: MissResponder::new(limits.miss_body_max_bytes, limits.miss_bodies_max_bytes),
            request_places: Arc::default(),
            refused_connections: refused_connections(&new)?,
            config,
            reachable: AtomicBool::new(true),
        })))
    }

    /// The counts of requests in flight.
    pub fn traffic(&self) -> Arc<Traffic> {
        Arc::clone(&self.0.traffic)
    }
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Proxy").field("config", &self.0.config).finish_non_exhaustive()
    }
}
