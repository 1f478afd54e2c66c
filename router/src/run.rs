//! Runs a router: binds, serves, drains.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::admin;
use crate::config::Listen;
use crate::core::Core;
use crate::fleet::{intake, poll};
use crate::ingress::{grpc, http, listener};

/// A router that is bound and serves. Dropping it ends everything at once.
pub struct Running {
    core: Arc<Core>,
    addresses: Addresses,
    /// Stops the doors from accepting.
    stop: CancellationToken,
    /// The doors; each ends once its last connection has.
    doors: JoinSet<io::Result<()>>,
    /// The fleet's tasks, which end with the router.
    _fleet: JoinSet<()>,
}

/// The bound addresses.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// The OpenAI front door.
    pub http: SocketAddr,
    /// The gRPC front door, if there is one.
    pub grpc: Option<SocketAddr>,
    /// The admin listener.
    pub admin: SocketAddr,
}

impl Running {
    /// Binds every address, then starts to serve.
    ///
    /// # Errors
    /// An address that cannot be bound.
    pub async fn start(core: Arc<Core>, listen: &Listen) -> io::Result<Self> {
        let http_socket = listener::bind(listen.http).await?;
        let admin_socket = listener::bind(listen.admin).await?;
        let grpc_socket = match listen.grpc {
            Some(address) => Some(listener::bind(address).await?),
            None => None,
        };
        let addresses = Addresses {
            http: http_socket.local_addr()?,
            grpc: grpc_socket.as_ref().map(|socket| socket.local_addr()).transpose()?,
            admin: admin_socket.local_addr()?,
        };
        let stop = CancellationToken::new();
        let mut doors = JoinSet::new();
        doors.spawn(listener::serve(http_socket, http::routes(Arc::clone(&core)), stop.clone()));
        doors.spawn(listener::serve(admin_socket, admin::routes(Arc::clone(&core)), stop.clone()));
        if let Some(socket) = grpc_socket {
            doors.spawn(listener::serve(socket, grpc::routes(&core, stop.clone()), stop.clone()));
        }
        let mut fleet = JoinSet::new();
        for served in &core.models {
            for worker in &served.pool.workers {
                fleet.spawn(poll::run(Arc::clone(worker), served.client.clone()));
                if worker.config.kv_events.is_some() {
                    let (core, served) = (Arc::clone(&core), Arc::clone(served));
                    fleet.spawn(intake::run(core, served, Arc::clone(worker)));
                }
            }
        }
        Ok(Self { core, addresses, stop, doors, _fleet: fleet })
    }

    /// The bound addresses.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// What serves the requests.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Writes the ready file: the bound addresses and the models, as JSON. Written
    /// beside its place and moved there, so that nobody reads half of it.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_ready_file(&self, path: &Path) -> io::Result<()> {
        let Addresses { http, grpc, admin } = self.addresses;
        let models: Vec<_> = self.core.models.iter().map(|served| served.name()).collect();
        let mut ready = json!({
            "http": http.to_string(), "admin": admin.to_string(), "models": models,
        });
        if let Some(grpc) = grpc {
            ready["grpc"] = grpc.to_string().into();
        }
        let beside = path.with_extension("partial");
        std::fs::write(&beside, ready.to_string())?;
        std::fs::rename(&beside, path)
    }

    /// Drains: not ready at once; still accepting for `limits.drain_delay`, so that
    /// balancers notice; then requests in flight may end within
    /// `limits.drain_grace`. Says how many did not.
    pub async fn drain(mut self) -> usize {
        let limits = self.core.limits.clone();
        self.core.drain();
        tracing::info!(in_flight = self.core.live.len(), "draining: not ready any more");
        tokio::time::sleep(limits.drain_delay).await;
        self.stop.cancel();
        let all_closed = async { while self.doors.join_next().await.is_some() {} };
        let cut = match tokio::time::timeout(limits.drain_grace, all_closed).await {
            Ok(()) => 0,
            Err(_) => self.core.live.len(),
        };
        if cut > 0 {
            tracing::warn!(cut, "limits.drain_grace is over: requests are cut off");
        } else {
            tracing::info!("drained");
        }
        cut
    }
}

/// Waits for SIGTERM or SIGINT. SIGHUP, which asks for a reload, is answered in the
/// log instead of ending the process.
///
/// # Errors
/// If signals cannot be watched.
pub async fn stop_signal() -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    loop {
        tokio::select! {
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            _ = hang_up.recv() => {
                tracing::warn!("SIGHUP: this version does not reload; restart to change the configuration");
            }
        }
    }
}

/// Serves until a stop signal, then drains; a second signal ends at once.
///
/// # Errors
/// If signals cannot be watched.
pub async fn until_stopped(running: Running) -> io::Result<()> {
    stop_signal().await?;
    tokio::select! {
        _cut = running.drain() => {}
        second = stop_signal() => {
            second?;
            tracing::warn!("a second stop signal: ending at once");
        }
    }
    Ok(())
}

/// Waits until the router is ready, for at most `patience`; says why not if not.
pub async fn wait_ready(core: &Core, patience: Duration) -> Option<String> {
    let ready = async {
        while core.unready(http::SYNC_PATIENCE).is_some() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    match tokio::time::timeout(patience, ready).await {
        Ok(()) => None,
        Err(_) => core.unready(http::SYNC_PATIENCE),
    }
}
