//! A worker is judged by what its engine says and does: each fault is found with its cause, and no
//! request that another worker could serve waits for it or fails by it.

use splitrail_sim::{Fault, FaultKind};
use splitrail_tests::Spec;
use splitrail_tests::cluster::{Cluster, eventually};
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::solo::whole_reply;
use splitrail_tests::trial::{CHAT, Trial, chat, prompt, streamed};

/// Two workers in turn, which are probed often.
fn two_in_turn(model: &str) -> Spec {
    let model = format!("health: {{ probe_interval: 50ms }}\n{model}");
    Spec { policy: "{ kind: round_robin }", model, ..Spec::aggregated(2) }
}

/// The state of a worker, why it is in it, and the legs whose circuit breakers are open.
async fn worker(cluster: &Cluster, id: &str) -> (String, String, usize) {
    let workers = cluster.admin.get("/admin/workers").await.json();
    let workers = workers["workers"].as_array().unwrap().clone();
    let found = workers.iter().find(|worker| worker["id"] == id).unwrap();
    let text = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
    (text("state"), text("state_why"), found["breakers_open"].as_array().unwrap().len())
}

async fn statuses(cluster: &Cluster, requests: usize, text: &str) -> Vec<u16> {
    let mut statuses = Vec::new();
    for number in 0..requests {
        let body = chat(&prompt(8, &format!("{text}{number}-")));
        statuses.push(cluster.http.post(CHAT, &body).await.status.as_u16());
    }
    statuses
}

fn set(cluster: &Cluster, engine: &str, kind: FaultKind) {
    cluster.engine(engine).set_fault(Fault { kind, times: None });
}

/// Sends a request that waits for the engine, switches a fault of the engine on, and returns how the
/// request ends.
async fn leave(trial: &Trial, waits: FaultKind, then: FaultKind) -> u16 {
    let cluster = &trial.cluster;
    set(cluster, "w0", waits);
    set(cluster, "w1", FaultKind::SlowFirstByte { delay_ms: 1 });
    let mut sent = 0;
    // In turn, one of two requests goes to the engine that will not answer it.
    let (first, second) = (chat(&prompt(8, "leave0-")), chat(&prompt(8, "leave1-")));
    let both =
        async { tokio::join!(cluster.http.post(CHAT, &first), cluster.http.post(CHAT, &second)) };
    let fault = async {
        eventually("the engine has a request", async || {
            sent = trial.counts(["w0"])[0];
            sent > 0
        })
        .await;
        set(cluster, "w0", then);
    };
    let ((first, second), ()) = tokio::join!(both, fault);
    first.status.as_u16().max(second.status.as_u16())
}

#[tokio::test]
async fn an_engine_that_sleeps_is_unready_and_its_legs_move_at_once() {
    let trial = Trial::start(two_in_turn("")).await;
    assert_eq!(leave(&trial, FaultKind::Hang, FaultKind::Asleep).await, 200);
    let cluster = &trial.cluster;
    let (state, why, _) = worker(cluster, "w0").await;
    assert_eq!((state.as_str(), why.contains("wake it up")), ("unready", true), "{why}");
    let before = trial.counts(["w0"]);
    assert_eq!(statuses(cluster, 6, "asleep").await, [200; 6]);
    assert_eq!(trial.counts(["w0"]), before, "nothing is sent to it");
    cluster.engine("w0").clear_faults();
    eventually("it serves again", async || worker(cluster, "w0").await.0 == "serving").await;
}

#[tokio::test]
async fn an_engine_whose_core_is_dead_is_down_and_its_legs_move_at_once() {
    let trial = Trial::start(two_in_turn("")).await;
    assert_eq!(leave(&trial, FaultKind::Hang, FaultKind::DeadCore).await, 200);
    let (state, why, _) = worker(&trial.cluster, "w0").await;
    assert_eq!((state.as_str(), why.contains("/health with status 503")), ("down", true), "{why}");
    assert_eq!(statuses(&trial.cluster, 6, "dead").await, [200; 6]);
}

