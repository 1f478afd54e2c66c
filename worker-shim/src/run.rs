//! The shim as one program: binds, watches its engine, serves, attaches, drains.

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
use crate::config::{Config, Events, Role};
use crate::drain::{self, DrainInputs, DrainWait};
use crate::engine::{Busy, Engine};
use crate::mirror::{self, Mirror};
use crate::plane;
use crate::proxy::{self, Ask, Proxy, Residency, Traffic};
use crate::status::Status;
use crate::telemetry::Metrics;

/// How long a drain waits before it looks again, if nothing changes.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// How long open connections may take to end once nothing is in flight.
const CLOSING: Duration = Duration::from_secs(1);

/// Why a shim cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// `listen` cannot be bound.
    #[error("{0}")]
    Listen(#[source] io::Error),
    /// A secret cannot be had.
    #[error("`{key}`: {source}")]
    Secret {
        /// Which.
        key: &'static str,
        /// Why.
        source: SecretError,
    },
    /// A file of `tls` cannot be read.
    #[error("`tls`: {0}")]
    Tls(#[source] io::Error),
    /// An address that passed the configuration's check does not pass another.
    #[error("`{0}` is not an address")]
    Address(&'static str),
    /// A mistake of this program.
    #[error("metrics: {0}")]
    Defect(#[from] prometheus::Error),
}

/// A part of the shim has ended, which none does while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Whether it panicked.
    pub is_panic: bool,
}

impl fmt::Display for Ended {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self.is_panic {
            true => "a part of the shim broke off: please report what was logged before",
            false => "a part of the shim ended: please report this",
        })
    }
}

/// A shim that is bound and serves. Dropped, it ends at once.
pub struct Running {
    address: SocketAddr,
    grace: Duration,
    engine: Engine,
    traffic: Arc<Traffic>,
    status: Arc<Status>,
    /// Fires when routers are to send no more work.
    leaving: CancellationToken,
    /// Fires when the listener is to close.
    closing: CancellationToken,
    listener: JoinSet<()>,
    /// What runs beside the listener; none of it ends by itself.
    parts: JoinSet<()>,
}

impl Running {
    /// Binds the listener and starts all parts. The engine may be down: it is waited for.
    ///
    /// # Errors
    /// An address that cannot be bound, or something that the configuration refers to and
    /// that is not there any more.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let metrics = Arc::new(Metrics::new()?);
        let (engine, watcher) = Engine::new(settings::engine(&config)?);
        let mirror = Mirror::new(mirror::Config {
            blocks_max: config.limits.mirror_blocks_max,
            ring_bytes_max: config.limits.changes_max_bytes,
            seed: config.hash_seed.map(HashSeed),
            ..mirror::Config::default()
        });
        let attached = attach::RouterStatuses::default();
        let published = plane::SharedPlaneStatus::default();
        let published = matches!(config.events, Events::Nats(_)).then_some(published);
        let status = Arc::new(Status {
            id: config.id.clone(),
            role: config.role,
            engine: engine.clone(),
            mirror: mirror.clone(),
            routers: attached.clone(),
            plane: published.clone(),
            metrics: Arc::clone(&metrics),
            draining: AtomicBool::new(false),
        });
        let answers = Arc::clone(&status);
        let proxy = Proxy::new(
            settings::proxy(&config)?,
            Arc::new(Held(mirror.clone())),
            engine.capabilities.clone(),
            Arc::new(move |request| answers.respond(request)),
            metrics.registry(),
        )?;
        let socket = bind(config.listen).await.map_err(StartError::Listen)?;
        let address = socket.local_addr().map_err(StartError::Listen)?;
        let (leaving, closing) = (CancellationToken::new(), CancellationToken::new());
        let traffic = proxy.traffic();
        let mut parts = JoinSet::new();
        parts.spawn(follow::run(follow::Follow {
            attach: settings::attach(&config, address, attached)?,
            plane: settings::plane(&config, address, published.unwrap_or_default()),
            mirror,
            engine: engine.clone(),
            leaving: leaving.clone(),
        }));
        parts.spawn(watcher.run(Arc::clone(&traffic), metrics));
        let mut listener = JoinSet::new();
        listener.spawn(proxy::serve(socket, proxy, closing.clone()));
        let grace = config.drain.grace;
        Ok(Self { address, grace, engine, traffic, status, leaving, closing, listener, parts })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What is known of the engine.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Waits until the engine was reached for the first time, and said what it is.
    pub async fn reached(&self) {
        let mut identity = self.engine.identity.clone();
        if identity.wait_for(Option::is_some).await.is_err() {
            // Nobody asks any more: `ended` says so.
            std::future::pending().await
        }
    }

