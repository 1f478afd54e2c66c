//! Circuit breakers exclude failing workers for a time, and retries have a budget.

use splitrail_sim::FaultKind;
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, Trial, broken_off, completion, prompt};

/// Workers take turns, so that a sick one gets its share.
fn in_turn(prefill: usize, decode: usize, model: &str) -> Spec {
    let policy = "{ kind: round_robin }";
    Spec { prefill, decode, policy, model: model.into(), ..Spec::default() }
}

async fn open(trial: &Trial, worker: &str, leg: &str) -> bool {
    let labels = [("worker", worker), ("leg", leg)];
    trial.cluster.metric("splitrail_worker_breaker_open", &labels).await == 1.0
}

/// Sends requests that must all be answered.
async fn send(trial: &mut Trial, count: usize, salt: &str) {
    for i in 0..count {
        let body = completion(&prompt(20, &format!("{salt}{i}-")));
        let reply = trial.post("ok", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
}

#[tokio::test]
async fn a_failing_worker_gets_no_requests_of_either_leg_until_it_recovers() {
    for (sick, leg) in [("p0", "prefill"), ("d0", "decode")] {
        let model = "breaker: { failures: 3, cooldown: 300ms }";
        let mut trial = Trial::start(in_turn(2, 2, model)).await;
        trial.fault(sick, FaultKind::Status { status: 500 }, None);
        eventually("the breaker opens", async || {
            send(&mut trial, 1, "open").await;
            open(&trial, sick, leg).await
        })
        .await;
        let asked = trial.counts([sick])[0];
        assert_eq!(asked, 3, "as often as it takes");
        assert!(!open(&trial, if leg == "decode" { "d1" } else { "p1" }, leg).await);
        let workers = trial.cluster.admin.get("/admin/workers").await.json();
        let found = workers["workers"].as_array().unwrap().iter().find(|w| w["id"] == sick);
        assert_eq!(found.unwrap()["breakers_open"], serde_json::json!([leg]));
        // It is well again: a trial finds that out.
        trial.cluster.engine(sick).clear_faults();
        eventually("the breaker closes", async || {
            send(&mut trial, 1, "close").await;
            !open(&trial, sick, leg).await
        })
        .await;
        send(&mut trial, 4, "after").await;
        assert!(trial.counts([sick])[0] > asked + 1, "it takes its turns again");
        trial.finish().await;
    }
}

#[tokio::test]
async fn only_a_trial_reaches_a_worker_whose_breaker_is_open() {
    // It stays open for longer than this test lasts.
    let model = "breaker: { failures: 2, cooldown: 10m }";
    let mut trial = Trial::start(in_turn(2, 1, model)).await;
    trial.fault("p0", FaultKind::Reset, Some(2));
    eventually("the breaker opens", async || {
        send(&mut trial, 1, "open").await;
        open(&trial, "p0", "prefill").await
    })
    .await;
    let before = trial.counts(["p0"]);
    send(&mut trial, 10, "spared").await;
    assert_eq!(trial.counts(["p0"]), before);
    trial.finish().await;
}

#[tokio::test]
async fn if_all_breakers_are_open_the_error_of_the_engine_is_reported() {
    let model = "breaker: { failures: 2, cooldown: 10m }\non_no_prefill: local";
    let mut trial = Trial::start(in_turn(1, 1, model)).await;
    trial.fault("d0", FaultKind::Status { status: 500 }, None);
    for i in 0..5 {
        let body = completion(&prompt(20, &format!("real{i}")));
        let reply = trial.post("engine_failed", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 502, "{}", reply.text());
    }
    assert!(open(&trial, "d0", "decode").await);
    // And where it is well again, that is found out by the next request.
    trial.cluster.engine("d0").clear_faults();
    send(&mut trial, 1, "well").await;
    assert!(!open(&trial, "d0", "decode").await);
    trial.finish().await;
}

#[tokio::test]
async fn mistakes_of_clients_and_full_engines_open_no_breaker() {
    let model = "breaker: { failures: 1, cooldown: 10m }\nretries: { prefill: 0, decode: 0 }";
    let mut trial = Trial::start(in_turn(1, 1, model)).await;
    for (status, times, outcome) in [(400, 3, "engine_rejected"), (429, 3, "engine_full")] {
        for i in 0..times {
            trial.fault("d0", FaultKind::Status { status }, Some(1));
            let body = completion(&prompt(20, &format!("{status}-{i}")));
            let reply = trial.post(outcome, COMPLETIONS, &body).await;
            assert_eq!(reply.status.as_u16(), status);
        }
    }
    assert!(!open(&trial, "d0", "decode").await);
    trial.finish().await;
}

#[tokio::test]
async fn answers_that_break_off_count_against_their_worker() {
    let model = "breaker: { failures: 3, cooldown: 10m }";
    let mut trial = Trial::start(in_turn(1, 2, model)).await;
    trial.fault("d0", FaultKind::DieMidStream { after_chunks: 2 }, Some(3));
    let mut lost = 0;
    while lost < 3 {
        let body = completion(&prompt(20, &format!("lost{lost}-{}", trial.counts(["d1"])[0])));
        let mut events =
            trial.cluster.http.stream(COMPLETIONS, &splitrail_tests::trial::streamed(&body)).await;
        let events = events.rest().await;
        if events.last().is_some_and(|last| last == "[DONE]") {
            trial.expect("ok");
        } else {
            broken_off(&events);
            trial.expect("decode_lost");
            lost += 1;
        }
    }
    assert!(open(&trial, "d0", "decode").await);
    trial.finish().await;
}

#[tokio::test]
async fn retries_of_all_requests_share_a_budget() {
    // Every first attempt fails, every second one is good.
    let model = "breaker: { failures: 0 }\nretries: { prefill: 1, decode: 0, budget_percent: 0 }\n\
                 on_no_prefill: fail";
    let mut trial = Trial::start(in_turn(2, 1, model)).await;
    trial.fault("p0", FaultKind::Status { status: 500 }, None);
    trial.fault("p1", FaultKind::Status { status: 500 }, None);
    for i in 0..110 {
        let body = completion(&prompt(3, &format!("{i}-")));
        assert_eq!(trial.post("no_worker", COMPLETIONS, &body).await.status, 503);
    }
    // The reserve of a hundred is spent, and nothing fills it up.
    assert_eq!(trial.retries("prefill").await, 100.0);
    let refused = trial.cluster.metric("splitrail_retries_refused_total", &[]).await;
    assert_eq!(refused, 10.0);
    assert_eq!(trial.counts(["p0", "p1"]).iter().sum::<usize>(), 210);
    trial.finish().await;
}

#[tokio::test]
async fn a_worker_that_is_not_asked_in_the_end_has_not_had_its_trial() {
    // Every request looks at the decode workers first, and asks neither: both hold nothing.
    let model = "breaker: { failures: 2, cooldown: 200ms }\ngate: { kind: router }";
    let spec = Spec { flow: "decode_first", ..in_turn(1, 2, model) };
    let mut trial = Trial::start(spec).await;
    trial.fault("d0", FaultKind::Status { status: 500 }, Some(2));
    let mut turn = 0;
    for wanted in [true, false] {
        eventually("the breaker opens, and closes", async || {
            turn += 1;
            send(&mut trial, 1, &format!("cold{turn}-")).await;
            open(&trial, "d0", "decode").await == wanted
        })
        .await;
    }
    trial.finish().await;
}
