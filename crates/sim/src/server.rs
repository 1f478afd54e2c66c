//! One engine as a server within the process.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use axum::Router;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::adapters::Adapters;
use crate::config::SimConfig;
use crate::engine::Engine;
use crate::engine::core::Origin;
use crate::events::EventSockets;
use crate::faults::{Fault, FaultBoard};
use crate::http::connection::{ConnectionControl, CuttableListener};
use crate::http::request_body::random_hex;
use crate::http::{App, router, side_channel_router, unix_time};
use crate::record::{RecordedRequest, RequestLog, SimState};

/// A running engine. Dropping it ends all of its tasks and cuts its connections.
#[derive(Debug)]
pub struct SimEngine {
    app: Arc<App>,
    http_addr: SocketAddr,
    tasks: JoinSet<()>,
    connections: CancellationToken,
}

impl SimEngine {
    /// Binds everything and starts to serve.
    ///
    /// # Errors
    /// A listener cannot be bound, or the configuration has no usable KV block.
    pub async fn start(config: SimConfig) -> io::Result<Self> {
        let none = [config.block_size, config.max_num_seqs, config.data_parallel.into()];
        if config.kv_blocks < 2 || none.contains(&0) {
            let message = "an engine needs kv_blocks > 1 and a block_size, max_num_seqs and \
                           data_parallel above 0";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let http = TcpListener::bind((config.host, config.http_port)).await?;
        let side = TcpListener::bind((config.host, config.side_port)).await?;
        let http_addr = http.local_addr()?;
        let origin = Origin {
            engine_id: random_hex(16),
            host: config.host.to_string(),
            port: side.local_addr()?.port(),
            topic: format!("kv@{http_addr}@{}", config.model),
        };
        let mut tasks = JoinSet::new();
        let faults = Arc::new(FaultBoard::default());
        for fault in &config.faults {
            faults.set(fault.clone());
        }
        let (mut ranks, mut event_sources) = (Vec::new(), Vec::new());
        for (rank, sockets) in EventSockets::bind(&config).await?.into_iter().enumerate() {
            event_sources.push(sockets.endpoints());
            let sink = sockets.spawn(rank as u16, &config, &origin.topic, &faults, &mut tasks);
            let origin = Origin { engine_id: random_hex(16), ..origin.clone() };
            let engine = Arc::new(Engine::new(config.clone(), origin));
            tasks.spawn(Arc::clone(&engine).run(sink));
            ranks.push(engine);
        }
        let app = Arc::new(App {
            engine: Arc::clone(&ranks[0]),
            ranks,
            next_rank: AtomicUsize::new(0),
            faults,
            log: RequestLog::default(),
            started_at: unix_time(),
            fingerprint: format!("vllm-{}-{}", config.version, random_hex(4)),
            adapters: Adapters::new(&config.adapters),
            event_sources,
        });
        let connections = CancellationToken::new();
        for (listener, routes) in
            [(http, router(Arc::clone(&app))), (side, side_channel_router(Arc::clone(&app)))]
        {
            let listener = CuttableListener::new(listener, connections.clone());
            tasks.spawn(serve(listener, routes));
        }
        Ok(Self { app, http_addr, tasks, connections })
    }

    /// Address of the HTTP API.
    #[must_use]
    pub fn http_addr(&self) -> SocketAddr {
        self.http_addr
    }

    /// `http://host:port` of the HTTP API.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.http_addr)
    }

    /// `http://host:port` at which prefill and decode legs meet: the bootstrap server of
    /// [`KvConnector::Mooncake`](crate::KvConnector::Mooncake) and
    /// [`KvConnector::Sglang`](crate::KvConnector::Sglang).
    #[must_use]
    pub fn bootstrap_url(&self) -> String {
        let origin = &self.app.engine.origin;
        format!("http://{}:{}", origin.host, origin.port)
    }

    /// ZMQ endpoint of the KV events of rank 0, for example `tcp://127.0.0.1:5557`; the port of
    /// rank r is higher by r.
    #[must_use]
    pub fn kv_events_endpoint(&self) -> Option<&str> {
        self.app.event_sources[0].events.as_deref()
    }

    /// ZMQ endpoint of the replay of KV events of rank 0; the port of rank r is higher by r.
    #[must_use]
    pub fn kv_replay_endpoint(&self) -> Option<&str> {
        self.app.event_sources[0].replay.as_deref()
    }

    /// The settings with which the engine was started.
    #[must_use]
    pub fn config(&self) -> &SimConfig {
        &self.app.engine.config
    }

    /// The engine's state, over all its ranks.
    #[must_use]
    pub fn state(&self) -> SimState {
        self.app.state()
    }

    /// The hashes in the prefix cache (of rank 0), with their numbers of physical blocks, sorted by
    /// hash.
    #[must_use]
    pub fn resident(&self) -> Vec<(u64, usize)> {
        self.rank_resident(0)
    }

    /// The hashes in the prefix cache of a rank, with their numbers of physical blocks, sorted by
    /// hash.
    ///
    /// # Panics
    /// If the rank does not exist.
    #[must_use]
    pub fn rank_resident(&self, rank: usize) -> Vec<(u64, usize)> {
        let mut resident: Vec<_> = self.app.ranks[rank].core().cache.resident().collect();
        resident.sort_unstable();
        resident
    }

    /// The last 256 requests, oldest first.
    #[must_use]
    pub fn requests(&self) -> Vec<RecordedRequest> {
        self.app.log.list()
    }

    /// Activates a fault, or deactivates it with `times: Some(0)`.
    pub fn set_fault(&self, fault: Fault) {
        self.app.faults.set(fault);
    }

    /// Deactivates all faults.
    pub fn clear_faults(&self) {
        self.app.faults.clear();
    }

    /// Kills the engine core, like a crash: the HTTP server continues and answers with errors.
    pub fn die(&self) {
        self.app.die();
    }

    /// Ends all tasks, cuts all connections and waits until the ports are free.
    pub async fn shutdown(mut self) {
        self.connections.cancel();
        self.tasks.shutdown().await;
    }
}

impl Drop for SimEngine {
    fn drop(&mut self) {
        self.connections.cancel();
    }
}

async fn serve(listener: CuttableListener, routes: Router) {
    let service = routes.into_make_service_with_connect_info::<ConnectionControl>();
    if let Err(error) = axum::serve(listener, service).await {
        tracing::debug!(%error, "a listener of the simulated engine ended");
    }
}
