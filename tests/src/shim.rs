//! A scripted shim: it sends the messages that a test specifies.

use std::net::SocketAddr;
use std::time::Duration;

use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use splitrail_proto::v1::attach_response::Message as RouterMessage;
use splitrail_proto::v1::fleet_service_client::FleetServiceClient;
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

/// How long a router may take to answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Who attaches: a worker that does both.
pub fn hello(id: &str, url: &str) -> v1::Hello {
    v1::Hello {
        protocol: 1,
        worker_id: id.to_owned(),
        instance_id: format!("{id}-first"),
        role: v1::WorkerRole::Both.into(),
        url: url.to_owned(),
        model: "sim".to_owned(),
        capabilities: Some(v1::Capabilities::default()),
        mirror_id: format!("{id}-mirror"),
        instance_secret: format!("the secret of {id}, first process").into_bytes(),
    }
}

/// An attached shim. Dropping it breaks its stream off.
pub struct Shim {
    say: mpsc::Sender<v1::AttachRequest>,
    answers: Streaming<v1::AttachResponse>,
    /// How the router welcomed it.
    pub welcome: v1::Welcome,
}

impl Shim {
    /// Attaches to a router's fleet listener.
    ///
    /// # Errors
    /// How the router refuses it.
    pub async fn attach(router: SocketAddr, hello: v1::Hello) -> Result<Self, Status> {
        let endpoint = Endpoint::from_shared(format!("http://{router}")).expect("an address");
        Self::attach_over(endpoint.connect_lazy(), None, hello).await
    }

    /// Attaches over a channel, with a token.
    ///
    /// # Errors
    /// How the router refuses it.
    pub async fn attach_over(
        channel: Channel,
        token: Option<&str>,
        hello: v1::Hello,
    ) -> Result<Self, Status> {
        let (say, mut said) = mpsc::channel(1024);
        let message = Some(Message::Hello(hello));
        say.try_send(v1::AttachRequest { message }).expect("room");
        let stream = futures_util::stream::poll_fn(move |context| said.poll_recv(context));
        let mut request = Request::new(stream);
        if let Some(token) = token {
            let bearer = format!("Bearer {token}").parse().expect("a header");
            request.metadata_mut().insert("authorization", bearer);
        }
        let mut client = FleetServiceClient::new(channel);
        let mut answers = client.attach(request).await?.into_inner();
        match answers.message().await?.and_then(|answer| answer.message) {
            Some(RouterMessage::Welcome(welcome)) => Ok(Self { say, answers, welcome }),
            other => panic!("no welcome but {other:?}"),
        }
    }

    /// Says something.
    pub async fn say(&self, message: Message) {
        // A stream that has ended is found out by who reads the answers.
        let _ended = self.say.send(v1::AttachRequest { message: Some(message) }).await;
    }

    /// Says all that a worker is to hold: one chain per run.
    pub async fn snapshot(&self, mirror: &str, sequence: u64, runs: Vec<v1::Run>) {
        let mirror_id = mirror.to_owned();
        let part =
            v1::SnapshotPart { mirror_id, sequence, rank: 0, runs, last: true, rank_names: 0 };
        self.say(Message::Snapshot(part)).await;
    }

    /// Says that blocks of these hashes, which are their names as well, are stored at a
    /// prompt's start.
    pub async fn stored(&self, sequence: u64, hashes: impl IntoIterator<Item = u64>) {
        let hashes: Vec<u64> = hashes.into_iter().collect();
        let stored = v1::Stored { parent: None, names: hashes.clone(), hashes, tier: 0 };
        self.change(sequence, v1::change::Change::Stored(stored)).await;
    }

    /// Says one change.
    pub async fn change(&self, sequence: u64, change: v1::change::Change) {
        let changes = vec![v1::Change { change: Some(change) }];
        let events = v1::Events { sequence, rank: 0, engine_time_s: 0.0, changes };
        self.say(Message::Events(events)).await;
    }

    /// Says that the engine is up, and how busy it is.
    pub async fn load(&self, requests: u64, prefill_tokens_queued: u64) {
        self.say(Message::Load(v1::Load {
            up: true,
            requests: Some(requests),
            prefill_tokens_queued: Some(prefill_tokens_queued),
            ..v1::Load::default()
        }))
        .await;
    }

    /// What the router says next; `None` if it ends the stream.
    ///
    /// # Errors
    /// How it ends the stream.
    pub async fn answer(&mut self) -> Result<Option<RouterMessage>, Status> {
        let next = tokio::time::timeout(PATIENCE, self.answers.message()).await;
        Ok(next.expect("an answer in time")?.and_then(|answer| answer.message))
    }

    /// Waits until all up to a change is in the index.
    pub async fn acked(&mut self, sequence: u64) {
        loop {
            match self.answer().await {
                Ok(Some(RouterMessage::Ack(ack))) if ack.sequence == sequence => return,
                Ok(Some(RouterMessage::Ack(_))) => {}
                other => panic!("no ack of {sequence} but {other:?}"),
            }
        }
    }

    /// Waits for the request for a snapshot, and says its reason.
    pub async fn resync(&mut self) -> String {
        loop {
            match self.answer().await {
                Ok(Some(RouterMessage::Resync(resync))) => return resync.reason,
                Ok(Some(RouterMessage::Ack(_))) => {}
                other => panic!("no resync but {other:?}"),
            }
        }
    }

    /// Waits until the router ends the stream, and says how.
    pub async fn ended(&mut self) -> tonic::Code {
        loop {
            match self.answer().await {
                Ok(None) => return tonic::Code::Ok,
                Ok(Some(_)) => {}
                Err(status) => return status.code(),
            }
        }
    }
}

/// Blocks of a chain, whose hashes are their names as well.
pub fn run(parent: Option<u64>, hashes: impl IntoIterator<Item = u64>) -> v1::Run {
    let hashes: Vec<u64> = hashes.into_iter().collect();
    v1::Run { parent, names: hashes.clone(), hashes, named: Vec::new() }
}
