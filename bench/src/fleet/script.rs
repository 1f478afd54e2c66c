//! Scripted shims: they attach as real ones do, report the blocks that they are given, and attach
//! again when a router is gone.

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
use super::shape::Cache;

/// Pauses between attempts, as shims make them.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// Messages that wait for room in a stream: a snapshot is made as it is sent.
const AHEAD: usize = 1;
/// The change that snapshots are as of.
const SEQUENCE: u64 = 1;

/// That a router has all of a worker's blocks.
#[derive(Clone, Debug)]
pub(super) struct Whole {
    /// Which process of the router.
    pub(super) router_id: String,
    /// When it said so.
    pub(super) at: Instant,
    /// How many blocks.
    pub(super) blocks: usize,
}

/// One scripted shim.
#[derive(Clone, Debug)]
pub(super) struct Shim {
    /// Where the router's fleet listener is.
    pub(super) router: SocketAddr,
    /// Where the router sends requests.
    pub(super) engine: SocketAddr,
    /// What it holds.
    pub(super) cache: Cache,
    /// Who hears of snapshots that are whole.
    pub(super) wholes: mpsc::Sender<Whole>,
}

/// Runs shims until the set is dropped.
pub(super) fn attach_all(shims: impl Iterator<Item = Shim>) -> JoinSet<()> {
    let mut attached = JoinSet::new();
    for shim in shims {
        attached.spawn(shim.run());
    }
    attached
}

impl Shim {
    async fn run(self) {
        let mut pause = RETRY_MIN;
        loop {
            let began = Instant::now();
            // However it ended, it is tried again.
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
        let (say, mut said) = mpsc::channel(AHEAD);
        let message =
            Some(Message::Hello(hello(self.cache.worker, self.engine, self.cache.blocks)));
        say.send(v1::AttachRequest { message }).await?;
        let stream = futures_util::stream::poll_fn(move |context| said.poll_recv(context));
        let mut client = FleetServiceClient::new(channel);
        let mut answers = client.attach(Request::new(stream)).await?.into_inner();
        let first = answers.message().await?.and_then(|answer| answer.message);
        let Some(RouterMessage::Welcome(welcome)) = first else { return Err("no welcome".into()) };
        self.tell(&welcome, &say, &mut answers).await
    }

    async fn tell(
        &self,
        welcome: &v1::Welcome,
        say: &mpsc::Sender<v1::AttachRequest>,
        answers: &mut Streaming<v1::AttachResponse>,
    ) -> Result<(), Failure> {
        say.send(load()).await?;
        self.snapshot(say).await?;
        let every = Duration::from_millis(u64::from(welcome.load_interval_ms).max(50));
        let mut tick = interval(every);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let answer = tokio::select! {
                _ = tick.tick() => {
                    say.send(load()).await?;
                    continue;
                }
                answer = answers.message() => answer?.and_then(|answer| answer.message),
            };
            match answer {
                Some(RouterMessage::Ack(ack)) if ack.sequence == SEQUENCE => {
                    let (router_id, at) = (welcome.router_id.clone(), Instant::now());
                    let blocks = self.cache.blocks;
                    self.wholes.send(Whole { router_id, at, blocks }).await?;
                }
                Some(RouterMessage::Resync(_)) => self.snapshot(say).await?,
                Some(_) => {}
                None => return Ok(()),
            }
        }
    }

    async fn snapshot(&self, say: &mpsc::Sender<v1::AttachRequest>) -> Result<(), Failure> {
        for part in self.cache.parts(&format!("w{}-mirror", self.cache.worker), SEQUENCE) {
            say.send(v1::AttachRequest { message: Some(Message::Snapshot(part)) }).await?;
        }
        Ok(())
    }
}

/// Who the shim of a worker is.
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
        worker_id: id,
        role: v1::WorkerRole::Both.into(),
        url: format!("http://{engine}"),
        model: "sim".to_owned(),
        capabilities: Some(capabilities),
        instance_secret: Vec::new(),
    }
}

/// An engine that is up and has nothing to do.
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
