//! A router for tests that checks every message: it builds its own index from the messages of a
//! shim and records all violations of the protocol.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::Stream;
use splitrail_kv::{
    BlockHash, BlockName, EngineHash, HASH_LAYOUT, HashSeed, HashedBlock, Index, IndexConfig,
    RunNames, SnapshotRun, Tier, WorkerKey,
};
use splitrail_proto::v1::attach_request::Message;
use splitrail_proto::v1::attach_response::Message as RouterMessage;
use splitrail_proto::v1::fleet_service_server::{FleetService, FleetServiceServer};
use splitrail_proto::v1::{
    Ack, AttachRequest, AttachResponse, Bye, Capabilities, Events, Hello, Load, ResyncRequest, Run,
    SnapshotPart, Welcome, change,
};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tonic::transport::{Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

/// For each block name: the hash of the preceding block, the hash of the block, and the number
/// of copies per tier.
pub type Content = BTreeMap<u64, (Option<u64>, u64, [u32; Tier::COUNT])>;

/// The content of one rank of an index, independent of its division into runs.
pub fn content(index: &Index, rank: u16) -> Content {
    let mut content = Content::new();
    for run in index.snapshot(WorkerKey { worker: 0, rank }) {
        for named in run.names.iter() {
            let at = named.at as usize;
            let before = at.checked_sub(1).map_or(run.parent, |before| Some(run.hashes[before]));
            let said = (before.map(|hash| hash.0), run.hashes[at].0, named.copies);
            assert!(content.insert(named.engine.0, said).is_none(), "a name stands for one block");
        }
    }
    content
}

/// The state of the router.
pub struct RouterState {
    pub welcome: Welcome,
    pub index: Index,
    pub mirror_id: String,
    pub sequence: u64,
    pub hello: Option<Hello>,
    pub capabilities: Option<Capabilities>,
    pub loads: Vec<Load>,
    pub byes: Vec<Bye>,
    /// Streams that were opened, and those that continued without a snapshot.
    pub attached: u64,
    pub continued: u64,
    /// Streams that have ended.
    pub ended: u64,
    pub snapshots: u64,
    /// The number of parts of the largest snapshot.
    pub parts_max: usize,
    /// Violations of the protocol.
    pub faults: Vec<String>,
    /// The required value of `authorization`, if any.
    pub bearer: Option<String>,
    parts: Vec<SnapshotPart>,
    streams: u64,
}

/// How streams are disturbed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Control {
    /// Whether reading is paused.
    pub paused: bool,
    /// Incremented to end all streams.
    pub disconnects: u64,
    /// Incremented to ask for a resynchronisation.
    pub resync: u64,
}

#[derive(Clone)]
pub struct FakeRouter {
    pub address: SocketAddr,
    known: Arc<Mutex<RouterState>>,
    changed: Arc<watch::Sender<u64>>,
    control: Arc<watch::Sender<Control>>,
    tasks: Arc<Mutex<JoinSet<()>>>,
}

fn new_index(welcome: &Welcome) -> Index {
    Index::new(IndexConfig {
        model: welcome.model.clone(),
        block_size: welcome.block_size,
        seed: HashSeed(welcome.hash_seed),
        max_blocks_per_worker: 1 << 20,
    })
}

/// The welcome message of a router.
pub fn welcome(block_size: u32) -> Welcome {
    Welcome {
        protocol: 1,
        router_id: format!("router-{}", rand::random::<u64>()),
        hash_seed: 7,
        hash_layout: HASH_LAYOUT,
        model: "m".to_owned(),
        block_size,
        blocks_max: 1 << 20,
        load_interval_ms: 100,
        known_sequence: None,
    }
}

impl FakeRouter {
    pub async fn start(welcome: Welcome) -> Self {
        Self::start_with(welcome, None).await
    }

    pub async fn start_with(welcome: Welcome, tls: Option<ServerTlsConfig>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let known = RouterState {
            index: new_index(&welcome),
            welcome,
            mirror_id: String::new(),
            sequence: 0,
            hello: None,
            capabilities: None,
            loads: Vec::new(),
            byes: Vec::new(),
            attached: 0,
            continued: 0,
            ended: 0,
            snapshots: 0,
            parts_max: 0,
            faults: Vec::new(),
            bearer: None,
            parts: Vec::new(),
            streams: 0,
        };
        let router = Self {
            address: listener.local_addr().unwrap(),
            known: Arc::new(Mutex::new(known)),
            changed: Arc::new(watch::Sender::new(0)),
            control: Arc::new(watch::Sender::new(Control::default())),
            tasks: Arc::default(),
        };
        // Small windows, so that a router that does not read blocks the shim at once.
        let mut server = Server::builder()
            .initial_stream_window_size(Some(2048))
            .initial_connection_window_size(Some(4096));
        if let Some(tls) = tls {
            server = server.tls_config(tls).unwrap();
        }
        let serving = server.add_service(FleetServiceServer::new(router.clone()));
        let incoming = futures_util::stream::unfold(listener, async |listener| {
            Some((listener.accept().await.map(|(stream, _)| stream), listener))
        });
        router.spawn(async move { serving.serve_with_incoming(incoming).await.unwrap() });
        router
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.lock().unwrap().spawn(task);
    }

