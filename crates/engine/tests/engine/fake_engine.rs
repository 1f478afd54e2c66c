//! The two sockets of an engine: a publisher and a replay service.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use rmp::encode as mp;
use splitrail_engine::zmtp::Endpoint;
use tokio::task::JoinSet;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// The frames of a replay's messages, which differ by version.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReplayForm {
    TwoFrames,
    EmptyFirst,
    TopicFirst,
}

impl ReplayForm {
    fn message(self, sequence: u64, payload: Bytes) -> Vec<Bytes> {
        let mut frames = match self {
            Self::TwoFrames => vec![],
            Self::EmptyFirst => vec![Bytes::new()],
            Self::TopicFirst => vec![Bytes::from_static(b"kv@test")],
        };
        frames.extend([Bytes::copy_from_slice(&sequence.to_be_bytes()), payload]);
        frames
    }
}

type Log = Arc<Mutex<Vec<(u64, Bytes)>>>;

/// A publisher and a replay service over one log of batches.
pub(crate) struct FakeEngine {
    /// `None` only while the engine is being dropped.
    publisher: Option<PubSocket>,
    log: Log,
    next: u64,
    pub(crate) events: Endpoint,
    pub(crate) replay: Endpoint,
    service: JoinSet<()>,
}

/// A batch that clears everything, with a time that identifies it.
pub(crate) fn payload(timestamp_s: f64) -> Bytes {
    let mut bytes = Vec::new();
    mp::write_array_len(&mut bytes, 3).unwrap();
    mp::write_f64(&mut bytes, timestamp_s).unwrap();
    mp::write_array_len(&mut bytes, 1).unwrap();
    mp::write_array_len(&mut bytes, 1).unwrap();
    mp::write_str(&mut bytes, "AllBlocksCleared").unwrap();
    mp::write_nil(&mut bytes).unwrap();
    bytes.into()
}

impl FakeEngine {
    /// An engine on ports of its own.
    pub(crate) async fn start(form: ReplayForm) -> Self {
        Self::bind("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", form).await
    }

    async fn bind(events: &str, replay: &str, form: ReplayForm) -> Self {
        let mut publisher = PubSocket::new();
        let events = publisher.bind(events).await.unwrap().to_string().parse().unwrap();
        let mut router = RouterSocket::new();
        let replay = router.bind(replay).await.unwrap().to_string().parse().unwrap();
        let log = Log::default();
        let mut service = JoinSet::new();
        service.spawn(serve_replays(router, log.clone(), form));
        Self { publisher: Some(publisher), log, next: 0, events, replay, service }
    }

    /// Ends this engine and starts another one on the same ports.
    pub(crate) async fn restart(mut self, form: ReplayForm) -> Self {
        let (events, replay) = (self.events.to_string(), self.replay.to_string());
        self.service.shutdown().await;
        self.publisher.take().unwrap().close().await;
        Self::bind(&events, &replay, form).await
    }

    /// Creates a batch that is not sent to subscribers, but that a replay returns.
    pub(crate) fn lose(&mut self, payload: Bytes) -> u64 {
        let sequence = self.next;
        self.next += 1;
        self.log.lock().unwrap().push((sequence, payload));
        sequence
    }

    /// Creates a batch and publishes it.
    pub(crate) async fn publish(&mut self, payload: Bytes) -> u64 {
        let sequence = self.lose(payload.clone());
        self.publish_frames(vec![
            Bytes::from_static(b"kv@test"),
            Bytes::copy_from_slice(&sequence.to_be_bytes()),
            payload,
        ])
        .await;
        sequence
    }

    /// Publishes any message.
    pub(crate) async fn publish_frames(&mut self, frames: Vec<Bytes>) {
        let publisher = self.publisher.as_mut().unwrap();
        publisher.send(ZmqMessage::try_from(frames).unwrap()).await.unwrap();
    }

    /// Keeps only the batches from a number on for replays.
    pub(crate) fn forget_before(&mut self, sequence: u64) {
        self.log.lock().unwrap().retain(|(kept, _)| *kept >= sequence);
    }

    /// Puts a batch with any number into the log.
    pub(crate) fn keep(&mut self, sequence: u64, payload: Bytes) {
        self.next = sequence + 1;
        self.log.lock().unwrap().push((sequence, payload));
    }
}

async fn serve_replays(mut router: RouterSocket, log: Log, form: ReplayForm) {
    while let Ok(request) = router.recv().await {
        let frames = request.into_vec();
        let [peer, empty, from] = &frames[..] else { panic!("{} frames", frames.len()) };
        assert!(empty.is_empty());
        let from = u64::from_be_bytes(from.as_ref().try_into().unwrap());
        let mut messages: Vec<_> = log.lock().unwrap().clone();
        messages.retain(|(sequence, _)| *sequence >= from);
        messages.push((u64::MAX, Bytes::new()));
        for (sequence, payload) in messages {
            let mut frames = form.message(sequence, payload);
            frames.insert(0, peer.clone());
            // The client may have disconnected.
            let _ = router.send(ZmqMessage::try_from(frames).unwrap()).await;
        }
    }
}
