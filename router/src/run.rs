//! Runs a router: binds, serves, drains.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

pub use splitrail_settings::process::write_whole;

use crate::admin::{self, Admin};
use crate::core::Core;
use crate::ingress::connection_service::Routes;
use crate::ingress::tls_listener::TlsListener;
use crate::ingress::{grpc, http, listener};
use crate::live::Live;
use crate::reload::{Reload, WatchedFile};
use crate::runtime_lag;
use splitrail_config::Listen;
use splitrail_config::tls::Protocols;
use splitrail_fleet::Fleet;
use splitrail_fleet::read_back::release_of;
use splitrail_fleet_listener::FleetListener;
use splitrail_ledger::lines::Lines;
use splitrail_ledger::summary::Summary;
use splitrail_telemetry::{TaskName, restart_on_panic};

/// A router that is bound and serving.
pub struct Running {
    /// The state that serves the requests.
    pub core: Arc<Core>,
    /// The bound addresses.
    pub addresses: Addresses,
    /// Stops the client listeners from accepting.
    stop: CancellationToken,
    /// The client listeners; each ends when its last connection has ended.
    listeners: JoinSet<io::Result<()>>,
    /// The admin listener and the listener for metrics, which serve until the drain is over.
    operator_listeners: JoinSet<io::Result<()>>,
    /// Stops the operators' listeners.
    stop_operators: CancellationToken,
    /// Requests reloads of the configuration.
    pub reload: Reload,
    _reloading: JoinSet<()>,
    /// What operators watch.
    live: Arc<Live>,
    _sampling: JoinSet<()>,
    /// The router's workers, whose tasks end with the router.
    pub fleet: Arc<Fleet>,
    /// Accepts shims; ends after the client listeners.
    fleet_listener: Option<FleetListener>,
    /// Logs the totals, and measures the runtime.
    background: JoinSet<()>,
    /// Prewarms workers and tries peer fetches until the client listeners stop accepting.
    prewarming: JoinSet<()>,
    /// Follows the files of credentials, and shares the limits of tenants with other routers.
    access: JoinSet<()>,
    /// Writes the ledger file until all ended requests are in it.
    ledger: JoinSet<()>,
    /// Tells the ledger's writer that the last request has ended.
    close_ledger: CancellationToken,
    /// Exports traces until all ended requests are exported.
    traces: JoinSet<()>,
    /// Tells the exporter that the last request has ended.
    close_traces: CancellationToken,
}

/// The bound addresses.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// The address of the OpenAI API.
    pub http: SocketAddr,
    /// The address of the gRPC API, if it is configured.
    pub grpc: Option<SocketAddr>,
    /// The address of the fleet listener, if it is configured.
    pub fleet: Option<SocketAddr>,
    /// The address of the admin listener.
    pub admin: SocketAddr,
    /// The address of the listener for metrics, if it is configured.
    pub metrics: Option<SocketAddr>,
}

impl Addresses {
    fn all(self) -> impl Iterator<Item = SocketAddr> {
        let Self { http, grpc, fleet, admin, metrics } = self;
        [Some(http), grpc, fleet, Some(admin), metrics].into_iter().flatten()
    }
}

impl Running {
    /// Binds every address, then starts to serve. There is no file to reload.
    ///
    /// # Errors
    /// An address cannot be bound, or a certificate cannot be used.
    pub async fn start(core: Arc<Core>, listen: &Listen) -> io::Result<Self> {
        Self::start_from(None, core, listen).await
    }

