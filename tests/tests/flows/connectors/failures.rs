//! One leg fails while the other runs.

use std::time::Duration;

use splitrail_sim::{FaultKind, KvConnector, SimConfig};
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, Reference, Trial, completion, prompt, streamed};

use super::pd;

const CONCURRENT: [KvConnector; 3] =
    [KvConnector::NixlPush, KvConnector::Mooncake, KvConnector::Sglang];

/// Waits until no engine works, waits or keeps anything, which a leg that was left behind
/// would for minutes.
async fn nothing_is_left_behind(trial: &Trial) {
    eventually("no leg is left behind", async || {
        trial.cluster.engines.iter().all(|(_, engine)| {
            let state = engine.state();
            (state.running, state.waiting, state.blocks_used, state.staged_hand_offs)
                == (0, 0, 0, 0)
        })
    })
    .await;
}

#[tokio::test]
async fn a_prefill_that_fails_ends_its_decode_at_once_and_another_takes_over() {
    let reference = Reference::start().await;
    for connector in CONCURRENT {
        for kind in [FaultKind::Status { status: 500 }, FaultKind::Reset] {
            let spec = Spec { policy: "{ kind: round_robin }", ..pd(connector, 2, 1) };
            let mut trial = Trial::start(spec).await;
            trial.fault("p0", kind.clone(), Some(1));
            for turn in 0..2 {
                let body = completion(&prompt(30, &format!("fails{turn}z")));
                let expected = reference.text(COMPLETIONS, &body).await;
                let reply = trial.post("ok", COMPLETIONS, &body).await;
                assert_eq!(reply.status, 200, "{connector:?} {kind:?}: {}", reply.text());
                assert_eq!(reply.json()["choices"][0]["text"], expected.as_str());
            }
            assert_eq!(trial.retries("prefill").await, 1.0, "{connector:?} {kind:?}");
            // An engine that pushes has failed when it was asked who it is.
            let aborted = u64::from(connector != KvConnector::NixlPush);
            assert_eq!(trial.cluster.engine("d0").state().totals.aborted, aborted, "{connector:?}");
            nothing_is_left_behind(&trial).await;
            trial.finish().await;
        }
    }
}

#[tokio::test]
async fn a_decode_leg_does_not_wait_if_no_prefill_succeeds() {
    for connector in CONCURRENT {
        let spec = Spec { model: "on_no_prefill: fail".into(), ..pd(connector, 1, 1) };
        let mut trial = Trial::start(spec).await;
        trial.fault("p0", FaultKind::Status { status: 503 }, None);
        let body = completion(&prompt(30, "none"));
        let reply = trial.post("no_worker", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 503, "{connector:?}: {}", reply.text());
        let events = trial.stream("no_worker", COMPLETIONS, &body).await;
        assert_eq!(events.status, 503, "{connector:?}");
        works_again(&trial);
        nothing_is_left_behind(&trial).await;
        trial.finish().await;
    }
    // Mooncake's decode workers can compute a prompt themselves.
    let reference = Reference::start().await;
    let mut trial = Trial::start(pd(KvConnector::Mooncake, 1, 1)).await;
    trial.fault("p0", FaultKind::Status { status: 503 }, None);
    let body = completion(&prompt(30, "local"));
    let reply = trial.post("ok", COMPLETIONS, &body).await;
    assert_eq!(reply.route("local"), Some("no_prefill"));
    assert_eq!(
        reply.json()["choices"][0]["text"],
        reference.text(COMPLETIONS, &body).await.as_str()
    );
    works_again(&trial);
    nothing_is_left_behind(&trial).await;
    trial.finish().await;
}

/// Ends the fault of the prefill engine. Mooncake's decode engine keeps the blocks of its legs until
/// then.
fn works_again(trial: &Trial) {
    trial.fault("p0", FaultKind::Status { status: 503 }, Some(0));
}

