//! What a worker forgets when its engine is another process.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use splitrail_config::model::BreakerConfig;

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
    worker.engine.facts.set_block_size(Some(16));
    worker.engine.facts.set_kv_names(KvNames { dtype: Some("fp8".into()), layout: None });
    worker.kv.parity.set_asked(true);
    worker.kv.parity.record(0, Parity::Ok);
    let believed = worker.kv.parity.is_believed();
    let before = worker.process();
    worker.record_restart();
    assert_eq!(worker.supports_cache_hit_threshold(), None);
    assert_eq!((worker.ranks.takes_rank_header(), worker.engine.facts.block_size()), (None, None));
    assert_eq!(*worker.engine.facts.kv_names(), KvNames::default());
    assert_eq!((believed, worker.kv.parity.is_believed()), (true, false));
    assert_eq!(worker.process(), before + 1);
}

#[test]
fn a_breaker_is_closed_by_what_shows_that_the_engine_works_and_by_nothing_else() {
    use splitrail_api::error::{Error, ErrorKind};
    let error = |kind| Error::new(kind, "x");
    let opens = |between: Option<Error>| {
        let worker = worker("w");
        worker.set_breakers(BreakerConfig { failures: 2, cooldown: Duration::from_secs(9) });
        worker.record(Leg::Decode, Some(&error(ErrorKind::EngineFailed)));
        worker.record(Leg::Decode, between.as_ref());
        worker.record(Leg::Decode, Some(&error(ErrorKind::EngineFailed)));
        worker.breaker(Leg::Decode).is_open()
    };
    assert!(!opens(None) && !opens(Some(error(ErrorKind::EngineRejected(400)))));
    for kind in [ErrorKind::EngineTimeout, ErrorKind::ForeignReply, ErrorKind::ClientGone] {
        assert!(opens(Some(error(kind))), "{kind:?}");
    }
    let worker = worker("w");
    worker.set_breakers(BreakerConfig { failures: 2, cooldown: Duration::from_secs(9) });
    let silent = error(ErrorKind::EngineTimeout).of_silent_stream();
    (0..2).for_each(|_| worker.record(Leg::Decode, Some(&silent)));
    assert!(worker.breaker(Leg::Decode).is_open(), "streams that fall silent");
    worker.record_restart();
    assert!(!worker.breaker(Leg::Decode).is_open(), "they were of another process");
}

#[test]
fn another_start_time_is_another_process_and_a_shim_takes_over_the_routers_own_report() {
    let polled = worker("w");
    let own =
        EngineLoad { started_at_s: Some(1000.0), block_size: Some(16), ..EngineLoad::default() };
    assert!(!polled.health.presence.reports(&own));
    let attached = worker("w");
    attached.succeed_to(&polled);
    let started = [1000.0, 1000.0, f64::NAN, 2000.0, 2000.0];
    let restarts = started.map(|started| attached.health.presence.reports_start(started));
    assert_eq!(restarts, [false, false, false, true, false]);
    polled.succeed_to(&attached);
    let own = EngineLoad { started_at_s: Some(2000.0), ..own };
    assert!(!polled.health.presence.reports(&own), "the router asks the same process");
}

#[test]
fn stranded_legs_are_those_of_an_engine_under_any_description() {
    let before = worker("w");
    before.transfer.push.strand();
    let after = worker("w");
    after.succeed_to(&before);
    assert_eq!(after.transfer.push.stranded(), 1);
    after.record_restart();
    assert_eq!(after.transfer.push.stranded(), 0);
}
