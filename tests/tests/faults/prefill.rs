//! Prefill workers that fail: nothing has reached the client yet.

use std::collections::HashSet;

use splitrail_sim::FaultKind;
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, Reference, SHORT_LEASE, Trial, chat, completion, either, error_of, prompt,
};
use splitrail_tests::{Client, Spec};

/// Prefill workers in turn: the one that fails is the first to be asked.
fn in_turn(prefill: usize, model: &str) -> Spec {
    Spec {
        prefill,
        decode: 1,
        policy: "{ kind: round_robin }",
        model: model.to_owned(),
        engine: |_, config| config.lease_ms = SHORT_LEASE.as_millis() as u64,
        ..Spec::default()
    }
}

fn failures() -> Vec<FaultKind> {
    vec![
        FaultKind::Status { status: 500 },
        FaultKind::Status { status: 502 },
        FaultKind::Status { status: 504 },
        FaultKind::Status { status: 407 },
        FaultKind::Reset,
        FaultKind::TruncatedBody,
        FaultKind::DieMidStream { after_chunks: 0 },
        FaultKind::NoHandOff,
        FaultKind::Abort { after_tokens: 0 },
    ]
}

#[tokio::test]
async fn a_failed_prefill_is_retried_on_another_worker_and_the_answer_is_right() {
    let reference = Reference::start().await;
    // A worker that fails so often would otherwise be left alone.
    let mut trial = Trial::start(in_turn(2, "breaker: { failures: 0 }")).await;
    for (turn, fault) in failures().into_iter().enumerate() {
        let (path, body) = either(turn, &prompt(40, &format!("a{turn}-")));
        let expected = reference.text(path, &body).await;
        let before = (trial.counts(["p0", "p1", "d0"]), trial.retries("prefill").await);
        trial.fault("p0", fault.clone(), Some(1));
        let reply = trial.post("ok", path, &body).await;
        assert_eq!(reply.status, 200, "{fault:?}: {}", reply.text());
        assert_eq!(whole_text(&reply.json(), 0), expected, "{fault:?}");
        assert_eq!(reply.route("prefill"), Some("p1"), "{fault:?}");
        assert_eq!(reply.route("local"), None, "{fault:?}");

        // The same again as a stream, which has begun with nothing of the failure.
        trial.fault("p0", fault.clone(), Some(1));
        let mut events = trial.stream("ok", path, &body).await;
        assert_eq!(events.status, 200, "{fault:?}");
        assert_eq!(streamed_text(&events.chunks().await, 0), expected, "{fault:?}");

        let ([p0, p1, d0], retries) = before;
        let after = trial.counts(["p0", "p1", "d0"]);
        assert_eq!(after, [p0 + 2, p1 + 2, d0 + 2], "{fault:?}: each asked once per request");
        assert_eq!(trial.retries("prefill").await, retries + 2.0, "{fault:?}");
        trial.check().await;
    }
    assert_eq!(trial.retries("decode").await, 0.0);
    assert_eq!(trial.local_prefills().await, 0.0);
    // A hand-off that got lost leaves its blocks pinned no longer than its lease.
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_prefill_engine_whose_core_died_gets_no_request() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(in_turn(2, "")).await;
    trial.cluster.engine("p0").die();
    for turn in 0..3 {
        let (path, body) = either(turn, &prompt(30, &format!("dead{turn}-")));
        let reply = trial.post("ok", path, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.route("prefill"), Some("p1"));
        assert_eq!(whole_text(&reply.json(), 0), reference.text(path, &body).await);
    }
    trial.finish().await;
}

#[tokio::test]
async fn a_prefill_that_times_out_is_retried_on_another_worker() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(in_turn(2, "timeouts: { prefill: 4s }")).await;
    trial.fault("p0", FaultKind::Hang, Some(1));
    let body = completion(&prompt(40, "hang"));
    let reply = trial.post("ok", COMPLETIONS, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.route("prefill"), Some("p1"));
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &body).await);
    assert_eq!(trial.counts(["p0", "p1", "d0"]), [1, 1, 1]);
    assert_eq!(trial.retries("prefill").await, 1.0);
    trial.finish().await;
}

#[tokio::test]
async fn each_prefill_worker_is_tried_at_most_once_and_no_more_than_configured() {
    let mut trial = Trial::start(in_turn(4, "retries: { prefill: 2 }")).await;
    for engine in ["p0", "p1", "p2", "p3"] {
        trial.fault(engine, FaultKind::Status { status: 502 }, None);
    }
    for turn in 1..=4 {
        let (path, body) = either(turn, &prompt(30, &format!("c{turn}-")));
        let before = trial.counts(["p0", "p1", "p2", "p3"]);
        let reply = trial.post("ok", path, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.route("local"), Some("no_prefill"));
        let after = trial.counts(["p0", "p1", "p2", "p3"]);
        let tries: Vec<usize> = after.iter().zip(before).map(|(a, b)| a - b).collect();
        assert_eq!(tries.iter().sum::<usize>(), 3, "one try and two retries: {tries:?}");
        assert!(tries.iter().all(|n| *n <= 1), "each at most once: {tries:?}");
        assert_eq!(trial.retries("prefill").await, 2.0 * turn as f64);
    }
    trial.finish().await;
}

#[tokio::test]
async fn without_retries_a_prefill_is_tried_once() {
    let mut trial = Trial::start(in_turn(2, "retries: { prefill: 0 }\non_no_prefill: fail")).await;
    trial.fault("p0", FaultKind::Status { status: 500 }, Some(1));
    let failed = trial.post("no_worker", CHAT, &chat(&prompt(30, "once"))).await;
    assert_eq!(failed.status, 503, "{}", failed.text());
    assert_eq!(trial.counts(["p0", "p1", "d0"]), [1, 0, 0]);
    assert_eq!(trial.retries("prefill").await, 0.0);
    trial.finish().await;
}

