//! Workers that fail or leave between the steps, late ones, and clients that leave.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use serde_json::Value;
use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::client::whole_text;
use splitrail_tests::cluster::eventually;
use splitrail_tests::raw_engine::{RawEngine, Turn, reply};
use splitrail_tests::trial::{COMPLETIONS, Reference};
use splitrail_tests::{Spec, Trial};

use super::{
    EAGER, Pair, Sent, cached, drain, ended, held, recorded, served, spec, steps, turns, undrain,
};

/// The engines' lease: longer than a transfer, and soon over.
const LEASE_MS: u64 = 2_800;

/// A cluster whose transfers take half a second.
fn slow(prefill: usize) -> Spec {
    let engine = |_: &str, config: &mut SimConfig| {
        config.transfer_us_per_block = 20_000;
        config.lease_ms = LEASE_MS;
    };
    Spec { engine, ..spec(prefill, 2) }
}

/// Sends a request, and does something as soon as the second step has begun.
async fn meanwhile(trial: &mut Trial, pair: &Pair, body: &Value, disturb: impl FnOnce(&Trial)) {
    trial.expect("ok");
    let request = Sent::new(trial, body);
    eventually("the hand-off is being taken", async || steps(trial, pair.other).len() == 1).await;
    disturb(trial);
    let reply = request.reply().await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let reference = Reference::start().await;
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, body).await);
    assert_eq!(ended(trial, "failed").await, 1.0);
}

