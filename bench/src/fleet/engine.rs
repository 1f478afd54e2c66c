//! A scripted engine: it reports its identity, sends replies, and publishes KV events, all of which
//! it can replay.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::sleep;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::Failure;
use super::events::{Chain, batch};

/// The metrics of an engine of vLLM 0.32.0. A shim reads them several times a second.
const METRICS: &str =
    include_str!("../../../crates/engine/tests/fixtures/vllm-0.32.0/metrics/a_after.txt");
/// Number of tokens per KV block, as [`METRICS`] says.
pub(super) const BLOCK_SIZE: u32 = 32;
/// Number of chunks of a streamed reply.
const CHUNKS: u32 = 16;
/// Interval between two chunks.
const CHUNK_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum number of batches that wait for the publisher.
const QUEUE: usize = 1024;
/// The sequence number of the message that ends a replay.
const END_OF_REPLAY: [u8; 8] = [0xff; 8];

/// A running engine. It ends when it is dropped.
pub(super) struct Engine {
    /// The address of its HTTP listener.
    pub(super) http: SocketAddr,
    published: Arc<PublishedBatches>,
    publisher: mpsc::Sender<(u64, Bytes)>,
    _tasks: JoinSet<()>,
}

/// All batches that the engine has published.
struct PublishedBatches {
    /// Number of chains held from the start, and blocks per chain; each chain is a batch.
    held: (u64, usize),
    /// Batches published after the start.
    later: Mutex<Vec<Bytes>>,
}

impl Engine {
    /// Starts an engine that holds `chains` chains of `blocks` blocks each.
    ///
    /// # Errors
    /// No port is free.
    pub(super) async fn start(chains: u64, blocks: usize) -> Result<Self, Failure> {
        let published =
            Arc::new(PublishedBatches { held: (chains, blocks), later: Mutex::default() });
        let (mut live, mut replay) = (PubSocket::new(), RouterSocket::new());
        let events = live.bind("tcp://127.0.0.1:0").await?.to_string();
        let replays = replay.bind("tcp://127.0.0.1:0").await?.to_string();
        let (publisher, batches) = mpsc::channel(QUEUE);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let http = listener.local_addr()?;
        let mut tasks = JoinSet::new();
        tasks.spawn(publish_all(live, batches));
        tasks.spawn(replay_all(replay, Arc::clone(&published)));
        let routes = routes(&events, &replays);
        tasks.spawn(async move {
            let _never = axum::serve(listener, routes).await;
        });
        Ok(Self { http, published, publisher, _tasks: tasks })
    }

    /// Publishes that one chain was stored and, if there is one, that another chain was removed.
    ///
    /// # Errors
    /// The publisher has ended.
    pub(super) async fn publish(
        &self,
        stored: &Chain,
        removed: Option<&Chain>,
    ) -> Result<(), Failure> {
        let payload = Bytes::from(batch(stored, removed)?);
        let number = {
            let mut later = self.published.later.lock().unwrap_or_else(PoisonError::into_inner);
            later.push(payload.clone());
            self.published.held.0 + later.len() as u64 - 1
        };
        Ok(self.publisher.send((number, payload)).await?)
    }
}

impl PublishedBatches {
    /// The batch with a sequence number; `None` if it has not been published.
    fn get(&self, number: u64) -> Option<Bytes> {
        let (chains, blocks) = self.held;
        if number < chains {
            return batch(&Chain::new(number, blocks), None).ok().map(Bytes::from);
        }
        let later = self.later.lock().unwrap_or_else(PoisonError::into_inner);
        later.get((number - chains) as usize).cloned()
    }
}

async fn publish_all(mut socket: PubSocket, mut batches: mpsc::Receiver<(u64, Bytes)>) {
    while let Some((number, payload)) = batches.recv().await {
        let number = Bytes::copy_from_slice(&number.to_be_bytes());
        // A subscriber that misses the message asks for a replay.
        let _lost = send(&mut socket, vec![Bytes::new(), number, payload]).await;
    }
}

async fn replay_all(mut socket: RouterSocket, published: Arc<PublishedBatches>) {
    while let Ok(request) = socket.recv().await {
        let frames = request.into_vec();
        // The sender, an empty frame, and the first sequence number that the sender wants.
        let [peer, delimiter, first] = frames.as_slice() else { continue };
        let Ok(first) = <[u8; 8]>::try_from(first.as_ref()) else { continue };
        let mut number = u64::from_be_bytes(first);
        loop {
            let payload = published.get(number);
            let is_last = payload.is_none();
            let at = payload.as_ref().map_or(END_OF_REPLAY, |_| number.to_be_bytes());
            let at = Bytes::copy_from_slice(&at);
            let payload = payload.unwrap_or_default();
            let frames = vec![peer.clone(), delimiter.clone(), Bytes::new(), at, payload];
            if send(&mut socket, frames).await.is_err() || is_last {
                break;
            }
            number += 1;
        }
    }
}

async fn send<S: SocketSend>(socket: &mut S, frames: Vec<Bytes>) -> Result<(), Failure> {
    let message = ZmqMessage::try_from(frames).map_err(|_| "a message has no frames")?;
    Ok(socket.send(message).await?)
}

fn routes(events: &str, replays: &str) -> Router {
    let models = r#"{"object": "list", "data": [{"id": "sim", "object": "model", "created": 0,
        "owned_by": "vllm", "root": "sim", "parent": null, "max_model_len": 131072}]}"#;
    let sources = format!(
        r#"{{"0": {{"enable_kv_cache_events": true, "publisher": "zmq",
            "endpoint": "{events}", "replay_endpoint": "{replays}"}}}}"#
    );
    Router::new()
        .route("/health", get(async || ""))
        .route("/metrics", get(async || METRICS))
        .route("/version", get(async || json(r#"{"version": "0.32.0"}"#)))
        .route("/v1/models", get(async move || json(models)))
        .route("/kv_event_sources", get(async move || json(sources)))
        .route("/v1/completions", post(complete))
}

fn json(text: impl Into<Body>) -> Response {
    ([("content-type", "application/json")], text.into()).into_response()
}

async fn complete(body: String) -> Response {
    if !body.contains(r#""stream": true"#) {
        return json(
            r#"{"id": "c", "object": "text_completion", "created": 0, "model": "sim",
            "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}}"#,
        );
    }
    let chunks = futures_util::stream::unfold(0, async |number: u32| {
        if number > 0 && number < CHUNKS {
            sleep(CHUNK_INTERVAL).await;
        }
        let text = match number {
            0..CHUNKS => {
                r#"data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"sim","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}"#
            }
            CHUNKS => "data: [DONE]",
            _ => return None,
        };
        Some((Ok::<_, Infallible>(Bytes::from(format!("{text}\n\n"))), number + 1))
    });
    ([("content-type", "text/event-stream")], Body::from_stream(chunks)).into_response()
}
