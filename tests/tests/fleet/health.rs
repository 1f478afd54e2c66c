//! Health of workers: a worker that fails more than the others is ejected, a new worker starts
//! slowly, a draining worker gets no new work. Workers join and leave while requests run.

use serde_json::{Value, json};
use splitrail_config::model::WorkerConfig;
use splitrail_fleet::WorkerSource;
use splitrail_sim::{FaultKind, KvConnector, Role, SimConfig, SimEngine};
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, Trial, completion, prompt};

/// Aggregated workers in turn; breakers never open, so that only what is tested acts.
fn in_turn(workers: usize, health: &str) -> Spec {
    Spec {
        policy: "{ kind: round_robin }",
        // Until a worker is ejected, a third of all requests are sent again.
        model: format!(
            "breaker: {{ failures: 0 }}\nretries: {{ budget_percent: 100 }}\nhealth: {health}"
        ),
        ..Spec::aggregated(workers)
    }
}

async fn send(trial: &mut Trial, count: usize, salt: &str) {
    for i in 0..count {
        let body = completion(&prompt(20, &format!("{salt}{i}-")));
        assert_eq!(trial.post("ok", COMPLETIONS, &body).await.status, 200);
    }
}

async fn worker(trial: &Trial, id: &str) -> Value {
    let workers = trial.cluster.admin.get("/admin/workers").await.json();
    let mut workers = workers["workers"].as_array().unwrap().clone();
    workers.retain(|worker| worker["id"] == id);
    workers.pop().unwrap_or_default()
}

async fn state(trial: &Trial, id: &str) -> String {
    worker(trial, id).await["state"].as_str().unwrap_or("absent").to_owned()
}

/// A further engine that joins the running fleet.
async fn join(trial: &Trial, id: &str) -> SimEngine {
    join_as(trial, id, SimConfig { role: Role::Both, ..SimConfig::default() }).await
}

async fn join_as(trial: &Trial, id: &str, config: SimConfig) -> SimEngine {
    let role = if config.role == Role::Both { "both" } else { "decode" };
    let engine = SimEngine::start(config).await.unwrap();
    let worker = json!({"id": id, "role": role, "url": engine.url()});
    let worker: WorkerConfig = serde_json::from_value(worker).unwrap();
    trial.cluster.running.fleet.claim("sim", WorkerSource::Admin, worker).unwrap();
    engine
}

/// Inference requests that an engine got.
fn asked(engine: &SimEngine) -> usize {
    engine.requests().iter().filter(|request| request.path == COMPLETIONS).count()
}

#[tokio::test]
async fn an_sglang_engine_says_its_load_its_pages_and_where_it_publishes() {
    let connector = KvConnector::Sglang;
    for (spec, role) in [(Spec::default(), Role::Decode), (Spec::aggregated(1), Role::Both)] {
        let trial = Trial::start(Spec { connector, ..spec }).await;
        let config = SimConfig { role, connector, ..SimConfig::default() };
        let engine = join_as(&trial, "further", config).await;
        let publisher = engine.kv_events_endpoint().unwrap();
        eventually("the router knows what the engine says", async || {
            let worker = worker(&trial, "further").await;
            let load = (&worker["engine_running"], &worker["engine_kv_used_ratio"]);
            load == (&json!(0), &json!(0.0))
                && worker["kv_block_size"] == 16
                && worker["kv_events"] == publisher
                && worker["events_current"] == true
        })
        .await;
    }
}

#[tokio::test]
async fn a_worker_whose_engine_publishes_nothing_has_no_part_in_kv_routing() {
    let connector = KvConnector::Sglang;
    let trial = Trial::start(Spec { connector, ..Spec::default() }).await;
    let config = SimConfig { role: Role::Decode, connector, ..SimConfig::default() };
    let silent = SimConfig { kv_events_port: None, ..config.clone() };
    let _quiet = join_as(&trial, "quiet", silent).await;
    let _heard = join_as(&trial, "heard", config).await;
    eventually("the router knows which of them publishes", async || {
        let (quiet, heard) = (worker(&trial, "quiet").await, worker(&trial, "heard").await);
        quiet["index_synced"] == true
            && (&quiet["kv_events"], &quiet["kv_routing"]) == (&Value::Null, &false.into())
            && heard["kv_routing"] == true
    })
    .await;
}