#[tokio::test]
async fn a_decode_that_fails_gets_a_new_prefill_under_a_new_name() {
    let reference = Reference::start().await;
    for connector in CONCURRENT {
        for kind in [FaultKind::Status { status: 500 }, FaultKind::Reset] {
            // What Mooncake has staged for a decode that failed waits for the engine's own
            // timeout: it may have been received, and so is not sent again.
            let engine = |_: &str, config: &mut SimConfig| config.lease_ms = 700;
            let spec = Spec { engine, ..pd(connector, 1, 2) };
            let mut trial = Trial::start(spec).await;
            for engine in ["d0", "d1"] {
                trial.fault(engine, kind.clone(), Some(1));
            }
            let body = completion(&prompt(30, "again"));
            // Both fail once: the budget is one further attempt.
            let reply = trial.post("engine_failed", COMPLETIONS, &body).await;
            assert_eq!(reply.status, 502, "{connector:?}: {}", reply.text());
            trial.fault("d0", kind.clone(), Some(1));
            trial.fault("d1", kind.clone(), Some(0));
            for turn in 0..2 {
                let body = completion(&prompt(30, &format!("again{turn}z")));
                let expected = reference.text(COMPLETIONS, &body).await;
                let reply = trial.post("ok", COMPLETIONS, &body).await;
                assert_eq!(reply.status, 200, "{connector:?}: {}", reply.text());
                assert_eq!(reply.json()["choices"][0]["text"], expected.as_str());
            }
            nothing_is_left_behind(&trial).await;
            trial.finish().await;
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_ends_both_legs() {
    for connector in CONCURRENT {
        let spec =
            Spec { engine: |_, config| config.prefill_us_per_token = 2_000, ..pd(connector, 1, 1) };
        let mut trial = Trial::start(spec).await;
        for stream in [false, true] {
            let body = completion(&prompt(60, &format!("leaves{stream}")));
            let body = if stream { streamed(&body) } else { body };
            trial.expect("cancelled");
            let sent = trial.cluster.http.post(COMPLETIONS, &body);
            let both = eventually("both legs are under way", async || {
                ["p0", "d0"].iter().all(|engine| {
                    let state = trial.cluster.engine(engine).state();
                    state.running + state.waiting > 0
                })
            });
            tokio::select! {
                reply = sent => panic!("answered too early: {reply:?}"),
                () = both => {}
            }
            nothing_is_left_behind(&trial).await;
        }
        if connector == KvConnector::Mooncake {
            // Both prefill legs ran on, and were not sent again.
            eventually("both are counted", async || {
                let finished = [("outcome", "finished")];
                trial.cluster.metric("splitrail_unused_hand_offs_total", &finished).await == 2.0
            })
            .await;
            assert_eq!(trial.counts(["p0"]), [2]);
        }
        trial.finish().await;
    }
}

/// Alone, each engine would wait for five minutes.
#[tokio::test]
async fn an_sglang_leg_whose_other_leg_hangs_ends_when_the_client_leaves() {
    let mut trial = Trial::start(pd(KvConnector::Sglang, 1, 1)).await;
    for (hangs, waits) in [("d0", "p0"), ("p0", "d0")] {
        for stream in [false, true] {
            trial.fault(hangs, FaultKind::Hang, Some(1));
            let body = completion(&prompt(60, &format!("{hangs}{stream}")));
            let body = if stream { streamed(&body) } else { body };
            trial.expect("cancelled");
            let sent = trial.cluster.http.post(COMPLETIONS, &body);
            let alone = eventually("one leg waits for the other", async || {
                trial.cluster.engine(waits).state().blocks_used > 0
            });
            tokio::select! {
                reply = sent => panic!("answered too early: {reply:?}"),
                () = alone => {}
            }
            nothing_is_left_behind(&trial).await;
        }
    }
    trial.finish().await;
}

#[tokio::test]
async fn a_leg_that_hangs_is_given_up_with_the_other() {
    for connector in CONCURRENT {
        let model = "timeouts: { prefill: 200ms }\non_no_prefill: fail".into();
        let spec = Spec { model, ..pd(connector, 1, 1) };
        let mut trial = Trial::start(spec).await;
        trial.fault("p0", FaultKind::Hang, Some(1));
        let body = completion(&prompt(30, "hangs"));
        let reply = trial.post("no_worker", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 503, "{connector:?}: {}", reply.text());
        nothing_is_left_behind(&trial).await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_prefill_that_is_slow_to_reply_does_not_hold_up_an_answer_for_long() {
    // The KV has been handed over: all that is missing is the prefill's own count.
    let reference = Reference::start().await;
    let mut trial = Trial::start(pd(KvConnector::Mooncake, 1, 1)).await;
    let body = completion(&prompt(30, "slow"));
    let kind = FaultKind::SlowFirstByte { delay_ms: Duration::from_millis(50).as_millis() as u64 };
    trial.fault("p0", kind, Some(1));
    let reply = trial.post("ok", COMPLETIONS, &body).await;
    assert_eq!(
        reply.json()["choices"][0]["text"],
        reference.text(COMPLETIONS, &body).await.as_str()
    );
    trial.finish().await;
}
