//! Pairs of legs that were given up are repaired whatever happens to the router meanwhile, and what
//! a repair uses is booked and bounded. A simulated decode engine keeps the blocks of a decode leg
//! of a push until its prefill leg has finished, for ever if none does.

use std::future::Future;

use serde_json::Value;
use splitrail_sim::{FaultKind, KvConnector, SimConfig};
use splitrail_tests::Spec;
use splitrail_tests::client::Reply;
use splitrail_tests::cluster::{Cluster, eventually};
use splitrail_tests::raw;
use splitrail_tests::trial::{COMPLETIONS, Trial, completion, prompt};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::{known, pd};

/// One worker of each kind, whose prefill takes some seconds.
fn slow() -> Spec {
    fn engine(name: &str, config: &mut SimConfig) {
        if name.starts_with('p') {
            config.prefill_us_per_token = 10_000;
        }
    }
    Spec { engine, ..pd(KvConnector::NixlPush, 1, 1) }
}

async fn repairs(cluster: &Cluster, outcome: &str) -> f64 {
    cluster.metric("splitrail_unused_hand_offs_total", &[("outcome", outcome)]).await
}

/// Waits until decode has registered its blocks with prefill.
async fn registered(cluster: &Cluster) {
    eventually("a decode leg waits for its KV", async || {
        cluster.engine("p0").state().registered == 1
    })
    .await;
}

/// Lets the client of a request leave as soon as a condition holds.
async fn leave(reply: impl Future<Output = Reply>, when: impl Future<Output = ()>) {
    tokio::select! {
        reply = reply => panic!("answered too early: {reply:?}"),
        () = when => {}
    }
}

/// Lets the client of a request leave as soon as its decode leg waits.
async fn give_up(trial: &mut Trial, body: &Value) {
    trial.expect("cancelled");
    leave(trial.cluster.http.post(COMPLETIONS, body), registered(&trial.cluster)).await;
}

/// Has the router take a worker for down until it is probed again.
fn out_of_reach(cluster: &Cluster, worker: &str) {
    let serving = cluster.running.core.serving();
    let roster = serving.models[0].pool.roster();
    let worker = roster.iter().find(|other| other.id() == worker).unwrap();
    worker.set_up(false, "a connection to it failed");
}

#[tokio::test]
async fn a_router_that_stops_lets_its_repairs_end() {
    let body = completion(&prompt(60, "stops"));
    for is_cut in [false, true] {
        let limits = match is_cut {
            true => "{ drain_delay: 10ms, drain_grace: 50ms }",
            false => "{ drain_delay: 10ms, drain_grace: 5s }",
        };
        let mut trial = Trial::start(Spec { limits, ..slow() }).await;
        let mut client = None;
        if is_cut {
            let address = trial.cluster.running.addresses.http;
            let mut socket = TcpStream::connect(address).await.unwrap();
            let body = body.to_string();
            let request = raw::request("POST", COMPLETIONS, &[], body.as_bytes());
            socket.write_all(&request).await.unwrap();
            client = Some(socket);
            registered(&trial.cluster).await;
        } else {
            give_up(&mut trial, &body).await;
        }
        let Cluster { running, engines, .. } = trial.cluster;
        let cut = running.drain().await;
        assert_eq!(cut, usize::from(is_cut));
        let engine = |named: &str| &engines.iter().find(|(name, _)| name == named).unwrap().1;
        let (prefill, decode) = (engine("p0"), engine("d0"));
        assert_eq!(prefill.state().running, 0, "the prefill leg has ended, is cut: {is_cut}");
        eventually("decode is freed", async || decode.state().orphans == 0).await;
        drop(client);
    }
}

