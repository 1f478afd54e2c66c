//! What a worker takes over is bounded, and requests of clients go first.

use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::completion;
use splitrail_tests::{Spec, Trial};

use super::{
    BLOCK, LEASE_MS, blocks, both, drain, eager, fetched, heat, heat_both, prewarmed, serve, spec,
    steps, turn, undrain, until_ended,
};
use crate::peer_fetch::Sent;

#[tokio::test]
async fn no_more_tokens_are_taken_over_than_configured() {
    let tokens_max = blocks("a") * BLOCK + 4 * BLOCK;
    let keys = format!("{{ enabled: true, link_share: 1, tokens_max: {tokens_max} }}");
    let mut trial = Trial::start(spec(&keys)).await;
    heat(&mut trial, &["a", "b"]).await;
    for end in ["third", "fourth"] {
        serve(&mut trial, &turn("b", end)).await;
    }
    trial.cluster.settle().await;
    trial.cluster.restart("p1").await;
    until_ended(&trial, "tokens").await;
    let taken = prewarmed(&trial, "p1").await["tokens"].as_u64().unwrap();
    assert!(taken <= tokens_max && taken > tokens_max - 2 * BLOCK, "{taken} of {tokens_max}");
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn prewarming_ends_when_its_time_is_over() {
    let mut trial = Trial::start(Spec {
        engine: |_, config: &mut SimConfig| {
            config.transfer_us_per_block = 300_000;
            config.lease_ms = LEASE_MS;
        },
        model: spec("{ enabled: true, time_max: 300ms }").model,
        ..eager()
    })
    .await;
    heat_slowly(&mut trial).await;
    trial.cluster.restart("p1").await;
    until_ended(&trial, "time").await;
    eventually("what is under way is cancelled", async || {
        fetched(&trial, "cancelled").await == 1.0
    })
    .await;
    assert_eq!(prewarmed(&trial, "p1").await["tokens"], 0);
    trial.finish().await;
}

/// Makes a prefix of two blocks hot where transfers are slow.
async fn heat_slowly(trial: &mut Trial) {
    super::greet(trial).await;
    drain(trial, "p1").await;
    for end in ["x", "y"] {
        let text = format!("in all, a beginning of two whole blocks, {end}");
        let body = completion(&text);
        serve(trial, &body).await;
    }
    eventually("the ids are known", async || super::remembered(trial).await > 300.0).await;
    trial.cluster.settle().await;
    undrain(trial, "p1").await;
}

#[tokio::test]
async fn a_full_cache_ends_it() {
    let engine = |name: &str, config: &mut SimConfig| {
        config.lease_ms = LEASE_MS;
        if name == "p1" {
            config.kv_blocks = 16;
        }
    };
    let mut trial = Trial::start(Spec { engine, ..eager() }).await;
    heat(&mut trial, &["a", "b"]).await;
    assert!(blocks("a") < 15 && blocks("a") + blocks("b") > 15, "one fits");
    trial.cluster.restart("p1").await;
    until_ended(&trial, "full").await;
    // Nine tenths of 16 blocks: one prefix, and the beginning of the other one.
    let taken = prewarmed(&trial, "p1").await["tokens"].as_u64().unwrap();
    assert!(taken > blocks("a") * BLOCK && taken <= 14 * BLOCK, "{taken}");
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn one_fetch_at_a_time_is_possible_and_the_most_used_prefix_comes_first() {
    let engine = |_: &str, config: &mut SimConfig| {
        config.transfer_us_per_block = 20_000;
        config.lease_ms = LEASE_MS;
    };
    let model = spec("{ enabled: true, link_share: 1, fetches_max: 1 }").model;
    let mut trial = Trial::start(Spec { engine, model, ..eager() }).await;
    heat(&mut trial, &["a", "b", "c"]).await;
    for end in ["third", "fourth", "fifth"] {
        serve(&mut trial, &turn("b", end)).await;
    }
    trial.cluster.settle().await;
    trial.cluster.restart("p1").await;
    let mut most = 0;
    eventually("all prefixes are fetched", async || {
        most = most.max(trial.cluster.engine("p1").state().running);
        prewarmed(&trial, "p1").await["running"] == false
    })
    .await;
    until_ended(&trial, "done").await;
    assert!(fetched(&trial, "fetched").await >= 3.0);
    assert!(most <= 1, "{most} at a time");
    let first = steps(&trial, "p1")[0]["prompt"].as_array().unwrap().len() as u64;
    assert_eq!(first, blocks("b") * BLOCK + 1);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn after_a_failed_fetch_prewarming_waits_for_the_only_source() {
    let mut trial = Trial::start(spec("{ enabled: true, link_share: 1, time_max: 3s }")).await;
    heat(&mut trial, &["a"]).await;
    // A worker that is drained sends nothing.
    drain(&trial, "d0").await;
    trial.fault("p0", FaultKind::Status { status: 500 }, Some(1));
    trial.cluster.restart("p1").await;
    until_ended(&trial, "time").await;
    assert_eq!(fetched(&trial, "failed").await, 1.0);
    assert_eq!((steps(&trial, "p0").len(), steps(&trial, "p1").len()), (1, 0));
    undrain(&trial, "d0").await;
    serve(&mut trial, &turn("a", "third")).await;
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_source_that_sends_a_prefix_for_a_client_sends_none_for_prewarming() {
    let keys = "queue: none\nsaturation: { requests: 1 }\ntimeouts: { peer_fetch: 60s }";
    let spec = both(3, keys);
    let model = spec.model.replace("link_share: 1", "link_share: 1, time_max: 2s");
    let mut trial = Trial::start(Spec { model, ..spec }).await;
    heat_both(&mut trial, &["w1", "w2"], "a").await;
    let hour = FaultKind::SlowFirstByte { delay_ms: 3_600_000 };
    trial.fault("w0", hour.clone(), Some(1));
    let before = trial.asked("w0").len();
    let blocking = Sent::new(&trial, &completion("short"));
    eventually("the source is busy", async || trial.asked("w0").len() > before).await;
    undrain(&trial, "w2").await;
    trial.fault("w2", hour, Some(1));
    let fetching = Sent::new(&trial, &turn("a", "third"));
    eventually("a client's prefix is being taken", async || steps(&trial, "w2").len() == 1).await;
    undrain(&trial, "w1").await;
    trial.cluster.restart("w1").await;
    until_ended(&trial, "time").await;
    assert_eq!((steps(&trial, "w0").len(), steps(&trial, "w1").len()), (1, 0));
    for leaving in [blocking, fetching] {
        trial.expect("cancelled");
        drop(leaving);
    }
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}