    /// Like `start`; the configuration was read from `file`, and is reloaded from there.
    ///
    /// # Errors
    /// An address cannot be bound, or a certificate cannot be used.
    pub async fn start_from(
        file: Option<PathBuf>,
        core: Arc<Core>,
        listen: &Listen,
    ) -> io::Result<Self> {
        let tls = Tls::open(&core, listen)?;
        let sockets = Sockets::bind(listen).await?;
        let addresses = sockets.addresses()?;
        core.cluster.own_addresses.get_or_init(|| addresses.all().collect());
        let fleet = Fleet::start(Arc::clone(&core.cluster)).map_err(io::Error::other)?;
        let open =
            |socket| FleetListener::open(Arc::clone(&core.cluster), Arc::clone(&fleet), socket);
        let fleet_listener = sockets.fleet.map(open).transpose()?;
        let stop = CancellationToken::new();
        let mut listeners = JoinSet::new();
        let client_listener = |name, routes: Routes, tls| {
            let (core, stop) = (Arc::clone(&core), stop.clone());
            listener::ClientListener { name, routes, tls, core, stop }
        };
        let routes = http::routes(Arc::clone(&core));
        listeners.spawn(listener::serve(sockets.http, client_listener("http", routes, tls.http)));
        let mut operator_listeners = JoinSet::new();
        let (reload, reloading) = Reload::start(Arc::clone(&core), Arc::clone(&fleet), file);
        let (live, sampling) = Live::start(Arc::clone(&core));
        let admin = Admin::new(&core, &fleet, &reload, &live);
        let routes = admin::routes(admin, addresses.admin).into();
        let stop_operators = CancellationToken::new();
        let operator_listener = |name, routes: Routes, tls| listener::ClientListener {
            stop: stop_operators.clone(),
            ..client_listener(name, routes, tls)
        };
        let admin = operator_listener("admin", routes, tls.admin);
        operator_listeners.spawn(listener::serve(sockets.admin, admin));
        if let Some(socket) = sockets.metrics {
            let routes = admin::metrics_routes(Arc::clone(&core)).into();
            let metrics = operator_listener("metrics", routes, tls.metrics);
            operator_listeners.spawn(listener::serve(socket, metrics));
        }
        if let Some(socket) = sockets.grpc {
            let (routes, told) = grpc::routes(&core, stop.clone());
            listeners.spawn(told);
            listeners.spawn(listener::serve(socket, client_listener("grpc", routes, tls.grpc)));
        }
        let (mut background, access) = (log_summary(&core), keep_access(&core));
        background.spawn(runtime_lag::observe(Arc::clone(&core.metrics)));
        let mut prewarming = JoinSet::new();
        prewarming.spawn(splitrail_transfer::prewarm::run(Arc::clone(&core.cluster), stop.clone()));
        prewarming.spawn(splitrail_transfer::trial::run(Arc::clone(&core.cluster), stop.clone()));
        let close_ledger = CancellationToken::new();
        let ledger = ledger_writers(&core, &close_ledger);
        let close_traces = CancellationToken::new();
        let traces = trace_exporter(&core, &close_traces);
        Ok(Self {
            core,
            addresses,
            stop,
            listeners,
            operator_listeners,
            stop_operators,
            reload,
            _reloading: reloading,
            live,
            _sampling: sampling,
            fleet,
            fleet_listener,
            background,
            prewarming,
            access,
            ledger,
            close_ledger,
            traces,
            close_traces,
        })
    }