    /// Waits for a part to end, which is a defect: half a shim is none.
    pub async fn ended(&mut self) -> Ended {
        let ended = tokio::select! {
            Some(ended) = self.parts.join_next() => ended,
            Some(ended) = self.listener.join_next() => ended,
            else => Ok(()),
        };
        Ended { is_panic: ended.is_err_and(|error| error.is_panic()) }
    }

    /// Asks routers for no more work, then waits for requests in flight and for KV that has
    /// yet to be fetched, up to the grace period.
    ///
    /// # Errors
    /// A part that ended meanwhile.
    pub async fn drain(&mut self) -> Result<(), Ended> {
        self.status.draining.store(true, Ordering::Relaxed);
        self.status.metrics.draining.set(1);
        tracing::info!(requests = self.traffic.requests(), "draining: routers are told");
        self.leaving.cancel();
        let (status, traffic, engine) = (&self.status, &self.traffic, &self.engine);
        let done = tokio::time::timeout(self.grace, nothing_left(status, traffic, engine));
        let parts = &mut self.parts;
        tokio::select! {
            done = done => match done {
                Ok(()) => tracing::info!("drained"),
                Err(_) => tracing::warn!(
                    requests = traffic.requests(),
                    staged = traffic.staged(),
                    "cut off: drain.grace is over"
                ),
            },
            Some(ended) = parts.join_next() => {
                return Err(Ended { is_panic: ended.is_err_and(|error| error.is_panic()) });
            }
        }
        self.closing.cancel();
        let listener = &mut self.listener;
        let closed = async { while listener.join_next().await.is_some() {} };
        // Whoever still holds a connection open has nothing in flight on it.
        let _in_time = tokio::time::timeout(CLOSING, closed).await;
        Ok(())
    }
}

/// Waits until a drain has nothing left to wait for.
async fn nothing_left(status: &Status, traffic: &Traffic, engine: &Engine) {
    let mut changed = traffic.changed();
    let mut busy_at = Instant::now();
    let mut said = None;
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
        if said.replace(waiting) != Some(waiting) && waiting != DrainWait::Stragglers {
            tracing::info!(
                waiting_for = waiting.name(),
                requests = traffic.requests(),
                staged = traffic.staged(),
                "draining"
            );
        }
        tokio::select! {
            Ok(()) = changed.changed() => {}
            () = tokio::time::sleep(LOOK_AGAIN) => {}
        }
    }
}

/// The mirror as the gate asks it.
struct Held(Mirror);

impl Residency for Held {
    fn holds<'a>(&'a self, ask: &'a Ask) -> BoxFuture<'a, bool> {
        Box::pin(async {
            self.0.refresh(ask.rank).await;
            self.0.holds(ask.namespace, ask.rank, ask.blocks, ask.last)
        })
    }
}

impl Busy for Traffic {
    fn requests(&self) -> u64 {
        self.requests()
    }

    fn prefill_tokens_queued(&self) -> u64 {
        self.prefill_tokens_queued()
    }

    fn changed(&self) -> tokio::sync::watch::Receiver<()> {
        self.changed()
    }
}

async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        io::Error::new(error.kind(), format!("cannot listen on {address}: {error}"))
    })
}
