//! A scripted engine: it reports its identity, streams replies, and publishes KV events, all of
//! which it can replay.

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

/// What an engine of vLLM 0.32.0 shows; a shim reads it several times a second.
const METRICS: &str =
    include_str!("../../../crates/engine/tests/fixtures/vllm-0.32.0/metrics/a_after.txt");
/// Tokens per KV block, by that.
pub(super) const BLOCK_SIZE: u32 = 32;
/// Chunks of a streamed answer, and the time between two.
const CHUNKS: u32 = 16;
const STEP: Duration = Duration::from_millis(5);
/// Batches that wait for the publisher.
const QUEUE: usize = 1024;
/// What ends a replay.
const END_OF_REPLAY: [u8; 8] = [0xff; 8];

/// A running engine.
pub(super) struct Engine {
    /// Where it serves.
    pub(super) http: SocketAddr,
    feed: Arc<Feed>,
    publish: mpsc::Sender<(u64, Bytes)>,
    _tasks: JoinSet<()>,
}

/// Everything that it has published.
struct Feed {
    /// Chains that it held from its beginning, a batch each, of so many blocks.
    held: (u64, usize),
    /// Batches since then.
    since: Mutex<Vec<Bytes>>,
}

impl Engine {
    /// Starts one that holds so many chains of so many blocks.
    ///
    /// # Errors
    /// Ports that cannot be had.
    pub(super) async fn start(chains: u64, blocks: usize) -> Result<Self, Failure> {
        let feed = Arc::new(Feed { held: (chains, blocks), since: Mutex::default() });
        let (mut live, mut replay) = (PubSocket::new(), RouterSocket::new());
        let events = live.bind("tcp://127.0.0.1:0").await?.to_string();
        let replays = replay.bind("tcp://127.0.0.1:0").await?.to_string();
        let (publish, batches) = mpsc::channel(QUEUE);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let http = listener.local_addr()?;
        let mut tasks = JoinSet::new();
        tasks.spawn(publish_all(live, batches));
        tasks.spawn(replay_all(replay, Arc::clone(&feed)));
        let routes = routes(&events, &replays);
        tasks.spawn(async move {
            let _never = axum::serve(listener, routes).await;
        });
        Ok(Self { http, feed, publish, _tasks: tasks })
    }

    /// Publishes that one chain is stored and another one is gone.
    ///
    /// # Errors
    /// If the publisher has ended.
    pub(super) async fn put(&self, stored: &Chain, removed: Option<&Chain>) -> Result<(), Failure> {
        let payload = Bytes::from(batch(stored, removed)?);
        let number = {
            let mut since = self.feed.since.lock().unwrap_or_else(PoisonError::into_inner);
            since.push(payload.clone());
            self.feed.held.0 + since.len() as u64 - 1
        };
        Ok(self.publish.send((number, payload)).await?)
    }
}

impl Feed {
    fn get(&self, number: u64) -> Option<Bytes> {
        let (chains, blocks) = self.held;
        if number < chains {
            return batch(&Chain::new(number, blocks), None).ok().map(Bytes::from);
        }
        let since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        since.get((number - chains) as usize).cloned()
    }
}

async fn publish_all(mut socket: PubSocket, mut batches: mpsc::Receiver<(u64, Bytes)>) {
    while let Some((number, payload)) = batches.recv().await {
        let number = Bytes::copy_from_slice(&number.to_be_bytes());
        // A subscriber that misses the message asks for a replay.
        let _lost = send(&mut socket, vec![Bytes::new(), number, payload]).await;
    }
}

async fn replay_all(mut socket: RouterSocket, feed: Arc<Feed>) {
    while let Ok(request) = socket.recv().await {
        let frames = request.into_vec();
        // Who asks, an empty frame, and the first number wanted.
        let [peer, delimiter, first] = frames.as_slice() else { continue };
        let Ok(first) = <[u8; 8]>::try_from(first.as_ref()) else { continue };
        let mut number = u64::from_be_bytes(first);
        loop {
            let payload = feed.get(number);
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
    let message = ZmqMessage::try_from(frames).map_err(|_| "a message of no frames")?;
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
        .route("/v1/completions", post(answer))
}

fn json(text: impl Into<Body>) -> Response {
    ([("content-type", "application/json")], text.into()).into_response()
}

async fn answer(body: String) -> Response {
    if !body.contains(r#""stream": true"#) {
        return json(
            r#"{"id": "c", "object": "text_completion", "created": 0, "model": "sim",
            "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}}"#,
        );
    }
    let chunks = futures_util::stream::unfold(0, async |number: u32| {
        if number > 0 && number < CHUNKS {
            sleep(STEP).await;
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
