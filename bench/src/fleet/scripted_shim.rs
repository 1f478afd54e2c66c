//! Scripted shims: they attach as real shims do, report the blocks that they are given, and attach
//! again when a router has ended.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use splitrail_proto::v1::attach_response::Message as RouterMessage;
use splitrail_proto::v1::fleet_service_client::FleetServiceClient;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tonic::transport::Endpoint;
use tonic::{Request, Streaming};

use super::Failure;
use super::worker_cache::WorkerCache;

/// Pause after the first failed attempt to attach, as real shims make it.
const RETRY_MIN: Duration = Duration::from_millis(100);
/// Maximum pause between two attempts to attach.
const RETRY_MAX: Duration = Duration::from_secs(5);
/// Maximum number of messages that wait for the stream, so that a snapshot is encoded while it is
/// sent.
const QUEUE: usize = 1;
/// Sequence number of the last change that each snapshot contains.
const SEQUENCE: u64 = 1;

/// A router's acknowledgement of a complete snapshot.
#[derive(Clone, Debug)]
pub(super) struct SnapshotAck {
    /// The id of the router's process.
    pub(super) router_id: String,
    /// When the acknowledgement arrived.
    pub(super) at: Instant,
    /// Number of blocks of the snapshot.
    pub(super) blocks: usize,
}

/// One scripted shim.
#[derive(Clone, Debug)]
pub(super) struct ScriptedShim {
    /// The address of the router's fleet listener.
    pub(super) router: SocketAddr,
    /// The address of the engine, to which the router sends requests.
    pub(super) engine: SocketAddr,
    /// The blocks of the worker.
    pub(super) cache: WorkerCache,
    /// Receives the acknowledgements of snapshots.
    pub(super) acks: mpsc::Sender<SnapshotAck>,
}

/// Runs the shims until the set is dropped.
pub(super) fn attach_all(shims: impl Iterator<Item = ScriptedShim>) -> JoinSet<()> {
    let mut attached = JoinSet::new();
    for shim in shims {
        attached.spawn(shim.run());
    }
    attached
}

impl ScriptedShim {
    async fn run(self) {
        let mut pause = RETRY_MIN;
        loop {
            let began = Instant::now();
            // The shim attaches again, whatever the reason of the end was.
            let _ended = self.attach().await;
            if began.elapsed() >= RETRY_MAX {
                pause = RETRY_MIN;
            }
            sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    async fn attach(&self) -> Result<(), Failure> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.router))?.tcp_nodelay(true);
        let channel = endpoint.connect().await?;
        let (sender, mut messages) = mpsc::channel(QUEUE);
        let message =
            Some(Message::Hello(hello(self.cache.worker, self.engine, self.cache.blocks)));
        sender.send(v1::AttachRequest { message }).await?;
        let stream = futures_util::stream::poll_fn(move |context| messages.poll_recv(context));
        let mut client = FleetServiceClient::new(channel);
        let mut replies = client.attach(Request::new(stream)).await?.into_inner();
        let first = replies.message().await?.and_then(|reply| reply.message);
        let Some(RouterMessage::Welcome(welcome)) = first else {
            return Err("the router's first message is no welcome".into());
        };
        self.report(&welcome, &sender, &mut replies).await
    }

    /// Sends the snapshot, and then the load at intervals, until the router closes the stream.
    async fn report(
        &self,
        welcome: &v1::Welcome,
        sender: &mpsc::Sender<v1::AttachRequest>,
        replies: &mut Streaming<v1::AttachResponse>,
    ) -> Result<(), Failure> {
        sender.send(load()).await?;
        self.send_snapshot(sender).await?;
        let load_interval = Duration::from_millis(u64::from(welcome.load_interval_ms).max(50));
        let mut tick = interval(load_interval);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let reply = tokio::select! {
                _ = tick.tick() => {
                    sender.send(load()).await?;
                    continue;
                }
                reply = replies.message() => reply?.and_then(|reply| reply.message),
            };
            match reply {
                Some(RouterMessage::Ack(ack)) if ack.sequence == SEQUENCE => {
                    let (router_id, at) = (welcome.router_id.clone(), Instant::now());
                    let blocks = self.cache.blocks;
                    self.acks.send(SnapshotAck { router_id, at, blocks }).await?;
                }
                Some(RouterMessage::Resync(_)) => self.send_snapshot(sender).await?,
                Some(_) => {}
                None => return Ok(()),
            }
        }
    }

    async fn send_snapshot(&self, sender: &mpsc::Sender<v1::AttachRequest>) -> Result<(), Failure> {
        for part in self.cache.parts(&format!("w{}-mirror", self.cache.worker), SEQUENCE) {
            sender.send(v1::AttachRequest { message: Some(Message::Snapshot(part)) }).await?;
        }
        Ok(())
    }
}

/// The first message of a worker's shim, with its identity.
pub(super) fn hello(worker: u64, engine: SocketAddr, blocks: usize) -> v1::Hello {
    let id = format!("w{worker}");
    let capabilities = v1::Capabilities {
        block_size: Some(16),
        kv_blocks: u32::try_from(blocks).ok(),
        publishes_kv_events: Some(true),
        replays_kv_events: Some(true),
        gates: Some(true),
        supports_cache_hit_threshold: Some(true),
        ..v1::Capabilities::default()
    };
    v1::Hello {
        protocol: 1,
        instance_id: format!("{id}-instance"),
        mirror_id: format!("{id}-mirror"),
        instance_secret: format!("the secret of {id}").into_bytes(),
        worker_id: id,
        role: v1::WorkerRole::Both.into(),
        url: format!("http://{engine}"),
        model: "sim".to_owned(),
        capabilities: Some(capabilities),
    }
}

/// The load of an engine that is up and has no requests.
pub(super) fn idle() -> v1::Load {
    v1::Load {
        up: true,
        running: Some(0),
        waiting: Some(0),
        requests: Some(0),
        prefill_tokens_queued: Some(0),
        ..v1::Load::default()
    }
}

fn load() -> v1::AttachRequest {
    v1::AttachRequest { message: Some(Message::Load(idle())) }
}