    /// Writes the ready file: the bound addresses and the models, as JSON. It is written under a
    /// temporary name and renamed, so that no reader sees a part of it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_ready_file(&self, path: &Path) -> io::Result<()> {
        let Addresses { http, grpc, fleet, admin, metrics } = self.addresses;
        let serving = self.core.serving();
        let models: Vec<_> = serving.models.iter().map(|served| served.name()).collect();
        let mut ready = json!({
            "http": http.to_string(), "admin": admin.to_string(), "models": models,
        });
        for (key, address) in [("grpc", grpc), ("fleet", fleet), ("metrics", metrics)] {
            if let Some(address) = address {
                ready[key] = address.to_string().into();
            }
        }
        write_whole(path, &ready.to_string())
    }

    /// Drains: the router is not ready from now on, but accepts for `limits.drain_delay`, so that
    /// load balancers notice; then requests in flight may take `limits.drain_grace`. What engines keep
    /// for requests that have ended is freed in the rest of that time, or in some seconds if that is
    /// longer. Returns the number of requests that did not end in time.
    pub async fn drain(mut self) -> usize {
        let limits = self.core.serving().limits.clone();
        let grace_ends = Instant::now() + limits.drain_delay + limits.drain_grace;
        let cut = self.end_requests().await;
        // What prewarming has not used is released.
        while self.prewarming.join_next().await.is_some() {}
        self.background.shutdown().await;
        let serving = self.core.serving();
        let until = grace_ends.max(Instant::now() + RELEASE_TIMEOUT).into();
        let pins = release_of(&serving, &self.core.metrics);
        tokio::join!(pins, self.core.cluster.finish_releases(until));
        self.access.shutdown().await;
        self.core.access.load_full().give_shares_back().await;
        if let Some(listener) = self.fleet_listener.take() {
            listener.close().await;
        }
        let now = Instant::now();
        report_totals(&mut Summary::new(now), &self.core, now);
        self.close_ledger.cancel();
        self.close_traces.cancel();
        let written = async { while self.ledger.join_next().await.is_some() {} };
        let exported = async { while self.traces.join_next().await.is_some() {} };
        let written = tokio::time::timeout(LEDGER_TIMEOUT, written);
        let exported = tokio::time::timeout(TRACES_TIMEOUT, exported);
        let (written, exported) = tokio::join!(written, exported);
        if written.is_err() {
            tracing::error!("the ledger file takes too long: its last lines are lost");
        }
        if exported.is_err() {
            tracing::warn!("the collector of traces takes too long: the last spans are lost");
        }
        self.end_operators().await;
        cut
    }

    /// Ends what operators watch, whose connections have a short time for what is not sent yet. A
    /// subscriber that does not read is cut off.
    async fn end_operators(&mut self) {
        self.live.end();
        self.stop_operators.cancel();
        let all_closed = async { while self.operator_listeners.join_next().await.is_some() {} };
        let _in_time = tokio::time::timeout(CLOSE_TIMEOUT, all_closed).await;
    }

    async fn end_requests(&mut self) -> usize {
        let limits = self.core.serving().limits.clone();
        self.core.drain();
        tracing::info!(in_flight = self.core.live.len(), "draining: not ready any more");
        tokio::time::sleep(limits.drain_delay).await;
        self.stop.cancel();
        let listeners = &mut self.listeners;
        let all_closed = async { while listeners.join_next().await.is_some() {} };
        if tokio::time::timeout(limits.drain_grace, all_closed).await.is_ok() {
            tracing::info!("drained");
            return 0;
        }
        let cut = self.core.live.len();
        for request in self.core.live.iter() {
            tracing::warn!(
                request_id = &*request.request_id,
                "cut off: limits.drain_grace is over"
            );
        }
        // Streams end with an error event, so that no client takes them for complete.
        self.core.abort.cancel();
        let all_closed = async { while self.listeners.join_next().await.is_some() {} };
        let _in_time = tokio::time::timeout(CLOSE_TIMEOUT, all_closed).await;
        // Replies that are not streamed end here.
        self.listeners.shutdown().await;
        cut
    }
}

/// Starts to log the totals, if the configuration asks for it.
fn log_summary(core: &Arc<Core>) -> JoinSet<()> {
    let mut summary = JoinSet::new();
    let log_interval = core.serving().config.ledger.log_interval;
    if !log_interval.is_zero() {
        let core = Arc::clone(core);
        let run = move || log_totals(Arc::clone(&core), log_interval);
        summary.spawn(restart_on_panic(TaskName::new("log of totals"), run));
    }
    summary
}

/// Starts the tasks that keep credentials current and share limits.
fn keep_access(core: &Arc<Core>) -> JoinSet<()> {
    let mut access = JoinSet::new();
    let followed = Arc::clone(core);
    let follow = move || follow_credential_files(Arc::clone(&followed));
    access.spawn(restart_on_panic(TaskName::new("files of credentials"), follow));
    access.spawn(follow_issuers(Arc::clone(core)));
    let sharing = Arc::clone(core);
    let share = move || sharing.access.load().share_limits();
    access.spawn(restart_on_panic(TaskName::new("shares of limits"), share));
    access
}