#[tokio::test]
async fn a_source_that_fails_is_left_alone_and_the_prompt_is_computed() {
    for fault in [FaultKind::Status { status: 500 }, FaultKind::Reset, FaultKind::TruncatedBody] {
        let mut trial = Trial::start(Spec { engine: slow(2).engine, ..spec(2, 2) }).await;
        let [first, second] = turns("fails");
        let pair = held(&mut trial, &first).await;
        trial.fault(&pair.holder, fault.clone(), Some(1));
        let reply = served(&mut trial, &second).await;
        assert_eq!(recorded(&trial, &reply).await["outcome"], "failed", "{fault:?}");
        assert_eq!(reply.route("prefill"), Some(pair.other), "{fault:?}");
        assert_eq!(trial.retries("prefill").await, 0.0, "no attempt of the request has failed");
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_source_is_not_free_of_work_until_its_prefix_is_taken() {
    let mut trial = Trial::start(slow(2)).await;
    let [first, second] = turns("books");
    let pair = held(&mut trial, &first).await;
    // The second step ends with the time for the fetch.
    trial.fault(pair.other, FaultKind::SlowFirstByte { delay_ms: 3_600_000 }, Some(1));
    trial.expect("ok");
    let request = Sent::new(&trial, &second);
    eventually("the hand-off is being taken", async || steps(&trial, pair.other).len() == 1).await;
    let labels = [("worker", pair.holder.as_str())];
    assert_eq!(trial.cluster.metric("splitrail_worker_requests", &labels).await, 1.0);
    assert_eq!(request.reply().await.status, 200);
    assert_eq!(ended(&trial, "timed_out").await, 1.0);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_source_that_dies_between_the_steps_costs_the_fetch_alone() {
    let mut trial = Trial::start(slow(2)).await;
    let [first, second] = turns("dies");
    let pair = held(&mut trial, &first).await;
    let holder = pair.holder.clone();
    meanwhile(&mut trial, &pair, &second, |trial| trial.cluster.engine(&holder).die()).await;
    trial.finish().await;
}

#[tokio::test]
async fn a_worker_that_dies_while_it_fetches_is_replaced() {
    let mut trial = Trial::start(slow(3)).await;
    drain(&trial, "p2").await;
    let [first, second] = turns("taker");
    let pair = held(&mut trial, &first).await;
    undrain(&trial, "p2").await;
    drain(&trial, "p1").await;
    undrain(&trial, "p1").await;
    drain(&trial, "p2").await;
    trial.expect("ok");
    let request = Sent::new(&trial, &second);
    eventually("the hand-off is being taken", async || steps(&trial, "p1").len() == 1).await;
    undrain(&trial, "p2").await;
    trial.cluster.engine("p1").die();
    let reply = request.reply().await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.route("prefill"), Some("p2"), "{:?}", pair.other);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_hand_off_that_the_source_does_not_give_out_costs_the_fetch_alone() {
    let mut trial = Trial::start(slow(2)).await;
    let [first, second] = turns("refuses");
    let pair = held(&mut trial, &first).await;
    trial.fault(&pair.holder, FaultKind::RefusePulls, Some(1));
    let reply = served(&mut trial, &second).await;
    assert_eq!(recorded(&trial, &reply).await["outcome"], "failed");
    assert_eq!(cached(&reply), 0);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

/// A prefill engine that computes nothing, and closes a kept connection when it gets a hand-off.
async fn closing() -> RawEngine {
    RawEngine::start(|asked| {
        let body: Value = serde_json::from_slice(&asked.heard.body).unwrap();
        match takes(&body) && asked.before > 0 {
            true => Turn::last(""),
            false if asked.heard.method == "GET" => {
                Turn::answer(reply(200, "application/json", "{}"))
            }
            false => Turn::answer(reply(500, "application/json", "{}")),
        }
    })
    .await
}

fn takes(body: &Value) -> bool {
    body["kv_transfer_params"]["do_remote_prefill"] == true
}

/// Other requests are sent again if a kept connection ends before their reply.
#[tokio::test]
async fn a_hand_off_that_may_have_arrived_is_not_sent_again() {
    let prefill = closing().await;
    let worker =
        format!("{{ id: p0, role: prefill, url: \"{}\", kv_events: none }}", prefill.url());
    let model = format!("{EAGER}\nbreaker: {{ failures: 0 }}");
    let spec = Spec { extra_workers: vec![worker], model, ..spec(0, 1) };
    let mut trial = Trial::start(spec).await;
    let [first, second] = turns("once");
    served(&mut trial, &first).await;
    trial.cluster.settle().await;
    let reply = served(&mut trial, &second).await;
    assert_eq!(recorded(&trial, &reply).await["outcome"], "failed");
    let heard = prefill.heard().into_iter();
    let bodies = heard.map(|heard| serde_json::from_slice::<Value>(&heard.body).unwrap());
    assert_eq!(bodies.filter(takes).count(), 1);
    trial.finish().await;
}

#[tokio::test]
async fn a_late_fetch_is_given_up_and_nothing_stays_held() {
    let engine = |_: &str, config: &mut SimConfig| {
        config.lease_ms = LEASE_MS;
    };
    let limit = "timeouts: { peer_fetch: 300ms }";
    let lease = "lease: 600ms\ntimeouts: { peer_fetch: 60s }";
    for (slow_step, keys) in [("holder", limit), ("other", limit), ("other", lease)] {
        let model = format!("{EAGER}\n{keys}");
        let mut trial = Trial::start(Spec { model, engine, ..spec(2, 2) }).await;
        let [first, second] = turns("late");
        let pair = held(&mut trial, &first).await;
        let worker = if slow_step == "holder" { &pair.holder } else { pair.other };
        trial.fault(worker, FaultKind::SlowFirstByte { delay_ms: 3000 }, Some(1));
        let reply = served(&mut trial, &second).await;
        assert_eq!(recorded(&trial, &reply).await["outcome"], "timed_out", "{slow_step}");
        assert_eq!(reply.route("prefill"), Some(pair.other), "{slow_step}");
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_fetch_that_waits_for_a_core_is_given_up_in_time() {
    let model = format!("{EAGER}\ntimeouts: {{ peer_fetch: 300ms }}");
    let mut trial = Trial::start(Spec { model, ..spec(2, 1) }).await;
    let [first, second] = turns("cores");
    let pair = held(&mut trial, &first).await;
    // Other requests keep all cores that compute tokens.
    let preparer = &trial.cluster.running.core.preparer;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let begun = Arc::new(AtomicUsize::new(0));
    let (mut busy, mut working) = (Vec::new(), tokio::task::JoinSet::new());
    for _ in 0..cores {
        let (until, ended) = std::sync::mpsc::sync_channel::<()>(1);
        let (preparer, begun) = (Arc::clone(preparer), Arc::clone(&begun));
        busy.push(until);
        working.spawn(async move {
            let work = move || {
                begun.fetch_add(1, Relaxed);
                // It fails when the sender is dropped.
                let _ended = ended.recv();
            };
            preparer.cores.run_off_reactor(0, work).await.unwrap();
        });
    }
    eventually("all cores work", async || begun.load(Relaxed) == cores).await;
    let reply = served(&mut trial, &second).await;
    assert_eq!(recorded(&trial, &reply).await["outcome"], "timed_out");
    assert_eq!((steps(&trial, &pair.holder).len(), cached(&reply)), (0, 0));
    drop(busy);
    trial.finish().await;
}

#[tokio::test]
async fn a_client_that_leaves_does_not_fail_the_fetch_of_those_who_wait_for_it() {
    let model = format!("{EAGER}\nqueue: none\ntimeouts: {{ peer_fetch: 60s }}");
    let mut trial = Trial::start(Spec { model, engine: slow(2).engine, ..spec(2, 1) }).await;
    let [first, second] = turns("joint");
    let pair = held(&mut trial, &first).await;
    trial.fault(pair.other, FaultKind::SlowFirstByte { delay_ms: 3_600_000 }, Some(1));
    trial.expect("cancelled");
    let leaving = Sent::new(&trial, &second);
    eventually("the hand-off is sent", async || steps(&trial, pair.other).len() == 1).await;
    let waiting = [0, 1].map(|at| {
        let mut body = second.clone();
        body["prompt"] = format!("{} {at}", body["prompt"].as_str().unwrap()).into();
        trial.expect("ok");
        Sent::new(&trial, &body)
    });
    let serving = trial.cluster.running.core.serving();
    let roster = serving.models[0].pool.roster();
    let fetcher = roster.iter().find(|worker| worker.id() == pair.other).unwrap();
    eventually("the others wait for the prefix", async || fetcher.load.booked.requests() == 3)
        .await;
    drop(leaving);
    let mut outcomes = Vec::new();
    for waiting in waiting {
        let reply = waiting.reply().await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert!(cached(&reply) > 0);
        outcomes.push(recorded(&trial, &reply).await["outcome"].clone());
    }
    outcomes.sort_by_key(Value::to_string);
    assert_eq!(outcomes, ["fetched", "shared"]);
    assert_eq!((ended(&trial, "cancelled").await, ended(&trial, "failed").await), (1.0, 0.0));
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_hand_off_that_could_not_be_sent_is_released() {
    let model = format!("{EAGER}\ntimeouts: {{ peer_fetch: 60s }}");
    let mut trial = Trial::start(Spec { model, engine: slow(2).engine, ..spec(3, 2) }).await;
    drain(&trial, "p2").await;
    let [first, second] = turns("unsent");
    let pair = held(&mut trial, &first).await;
    trial.fault(&pair.holder, FaultKind::SlowFirstByte { delay_ms: 3000 }, Some(1));
    trial.expect("ok");
    let request = Sent::new(&trial, &second);
    eventually("the source is asked", async || steps(&trial, &pair.holder).len() == 1).await;
    undrain(&trial, "p2").await;
    let place = trial.cluster.engines.iter().position(|(name, _)| name == pair.other).unwrap();
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
async fn a_client_that_leaves_during_a_fetch_leaves_nothing_behind() {
    for step in ["holder", "other"] {
        let mut trial = Trial::start(slow(2)).await;
        let [first, second] = turns("leaves");
        let pair = held(&mut trial, &first).await;
        if step == "holder" {
            trial.fault(&pair.holder, FaultKind::SlowFirstByte { delay_ms: 3000 }, Some(1));
        }
        let worker = if step == "holder" { pair.holder.clone() } else { pair.other.to_owned() };
        trial.expect("cancelled");
        let http = trial.cluster.http.clone();
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(async move { http.post(COMPLETIONS, &second).await });
        eventually("the step is sent", async || steps(&trial, &worker).len() == 1).await;
        tasks.shutdown().await;
        eventually("it is counted", async || ended(&trial, "cancelled").await == 1.0).await;
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}
