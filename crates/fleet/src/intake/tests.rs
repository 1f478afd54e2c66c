//! The intake of KV events: when an incomplete index is read again, and which addresses of an
//! engine are used.
#![allow(clippy::unwrap_used)]

use splitrail_engine::kv_events::SkippedEvents;
use splitrail_kv::{HashSeed, Index, IndexConfig, StoredBlock, Tier, WorkerKey};
use splitrail_sim::{SimConfig, SimEngine};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::*;
use std::task::{Context, Waker};
use std::time::Duration;

use splitrail_telemetry::Metrics;

use crate::Cluster;
use crate::ServedModel;
use crate::Worker;
use crate::models::{SharedParts, models};

/// Maximum number of blocks per worker in the index.
const BOUND: u64 = 16;

/// A router with one model and one worker, whose engine may be running or not.
fn cluster(kv_events: &str, kv_replay: &str) -> (Arc<Cluster>, Arc<ServedModel>, Arc<Worker>) {
    let yaml = format!(
        "limits: {{ index_blocks_per_worker_max: {BOUND} }}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: none }}
    flow: aggregated
    workers: [{{ id: w0, role: both, url: \"http://127.0.0.1:1\", kv_events: \"{kv_events}\", \
         kv_replay: \"{kv_replay}\" }}]
"
    );
    let folder = std::env::temp_dir();
    let loaded = splitrail_config::parse("test.yaml", &yaml, &folder);
    let config = Arc::new(loaded.unwrap_or_else(|problems| panic!("{problems}")).config);
    let metrics = Arc::new(Metrics::new().unwrap());
    let models =
        models(&config, SharedParts { memory: &Arc::default(), metrics: &metrics }, None).unwrap();
    let cluster = Arc::new(Cluster::new(models, config, metrics));
    let served = Arc::clone(&cluster.serving().models[0]);
    let config = served.config.workers[0].clone();
    let authority = "127.0.0.1:1".parse().unwrap();
    let worker = served.pool.enter(|number| Worker::new(number, config, authority));
    (cluster, served, worker)
}

fn part(cluster: &Arc<Cluster>, served: &ServedModel, worker: &Arc<Worker>) -> IndexPart {
    let (cluster, pool) = (Arc::clone(cluster), Arc::clone(&served.pool));
    IndexPart::new(cluster, served.name().into(), pool, Arc::clone(worker), Some(0))
}

/// Where the worker's first rank publishes.
fn source(worker: &Worker) -> EventSource {
    let published = worker.engine.facts.follow_publication().borrow().clone();
    let Publication::At(mut sources) = published else { panic!("no publisher") };
    sources.remove(0)
}

fn intake() -> Intake {
    let (cluster, served, worker) = cluster("tcp://127.0.0.1:1", "tcp://127.0.0.1:2");
    let source = source(&worker);
    let part = part(&cluster, &served, &worker);
    Intake { part, source, speaks: None, oldest_batch: None, is_replayed: true }
}

fn batch(event: KvEvent) -> Update {
    let batch = EventBatch {
        timestamp_s: 0.0,
        rank: None,
        events: vec![event],
        skipped: SkippedEvents::default(),
    };
    Update::Batch { sequence: 0, batch }
}

/// A prompt of one block for each number.
fn stored(numbers: std::ops::Range<u64>) -> Vec<Update> {
    let event = |number| KvEvent::Stored {
        parent: None,
        blocks: vec![StoredBlock {
            hash: EngineHash(number),
            tokens: vec![number as u32; 16],
            opaque: false,
        }],
        adapter: None,
        salt: None,
        tier: Tier::Device,
    };
    numbers.map(|number| batch(event(number))).collect()
}

fn removed(numbers: std::ops::Range<u64>) -> Update {
    batch(KvEvent::Removed { hashes: numbers.map(EngineHash).collect(), tier: Tier::Device })
}

async fn take_all(intake: &mut Intake, updates: Vec<Update>) {
    for update in updates {
        intake.take(update).await;
    }
}

#[tokio::test]
async fn events_that_are_read_again_count_but_have_no_lag() {
    let (cluster, served, worker) = cluster("tcp://127.0.0.1:1", "tcp://127.0.0.1:2");
    let (source, part) = (source(&worker), part(&cluster, &served, &worker));
    let mut intake = Intake { part, source, speaks: None, oldest_batch: None, is_replayed: true };
    let synced = || Update::Synced { outcome: SyncOutcome::Replayed };
    let labels = ["sim", "w0"];
    let seen = || {
        let metrics = &cluster.metrics;
        let lags = metrics.index_event_lag.with_label_values(&labels).get_sample_count();
        (metrics.index_events.with_label_values(&labels).get(), lags)
    };
    take_all(&mut intake, stored(0..4)).await;
    assert_eq!(seen(), (4, 0), "the replay at the start");
    take_all(&mut intake, vec![synced()]).await;
    take_all(&mut intake, stored(4..6)).await;
    assert_eq!(seen(), (6, 2));
    let error = splitrail_engine::zmtp::WireError::TimedOut;
    take_all(&mut intake, vec![Update::Disconnected { error }]).await;
    take_all(&mut intake, vec![Update::Reset { reason: ResetReason::Unverified }]).await;
    take_all(&mut intake, stored(0..4)).await;
    take_all(&mut intake, vec![synced()]).await;
    assert_eq!(seen(), (10, 2));
    // On the same connection, `Synced` does not come again.
    take_all(&mut intake, vec![Update::Reset { reason: ResetReason::Gap }]).await;
    take_all(&mut intake, stored(6..7)).await;
    assert_eq!(seen(), (11, 3));
}

/// A time after the minimum time until the index may be rebuilt.
fn due(intake: &Intake) -> Instant {
    Instant::now() + intake.part.truncated_min
}

#[tokio::test]
async fn an_incomplete_index_is_rebuilt_once_there_is_room_and_after_a_time() {
    let mut intake = intake();
    take_all(&mut intake, stored(0..BOUND)).await;
    assert!(!intake.part.worker.index_is_truncated());
    assert!(!intake.part.has_room_again(due(&intake)), "it lacks nothing");
    take_all(&mut intake, stored(BOUND..BOUND + 1)).await;
    assert!(intake.part.worker.index_is_truncated());
    assert!(!intake.part.has_room_again(due(&intake)), "there is no room");
    intake.take(removed(0..1)).await;
    assert!(!intake.part.has_room_again(due(&intake)), "there is too little room");
    intake.take(removed(1..4)).await;
    assert!(!intake.part.has_room_again(Instant::now()), "it was a moment ago");
    assert!(intake.part.has_room_again(due(&intake)));
}

#[tokio::test]
async fn an_index_lacks_nothing_of_a_cache_that_is_empty() {
    let mut intake = intake();
    take_all(&mut intake, stored(0..BOUND + 4)).await;
    assert!(intake.part.worker.index_is_truncated());
    intake.take(batch(KvEvent::Cleared)).await;
    assert!(!intake.part.worker.index_is_truncated());
    assert!(!intake.part.has_room_again(due(&intake)));
}

#[tokio::test]
async fn an_event_that_may_have_removed_any_block_is_a_rebuild_and_no_empty_cache() {
    let mut intake = intake();
    take_all(&mut intake, stored(0..BOUND + 4)).await;
    let unclear = || {
        let skipped = SkippedEvents { replaced_by_clear: 1, ..SkippedEvents::default() };
        let events = vec![KvEvent::Cleared];
        let batch = EventBatch { timestamp_s: 0.0, rank: None, events, skipped };
        Update::Batch { sequence: 0, batch }
    };
    let often = |intake: &Intake| intake.part.worker.kv.event_stats.often_rebuilt(Instant::now());
    intake.take(unclear()).await;
    assert_eq!(intake.part.blocks(), 0);
    assert!(intake.part.worker.index_is_truncated(), "the engine may hold all of them");
    take_all(&mut intake, stored(0..2)).await;
    intake.take(unclear()).await;
    assert_eq!(often(&intake), None);
    intake.take(Update::Reset { reason: ResetReason::Gap }).await;
    assert_eq!(often(&intake), Some("gap"));
    let worker = &intake.part.worker;
    assert_eq!(
        worker.kv.event_stats.often_rebuilt(Instant::now() + crate::event_stats::OFTEN),
        None
    );
}

/// The number of turns that a future takes of the thread.
fn turns(future: impl Future<Output = ()>) -> usize {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    (1..).find(|_| future.as_mut().poll(&mut context).is_ready()).unwrap()
}

/// An event that stores this many blocks at the start of a prompt.
fn chain(blocks: usize) -> KvEvent {
    let block = |number| StoredBlock {
        hash: EngineHash(number),
        tokens: vec![number as u32; 16],
        opaque: false,
    };
    let (salt, tier) = (Some("s".into()), Tier::Device);
    let blocks = (0..blocks as u64).map(block).collect();
    KvEvent::Stored { parent: None, blocks, adapter: None, salt, tier }
}

#[test]
fn a_batch_of_many_blocks_leaves_others_their_turn() {
    let mut intake = intake();
    let mut turns_for = |events: Vec<KvEvent>| {
        let skipped = SkippedEvents::default();
        let batch = EventBatch { timestamp_s: 0.0, rank: None, events, skipped };
        turns(intake.take(Update::Batch { sequence: 0, batch }))
    };
    let hashes = (0..4 * BLOCKS_PER_LOCK as u64).map(EngineHash).collect();
    assert_eq!(turns_for(vec![KvEvent::Removed { hashes, tier: Tier::Device }]), 4);
    assert_eq!(turns_for(vec![chain(1); 2 * BLOCKS_PER_LOCK]), 2);
    assert_eq!(turns_for(vec![chain(BLOCKS_PER_LOCK), chain(1)]), 2);
}

#[test]
fn the_portions_of_an_event_have_the_same_effect() {
    let event = chain(2 * BLOCKS_PER_LOCK + 1);
    let (model, seed) = ("m".to_owned(), HashSeed(7));
    let max_blocks_per_worker = 1 << 20;
    let config = IndexConfig { model, block_size: 16, seed, max_blocks_per_worker };
    let [mut whole, mut divided] = [Index::new(config.clone()), Index::new(config)];
    let key = WorkerKey { worker: 0, rank: 0 };
    whole.apply(key, &event);
    let mut applied = AppliedBlocks::default();
    portions(&event).for_each(|portion| applied += divided.apply(key, &portion));
    assert_eq!(applied.stored, blocks_of(&event));
    assert!(whole.snapshot(key).eq(divided.snapshot(key)));
}

/// Waits for a condition for a limited time.
async fn eventually(condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waiting).await.unwrap();
}

/// Lets an engine complete a prompt.
async fn serve(engine: &SimEngine, prompt: &str, n: u32) {
    let body = serde_json::json!({"model": "sim", "prompt": prompt, "max_tokens": 1, "n": n});
    let body = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: sim\r\ncontent-type: application/json\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(engine.http_addr()).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
}

#[tokio::test]
async fn the_index_is_rebuilt_when_evictions_make_room() {
    let engine =
        SimEngine::start(SimConfig { kv_blocks: 40, ..SimConfig::default() }).await.unwrap();
    let (events, replay) =
        (engine.kv_events_endpoint().unwrap(), engine.kv_replay_endpoint().unwrap());
    let (cluster, served, worker) = cluster(events, replay);
    let mut tasks = JoinSet::new();
    let mut part = part(&cluster, &served, &worker);
    part.truncated_min = Duration::from_millis(1);
    tasks.spawn(follow(part, source(&worker), None, watch::Sender::new(false)));
    serve(&engine, &"long ".repeat(100), 1).await;
    eventually(|| worker.index_is_truncated()).await;
    // Many prompts shorter than a block evict the long one and store no blocks.
    serve(&engine, "short", 36).await;
    let resyncs = cluster.metrics.index_resyncs.with_label_values(&["sim", "w0", "over_limit"]);
    eventually(|| resyncs.get() > 0 && worker.events_are_current()).await;
}

#[test]
fn an_engine_may_name_its_own_host_and_no_other() {
    let worker = |keys: &str, is_listed: bool| {
        let config =
            format!(r#"{{"id": "w", "role": "both", "url": "http://198.51.100.7:1"{keys}}}"#);
        let config = serde_json::from_str(&config).unwrap();
        let authority = "198.51.100.7:1".parse().unwrap();
        let mut worker = Worker::new(splitrail_policy::WorkerIndex(0), config, authority);
        (worker.address.guarded, worker.address.guards_events) = (!is_listed, !is_listed);
        worker
    };
    let source = |events: &str, replay: &str| EventSource {
        rank: 0,
        events: events.parse().unwrap(),
        replay: Some(replay.parse().unwrap()),
    };
    let own = source("tcp://198.51.100.7:5557", "tcp://198.51.100.7:5558");
    let other = source("tcp://203.0.113.9:5557", "tcp://198.51.100.7:5558");
    let half = source("tcp://198.51.100.7:5557", "tcp://203.0.113.9:5558");
    let asked = worker("", true);
    assert!(!is_guarded(&asked, &own));
    assert!(is_guarded(&asked, &other) && is_guarded(&asked, &half));
    assert!(is_guarded(&worker("", false), &own), "nobody has listed the worker");
    // What is written down is what an operator wants.
    let written = r#", "kv_events": "tcp://203.0.113.9:5557""#;
    assert!(!is_guarded(&worker(written, true), &other));
}