/// The bound sockets of the listeners.
struct Sockets {
    http: TcpListener,
    grpc: Option<TcpListener>,
    fleet: Option<TcpListener>,
    admin: TcpListener,
    metrics: Option<TcpListener>,
}

impl Sockets {
    async fn bind(listen: &Listen) -> io::Result<Self> {
        Ok(Self {
            http: listener::bind_clients(listen.http.address).await?,
            admin: listener::bind(listen.admin.address).await?,
            grpc: match &listen.grpc {
                Some(grpc) => Some(listener::bind_clients(grpc.address).await?),
                None => None,
            },
            metrics: match &listen.metrics {
                Some(metrics) => Some(listener::bind(metrics.address).await?),
                None => None,
            },
            fleet: match listen.fleet {
                Some(address) => Some(listener::bind(address).await?),
                None => None,
            },
        })
    }

    fn addresses(&self) -> io::Result<Addresses> {
        let of =
            |socket: &Option<TcpListener>| socket.as_ref().map(TcpListener::local_addr).transpose();
        Ok(Addresses {
            http: self.http.local_addr()?,
            grpc: of(&self.grpc)?,
            fleet: of(&self.fleet)?,
            admin: self.admin.local_addr()?,
            metrics: of(&self.metrics)?,
        })
    }
}

/// The TLS of the listeners for clients and operators.
struct Tls {
    http: Option<Arc<TlsListener>>,
    grpc: Option<Arc<TlsListener>>,
    admin: Option<Arc<TlsListener>>,
    metrics: Option<Arc<TlsListener>>,
}

impl Tls {
    fn open(core: &Core, listen: &Listen) -> io::Result<Self> {
        let open = |name, listener, protocols| TlsListener::open(name, listener, protocols, core);
        let grpc = listen.grpc.as_ref();
        let grpc = grpc.map(|grpc| open("grpc", grpc, Protocols::Http2)).transpose()?;
        let metrics = listen.metrics.as_ref();
        let metrics =
            metrics.map(|metrics| open("metrics", metrics, Protocols::Http)).transpose()?;
        Ok(Self {
            http: open("http", &listen.http, Protocols::Http)?,
            grpc: grpc.flatten(),
            metrics: metrics.flatten(),
            admin: open("admin", &listen.admin, Protocols::Http)?,
        })
    }
}

/// Starts the writers of ended requests, which run until they are closed.
fn ledger_writers(core: &Core, close: &CancellationToken) -> JoinSet<()> {
    let mut writers = JoinSet::new();
    let lines = [&core.logs.ledger, core.logs.recorder.lines()].map(Lines::take_writer);
    let others = [core.logs.audit.take_writer(), core.logs.access_log.take_writer()];
    for writer in lines.into_iter().chain(others).flatten() {
        writers.spawn(writer.run(close.clone()));
    }
    writers
}

/// Starts the exporter of traces, which runs until it is closed.
fn trace_exporter(core: &Core, close: &CancellationToken) -> JoinSet<()> {
    let mut task = JoinSet::new();
    if let Some(exporter) = core.logs.traces.take_exporter() {
        task.spawn(exporter.run(close.clone()));
    }
    task
}

/// Maximum time for a collector to take the last spans.
const TRACES_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum time for a disk to write the last lines of the ledger file.
const LEDGER_TIMEOUT: Duration = Duration::from_secs(10);

/// Least time for what engines keep for requests that have ended.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time for clients to read why their stream ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Dropping a router stops accepting immediately; its connections end with all their requests, and
/// its fleet's tasks end.
impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// The signals that a process handles. Once it exists, none of them ends the process.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    /// Whether SIGHUP was ignored when the process started.
    ignored_hang_up: bool,
    stops_on_hang_up: bool,
}

/// Whether the parent had SIGHUP ignored, as `nohup` does; a handler replaces that.
fn ignores_hang_up() -> bool {
    const MASK: &str = "SigIgn:";
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix(MASK));
    // Signal 1 is the lowest bit.
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & 1 == 1)
}

