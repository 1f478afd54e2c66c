//! Scripted shims that publish over a broker as real shims do: snapshots in the broker's object
//! store, the changes after each snapshot, heartbeats, and replies to routers' questions.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use prost::Message as _;
use splitrail_event_plane::async_nats::Client;
use splitrail_event_plane::async_nats::jetstream::object_store::ObjectMetadata;
use splitrail_event_plane::snapshot::{Label, StoredParts};
use splitrail_event_plane::{Broker, names};
use splitrail_proto::v1;
use tokio::time::{sleep, timeout};

mod heartbeats;

use super::Failure;
use super::router::MODEL;
use super::scripted_shim;
use super::worker_cache::WorkerCache;
use crate::splitmix::mix;

/// Maximum number of snapshots that are stored concurrently.
const CONCURRENT_SNAPSHOTS: usize = 8;
/// Sequence number of the last change that each snapshot contains.
const SEQUENCE: u64 = 1;
/// Number of messages of a worker after its snapshot.
const TAIL_MESSAGES: u64 = 4;
/// Number of blocks that each of these messages stores.
const MESSAGE_BLOCKS: u64 = 8;
/// Number of blocks of a worker that are in messages and not in its snapshot.
pub(super) const TAIL_BLOCKS: usize = (TAIL_MESSAGES * MESSAGE_BLOCKS) as usize;
/// Maximum time until a started router replies, and until a killed router no longer does.
const ROUTER_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between two questions to routers.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The scripted shims of all workers, which share one connection to the broker.
#[derive(Clone)]
pub(super) struct ScriptedPublishers {
    broker: Broker,
    /// The identity of each shim and its worker.
    workers: Arc<Vec<v1::Hello>>,
    /// What the router has sent: among others its hash seed and its load interval.
    terms: v1::Welcome,
    /// Number of KV blocks of each snapshot.
    blocks: usize,
    /// Number of snapshots that routers have requested.
    requested: Arc<AtomicU64>,
}

impl ScriptedPublishers {
    /// Asks the router for its terms, and waits until it has made the stream and the object store.
    ///
    /// # Errors
    /// No router is ready in time.
    pub(super) async fn connect(
        broker: Broker,
        engines: &[SocketAddr],
        blocks: usize,
    ) -> Result<Self, Failure> {
        let terms = timeout(ROUTER_TIMEOUT, async {
            loop {
                if let Ok(terms) = terms(&broker.client).await {
                    let stream = broker.context.get_stream(names::stream(MODEL)).await;
                    let store = broker.context.get_object_store(names::bucket(MODEL)).await;
                    if stream.is_ok() && store.is_ok() {
                        return terms;
                    }
                }
                sleep(POLL_INTERVAL).await;
            }
        });
        let terms = terms.await.map_err(|_| "no router sends its terms in time")?;
        let workers = engines.iter().zip(0..);
        let workers = workers.map(|(engine, worker)| scripted_shim::hello(worker, *engine, blocks));
        let workers = Arc::new(workers.collect());
        Ok(Self { broker, workers, terms, blocks, requested: Arc::default() })
    }

    /// Stores all snapshots, and publishes the messages after them.
    ///
    /// # Errors
    /// The broker does not accept a snapshot or a message.
    pub(super) async fn publish(&self) -> Result<(), Failure> {
        let workers = futures_util::stream::iter(0..self.workers.len());
        let publishing = workers.map(|at| self.publish_one(at));
        let mut done = publishing.buffer_unordered(CONCURRENT_SNAPSHOTS);
        while let Some(done) = done.next().await {
            done?;
        }
        Ok(())
    }

    async fn publish_one(&self, at: usize) -> Result<(), Failure> {
        self.store_snapshot(at).await?;
        for number in 1..=TAIL_MESSAGES {
            let events = vec![stored(at as u64, SEQUENCE + number)];
            self.publish_events(at, events).await?;
        }
        Ok(())
    }

    /// Stores the snapshot of a worker.
    async fn store_snapshot(&self, at: usize) -> Result<(), Failure> {
        let (context, hello) = (&self.broker.context, &self.workers[at]);
        let stream = context.get_stream(names::stream(MODEL)).await?;
        let label = Label {
            mirror_id: hello.mirror_id.clone(),
            sequence: SEQUENCE,
            stream_sequence: stream.cached_info().state.last_sequence,
        };
        let metadata = ObjectMetadata {
            name: names::token(&hello.worker_id),
            metadata: label.to_metadata(),
            ..ObjectMetadata::default()
        };
        let cache = WorkerCache { worker: at as u64, blocks: self.blocks };
        let parts = cache.parts(&hello.mirror_id, SEQUENCE);
        let bucket = context.get_object_store(names::bucket(MODEL)).await?;
        bucket.put(metadata, &mut StoredParts::new(parts.into_iter())).await?;
        Ok(())
    }

    /// Publishes changes of a worker as one message.
    async fn publish_events(&self, at: usize, events: Vec<v1::Events>) -> Result<(), Failure> {
        let hello = &self.workers[at];
        let message = v1::PlaneEvents {
            worker_id: hello.worker_id.clone(),
            instance_id: hello.instance_id.clone(),
            mirror_id: hello.mirror_id.clone(),
            events,
            snapshot_sequence: Some(SEQUENCE),
        };
        let subject = names::kv(MODEL, &hello.worker_id);
        let sent = self.broker.context.publish(subject, message.encode_to_vec().into()).await?;
        sent.await?;
        Ok(())
    }
}

/// Waits until no router replies any more, so that a killed router is not taken for its successor.
///
/// # Errors
/// A router still replies after [`ROUTER_TIMEOUT`].
pub(super) async fn wait_until_no_router(client: &Client) -> Result<(), Failure> {
    let started = Instant::now();
    while terms(client).await.is_ok() {
        if started.elapsed() > ROUTER_TIMEOUT {
            return Err("the killed router still replies".into());
        }
        sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

/// Asks a router for its terms.
async fn terms(client: &Client) -> Result<v1::Welcome, Failure> {
    let question = v1::PlaneAsk { model: MODEL.to_owned(), ..v1::PlaneAsk::default() };
    let reply = client.request(names::terms(MODEL), question.encode_to_vec().into());
    Ok(v1::Welcome::decode(reply.await?.payload)?)
}

/// A change that stores a chain of blocks that no other change contains.
fn stored(worker: u64, sequence: u64) -> v1::Events {
    let seed = mix(mix(worker) ^ sequence << 48);
    let hashes: Vec<u64> = (0..MESSAGE_BLOCKS).map(|at| mix(seed.wrapping_add(at))).collect();
    let names = hashes.iter().map(|hash| mix(*hash)).collect();
    let stored = v1::Stored { parent: None, names, hashes, tier: 0 };
    let changes = vec![v1::Change { change: Some(v1::change::Change::Stored(stored)) }];
    v1::Events { sequence, rank: 0, engine_time_s: 0.0, changes }
}
