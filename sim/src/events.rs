//! KV events on ZMQ, in vLLM's dialect: a PUB socket for what happens and a
//! ROUTER socket for what was missed.

mod encode;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::sync::mpsc;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage, ZmqResult};

use crate::cache::CacheEvent;
use crate::faults::FaultBoard;

pub(crate) use encode::Encoder;

/// Batches that can be replayed; older ones are forgotten, as by the real engine.
pub(crate) const REPLAY_BATCHES: usize = 10_000;
/// Sequence "number" of the message that ends a replay.
const END_OF_REPLAY: [u8; 8] = [0xff; 8];

type Batch = (u64, Bytes);

/// Batches that were published, for replay.
#[derive(Debug, Clone, Default)]
pub(crate) struct History(Arc<Mutex<VecDeque<Batch>>>);

impl History {
    fn push(&self, batch: Batch) {
        let mut batches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        batches.push_back(batch);
        if batches.len() > REPLAY_BATCHES {
            batches.pop_front();
        }
    }

    fn since(&self, start: u64) -> Vec<Batch> {
        let batches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        batches
            .iter()
            .filter(|(sequence, _)| *sequence >= start)
            .cloned()
            .collect()
    }
}

/// Publishes each step's events as one batch until the engine is gone.
pub(crate) async fn publish(
    mut socket: PubSocket,
    mut steps: mpsc::Receiver<Vec<CacheEvent>>,
    topic: String,
    encoder: Encoder,
    history: History,
    faults: Arc<FaultBoard>,
) {
    let topic = Bytes::from(topic);
    let mut sequence: u64 = 0;
    while let Some(events) = steps.recv().await {
        let seconds = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let payload = Bytes::from(encoder.batch(seconds.as_secs_f64(), &events));
        history.push((sequence, payload.clone()));
        let dropped = faults.strikes("drop_event_batches");
        let payload = match faults.strikes("garbage_events") {
            true => Bytes::from(rand::random::<[u8; 32]>().to_vec()),
            false => payload,
        };
        if !dropped {
            let number = Bytes::copy_from_slice(&sequence.to_be_bytes());
            let frames = vec![topic.clone(), number, payload];
            if let Err(error) = send(&mut socket, frames).await {
                tracing::debug!(%error, "KV events were not published");
            }
        }
        sequence += 1;
    }
}

/// Answers replay requests until it is dropped.
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
        // Identity, empty delimiter, first wanted sequence number.
        let [peer, delimiter, start] = request.as_slice() else {
            continue;
        };
        let Ok(start) = <[u8; 8]>::try_from(start.as_ref()) else {
            continue;
        };
        let envelope = |frames: [Bytes; 3]| {
            [peer.clone(), delimiter.clone()]
                .into_iter()
                .chain(frames)
                .collect::<Vec<_>>()
        };
        let mut replies: Vec<Vec<Bytes>> = history
            .since(u64::from_be_bytes(start))
            .into_iter()
            .map(|(sequence, payload)| {
                let number = Bytes::copy_from_slice(&sequence.to_be_bytes());
                envelope([topic.clone(), number, payload])
            })
            .collect();
        replies.push(envelope([
            Bytes::new(),
            Bytes::from_static(&END_OF_REPLAY),
            Bytes::new(),
        ]));
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
