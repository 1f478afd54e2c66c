//! One engine as an in-process server.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::SimConfig;
use crate::engine::Engine;
use crate::engine::core::Origin;
use crate::events::{self, Encoder, EventSink, History};
use crate::faults::{Fault, FaultBoard};
use crate::http::ask::random_hex;
use crate::http::connection::{ConnectionControl, CuttableListener};
use crate::http::{App, router, side_channel_router, unix_seconds};
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
    /// When a listener cannot be bound, or the configuration has no usable KV block.
    pub async fn start(config: SimConfig) -> io::Result<Self> {
        if config.kv_blocks < 2 || config.block_size == 0 || config.max_num_seqs == 0 {
            let message = "an engine needs kv_blocks > 1, block_size > 0 and max_num_seqs > 0";
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
        let sockets = EventSockets::bind(&config).await?;
        let (events_endpoint, replay_endpoint) = sockets.endpoints();
        let sink = sockets.spawn(&config, &origin.topic, &faults, &mut tasks);
        let engine = Arc::new(Engine::new(config, origin));
        let app = Arc::new(App {
            engine: Arc::clone(&engine),
            faults,
            log: RequestLog::default(),
            started_at: unix_seconds(),
            fingerprint: format!("vllm-{}-{}", engine.config.version, random_hex(4)),
            events_endpoint,
            replay_endpoint,
        });
        tasks.spawn(engine.run(sink));
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

    /// `http://host:port` where prefill and decode meet: the bootstrap server of
    /// [`KvConnector::Mooncake`](crate::KvConnector::Mooncake) and
    /// [`KvConnector::Sglang`](crate::KvConnector::Sglang).
    #[must_use]
    pub fn bootstrap_url(&self) -> String {
        let origin = &self.app.engine.origin;
        format!("http://{}:{}", origin.host, origin.port)
    }

    /// ZMQ endpoint of the KV events, for example `tcp://127.0.0.1:5557`.
    #[must_use]
    pub fn kv_events_endpoint(&self) -> Option<&str> {
        self.app.events_endpoint.as_deref()
    }

    /// ZMQ endpoint of the replay of KV events.
    #[must_use]
    pub fn kv_replay_endpoint(&self) -> Option<&str> {
        self.app.replay_endpoint.as_deref()
    }

    /// Settings that the engine was started with.
    #[must_use]
    pub fn config(&self) -> &SimConfig {
        &self.app.engine.config
    }

    /// What the engine holds now.
    #[must_use]
    pub fn state(&self) -> SimState {
        self.app.engine.state()
    }

    /// Hashes that the prefix cache knows, with their number of physical
    /// blocks, ordered by hash.
    #[must_use]
    pub fn resident(&self) -> Vec<(u64, usize)> {
        let mut resident: Vec<_> = self.app.engine.core().cache.resident().collect();
        resident.sort_unstable();
        resident
    }

    /// The last 256 requests that came in, oldest first.
    #[must_use]
    pub fn requests(&self) -> Vec<RecordedRequest> {
        self.app.log.list()
    }

    /// Switches a fault on, or off with `times: Some(0)`.
    pub fn set_fault(&self, fault: Fault) {
        self.app.faults.set(fault);
    }

    /// Switches all faults off.
    pub fn clear_faults(&self) {
        self.app.faults.clear();
    }

    /// Kills the engine core, as a crash would: the HTTP server stays and answers errors.
    pub fn die(&self) {
        self.app.engine.die();
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

/// Sockets of KV events, bound before anything runs.
#[derive(Default)]
struct EventSockets {
    publisher: Option<(zeromq::PubSocket, String)>,
    replay: Option<(zeromq::RouterSocket, String)>,
}

impl EventSockets {
    async fn bind(config: &SimConfig) -> io::Result<Self> {
        let mut sockets = Self::default();
        if let Some(port) = config.kv_events_port {
            let address = format!("tcp://{}", SocketAddr::new(config.host, port));
            sockets.publisher = Some(events::bind_pub(&address).await.map_err(io::Error::other)?);
        }
        if let Some(port) = config.kv_replay_port {
            let address = format!("tcp://{}", SocketAddr::new(config.host, port));
            sockets.replay = Some(events::bind_router(&address).await.map_err(io::Error::other)?);
        }
        Ok(sockets)
    }

    fn endpoints(&self) -> (Option<String>, Option<String>) {
        let publisher = self.publisher.as_ref().map(|(_, endpoint)| endpoint.clone());
        (publisher, self.replay.as_ref().map(|(_, endpoint)| endpoint.clone()))
    }

    /// Starts the tasks; returns where the engine puts its events.
    fn spawn(
        self,
        config: &SimConfig,
        topic: &str,
        faults: &Arc<FaultBoard>,
        tasks: &mut JoinSet<()>,
    ) -> EventSink {
        let history = History::default();
        if let Some((socket, _)) = self.replay {
            tasks.spawn(events::replay(socket, topic.to_owned(), history.clone()));
        }
        let publisher = self.publisher.map(|(socket, _)| {
            let (sender, batches) = mpsc::channel(events::PUBLISH_QUEUE_BATCHES);
            tasks.spawn(events::publish(socket, batches, topic.to_owned(), Arc::clone(faults)));
            sender
        });
        let encoder = Encoder {
            form: config.event_form,
            hashes: config.hash_form,
            block_size: config.block_size,
        };
        let faults = Arc::clone(faults);
        EventSink { encoder, history, publisher, next_sequence: 0, faults }
    }
}
