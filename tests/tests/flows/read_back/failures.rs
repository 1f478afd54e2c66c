//! A read that fails costs time and nothing else.

use serde_json::json;
use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::Spec;
use splitrail_tests::client::Client;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, Trial};

use super::{complete, ends, ids_of, nothing_is_pinned, of_ids, prompt_ids, reading, reads};

/// A history of 190 tokens, of which a decode worker keeps 189.
async fn history(trial: &mut Trial, salt: u64) -> Vec<u64> {
    let first = prompt_ids(100, salt);
    let reply = complete(trial, &first, 90).await;
    trial.cluster.settle().await;
    [first, ids_of(&reply), prompt_ids(20, salt + 1000)].concat()
}

async fn expected(next: &[u64]) -> Vec<u64> {
    let mut reference = Trial::start(Spec::aggregated(1)).await;
    ids_of(&complete(&mut reference, next, 12).await)
}

/// The engine frees the blocks long before the router thinks so.
fn short(_name: &str, config: &mut SimConfig) {
    config.bidirectional_ttl_ms = Some(1);
}

#[tokio::test]
async fn a_read_after_the_end_of_the_pin_is_refused_and_the_prompt_is_computed() {
    let mut trial = Trial::start(Spec { engine: short, ..reading(1, 1, "") }).await;
    let next = history(&mut trial, 1).await;
    nothing_is_pinned(&trial).await;
    let reply = complete(&mut trial, &next, 12).await;
    assert_eq!(ids_of(&reply), expected(&next).await);
    assert_eq!((reads(&trial, "failed").await, trial.retries("prefill").await), (1.0, 1.0));
    // The worker reads nothing for a while.
    let next = history(&mut trial, 2).await;
    complete(&mut trial, &next, 12).await;
    assert_eq!(reads(&trial, "failed").await, 1.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_decode_engine_that_is_gone_costs_one_attempt() {
    let mut trial = Trial::start(reading(1, 2, "health: { probe_interval: 1h }")).await;
    let next = history(&mut trial, 1).await;
    let keeper = if trial.counts(["d0"])[0] > 0 { "d0" } else { "d1" };
    let place = trial.cluster.engines.iter().position(|(name, _)| name == keeper).unwrap();
    trial.cluster.engines.remove(place).1.shutdown().await;
    let reply = complete(&mut trial, &next, 12).await;
    assert_eq!(ids_of(&reply), expected(&next).await);
    trial.finish().await;
}

#[tokio::test]
async fn a_prefill_engine_that_fails_while_it_reads_is_replaced() {
    let mut trial = Trial::start(reading(2, 1, "")).await;
    let next = history(&mut trial, 1).await;
    // Another pin with the same beginning, which a further attempt on p1 would find. Its own prefill, on
    // p0 again, holds that beginning.
    complete(&mut trial, &prompt_ids(20, 8), 1).await;
    let fork = [&next[..96], &prompt_ids(90, 7)].concat();
    complete(&mut trial, &fork, 90).await;
    for prefill in ["p0", "p1"] {
        trial.fault(prefill, FaultKind::Status { status: 500 }, Some(1));
    }
    let reply = complete(&mut trial, &next, 12).await;
    assert_eq!(ids_of(&reply), expected(&next).await);
    let read = (reads(&trial, "failed").await, reads(&trial, "read").await);
    assert_eq!(read, (1.0, 0.0), "no further attempt reads");
    assert_eq!(ends(&trial, "left").await, 1.0, "the engine may be reading");
    trial.finish().await;
}

/// An engine without the flag would never answer; the simulated one refuses.
fn half(name: &str, config: &mut SimConfig) {
    config.bidirectional_ttl_ms = (name == "d0").then_some(480_000);
}

#[tokio::test]
async fn a_prefill_engine_without_the_flag_is_asked_once_and_then_left_alone() {
    let mut trial = Trial::start(Spec { engine: half, ..reading(1, 1, "") }).await;
    for salt in 0..3 {
        let next = history(&mut trial, salt).await;
        let reply = complete(&mut trial, &next, 12).await;
        assert_eq!(ids_of(&reply), expected(&next).await);
    }
    assert_eq!(reads(&trial, "failed").await, 1.0);
    trial.finish().await;
}

/// Blocks that the router takes to be pinned on `d0`.
fn pinned(trial: &Trial) -> u64 {
    let serving = trial.cluster.running.core.serving();
    let pool = &serving.models[0].pool;
    let roster = pool.roster();
    let keeper = roster.iter().find(|worker| worker.id() == "d0").unwrap();
    pool.read_back.pinned_blocks(keeper.index)
}

#[tokio::test]
async fn a_request_that_an_engine_refuses_for_what_it_asks_pauses_no_reads() {
    let mut trial = Trial::start(reading(1, 1, "")).await;
    let next = history(&mut trial, 1).await;
    assert_eq!(pinned(&trial), 12);
    trial.fault("p0", FaultKind::Status { status: 400 }, Some(1));
    let reply = trial.post("engine_rejected", COMPLETIONS, &of_ids(&next, 12)).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    assert_eq!(trial.retries("prefill").await, 0.0);
    assert_eq!(reads(&trial, "refused").await, 1.0);
    // They are read no more, and stay pinned.
    assert_eq!((pinned(&trial), ends(&trial, "left").await), (12, 1.0));
    let next = history(&mut trial, 2).await;
    complete(&mut trial, &next, 12).await;
    assert_eq!((reads(&trial, "read").await, reads(&trial, "failed").await), (1.0, 0.0));
    trial.finish().await;
}

/// Pins end soon after their conversations.
fn soon(_name: &str, config: &mut SimConfig) {
    config.bidirectional_ttl_ms = Some(2_000);
}

#[tokio::test]
async fn a_client_that_leaves_during_a_read_leaves_nothing_held() {
    let mut trial = Trial::start(Spec { engine: soon, ..reading(1, 1, "") }).await;
    let next = history(&mut trial, 1).await;
    trial.fault("p0", FaultKind::SlowFirstByte { delay_ms: 3_600_000 }, Some(1));
    trial.expect("cancelled");
    let body = of_ids(&next, 12);
    let leaving = trial.cluster.http.post(COMPLETIONS, &body);
    let asked = trial.counts(["p0"])[0];
    let begun = eventually("the leg is there", async || trial.counts(["p0"])[0] > asked);
    tokio::select! {
        reply = leaving => panic!("{reply:?}"),
        () = begun => {}
    }
    nothing_is_pinned(&trial).await;
    assert_eq!((ends(&trial, "left").await, reads(&trial, "cancelled").await), (1.0, 1.0));
    assert_eq!(pinned(&trial), 12, "until the end by the router's own clock");
    trial.finish().await;
}

#[tokio::test]
async fn a_worker_is_not_free_of_work_while_it_is_read() {
    let mut trial = Trial::start(Spec { engine: soon, ..reading(1, 1, "") }).await;
    let next = history(&mut trial, 1).await;
    trial.fault("p0", FaultKind::SlowFirstByte { delay_ms: 3_600_000 }, Some(1));
    trial.expect("cancelled");
    let body = of_ids(&next, 12);
    let reading = trial.cluster.http.post(COMPLETIONS, &body);
    let labels = [("worker", "d0")];
    let booked = async || trial.cluster.metric("splitrail_worker_requests", &labels).await;
    assert_eq!(booked().await, 0.0);
    tokio::select! {
        reply = reading => panic!("{reply:?}"),
        () = eventually("its holder is booked", async || booked().await == 1.0) => {}
    }
    eventually("it is free", async || booked().await == 0.0).await;
    trial.finish().await;
}

/// vLLM may preempt a leg that reads when its cache is full, and then never continues it. The simulated
/// engine refuses it.
#[tokio::test]
async fn nothing_is_read_into_a_cache_that_is_nearly_full() {
    let engine = |name: &str, config: &mut SimConfig| {
        config.bidirectional_ttl_ms = Some(480_000);
        if name == "p0" {
            config.kv_blocks = 401;
        }
    };
    let mut trial = Trial::start(Spec { engine, ..reading(1, 1, "") }).await;
    let next = history(&mut trial, 1).await;
    // A hand-off that nobody takes holds 382 of 400 blocks.
    let mut large = of_ids(&prompt_ids(382 * 16, 2), 1);
    large["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let prefill = trial.cluster.engine("p0").url();
    let prefill = Client::new(prefill.strip_prefix("http://").unwrap().parse().unwrap());
    assert_eq!(prefill.post(COMPLETIONS, &large).await.status, 200);
    let headers = [("content-type", "application/json")];
    let body = of_ids(&next, 12);
    eventually("the router knows", async || {
        let told = trial.cluster.admin.post_with("/admin/explain", &headers, body.to_string());
        told.await.json()["explanation"]["prompts"][0]["no_read_back"] == "cache_full"
    })
    .await;
    let reply = complete(&mut trial, &next, 12).await;
    assert_eq!(ids_of(&reply), expected(&next).await);
    assert_eq!((reads(&trial, "read").await, reads(&trial, "failed").await), (0.0, 0.0));
    trial.finish().await;
}