#[tokio::test]
async fn an_engine_without_metrics_serves() {
    let trial = Trial::start(two_in_turn("")).await;
    set(&trial.cluster, "w0", FaultKind::NoMetrics);
    let no_load = async || {
        let found = trial.cluster.admin.get("/admin/attention").await.json();
        let found = found["needs_attention"].as_array().unwrap().iter();
        let workers = |one: &serde_json::Value| one["workers"].to_string();
        found.filter(|one| one["kind"] == "no_load").map(workers).collect::<Vec<_>>()
    };
    eventually("it is named", async || no_load().await == [r#"["w0"]"#]).await;
    let before = trial.counts(["w0"])[0];
    assert_eq!(statuses(&trial.cluster, 8, "no-metrics").await, [200; 8]);
    assert_eq!(trial.counts(["w0"])[0], before + 4);
    assert_ne!(worker(&trial.cluster, "w0").await.0, "down");
    set(&trial.cluster, "w1", FaultKind::NoMetrics);
    eventually("both are named in one line", async || no_load().await == [r#"["w0","w1"]"#]).await;
}

#[tokio::test]
async fn full_engines_rest_and_their_retry_after_reaches_the_client() {
    let trial = Trial::start(two_in_turn("")).await;
    set(&trial.cluster, "w0", FaultKind::Full { retry_after_s: 7 });
    assert_eq!(statuses(&trial.cluster, 8, "one-full").await, [200; 8]);
    set(&trial.cluster, "w1", FaultKind::Full { retry_after_s: 7 });
    for number in 0..8 {
        let body = chat(&prompt(8, &format!("both-full{number}-")));
        let reply = trial.cluster.http.post(CHAT, &body).await;
        assert_eq!((reply.status.as_u16(), reply.header("retry-after")), (503, "7"));
    }
    for id in ["w0", "w1"] {
        trial.cluster.engine(id).clear_faults();
        assert_eq!(worker(&trial.cluster, id).await.2, 0, "no breaker of {id} is open");
    }
    assert_eq!(statuses(&trial.cluster, 4, "free").await, [200; 4], "served at once");
}

#[tokio::test]
async fn a_prompt_that_fails_everywhere_takes_no_worker_out() {
    let trial = Trial::start(two_in_turn("")).await;
    for id in ["w0", "w1"] {
        set(&trial.cluster, id, FaultKind::Poison { text: "poison".to_owned() });
    }
    let poisoned = chat("poison");
    for number in 0..40 {
        let before: usize = trial.counts(["w0", "w1"]).iter().sum();
        assert_eq!(trial.cluster.http.post(CHAT, &poisoned).await.status.as_u16(), 502);
        let legs = trial.counts(["w0", "w1"]).iter().sum::<usize>() - before;
        assert_eq!(legs, if number == 0 { 2 } else { 1 }, "request {number}");
    }
    for id in ["w0", "w1"] {
        assert_eq!(worker(&trial.cluster, id).await.2, 0, "no breaker of {id} is open");
    }
    assert_eq!(statuses(&trial.cluster, 4, "innocent").await, [200; 4]);
}

#[tokio::test]
async fn a_prompt_that_takes_long_on_an_engine_that_works_is_waited_for() {
    let trial = Trial::start(two_in_turn("timeouts: { first_token: 1500ms }")).await;
    // Streams teach how long a first token takes.
    for number in 0..6 {
        let body = streamed(&chat(&prompt(8, &format!("warm{number}-"))));
        trial.cluster.http.stream(CHAT, &body).await.chunks().await;
    }
    let before: usize = trial.counts(["w0", "w1"]).iter().sum();
    for id in ["w0", "w1"] {
        let kind = FaultKind::SlowFirstByte { delay_ms: 4_000 };
        trial.cluster.engine(id).set_fault(Fault { kind, times: Some(1) });
    }
    let body = streamed(&chat(&prompt(8, "long-")));
    let mut events = trial.cluster.http.stream(CHAT, &body).await;
    assert!(!events.chunks().await.is_empty());
    let of_clients = |id: &str| {
        let asked = trial.cluster.engine(id).requests();
        asked.iter().filter(|request| request.body.to_string().contains("long-")).count()
    };
    assert!(trial.counts(["w0", "w1"]).iter().sum::<usize>() > before);
    assert_eq!(of_clients("w0") + of_clients("w1"), 1, "sent to one engine, once");
}

#[tokio::test]
async fn readiness_names_why_no_worker_serves() {
    let cluster = Cluster::start(two_in_turn("")).await;
    set(&cluster, "w0", FaultKind::Asleep);
    eventually("w0 sleeps", async || worker(&cluster, "w0").await.0 == "unready").await;
    assert_eq!(cluster.admin.get("/ready").await.status, 200, "the other one serves");
    set(&cluster, "w1", FaultKind::Asleep);
    eventually("nobody serves", async || cluster.admin.get("/ready").await.status == 503).await;
    let reason = cluster.admin.get("/ready").await.json()["reason"].to_string();
    assert!(reason.contains("w0 is unready (its engine sleeps: wake it up"), "{reason}");
    cluster.engine("w1").clear_faults();
    eventually("one serves", async || cluster.admin.get("/ready").await.status == 200).await;
}

#[tokio::test]
async fn a_worker_whose_engine_serves_another_model_gets_nothing_and_is_named() {
    let spec = Spec {
        engine: |name, config| {
            if name == "w0" {
                config.model = "another".into();
            }
        },
        ..two_in_turn("")
    };
    let cluster = Cluster::start(spec).await;
    eventually("it is found", async || worker(&cluster, "w0").await.0 == "unready").await;
    let (_, why, _) = worker(&cluster, "w0").await;
    assert!(why.contains("--served-model-name"), "{why}");
    assert_eq!(statuses(&cluster, 6, "another").await, [200; 6]);
    assert_eq!(cluster.admin.get("/ready").await.status, 200);
}

#[tokio::test]
async fn an_engine_that_lists_its_model_by_another_name_and_serves_it_stays_in_service() {
    const MODELS: &str = r#"{"data":[{"id":"/models/of-the-engine"}]}"#;
    let engine = ScriptedServer::start(|heard| match heard.is_inference() {
        true => whole_reply(),
        false => ScriptedReply::json(200, MODELS),
    })
    .await;
    let worker_yaml = format!("{{ id: w9, role: both, url: \"{}\" }}", engine.url());
    let spec = Spec { extra_workers: vec![worker_yaml], ..two_in_turn("") };
    let cluster = Cluster::start(spec).await;
    eventually("it is asked whether it serves the model", async || {
        engine.heard().iter().any(|heard| heard.is_inference())
    })
    .await;
    eventually("it serves", async || worker(&cluster, "w9").await.0 == "serving").await;
}
