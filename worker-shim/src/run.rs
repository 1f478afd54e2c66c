//! The running shim: binds the listener, watches the engine, serves, attaches and drains.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use splitrail_kv::HashSeed;
use splitrail_settings::SecretError;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

mod follow;
mod settings;

use crate::attach;
use crate::config::{Config, Role};
use crate::drain::{self, DrainInputs, DrainWait};
use crate::engine::Engine;
use crate::mirror::{self, Mirror};
use crate::proxy::{self, GateRequirement, Proxy, Residency, Traffic};
use crate::status::StatusEndpoints;
use crate::telemetry::Metrics;

/// Maximum interval between two checks of a drain.
const DRAIN_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum time for which open connections may take to close once nothing is in flight.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a shim cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address `listen` cannot be bound.
    #[error("{0}")]
    Listen(#[source] io::Error),
    /// A secret cannot be read.
    #[error("`{key}`: {source}")]
    Secret {
        /// The configuration key of the secret.
        key: &'static str,
        /// The cause.
        source: SecretError,
    },
    /// A file of `tls` cannot be read.
    #[error("`tls`: {0}")]
    Tls(#[source] io::Error),
    /// An address was accepted by the check of the configuration but cannot be used.
    #[error("`{0}` is not an address")]
    Address(&'static str),
    /// A metric is defined twice, which is a bug.
    #[error("metrics: {0}")]
    Defect(#[from] prometheus::Error),
}

/// A task of the shim has ended although none should while the shim runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnexpectedExit {
    /// Whether the task panicked.
    pub is_panic: bool,
}

impl fmt::Display for UnexpectedExit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self.is_panic {
            true => "a task of the shim panicked: please report the preceding log lines",
            false => "a task of the shim ended unexpectedly: please report this",
        })
    }
}

/// A shim that is bound and serves. Dropping it ends all its tasks at once.
pub struct RunningShim {
    address: SocketAddr,
    grace: Duration,
    engine: Engine,
    traffic: Arc<Traffic>,
    status: Arc<StatusEndpoints>,
    /// Fires when routers are to be asked to send no more work.
    leaving: CancellationToken,
    /// Fires when the listener is to be closed.
    closing: CancellationToken,
    listener: JoinSet<()>,
    /// The other tasks. None of them ends by itself.
    tasks: JoinSet<()>,
}