#[tokio::test]
async fn workers_are_asked_in_the_ways_of_the_engine_that_a_reload_names() {
    let connector = KvConnector::Sglang;
    let model = "engine: vllm".into();
    let trial = Trial::start(Spec { connector, model, ..Spec::aggregated(1) }).await;
    assert!(worker(&trial, "w0").await["kv_block_size"].is_null(), "no metrics of vLLM's");
    let corrected = trial.cluster.yaml.replace("engine: vllm", "engine: sglang");
    assert_eq!(trial.cluster.reload(&corrected).await.status, 200);
    eventually("the router knows the engine's pages", async || {
        worker(&trial, "w0").await["kv_block_size"] == 16
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_fails_more_than_the_others_is_ejected_and_readmitted() {
    let health = "{ ejection: { interval: 1s, requests_min: 3, base_time: 100ms, ejected_percent_max: 50 } }";
    let mut trial = Trial::start(in_turn(3, health)).await;
    trial.fault("w1", FaultKind::Status { status: 500 }, None);
    eventually("the failing one is ejected", async || {
        send(&mut trial, 6, "eject").await;
        let labels = [("worker", "w1"), ("to", "ejected")];
        trial.cluster.metric("splitrail_worker_transitions_total", &labels).await > 0.0
    })
    .await;
    for other in ["w0", "w2"] {
        assert_eq!(state(&trial, other).await, "serving");
    }
    trial.cluster.engine("w1").clear_faults();
    eventually("its time is over", async || state(&trial, "w1").await == "serving").await;
    let before = trial.counts(["w1"])[0];
    send(&mut trial, 6, "again").await;
    assert!(trial.counts(["w1"])[0] > before, "it takes its turns again");
    trial.finish().await;
}

#[tokio::test]
async fn workers_that_join_later_start_slowly_and_initial_ones_do_not() {
    let mut trial = Trial::start(in_turn(1, "{ slow_start: 10m }")).await;
    let newcomer = join(&trial, "late").await;
    eventually("it was heard of", async || state(&trial, "late").await == "warming").await;
    send(&mut trial, 60, "slow").await;
    let taken = asked(&newcomer);
    assert!(taken < 60 / 2, "{taken} of 60 went to the one that is to start slowly");
    trial.finish().await;
}

#[tokio::test]
async fn a_draining_worker_ends_what_it_has_and_gets_nothing_new() {
    let mut trial = Trial::start(in_turn(2, "{}")).await;
    let slow =
        json!({"model": "sim", "max_tokens": 200, "temperature": 0, "prompt": prompt(20, "s")});
    let mut streams = Vec::new();
    for _ in 0..2 {
        streams.push(trial.stream("ok", COMPLETIONS, &slow).await);
    }
    let before = trial.counts(["w0", "w1"]);
    assert!(trial.cluster.running.fleet.drain("sim", "w0", true).is_some());
    assert_eq!(state(&trial, "w0").await, "draining");
    send(&mut trial, 4, "drained").await;
    let after = trial.counts(["w0", "w1"]);
    assert_eq!((after[0], after[1]), (before[0], before[1] + 4));
    for mut stream in streams {
        assert_eq!(stream.rest().await.last().map(String::as_str), Some("[DONE]"));
    }
    trial.cluster.running.fleet.drain("sim", "w0", false);
    send(&mut trial, 4, "back").await;
    assert!(trial.counts(["w0"])[0] > after[0]);
    assert!(trial.cluster.running.fleet.drain("sim", "nobody", true).is_none());
    trial.finish().await;
}

#[tokio::test]
async fn a_worker_that_leaves_takes_its_series_with_it_and_ends_what_it_has() {
    let mut trial = Trial::start(in_turn(1, "{}")).await;
    let engine = join(&trial, "guest").await;
    eventually("it serves", async || state(&trial, "guest").await == "serving").await;
    let slow =
        json!({"model": "sim", "max_tokens": 200, "temperature": 0, "prompt": prompt(20, "l")});
    let mut streams = Vec::new();
    for _ in 0..2 {
        streams.push(trial.stream("ok", COMPLETIONS, &slow).await);
    }
    assert_eq!(asked(&engine), 1);
    trial.cluster.running.fleet.revoke("sim", WorkerSource::Admin, "guest");
    assert_eq!(state(&trial, "guest").await, "absent");
    send(&mut trial, 2, "after").await;
    for mut stream in streams {
        assert_eq!(stream.rest().await.last().map(String::as_str), Some("[DONE]"));
    }
    assert_eq!(asked(&engine), 1);
    let text = trial.cluster.admin.get("/metrics").await.text();
    assert!(!text.contains("worker=\"guest\""), "{text}");
    trial.finish().await;
}