impl Signals {
    /// Watches SIGTERM, SIGINT and SIGHUP.
    ///
    /// # Errors
    /// Signals cannot be watched.
    pub fn watch() -> io::Result<Self> {
        let ignored_hang_up = ignores_hang_up();
        let terminate = signal(SignalKind::terminate())?;
        let interrupt = signal(SignalKind::interrupt())?;
        let hang_up = signal(SignalKind::hangup())?;
        Ok(Self { terminate, interrupt, hang_up, ignored_hang_up, stops_on_hang_up: false })
    }

    /// The same signals for a process that belongs to its terminal: SIGHUP stops it, unless it was
    /// ignored when the process started.
    pub fn stopped_by_terminal(mut self) -> Self {
        self.stops_on_hang_up = !self.ignored_hang_up;
        self
    }

    /// Waits for a signal that stops; calls `hung_up` for each SIGHUP that reloads meanwhile.
    pub async fn stopped(&mut self, hung_up: impl Fn()) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hang_up.recv() => match self.stops_on_hang_up {
                    true => return,
                    false => hung_up(),
                },
            }
        }
    }
}

/// Serves until a stop signal, then drains; a second signal ends it immediately. SIGHUP reloads, and so
/// does another content of the file that is `watched`.
pub async fn until_stopped(running: Running, mut signals: Signals, watched: Option<WatchedFile>) {
    let reload = running.reload.clone();
    let changed = async {
        match watched {
            Some(file) => file.follow(|| reload.soon()).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = signals.stopped(|| reload.soon()) => {}
        () = changed => {}
    }
    tokio::select! {
        _cut = running.drain() => {}
        () = signals.stopped(|| tracing::warn!("SIGHUP: no reload while draining")) => {
            tracing::warn!("a second stop signal: ending at once");
        }
    }
}

/// Waits until the router is ready, for at most `patience`; returns why it is not, if it is not.
pub async fn wait_ready(core: &Core, patience: Duration) -> Option<String> {
    let ready = async {
        while core.unready().is_some() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    match tokio::time::timeout(patience, ready).await {
        Ok(()) => None,
        Err(_) => core.unready(),
    }
}

/// How often the files of API keys are looked at: a revoked key is refused after this time.
const ACCESS_INTERVAL: Duration = Duration::from_secs(1);

fn access_ticks() -> Interval {
    let mut ticks = tokio::time::interval(ACCESS_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Reads the files of credentials again when they change, until the task is ended.
async fn follow_credential_files(core: Arc<Core>) {
    let (mut ticks, mut reads) = (access_ticks(), JoinSet::new());
    loop {
        ticks.tick().await;
        // Off the reactor, because a disk may be slow.
        for read in core.access.load().due_reads(Instant::now()) {
            reads.spawn_blocking(read);
        }
        while let Some(read) = reads.try_join_next() {
            if read.is_err() {
                tracing::error!("a file of credentials could not be read again: a defect");
            }
        }
    }
}

/// Keeps the keys of the issuers of tokens current, also of those that a reload adds, until the
/// task is ended.
async fn follow_issuers(core: Arc<Core>) {
    let mut ticks = access_ticks();
    let mut issuers = JoinSet::new();
    loop {
        ticks.tick().await;
        for task in core.access.load().take_tasks() {
            issuers.spawn(task);
        }
        // The tasks of issuers that are gone have ended.
        while issuers.try_join_next().is_some() {}
    }
}

/// Logs the totals of all models periodically, until the task is ended.
async fn log_totals(core: Arc<Core>, every: Duration) {
    let mut summary = Summary::new(Instant::now());
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        report_totals(&mut summary, &core, Instant::now());
    }
}

fn report_totals(summary: &mut Summary, core: &Core, now: Instant) {
    let serving = core.serving();
    let models: Vec<&str> = serving.models.iter().map(|served| served.name()).collect();
    summary.say(&core.metrics, &models, now);
}
