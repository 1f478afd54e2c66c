//! What comes over the event plane: stored snapshots and messages of KV events, as a broker that
//! anyone can write to would hand them out. The first byte says which of them follows.

use std::sync::Arc;

use prost::Message as _;
use splitrail_config::model::WorkerConfig;
use splitrail_event_plane::{names, snapshot};
use splitrail_fleet::{Pool, Worker};
use splitrail_fleet_listener::ShimBlocks;
use splitrail_kv::{AppliedBlocks, HashSeed, IndexConfig};
use splitrail_proto::v1::{PlaneAsk, PlaneEvents, PlaneReport};

const LIMIT: usize = 16;

pub(crate) fn check(data: &[u8]) {
    let [kind, rest @ ..] = data else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    match kind % 4 {
        0 => runtime.block_on(stored(rest)),
        1 => runtime.block_on(events(rest)),
        2 => reports(rest),
        _ => subjects(rest),
    }
}

/// A worker in an index of its own, and the published changes of its blocks.
struct PublishedChanges {
    pool: Arc<Pool>,
    number: u32,
    blocks: ShimBlocks,
}

impl PublishedChanges {
    fn new() -> Self {
        let config = IndexConfig {
            model: "m".to_owned(),
            block_size: 16,
            seed: HashSeed(7),
            max_blocks_per_worker: LIMIT,
        };
        let pool = Arc::new(Pool::new(config, Some(1)));
        let config = r#"{"id": "w", "role": "both", "url": "http://w:1"}"#;
        let config: WorkerConfig = serde_json::from_str(config).expect("a worker");
        let worker = pool.enter(|number| Worker::new(number, config, "w:1".parse().expect("w")));
        let blocks = ShimBlocks::new(Arc::clone(&pool), Arc::clone(&worker));
        Self { pool, number: worker.index.0, blocks }
    }

    fn is_sound(&self) {
        let index = self.pool.index();
        assert!(index.held(self.number) <= LIMIT, "{} blocks", index.held(self.number));
        if !self.blocks.is_restoring() {
            assert_eq!(index.check(), Ok(()));
        }
    }
}

/// A stored snapshot: read part by part, each bounded before it is read.
async fn stored(mut bytes: &[u8]) {
    let mut told = PublishedChanges::new();
    let mut sum = AppliedBlocks::default();
    let whole = bytes;
    let mut taken = 0;
    loop {
        let before = bytes.len();
        let Ok(Some(part)) = snapshot::read(&mut bytes).await else {
            break;
        };
        taken += before - bytes.len();
        assert!(part.encoded_len() <= taken, "more than was stored");
        if told.blocks.snapshot(part, &mut sum).await.is_err() {
            told.blocks.distrust();
            assert!(!told.blocks.is_complete());
        }
        told.is_sound();
    }
    assert!(taken <= whole.len());
    told.blocks.distrust();
    told.is_sound();
}

/// Messages of events, one behind the other.
async fn events(mut bytes: &[u8]) {
    let mut told = PublishedChanges::new();
    let mut sum = AppliedBlocks::default();
    while let Ok(message) = PlaneEvents::decode_length_delimited(&mut bytes) {
        is_the_same_again(&message);
        for events in &message.events {
            if told.blocks.events(events, &mut sum).await.is_err() {
                told.blocks.distrust();
            }
            told.is_sound();
        }
    }
}

/// What is read is the same once it was written and read again.
fn is_the_same_again<M: prost::Message + Default>(message: &M) {
    let bytes = message.encode_to_vec();
    let again = M::decode(&*bytes).expect("a message that was written");
    assert_eq!(again.encode_to_vec(), bytes);
}

fn reports(bytes: &[u8]) {
    if let Ok(report) = PlaneReport::decode(bytes) {
        is_the_same_again(&report);
    }
    if let Ok(ask) = PlaneAsk::decode(bytes) {
        is_the_same_again(&ask);
    }
}

/// No name of a model or worker makes a subject of other workers' or of more tokens.
fn subjects(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (model, worker) = text.split_once('\n').unwrap_or((&text, ""));
    let is_plain = |token: &str| {
        !token.is_empty()
            && token.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    assert!(is_plain(&names::token(model)) && is_plain(&names::token(worker)));
    let subject = names::kv(model, worker);
    assert_eq!(names::last(&subject), names::token(worker));
    assert_eq!(subject.split('.').count(), names::kv("m", "w").split('.').count());
    if model != worker {
        assert_ne!(names::token(model), names::token(worker));
    }
}
