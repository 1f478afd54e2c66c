//! What a worker forgets when its engine is another process.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::engine_facts::KvNames;
use crate::parity::Parity;

/// A worker that no pool has.
pub fn worker(id: &str) -> Worker {
    let config = format!(r#"{{"id": "{id}", "role": "both", "url": "http://{id}:1"}}"#);
    let config = serde_json::from_str(&config).unwrap();
    Worker::new(WorkerIndex(0), config, format!("{id}:1").parse().unwrap())
}

#[test]
fn nothing_that_was_learned_of_an_engine_outlives_its_process() {
    let worker = worker("w");
    worker.set_supports_cache_hit_threshold(Some(true));
    worker.ranks.set_takes_rank_header(Some(true));
    worker.facts.set_block_size(Some(16));
    worker.facts.set_kv_names(KvNames { dtype: Some("fp8".into()), layout: None });
    worker.parity.set_asked(true);
    worker.parity.judge(0, Parity::Ok);
    let believed = worker.parity.is_believed();
    let before = worker.process();
    worker.record_restart();
    assert_eq!(worker.supports_cache_hit_threshold(), None);
    assert_eq!((worker.ranks.takes_rank_header(), worker.facts.block_size()), (None, None));
    assert_eq!(*worker.facts.kv_names(), KvNames::default());
    assert_eq!((believed, worker.parity.is_believed()), (true, false));
    assert_eq!(worker.process(), before + 1);
}