#[tokio::test]
async fn a_repair_goes_on_while_the_router_considers_its_worker_down() {
    let model = "breaker: { failures: 0 }".into();
    let mut trial = Trial::start(Spec { model, ..slow() }).await;
    // A connection to each worker fails while its engine computes.
    give_up(&mut trial, &completion(&prompt(60, "flip"))).await;
    for worker in ["p0", "d0"] {
        out_of_reach(&trial.cluster, worker);
    }
    eventually("it is freed", async || repairs(&trial.cluster, "finished").await == 1.0).await;
    for worker in ["p0", "d0"] {
        known(&trial.cluster, worker, 1.0).await;
    }
    // The same while a prefill leg that has failed is sent again and again. Who the engines are is
    // known, so that the fault strikes a leg.
    let known_again = completion(&prompt(5, "known"));
    assert_eq!(trial.post("ok", COMPLETIONS, &known_again).await.status, 200);
    trial.fault("p0", FaultKind::Reset, Some(4));
    let reply = trial.post("ok", COMPLETIONS, &completion(&prompt(5, "again"))).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    out_of_reach(&trial.cluster, "p0");
    eventually("the next is freed", async || repairs(&trial.cluster, "finished").await == 2.0)
        .await;
    known(&trial.cluster, "p0", 1.0).await;
    // A reload replaces the pool, and the request keeps its workers.
    let limits = "drain_grace: 5s, index_blocks_per_worker_max: 100000";
    let yaml = trial.cluster.yaml.replace("drain_grace: 5s", limits);
    let body = completion(&prompt(60, "reload"));
    trial.expect("cancelled");
    leave(trial.cluster.http.post(COMPLETIONS, &body), async {
        registered(&trial.cluster).await;
        assert_eq!(trial.cluster.reload(&yaml).await.status, 200);
    })
    .await;
    eventually("the last is freed", async || repairs(&trial.cluster, "finished").await == 3.0)
        .await;
    assert_eq!(trial.cluster.engine("d0").state().orphans, 0);
    assert_eq!(repairs(&trial.cluster, "stranded").await, 0.0);
    trial.finish().await;
}

#[tokio::test]
async fn hundreds_of_clients_that_leave_together_strand_nothing() {
    const CLIENTS: usize = 300;
    fn engine(name: &str, config: &mut SimConfig) {
        if name.starts_with('p') {
            config.prefill_us_per_token = 1_000;
            config.max_num_seqs = 1;
        }
    }
    let mut trial = Trial::start(Spec { engine, ..slow() }).await;
    // The first prompt keeps the others waiting.
    let bodies: Vec<Value> = std::iter::once(completion(&prompt(900, "first")))
        .chain((0..CLIENTS).map(|client| completion(&prompt(2, &format!("c{client}z")))))
        .collect();
    (0..=CLIENTS).for_each(|_| trial.expect("cancelled"));
    let cluster = &trial.cluster;
    let replies = futures_util::future::join_all(
        bodies.iter().map(|body| cluster.http.post(COMPLETIONS, body)),
    );
    let all_wait = eventually("all legs are sent", async || {
        ["p0", "d0"].iter().all(|engine| {
            let state = cluster.engine(engine).state();
            state.running + state.waiting > CLIENTS
        })
    });
    tokio::select! {
        _ = replies => panic!("answered too early"),
        () = all_wait => {}
    }
    eventually("all are freed", async || {
        repairs(cluster, "finished").await + repairs(cluster, "stranded").await
            == (CLIENTS + 1) as f64
    })
    .await;
    assert_eq!(repairs(cluster, "stranded").await, 0.0);
    assert_eq!(cluster.engine("d0").state().orphans, 0);
    trial.finish().await;
}

#[tokio::test]
async fn the_work_of_a_repair_is_booked_and_charged() {
    const NOTE_BYTES: usize = 4 << 20;
    let mut trial = Trial::start(slow()).await;
    let mut body = completion(&prompt(60, "uses"));
    body["note"] = "n".repeat(NOTE_BYTES).into();
    give_up(&mut trial, &body).await;
    let cluster = &trial.cluster;
    eventually("the request has ended", async || cluster.running.core.live.is_empty()).await;
    let workers = cluster.admin.get("/admin/workers").await.json();
    let memory = cluster.metric("splitrail_request_memory_bytes", &[]).await;
    assert_eq!(repairs(cluster, "finished").await, 0.0, "the repair has not ended yet");
    for (id, computes) in [("p0", true), ("d0", false)] {
        let workers = workers["workers"].as_array().unwrap();
        let worker = workers.iter().find(|worker| worker["id"] == id).unwrap();
        assert_eq!(worker["requests"], 1, "{id}");
        assert!(worker["active_tokens"].as_u64() > Some(60), "{id}: {worker}");
        assert_eq!(worker["prefill_tokens"].as_u64() > Some(60), computes, "{id}: {worker}");
    }
    assert!(memory >= NOTE_BYTES as f64, "{memory}");
    eventually("it is freed", async || repairs(cluster, "finished").await == 1.0).await;
    eventually("its memory is returned", async || {
        cluster.metric("splitrail_request_memory_bytes", &[]).await < NOTE_BYTES as f64
    })
    .await;
    trial.finish().await;
}

