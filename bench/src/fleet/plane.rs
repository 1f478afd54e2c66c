//! Scripted shims on the event plane, with the messages of real ones: snapshots in the broker's
//! store, changes after each snapshot, heartbeats, and replies to routers' questions.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use prost::Message as _;
use splitrail_event_plane::async_nats::Client;
use splitrail_event_plane::async_nats::jetstream::object_store::ObjectMetadata;
use splitrail_event_plane::snapshot::{Label, Stored};
use splitrail_event_plane::{Broker, names};
use splitrail_proto::v1;
use tokio::time::{sleep, timeout};

mod live;

use super::Failure;
use super::router::MODEL;
use super::script;
use super::shape::{Cache, mix};

/// Snapshots that are stored at once.
const AT_ONCE: usize = 8;
/// The change that snapshots are as of.
const SEQUENCE: u64 = 1;
/// Messages behind each, and the blocks that each of them stores.
const TAIL: u64 = 4;
const MESSAGE_BLOCKS: u64 = 8;
/// Blocks that are in messages alone.
pub(super) const TAIL_BLOCKS: usize = (TAIL * MESSAGE_BLOCKS) as usize;
/// How long a router may take to say how it hashes.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two questions.
const GLANCE: Duration = Duration::from_millis(50);

/// All shims.
#[derive(Clone)]
pub(super) struct Publishers {
    broker: Broker,
    workers: Arc<Vec<v1::Hello>>,
    terms: v1::Welcome,
    /// KV blocks of each snapshot.
    blocks: usize,
    /// Snapshots that a router has asked for.
    asked: Arc<AtomicU64>,
}

impl Publishers {
    /// Asks the router how it hashes; it has made stream and store by then, or soon.
    ///
    /// # Errors
    /// If nobody answers.
    pub(super) async fn greet(
        broker: Broker,
        engines: &[SocketAddr],
        blocks: usize,
    ) -> Result<Self, Failure> {
        let terms = timeout(PATIENCE, async {
            loop {
                if let Ok(terms) = terms(&broker.client).await {
                    let stream = broker.context.get_stream(names::stream(MODEL)).await;
                    let store = broker.context.get_object_store(names::bucket(MODEL)).await;
                    if stream.is_ok() && store.is_ok() {
                        return terms;
                    }
                }
                sleep(GLANCE).await;
            }
        });
        let terms = terms.await.map_err(|_| "no router says how it hashes")?;
        let workers = engines.iter().zip(0..);
        let workers = workers.map(|(engine, worker)| script::hello(worker, *engine, blocks));
        let workers = Arc::new(workers.collect());
        Ok(Self { broker, workers, terms, blocks, asked: Arc::default() })
    }

    /// Stores all snapshots, and publishes what follows them.
    ///
    /// # Errors
    /// What the broker does not take.
    pub(super) async fn publish(&self) -> Result<(), Failure> {
        let places = futures_util::stream::iter(0..self.workers.len());
        let mut done = places.map(|at| self.publish_one(at)).buffer_unordered(AT_ONCE);
        while let Some(done) = done.next().await {
            done?;
        }
        Ok(())
    }

    async fn publish_one(&self, at: usize) -> Result<(), Failure> {
        self.store(at).await?;
        for number in 1..=TAIL {
            let events = vec![stored(at as u64, SEQUENCE + number)];
            self.append(at, events).await?;
        }
        Ok(())
    }

    async fn store(&self, at: usize) -> Result<(), Failure> {
        let (context, hello) = (&self.broker.context, &self.workers[at]);
        let stream = context.get_stream(names::stream(MODEL)).await?;
        let label = Label {
            mirror_id: hello.mirror_id.clone(),
            sequence: SEQUENCE,
            stream_sequence: stream.cached_info().state.last_sequence,
        };
        let about = ObjectMetadata {
            name: names::token(&hello.worker_id),
            metadata: label.to_metadata(),
            ..ObjectMetadata::default()
        };
        let cache = Cache { worker: at as u64, blocks: self.blocks };
        let parts = cache.parts(&hello.mirror_id, SEQUENCE);
        let bucket = context.get_object_store(names::bucket(MODEL)).await?;
        bucket.put(about, &mut Stored::new(parts.into_iter())).await?;
        Ok(())
    }

    async fn append(&self, at: usize, events: Vec<v1::Events>) -> Result<(), Failure> {
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

/// Waits until a router of the broker's is gone: it must not be taken for the next one.
///
/// # Errors
/// If it goes on to answer.
pub(super) async fn gone(client: &Client) -> Result<(), Failure> {
    let started = Instant::now();
    while terms(client).await.is_ok() {
        if started.elapsed() > PATIENCE {
            return Err("the killed router goes on to answer".into());
        }
        sleep(GLANCE).await;
    }
    Ok(())
}

async fn terms(client: &Client) -> Result<v1::Welcome, Failure> {
    let question = v1::PlaneAsk { model: MODEL.to_owned(), ..v1::PlaneAsk::default() };
    let asked = client.request(names::terms(MODEL), question.encode_to_vec().into());
    Ok(v1::Welcome::decode(asked.await?.payload)?)
}

/// A change that stores a chain of its own.
fn stored(worker: u64, sequence: u64) -> v1::Events {
    let seed = mix(mix(worker) ^ sequence << 48);
    let hashes: Vec<u64> = (0..MESSAGE_BLOCKS).map(|at| mix(seed.wrapping_add(at))).collect();
    let names = hashes.iter().map(|hash| mix(*hash)).collect();
    let stored = v1::Stored { parent: None, names, hashes, tier: 0 };
    let changes = vec![v1::Change { change: Some(v1::change::Change::Stored(stored)) }];
    v1::Events { sequence, rank: 0, engine_time_s: 0.0, changes }
}
