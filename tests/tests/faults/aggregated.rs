//! The same promises where one worker does everything.

use splitrail_sim::FaultKind;
use splitrail_tests::Spec;
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, Reference, Trial, broken_off, chat, completion, either, error_of, prompt,
};

fn in_turn(workers: usize, model: &str) -> Spec {
    Spec { policy: "{ kind: round_robin }", model: model.to_owned(), ..Spec::aggregated(workers) }
}

#[tokio::test]
async fn a_failed_worker_is_replaced_before_the_first_byte() {
    let reference = Reference::start().await;
    // A worker that fails so often would otherwise be left alone.
    let mut trial = Trial::start(in_turn(2, "breaker: { failures: 0 }")).await;
    let faults = [
        FaultKind::Status { status: 500 },
        FaultKind::Status { status: 502 },
        FaultKind::Reset,
        FaultKind::DieMidStream { after_chunks: 0 },
    ];
    for (turn, fault) in faults.into_iter().enumerate() {
        let (path, body) = either(turn, &prompt(40, &format!("g{turn}-")));
        let expected = reference.text(path, &body).await;
        trial.fault("w0", fault.clone(), Some(1));
        let reply = trial.post("ok", path, &body).await;
        assert_eq!(reply.status, 200, "{fault:?}: {}", reply.text());
        assert_eq!(whole_text(&reply.json(), 0), expected, "{fault:?}");
        trial.fault("w0", fault.clone(), Some(1));
        let mut events = trial.stream("ok", path, &body).await;
        assert_eq!(streamed_text(&events.chunks().await, 0), expected, "{fault:?}");
        assert_eq!(trial.counts(["w0", "w1"]), [2 * turn + 2; 2], "{fault:?}");
        trial.check().await;
    }
    assert_eq!(trial.retries("decode").await, 8.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_worker_that_hangs_is_replaced() {
    let reference = Reference::start().await;
    let timeouts = "timeouts: { first_token: 4s, reply: 4s }";
    let mut trial = Trial::start(in_turn(2, timeouts)).await;
    trial.fault("w0", FaultKind::Hang, Some(1));
    let body = chat(&prompt(40, "hang"));
    let mut events = trial.stream("ok", CHAT, &body).await;
    let expected = reference.text(CHAT, &body).await;
    assert_eq!(streamed_text(&events.chunks().await, 0), expected);
    assert_eq!(trial.counts(["w0", "w1"]), [1, 1]);
    trial.finish().await;
}

#[tokio::test]
async fn all_workers_failing_is_one_typed_error() {
    let mut trial = Trial::start(in_turn(2, "")).await;
    for (status, outcome, told) in
        [(500, "engine_failed", 502), (503, "engine_full", 503), (429, "engine_full", 429)]
    {
        for engine in ["w0", "w1"] {
            trial.fault(engine, FaultKind::Status { status }, Some(1));
        }
        let text = prompt(30, &format!("all{status}-"));
        let reply = trial.post(outcome, CHAT, &chat(&text)).await;
        assert_eq!(reply.status, told, "{}", reply.text());
        error_of(&reply.json());
        assert_eq!(reply.header("retry-after").is_empty(), told == 502);
    }
    let [first, second] = trial.counts(["w0", "w1"]);
    assert!(first >= 2 && second >= 2, "each once per request, unless it rests");
    trial.finish().await;
}

#[tokio::test]
async fn a_worker_that_dies_during_the_stream_is_reported() {
    let mut trial = Trial::start(in_turn(2, "")).await;
    trial.fault("w0", FaultKind::DieMidStream { after_chunks: 4 }, Some(1));
    let mut events = trial.stream("decode_lost", CHAT, &chat(&prompt(30, "mid"))).await;
    let (chunks, _) = broken_off(&events.rest().await);
    assert_eq!(chunks.len(), 4);
    assert_eq!(trial.counts(["w0", "w1"]), [1, 0]);
    trial.finish().await;
}

#[tokio::test]
async fn what_an_engine_cannot_do_for_one_request_is_told_and_costs_no_worker_its_work() {
    let mut trial = Trial::start(Spec::aggregated(2)).await;
    for worker in ["w0", "w1"] {
        trial.fault(worker, FaultKind::Status { status: 501 }, Some(1));
    }
    let refused = trial.post("engine_rejected", COMPLETIONS, &completion(&prompt(4, "a"))).await;
    assert_eq!(refused.status, 501, "{}", refused.text());
    trial.cluster.engine("w0").clear_faults();
    trial.cluster.engine("w1").clear_faults();
    for salt in ["b", "c", "d"] {
        trial.post("ok", COMPLETIONS, &completion(&prompt(4, salt))).await;
    }
    trial.finish().await;
}

#[tokio::test]
async fn engines_that_offer_no_completions_are_named_and_tried_again_if_no_other_is_left() {
    let mut trial = Trial::start(Spec::aggregated(2)).await;
    for worker in ["w0", "w1"] {
        trial.fault(worker, FaultKind::Status { status: 405 }, None);
    }
    for salt in ["a", "b"] {
        let refused = trial.post("engine_failed", COMPLETIONS, &completion(&prompt(4, salt))).await;
        assert_eq!(refused.status, 502, "{}", refused.text());
    }
    let found = trial.cluster.admin.get("/admin/attention").await.json();
    let found = found["needs_attention"].as_array().unwrap().clone();
    let lacks = found.iter().find(|one| one["kind"] == "lacks_endpoint").unwrap();
    assert_eq!(lacks["workers"].to_string(), r#"["w0","w1"]"#);
    for worker in ["w0", "w1"] {
        trial.cluster.engine(worker).clear_faults();
    }
    trial.post("ok", COMPLETIONS, &completion(&prompt(4, "c"))).await;
    trial.finish().await;
}