#[tokio::test]
async fn a_whole_reply_that_is_given_up_while_it_is_generated_needs_no_further_prefill() {
    let spec = Spec {
        model: "lease: 1s\nhealth: { probe_interval: 20ms }".into(),
        engine: |name, config| match name {
            // The block of the question who it is is kept for longer than the pair's lease.
            "p0" => config.lease_ms = 2_500,
            _ => config.decode_us_per_step = 300_000,
        },
        ..pd(KvConnector::NixlPush, 1, 1)
    };
    let mut trial = Trial::start(spec).await;
    let mut body = completion(&prompt(30, "generates"));
    body["max_tokens"] = 100.into();
    trial.expect("cancelled");
    let cluster = &trial.cluster;
    leave(cluster.http.post(COMPLETIONS, &body), async {
        eventually("decode has the KV", async || {
            cluster.engine("d0").state().totals.external_kv_transfer_tokens > 0
        })
        .await;
        eventually("the lease has ended", async || cluster.engine("p0").state().blocks_used == 0)
            .await;
    })
    .await;
    cluster.quiet().await;
    assert_eq!(trial.asked("p0").len(), 1);
    assert_eq!(repairs(cluster, "finished").await, 0.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_decode_engine_that_does_not_say_who_it_is_is_left_alone_after_some_failures() {
    let spec = Spec {
        policy: "{ kind: round_robin }",
        model: "breaker: { failures: 3, cooldown: 1h }\nretries: { budget_percent: 100 }".into(),
        engine: |name, config| {
            if name == "d0" {
                config.connector = KvConnector::Nixl;
            }
        },
        worker: |name| if name == "d0" { ", supports_cache_hit_threshold: false" } else { "" },
        ..pd(KvConnector::NixlPush, 1, 2)
    };
    let mut trial = Trial::start(spec).await;
    for turn in 0..20 {
        let body = completion(&prompt(30, &format!("mute{turn}z")));
        let reply = trial.post("ok", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(trial.retries("decode").await, 3.0);
    assert!(trial.asked("d0").is_empty());
    trial.finish().await;
}

#[tokio::test]
async fn a_repair_without_room_counts_its_leg_as_stranded() {
    let spec = pd(KvConnector::NixlPush, 1, 1);
    let mut trial =
        Trial::start(Spec { limits: "{ in_flight_max: 1 }", model: "lease: 20s".into(), ..spec })
            .await;
    // Who they are is known, so that the faults strike legs.
    let known_before = completion(&prompt(5, "known"));
    assert_eq!(trial.post("ok", COMPLETIONS, &known_before).await.status, 200);
    let asked = trial.asked("d0").len();
    trial.fault("p0", FaultKind::Hang, Some(1));
    trial.expect("cancelled");
    leave(trial.cluster.http.post(COMPLETIONS, &completion(&prompt(30, "first"))), async {
        eventually("decode has its leg", async || trial.asked("d0").len() > asked).await;
    })
    .await;
    let cluster = &trial.cluster;
    eventually("the request has ended", async || cluster.running.core.live.is_empty()).await;
    // Its repair waits for the prefill leg, and takes the only place. Of the second pair, prefill has
    // replied, and decode has not registered.
    let before = cluster.engine("p0").state().totals.hand_offs_staged;
    trial.fault("d0", FaultKind::SlowFirstByte { delay_ms: 3_600_000 }, Some(1));
    trial.expect("cancelled");
    let cluster = &trial.cluster;
    leave(cluster.http.post(COMPLETIONS, &completion(&prompt(30, "second"))), async {
        eventually("prefill has replied", async || {
            let booked = cluster.metric("splitrail_worker_requests", &[("worker", "p0")]).await;
            cluster.engine("p0").state().totals.hand_offs_staged > before && booked == 1.0
        })
        .await;
    })
    .await;
    eventually("it is counted", async || repairs(cluster, "stranded").await == 1.0).await;
}
