//! KV events over ZMQ in vLLM's dialect: a PUB socket for live batches and a ROUTER socket for
//! replays.

mod distort;
mod encode;
mod sockets;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::sync::mpsc;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage, ZmqResult};

use crate::cache::CacheEvent;
use crate::faults::FaultBoard;

pub(crate) use encode::Encoder;
pub(crate) use sockets::{Endpoints, EventSockets};

/// Sequence number of the message that ends a replay.
const END_OF_REPLAY: [u8; 8] = [0xff; 8];

/// Maximum number of steps whose events wait for the publisher.
pub(crate) const PUBLISH_QUEUE_BATCHES: usize = 1024;

/// Sequence number and payload.
pub(crate) type Batch = (u64, Bytes);

/// Published batches, for replay.
#[derive(Debug, Clone)]
pub(crate) struct History {
    batches: Arc<Mutex<VecDeque<Batch>>>,
    /// Number of batches that are kept.
    capacity: usize,
}

impl History {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { batches: Arc::default(), capacity }
    }

    fn push(&self, batch: Batch) {
        let mut batches = self.batches.lock().unwrap_or_else(PoisonError::into_inner);
        batches.push_back(batch);
        if batches.len() > self.capacity {
            batches.pop_front();
        }
    }

    fn since(&self, start: u64) -> Vec<Batch> {
        let batches = self.batches.lock().unwrap_or_else(PoisonError::into_inner);
        batches.iter().filter(|(sequence, _)| *sequence >= start).cloned().collect()
    }
}

/// Receives each step's events. A batch is first numbered and stored for replay, and then
/// published.
#[derive(Debug)]
pub(crate) struct EventSink {
    pub(crate) encoder: Encoder,
    /// The rank of the events.
    pub(crate) rank: u16,
    /// How far the engine's clock is ahead, in seconds.
    pub(crate) clock_ahead_s: i64,
    pub(crate) history: History,
    pub(crate) publisher: Option<mpsc::Sender<Batch>>,
    pub(crate) next_sequence: u64,
    pub(crate) faults: Arc<FaultBoard>,
}

impl EventSink {
    pub(crate) async fn put(&mut self, events: &[CacheEvent]) {
        if events.is_empty() {
            return;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = now.as_secs_f64() + self.clock_ahead_s as f64;
        let told = distort::distort(&self.faults, self.rank, events);
        let encode = |events: &[CacheEvent]| {
            Bytes::from(self.encoder.batch(seconds, events, told.odd, told.rank))
        };
        let number = self.next_sequence;
        self.history.push((number, encode(&told.replayed)));
        if let Some(publisher) = &self.publisher {
            // Without a publisher the engine continues.
            let _ = publisher.send((number, encode(&told.live))).await;
        }
        self.next_sequence += 1;
    }
}

/// Publishes batches until the engine has ended.
pub(crate) async fn publish(
    mut socket: PubSocket,
    mut batches: mpsc::Receiver<Batch>,
    topic: String,
    faults: Arc<FaultBoard>,
) {
    let topic = Bytes::from(topic);
    while let Some((sequence, payload)) = batches.recv().await {
        if faults.occurs_now("drop_event_batches") {
            continue;
        }
        let payload = match faults.occurs_now("garbage_events") {
            true => Bytes::from(rand::random::<[u8; 32]>().to_vec()),
            false => payload,
        };
        let number = Bytes::copy_from_slice(&sequence.to_be_bytes());
        if let Err(error) = send(&mut socket, vec![topic.clone(), number, payload]).await {
            tracing::debug!(%error, "KV events were not published");
        }
    }
}

/// Answers replay requests until dropped.
pub(crate) async fn replay(mut socket: RouterSocket, topic: String, history: History) {
    let topic = Bytes::from(topic);
    loop {
        let request = match socket.recv().await {
            Ok(request) => request.into_vec(),
            Err(error) => {
                tracing::debug!(%error, "the replay socket failed");
                return;
            }
        };
        // Identity, empty delimiter, first requested sequence number.
        let [peer, delimiter, start] = request.as_slice() else {
            continue;
        };
        let Ok(start) = <[u8; 8]>::try_from(start.as_ref()) else {
            continue;
        };
        let envelope = |frames: [Bytes; 3]| {
            [peer.clone(), delimiter.clone()].into_iter().chain(frames).collect::<Vec<_>>()
        };
        let mut replies: Vec<Vec<Bytes>> = history
            .since(u64::from_be_bytes(start))
            .into_iter()
            .map(|(sequence, payload)| {
                let number = Bytes::copy_from_slice(&sequence.to_be_bytes());
                envelope([topic.clone(), number, payload])
            })
            .collect();
        replies.push(envelope([Bytes::new(), Bytes::from_static(&END_OF_REPLAY), Bytes::new()]));
        for reply in replies {
            if send(&mut socket, reply).await.is_err() {
                break; // the asker went away
            }
        }
    }
}

/// Binds a PUB socket; returns its endpoint.
pub(crate) async fn bind_pub(address: &str) -> ZmqResult<(PubSocket, String)> {
    let mut socket = PubSocket::new();
    let endpoint = socket.bind(address).await?.to_string();
    Ok((socket, endpoint))
}

/// Binds a ROUTER socket; returns its endpoint.
pub(crate) async fn bind_router(address: &str) -> ZmqResult<(RouterSocket, String)> {
    let mut socket = RouterSocket::new();
    let endpoint = socket.bind(address).await?.to_string();
    Ok((socket, endpoint))
}

async fn send<S: SocketSend>(socket: &mut S, frames: Vec<Bytes>) -> ZmqResult<()> {
    match ZmqMessage::try_from(frames) {
        Ok(message) => socket.send(message).await,
        Err(_) => Ok(()), // no frames, nothing to send
    }
}
