//! What a shim sends, message by message, against the index: bounded, sound, and only
//! known as whole when it is.

use std::sync::Arc;

use prost::Message as _;
use splitrail_config::model::WorkerConfig;
use splitrail_fleet::{Pool, Worker};
use splitrail_fleet_listener::ShimBlocks;
use splitrail_kv::{AppliedBlocks, HashSeed, IndexConfig};
use splitrail_proto::v1::AttachRequest;
use splitrail_proto::v1::attach_request::Message;

const LIMIT: usize = 16;

pub(crate) fn check(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.expect("a runtime").block_on(play(data));
}

async fn play(mut data: &[u8]) {
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
    let mut blocks = ShimBlocks::new(Arc::clone(&pool), Arc::clone(&worker));
    let number = worker.index.0;
    while let Ok(request) = AttachRequest::decode_length_delimited(&mut data) {
        let mut sum = AppliedBlocks::default();
        let fault = match request.message {
            Some(Message::Snapshot(part)) => {
                let (mirror_id, last) = (part.mirror_id.clone(), part.last);
                match blocks.snapshot(part, &mut sum).await {
                    Ok(whole) => {
                        assert_eq!(whole.is_some(), last);
                        assert_eq!(blocks.known(&mirror_id), whole);
                        None
                    }
                    Err(fault) => Some(fault),
                }
            }
            Some(Message::Events(events)) => {
                let was_whole = blocks.is_complete();
                match blocks.events(&events, &mut sum).await {
                    Ok(sequence) => {
                        assert!(was_whole && sequence == events.sequence);
                        None
                    }
                    Err(fault) => Some(fault),
                }
            }
            _ => None,
        };
        if fault.is_some() {
            blocks.distrust();
            assert!(!blocks.is_complete());
        }
        let index = pool.index();
        assert!(index.held(number) <= LIMIT, "{} blocks", index.held(number));
        if !blocks.is_restoring() {
            assert_eq!(index.check(), Ok(()));
        }
    }
    blocks.distrust();
    let mut index = pool.index();
    index.remove_worker(number);
    assert_eq!(index.check(), Ok(()));
    assert_eq!(index.distinct_blocks(), 0, "nothing outlives its worker");
}