#[tokio::test]
async fn without_prefill_workers_the_decode_worker_computes_the_prompt() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(in_turn(2, "on_no_prefill: local")).await;
    for engine in ["p0", "p1"] {
        trial.fault(engine, FaultKind::Status { status: 502 }, None);
    }
    for turn in 0..4 {
        let (path, body) = either(turn, &prompt(40, &format!("local{turn}-")));
        let expected = reference.text(path, &body).await;
        if turn < 2 {
            let reply = trial.post("ok", path, &body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
            assert_eq!(whole_text(&reply.json(), 0), expected);
            let route = ["local", "prefill", "decode"].map(|key| reply.route(key));
            assert_eq!(route, [Some("no_prefill"), None, Some("d0")]);
            let usage = &reply.json()["usage"]["prompt_tokens_details"];
            assert_eq!(usage["cached_tokens"], 0, "computed from nothing: {usage}");
        } else {
            let mut events = trial.stream("ok", path, &body).await;
            let route = events.headers["x-splitrail-route"].to_str().unwrap().to_owned();
            assert!(route.contains("local=no_prefill"), "{route}");
            assert_eq!(streamed_text(&events.chunks().await, 0), expected);
        }
        assert_eq!(trial.local_prefills().await, turn as f64 + 1.0);
        assert_eq!(trial.counts(["p0", "p1", "d0"]), [turn + 1; 3]);
    }
    let sent = trial.asked("d0");
    assert!(sent.iter().all(|request| request.body["kv_transfer_params"].is_null()));
    trial.finish().await;
}

#[tokio::test]
async fn without_prefill_workers_a_model_may_fail_instead() {
    let mut trial = Trial::start(in_turn(2, "on_no_prefill: fail")).await;
    for status in [500, 502, 504] {
        for engine in ["p0", "p1"] {
            trial.fault(engine, FaultKind::Status { status }, None);
        }
        let reply = trial.post("no_worker", CHAT, &chat(&prompt(30, "x"))).await;
        assert_eq!(reply.status, 503, "{status}: {}", reply.text());
        assert!(reply.header("retry-after").parse::<u32>().unwrap() > 0);
        error_of(&reply.json());
        // A request to be streamed is refused by its status, not in a stream.
        let body = splitrail_tests::trial::streamed(&chat(&prompt(30, "x")));
        let reply = trial.post("no_worker", CHAT, &body).await;
        assert_eq!(reply.status, 503, "{status}: {}", reply.text());
        error_of(&reply.json());
    }
    assert_eq!(trial.asked("d0").len(), 0, "decode was never asked");
    assert_eq!(trial.local_prefills().await, 0.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_prompt_too_long_is_the_clients_error_in_the_engines_words() {
    let spec = Spec { engine: |_, config| config.max_model_len = 64, ..in_turn(2, "") };
    let mut trial = Trial::start(spec).await;
    let mut body = completion(&prompt(100, "long"));
    let reply = trial.post("engine_rejected", COMPLETIONS, &body).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    let error = error_of(&reply.json()).clone();
    assert_eq!(error["type"], "invalid_request_error");
    // What the engine that was asked says to the same request.
    body["max_tokens"] = 1.into();
    let engine = Client::new(trial.cluster.engine("p1").http_addr());
    let own = engine.post(COMPLETIONS, &body).await.json();
    assert_eq!(error["message"], own["error"]["message"]);
    assert_eq!(error["param"], own["error"]["param"]);
    // The answering engine is asked at once where its limit is known already.
    let [p0, p1, d0] = trial.counts(["p0", "p1", "d0"]);
    assert_eq!((p0 + d0, p1), (1, 1), "p1 only by this test");
    assert_eq!(trial.retries("prefill").await, 0.0);
    trial.finish().await;
}

#[tokio::test]
async fn an_answer_that_does_not_fit_is_the_clients_error_too() {
    let spec = Spec {
        decode: 2,
        engine: |_, config| {
            config.max_model_len = 400;
            config.lease_ms = SHORT_LEASE.as_millis() as u64;
        },
        ..in_turn(2, "")
    };
    let mut trial = Trial::start(spec).await;
    let mut body = completion(&prompt(30, "fits"));
    body["max_tokens"] = 5000.into();
    let reply = trial.post("engine_rejected", COMPLETIONS, &body).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    error_of(&reply.json());
    // A further call of one token may free what the prefill has staged.
    let decodes = ["d0", "d1"].map(|decode| {
        let asked = trial.asked(decode);
        asked.iter().filter(|request| request.body["max_tokens"] == 5000).count()
    });
    assert!(decodes.iter().sum::<usize>() <= 1, "asking again would not help: {decodes:?}");
    assert_eq!(trial.retries("decode").await, 0.0);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn engines_get_a_new_request_id_with_each_attempt() {
    let mut trial = Trial::start(in_turn(3, "")).await;
    for engine in ["p0", "p1"] {
        trial.fault(engine, FaultKind::NoHandOff, Some(1));
    }
    for engine in ["p0", "p2"] {
        trial.fault(engine, FaultKind::Status { status: 500 }, Some(1));
    }
    let reply = trial.post("ok", CHAT, &chat(&prompt(30, "ids"))).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let mut ids = HashSet::new();
    for engine in ["p0", "p1", "p2"] {
        for request in trial.asked(engine) {
            let id = request.header("x-request-id").unwrap().to_owned();
            assert_ne!(id, reply.header("x-request-id"), "the client's is not an engine's");
            assert!(ids.insert(id), "two attempts under one id, the second on {engine}");
        }
    }
    trial.finish().await;
}