impl RunningShim {
    /// Binds the listener and starts all tasks. The engine may still be down.
    ///
    /// # Errors
    /// If the address cannot be bound, or a file or variable that the configuration refers to
    /// cannot be read.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let metrics = Arc::new(Metrics::new()?);
        let (engine, watcher) = Engine::new(settings::engine(&config)?);
        let mirror = Mirror::new(mirror::MirrorConfig {
            blocks_max: config.limits.mirror_blocks_max,
            ring_bytes_max: config.limits.change_log_max_bytes,
            seed: config.hash_seed.map(HashSeed),
            ..mirror::MirrorConfig::default()
        });
        let attached = attach::RouterStatuses::default();
        let status = Arc::new(StatusEndpoints {
            id: config.id.clone(),
            role: config.role,
            engine: engine.clone(),
            mirror: mirror.clone(),
            routers: attached.clone(),
            metrics: Arc::clone(&metrics),
            draining: AtomicBool::new(false),
        });
        let endpoints = Arc::clone(&status);
        let proxy = Proxy::new(
            settings::proxy(&config)?,
            Arc::new(MirrorResidency(mirror.clone())),
            engine.capabilities.clone(),
            Arc::new(move |method, path| endpoints.respond(method, path)),
            metrics.registry(),
        )?;
        let socket = bind(config.listen).await.map_err(StartError::Listen)?;
        let address = socket.local_addr().map_err(StartError::Listen)?;
        let (leaving, closing) = (CancellationToken::new(), CancellationToken::new());
        let traffic = proxy.traffic();
        let mut tasks = JoinSet::new();
        let unfollowed_groups = mirror.unfollowed_groups();
        tasks.spawn(follow::run(follow::FollowerInputs {
            attach: settings::attach(&config, address, attached)?,
            mirror,
            engine: engine.clone(),
            leaving: leaving.clone(),
        }));
        tasks.spawn(watcher.report_groups(unfollowed_groups));
        tasks.spawn(watcher.run(Arc::clone(&traffic), metrics));
        let mut listener = JoinSet::new();
        listener.spawn(proxy::serve(socket, proxy, closing.clone()));
        let grace = config.drain.grace;
        Ok(Self { address, grace, engine, traffic, status, leaving, closing, listener, tasks })
    }

    /// The address of the listener.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The state of the engine.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Waits until the engine's identity is known for the first time.
    pub async fn wait_for_engine(&self) {
        let mut identity = self.engine.identity.clone();
        if identity.wait_for(Option::is_some).await.is_err() {
            // The watcher has ended, which `unexpected_exit` reports.
            std::future::pending().await
        }
    }

    /// Waits until a task ends, which is a bug.
    pub async fn unexpected_exit(&mut self) -> UnexpectedExit {
        let ended = tokio::select! {
            Some(ended) = self.tasks.join_next() => ended,
            Some(ended) = self.listener.join_next() => ended,
            else => Ok(()),
        };
        UnexpectedExit { is_panic: ended.is_err_and(|error| error.is_panic()) }
    }

    /// Asks routers to send no more work, then waits for requests in flight and for hand-offs that
    /// have not been fetched, up to the grace period.
    ///
    /// # Errors
    /// If a task ends unexpectedly in the meantime.
    pub async fn drain(&mut self) -> Result<(), UnexpectedExit> {
        self.status.draining.store(true, Ordering::Relaxed);
        self.status.metrics.draining.set(1);
        tracing::info!(requests = self.traffic.requests(), "draining: informing routers");
        self.leaving.cancel();
        let (status, traffic, engine) = (&self.status, &self.traffic, &self.engine);
        let done = tokio::time::timeout(self.grace, wait_until_drained(status, traffic, engine));
        let tasks = &mut self.tasks;
        tokio::select! {
            done = done => match done {
                Ok(()) => tracing::info!("drained"),
                Err(_) => tracing::warn!(
                    requests = traffic.requests(),
                    staged = traffic.staged(),
                    "drain.grace has passed: ending with work left"
                ),
            },
            Some(ended) = tasks.join_next() => {
                return Err(UnexpectedExit { is_panic: ended.is_err_and(|error| error.is_panic()) });
            }
        }
        self.closing.cancel();
        let listener = &mut self.listener;
        let closed = async { while listener.join_next().await.is_some() {} };
        // Connections that are still open have no request in flight.
        let _in_time = tokio::time::timeout(CLOSE_TIMEOUT, closed).await;
        Ok(())
    }
}

/// Waits until a drain has nothing left to wait for.
async fn wait_until_drained(status: &StatusEndpoints, traffic: &Traffic, engine: &Engine) {
    let mut changed = traffic.changed();
    let mut busy_at = Instant::now();
    let mut logged = None;
    loop {
        let now = Instant::now();
        if traffic.requests() > 0 {
            busy_at = now;
        }
        let waiting = {
            let polled = engine.polled.borrow();
            let staged = if status.role == Role::Decode { 0 } else { traffic.staged() };
            let requests = traffic.requests();
            drain::remaining_wait(&DrainInputs { requests, staged, busy_at, polled: &polled }, now)
        };
        let Some(waiting) = waiting else { return };
        if logged.replace(waiting) != Some(waiting) && waiting != DrainWait::Stragglers {
            tracing::info!(
                waiting_for = waiting.name(),
                requests = traffic.requests(),
                staged = traffic.staged(),
                "draining"
            );
        }
        tokio::select! {
            Ok(()) = changed.changed() => {}
            () = tokio::time::sleep(DRAIN_CHECK_INTERVAL) => {}
        }
    }
}

/// Answers the gate's questions from the mirror.
struct MirrorResidency(Mirror);

impl Residency for MirrorResidency {
    fn holds<'a>(&'a self, requirement: &'a GateRequirement) -> BoxFuture<'a, bool> {
        Box::pin(async {
            self.0.refresh(requirement.rank).await;
            self.0.holds(
                requirement.namespace,
                requirement.rank,
                requirement.blocks,
                requirement.last,
            )
        })
    }
}

async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        io::Error::new(error.kind(), format!("cannot listen on {address}: {error}"))
    })
}
