//! The listener to which shims attach: `FleetService`.
//!
//! A stream is identified and authorised (`hello`), reserves its worker (`registry`: one shim for
//! each worker), and is served by the session of this worker: a task that lives as long as the
//! worker is attached, over all streams of its shim.

mod blocks;
mod connection;
mod context;
mod credentials;
mod hello;
mod inbound;
mod receive;
mod registry;
mod session;
mod stream;
mod tls;
mod tokens;
mod wire;

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use futures_util::Stream;
use splitrail_proto::v1;
use splitrail_proto::v1::fleet_service_server::{FleetService, FleetServiceServer};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status, Streaming};

pub use blocks::{Fault, RANKS_MAX, ShimBlocks};
use tokens::ShimTokens;

use connection::{Acceptor, Peer};
use context::AttachContext;
use credentials::AllowedWorkers;
use inbound::Inbound;
use receive::receive;
use registry::SessionRegistry;
use splitrail_api::text::random_id;
use splitrail_config::model::ClientWorkers;
use splitrail_fleet::Cluster;
use splitrail_fleet::Fleet;
use splitrail_settings::log_throttle::LogThrottle;
use tls::Certificates;

/// Maximum size of a shim's message in bytes; a message carries some thousands of blocks.
const MESSAGE_MAX_BYTES: usize = 1 << 20;
/// Maximum number of streams of one connection: a shim needs one, and a second one to replace it.
const STREAMS_MAX: u32 = 4;
/// Connections beside those of attached shims: connections that are being opened or closed. Also an
/// eighth of `fleet.attach_max`, so that all shims may come from one address.
const CONNECTIONS_BESIDE: usize = 64;
/// Maximum number of messages that wait for a shim to read them.
const REPLIES_MAX: usize = 8;
/// Maximum size of a call's headers in bytes.
const HEADERS_MAX_BYTES: u32 = 16 << 10;
/// Interval of HTTP/2 keep-alive pings, and the maximum time for the reply to one.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Maximum time for streams to end when the router stops.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The tasks that belong to streams.
type Tasks = Arc<Mutex<JoinSet<()>>>;

/// Accepts shims. Dropping it closes the listener and detaches all workers.
pub struct FleetListener {
    stop: CancellationToken,
    tasks: Tasks,
    server: JoinSet<()>,
}

impl FleetListener {
    /// Starts on a bound listener.
    ///
    /// # Errors
    /// Tokens or certificates cannot be read.
    pub fn open(
        cluster: Arc<Cluster>,
        fleet: Arc<Fleet>,
        listener: TcpListener,
    ) -> io::Result<Self> {
        let config = cluster.fleet.clone();
        let stop = CancellationToken::new();
        let tasks = Tasks::default();
        let context = Arc::new(AttachContext {
            router_id: random_id(),
            registry: Arc::new(SessionRegistry::new(Arc::clone(&fleet), config.attach_max)),
            stop: stop.clone(),
            cluster,
            fleet,
            config,
            refused: LogThrottle::default(),
        });
        let mut serving = JoinSet::new();
        serving.spawn(serve(context, Arc::clone(&tasks), listener)?);
        Ok(Self { stop, tasks, server: serving })
    }

    /// Tells all shims that the router stops, and waits up to `CLOSE_TIMEOUT` for them to receive
    /// it.
    pub async fn close(mut self) {
        self.stop.cancel();
        let tasks = std::mem::take(&mut *lock(&self.tasks));
        let ended = async {
            tasks.join_all().await;
            while self.server.join_next().await.is_some() {}
        };
        let _in_time = tokio::time::timeout(CLOSE_TIMEOUT, ended).await;
    }
}

/// Prepares the server for shims that connect.
fn serve(
    context: Arc<AttachContext>,
    tasks: Tasks,
    listener: TcpListener,
) -> io::Result<impl Future<Output = ()> + Send + 'static> {
    let config = &context.config;
    let mut server = Server::builder()
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
        .max_concurrent_streams(STREAMS_MAX)
        .http2_max_header_list_size(HEADERS_MAX_BYTES);
    let expires = &context.cluster.metrics.certificate_expires;
    let expires = || expires.with_label_values(&["fleet"]);
    let tls = config.tls.as_ref();
    let tls = tls.map(|files| Certificates::open(files, expires(), Instant::now()));
    let tokens = ShimTokens::open(config, Instant::now()).map_err(io::Error::other)?;
    let acceptor = Acceptor {
        listener,
        context: Arc::clone(&context),
        tls: tls.transpose()?,
        shares: Arc::default(),
        connections_max: config.attach_max + config.attach_max / 8 + CONNECTIONS_BESIDE,
    };
    let incoming = acceptor.incoming();
    let until = context.stop.clone().cancelled_owned();
    let service = Service { context, tokens, tasks };
    let service = FleetServiceServer::new(service).max_decoding_message_size(MESSAGE_MAX_BYTES);
    Ok(async move {
        let served = server.add_service(service);
        if let Err(error) = served.serve_with_incoming_shutdown(incoming, until).await {
            tracing::error!(%error, "the fleet listener has ended");
        }
    })
}

impl Drop for FleetListener {
    fn drop(&mut self) {
        self.stop.cancel();
        lock(&self.tasks).abort_all();
    }
}

/// A panic while the lock was held cannot leave the set half-changed.
fn lock(tasks: &Tasks) -> std::sync::MutexGuard<'_, JoinSet<()>> {
    tasks.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The implementation of the gRPC service.
struct Service {
    context: Arc<AttachContext>,
    tokens: Option<ShimTokens>,
    tasks: Tasks,
}

#[tonic::async_trait]
impl FleetService for Service {
    type AttachStream = Pin<Box<dyn Stream<Item = Result<v1::AttachResponse, Status>> + Send>>;

    async fn attach(
        &self,
        request: Request<Streaming<v1::AttachRequest>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut allowed = AllowedWorkers::default();
        if let Some(tokens) = &self.tokens {
            let given = request.metadata().get("authorization").map(|value| value.as_bytes());
            let Some(workers) = tokens.accept(given, Instant::now()).await else {
                self.context.count(Code::Unauthenticated);
                return Err(Status::unauthenticated("`authorization: Bearer TOKEN` is needed"));
            };
            allowed.bind_to_token(workers);
        }
        let tls = self.context.config.tls.as_ref();
        let by_names = tls.is_some_and(|tls| tls.client_workers == ClientWorkers::DnsNames);
        let peer = request.extensions().get::<Peer>();
        if peer.is_some_and(|peer| peer.has_expired(SystemTime::now())) {
            self.context.count(Code::Unauthenticated);
            return Err(Status::unauthenticated("the shim's certificate has expired"));
        }
        if by_names {
            allowed.bind_to_certificate(peer.and_then(Peer::certificate));
        }
        let peer = peer.cloned().unwrap_or_default();
        let (outbound, replies) = mpsc::channel(REPLIES_MAX);
        let mut tasks = lock(&self.tasks);
        // Bounded by the connections and their streams, and by the sessions.
        while tasks.try_join_next().is_some() {}
        let inbound = Inbound::new(request.into_inner(), peer);
        tasks.spawn(receive(Arc::clone(&self.context), inbound, outbound, allowed));
        drop(tasks);
        let replies = futures_util::stream::unfold(replies, async |mut replies| {
            let reply = replies.recv().await?;
            Some((reply, replies))
        });
        Ok(Response::new(Box::pin(replies)))
    }
}