    pub fn known(&self) -> MutexGuard<'_, RouterState> {
        self.known.lock().unwrap()
    }

    /// Pauses or resumes reading.
    pub fn pause(&self, paused: bool) {
        self.control.send_modify(|control| control.paused = paused);
    }

    /// Ends all streams.
    pub fn disconnect(&self) {
        self.control.send_modify(|control| control.disconnects += 1);
    }

    pub fn ask_again(&self) {
        self.control.send_modify(|control| control.resync += 1);
    }

    /// Discards all state, like a restarted process.
    pub fn restart(&self) {
        {
            let mut known = self.known();
            known.index = new_index(&known.welcome);
            // Messages in transit were meant for the previous process.
            known.streams += 1;
            (known.mirror_id, known.sequence) = (String::new(), 0);
            known.welcome.router_id = format!("router-{}", rand::random::<u64>());
        }
        self.disconnect();
    }

    /// Waits until a condition holds for the router's state. Panics if it does not hold in time.
    pub async fn wait_for(&self, what: &str, mut is_so: impl FnMut(&RouterState) -> bool) {
        let mut changed = self.changed.subscribe();
        let waiting = async {
            while !is_so(&self.known()) {
                changed.changed().await.unwrap();
            }
        };
        if tokio::time::timeout(Duration::from_secs(30), waiting).await.is_err() {
            let known = self.known();
            panic!("{what} never came: at {} of {}", known.sequence, known.mirror_id);
        }
    }

    /// Handles a message unless a newer stream exists. Returns the last known sequence number.
    fn take(&self, stream: u64, message: Message) -> Option<u64> {
        let mut known = self.known();
        if known.streams != stream {
            return None;
        }
        known.take(message);
        Some(known.sequence)
    }

    async fn serve(
        self,
        mut requests: Streaming<AttachRequest>,
        answers: mpsc::Sender<Result<AttachResponse, Status>>,
    ) {
        let mut control = self.control.subscribe();
        let seen = *control.borrow_and_update();
        let mut resync = seen.resync;
        let say = async |answer| {
            let answer = AttachResponse { message: Some(answer) };
            let _gone = answers.send(Ok(answer)).await;
        };
        let Ok(Some(AttachRequest { message: Some(Message::Hello(hello)) })) =
            requests.message().await
        else {
            return self.known().faults.push("the first message is not a hello".to_owned());
        };
        let (welcome, stream) = self.known().greet(hello);
        say(RouterMessage::Welcome(welcome)).await;
        loop {
            let now = *control.borrow_and_update();
            if now.disconnects != seen.disconnects {
                let _gone = answers.send(Err(Status::unavailable("cut"))).await;
                return;
            }
            if std::mem::replace(&mut resync, now.resync) != now.resync {
                say(RouterMessage::Resync(ResyncRequest { reason: "drift".to_owned() })).await;
            }
            let message = tokio::select! {
                _ = control.changed() => continue,
                message = requests.message(), if !now.paused => message,
            };
            let Ok(Some(AttachRequest { message: Some(message) })) = message else {
                return;
            };
            let Some(sequence) = self.take(stream, message) else {
                let _gone = answers.send(Err(Status::aborted("a newer stream"))).await;
                return;
            };
            self.changed.send_modify(|changed| *changed += 1);
            let ack = AttachResponse { message: Some(RouterMessage::Ack(Ack { sequence })) };
            let _full = answers.try_send(Ok(ack));
        }
    }
}

impl RouterState {
    fn greet(&mut self, hello: Hello) -> (Welcome, u64) {
        self.attached += 1;
        self.streams += 1;
        self.parts.clear();
        let mut welcome = self.welcome.clone();
        if !hello.mirror_id.is_empty() && hello.mirror_id == self.mirror_id {
            welcome.known_sequence = Some(self.sequence);
            self.continued += 1;
        } else {
            // The index is not valid before the whole snapshot has arrived.
            self.mirror_id = String::new();
        }
        self.capabilities.clone_from(&hello.capabilities);
        self.hello = Some(hello);
        (welcome, self.streams)
    }

