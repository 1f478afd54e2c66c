//! A leg that cannot take its prefix costs an attempt and nothing else.

use std::time::Instant;

use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::client::whole_text;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, Reference};

use super::super::{Sent, cached, drain, ended, steps, undrain};
use super::*;

/// Transfers take half a second.
fn slow(name: &str, config: &mut SimConfig) {
    flagged(name, config);
    config.transfer_us_per_block = 20_000;
}

#[tokio::test]
async fn a_prefix_that_the_source_does_not_give_out_is_computed_by_the_same_worker() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(one_shot(2, 2)).await;
    learned(&mut trial).await;
    let [first, second] = turns("refuses");
    let pair = held(&mut trial, &first).await;
    trial.fault(&pair.holder, FaultKind::RefusePulls, Some(1));
    let reply = served(&mut trial, &second).await;
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &second).await);
    fetched_by(&trial, &reply, "one_shot", "failed").await;
    assert_eq!((reply.route("prefill"), cached(&reply)), (Some("p1"), 0));
    assert_eq!(trial.retries("prefill").await, 1.0);
    // Neither worker takes part in a further fetch for a while.
    undrain(&trial, "p0").await;
    let [first, second] = turns("again");
    held(&mut trial, &first).await;
    let reply = served(&mut trial, &second).await;
    assert_eq!(recorded(&trial, &reply).await, Value::Null);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn the_attempt_without_the_prefix_needs_no_retry_budget() {
    let model = format!("{EAGER}\nretries: {{ budget_percent: 0 }}\non_no_prefill: fail");
    let mut trial = Trial::start(Spec { model, ..one_shot(2, 2) }).await;
    learned(&mut trial).await;
    let [first, second] = turns("budget");
    let pair = held(&mut trial, &first).await;
    let serving = trial.cluster.running.core.serving();
    while serving.models[0].retry_budget.withdraw() {}
    trial.fault(&pair.holder, FaultKind::RefusePulls, Some(1));
    let reply = served(&mut trial, &second).await;
    fetched_by(&trial, &reply, "one_shot", "failed").await;
    assert_eq!((reply.route("prefill"), trial.local_prefills().await), (Some("p1"), 0.0));
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_source_that_dies_during_the_leg_costs_one_attempt() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(Spec { engine: slow, ..one_shot(2, 2) }).await;
    learned(&mut trial).await;
    let [first, second] = turns("dies");
    let pair = held(&mut trial, &first).await;
    let taken = takes(&trial, "p1").len();
    trial.expect("ok");
    let request = Sent::new(&trial, &second);
    eventually("the prefix is being taken", async || takes(&trial, "p1").len() > taken).await;
    trial.cluster.engine(&pair.holder).die();
    let reply = request.reply().await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &second).await);
    assert_eq!(went(&trial, "one_shot", "failed").await, 1.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_leg_that_outlasts_the_lease_is_given_up_and_its_engine_gets_no_other_for_a_while() {
    let reference = Reference::start().await;
    // The router's lease is shorter than that of the engines, and still long for the prediction.
    // Nothing else ends the leg.
    let model = format!("{EAGER}\nlease: 2800ms\ntimeouts: {{ prefill: 1h }}");
    let engine = |name: &str, config: &mut SimConfig| {
        flagged(name, config);
        config.lease_ms = 4000;
    };
    let mut trial = Trial::start(Spec { engine, model, ..one_shot(2, 1) }).await;
    learned(&mut trial).await;
    let [first, second] = turns("late");
    held(&mut trial, &first).await;
    trial.fault("p1", FaultKind::SlowFirstByte { delay_ms: 3_600_000 }, Some(1));
    let reply = served(&mut trial, &second).await;
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &second).await);
    fetched_by(&trial, &reply, "one_shot", "timed_out").await;
    assert_eq!(reply.route("prefill"), Some("p1"));
    let serving = trial.cluster.running.core.serving();
    let worker = serving.models[0].pool.roster().named("p1").cloned().unwrap();
    assert!(
        !worker.transfer.read_back.may_read(Instant::now()),
        "it may lack what such a leg needs"
    );
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_hand_off_that_no_leg_carried_is_released() {
    let mut trial = Trial::start(one_shot(3, 2)).await;
    drain(&trial, "p2").await;
    learned(&mut trial).await;
    let [first, second] = turns("unsent");
    let pair = held(&mut trial, &first).await;
    let asked = steps(&trial, &pair.holder).len();
    trial.fault(&pair.holder, FaultKind::SlowFirstByte { delay_ms: 700 }, Some(1));
    trial.expect("ok");
    let request = Sent::new(&trial, &second);
    eventually("the source is asked", async || steps(&trial, &pair.holder).len() > asked).await;
    undrain(&trial, "p2").await;
    let place = trial.cluster.engines.iter().position(|(name, _)| name == "p1").unwrap();
    trial.cluster.engines.remove(place).1.shutdown().await;
    let reply = request.reply().await;
    assert_eq!((reply.status.as_u16(), reply.route("prefill")), (200, Some("p2")));
    let fetched = [("outcome", "fetched")];
    eventually("it is fetched so that its blocks are freed", async || {
        trial.cluster.metric("splitrail_unused_hand_offs_total", &fetched).await == 1.0
    })
    .await;
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_client_that_leaves_during_the_leg_leaves_nothing_behind() {
    let mut trial = Trial::start(Spec { engine: slow, ..one_shot(2, 2) }).await;
    learned(&mut trial).await;
    let [first, second] = turns("leaves");
    held(&mut trial, &first).await;
    let taken = takes(&trial, "p1").len();
    trial.expect("cancelled");
    let http = trial.cluster.http.clone();
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move { http.post(COMPLETIONS, &second).await });
    eventually("the leg is there", async || takes(&trial, "p1").len() > taken).await;
    tasks.shutdown().await;
    eventually("it is counted", async || ended(&trial, "cancelled").await == 1.0).await;
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}