    fn fault(&mut self, fault: impl Into<String>) {
        self.faults.push(fault.into());
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Hello(_) => self.fault("a second hello"),
            Message::Snapshot(part) => self.take_part(part),
            Message::Events(events) => self.take_events(events),
            Message::Load(load) => self.loads.push(load),
            Message::Bye(bye) => self.byes.push(bye),
            Message::Capabilities(capabilities) => self.capabilities = Some(capabilities),
        }
    }

    fn take_part(&mut self, part: SnapshotPart) {
        if self.parts.first().is_some_and(|first| {
            (&first.mirror_id, first.sequence) != (&part.mirror_id, part.sequence)
        }) {
            self.fault("parts of two snapshots are mixed");
        }
        let last = part.last;
        self.parts.push(part);
        if !last {
            return;
        }
        let parts = std::mem::take(&mut self.parts);
        self.parts_max = self.parts_max.max(parts.len());
        (self.mirror_id, self.sequence) = (parts[0].mirror_id.clone(), parts[0].sequence);
        self.snapshots += 1;
        self.index.remove_worker(0);
        let mut ranks: BTreeMap<u32, Vec<SnapshotRun>> = BTreeMap::new();
        for part in parts {
            ranks.entry(part.rank).or_default().extend(part.runs.into_iter().map(run));
        }
        for (rank, runs) in ranks {
            let names: usize = runs.iter().map(|run| run.names.len()).sum();
            let worker = WorkerKey { worker: 0, rank: u16::try_from(rank).unwrap() };
            let applied = self.index.restore(worker, runs);
            if applied.stored != names {
                self.fault(format!("a snapshot of {names} names: {applied:?}"));
            }
        }
    }

    fn take_events(&mut self, events: Events) {
        if self.mirror_id.is_empty() || !self.parts.is_empty() {
            self.fault("events come before the whole snapshot");
        }
        if events.sequence != self.sequence + 1 {
            self.fault(format!("{} follows {}", events.sequence, self.sequence));
        }
        self.sequence = events.sequence;
        let worker = WorkerKey { worker: 0, rank: u16::try_from(events.rank).unwrap() };
        for change in events.changes {
            let (done, wanted) = match change.change.unwrap() {
                change::Change::Stored(stored) => {
                    let hashed = stored.names.iter().zip(&stored.hashes);
                    let blocks: Vec<_> = hashed
                        .map(|(&name, &hash)| HashedBlock {
                            engine: EngineHash(name),
                            hash: BlockHash(hash),
                        })
                        .collect();
                    let parent = stored.parent.map(EngineHash);
                    let applied = self.index.store(worker, parent, &blocks, tier(stored.tier));
                    (applied.stored, stored.names.len())
                }
                change::Change::Removed(removed) => {
                    let names: Vec<_> = removed.names.iter().copied().map(EngineHash).collect();
                    (self.index.remove(worker, &names, tier(removed.tier)).removed, names.len())
                }
                change::Change::Cleared(_) => (self.index.clear_worker(worker).min(1), 1),
            };
            if done != wanted {
                self.fault(format!("{done} of {wanted} blocks in change {}", events.sequence));
            }
        }
    }
}

fn tier(tier: i32) -> Tier {
    Tier::ALL[usize::try_from(tier).unwrap()]
}

fn run(run: Run) -> SnapshotRun {
    let named = run.named.iter().map(|named| BlockName {
        at: named.at,
        engine: EngineHash(named.name),
        copies: named.copies.clone().try_into().unwrap(),
    });
    let names = match run.named.is_empty() {
        true => RunNames::Plain(run.names.into_iter().map(EngineHash).collect()),
        false => RunNames::Each(named.collect()),
    };
    SnapshotRun {
        parent: run.parent.map(BlockHash),
        hashes: run.hashes.into_iter().map(BlockHash).collect(),
        names,
    }
}

#[tonic::async_trait]
impl FleetService for FakeRouter {
    type AttachStream = Pin<Box<dyn Stream<Item = Result<AttachResponse, Status>> + Send>>;

    async fn attach(
        &self,
        request: Request<Streaming<AttachRequest>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let bearer = request.metadata().get("authorization").map(|value| value.as_bytes().to_vec());
        let wanted = self.known().bearer.clone();
        if wanted.is_some_and(|wanted| bearer != Some(wanted.into_bytes())) {
            return Err(Status::unauthenticated("who are you?"));
        }
        let (answers, mut outgoing) = mpsc::channel(64);
        let router = self.clone();
        self.spawn(async move {
            router.clone().serve(request.into_inner(), answers).await;
            router.known().ended += 1;
            router.changed.send_modify(|changed| *changed += 1);
        });
        let stream = futures_util::stream::poll_fn(move |context| outgoing.poll_recv(context));
        Ok(Response::new(Box::pin(stream)))
    }
}
