//! An attempt that is turned away is discarded whole; what follows is like any other.

use serde_json::json;
use splitrail_sim::{FaultKind, SimConfig, ThresholdReply};
use splitrail_tests::canned::{Canned, Then};
use splitrail_tests::client::streamed_text;
use splitrail_tests::trial::{COMPLETIONS, Reference, broken_off, completion, prompt, streamed};
use splitrail_tests::{Spec, Trial};

use super::support::*;

/// Every prompt is cold and wants half of it cached.
async fn all_are_turned_away(engine: fn(&str, &mut SimConfig)) {
    let mut trial = Trial::start(Spec { engine, ..asking() }).await;
    let reference = Reference::start().await;
    // More often than a breaker would bear.
    for (turn, (path, stream)) in ways().into_iter().cycle().take(8).enumerate() {
        let body = text_body(path, &prompt(30, &format!("cold{turn}")), 0.5);
        let (text, reply) = answered(&mut trial, path, &body, stream).await;
        assert_eq!(text, reference.text(path, &body).await);
        assert_eq!(tried(&reply), ("engine", "rejected"));
        assert_eq!((reply.route("prefill"), reply.route("decode")), (Some("p0"), Some("d0")));
        assert_eq!(reply.route("cached_tokens"), Some("0"));
    }
    assert_eq!(trial.counts(["p0", "d0"]), [8, 16]);
    let open = trial.cluster.metric("splitrail_worker_breaker_open", &[]).await;
    assert_eq!(open, 0.0);
    assert_eq!(trial.retries("decode").await, 0.0, "that is no failure");
    let wasted = trial.cluster.metric("splitrail_wasted_prompt_tokens_total", &[]).await;
    assert_eq!(wasted, 0.0, "the attempt computed nothing");
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn an_engine_rejects_with_the_finish_reason_of_the_first_event() {
    all_are_turned_away(|_, _| {}).await;
}

#[tokio::test]
async fn an_engine_rejects_with_the_finish_reason_of_a_later_event() {
    all_are_turned_away(|_, config| config.threshold_reply = ThresholdReply::AfterOpening).await;
}

#[tokio::test]
async fn an_engine_rejects_with_status_412() {
    all_are_turned_away(|_, config| config.threshold_reply = ThresholdReply::Status412).await;
}

#[tokio::test]
async fn an_engine_rejects_with_status_412_inside_a_stream() {
    all_are_turned_away(|_, config| {
        config.threshold_reply = ThresholdReply::Status412;
        config.early_stream_headers = true;
    })
    .await;
}

#[tokio::test]
async fn several_samples_and_batches_are_judged_as_one_and_each_by_itself() {
    let mut trial = Trial::start(asking()).await;
    let reference = Reference::start().await;
    let mut samples = completion(&prompt(30, "samples"));
    (samples["n"], samples["cache_hit_threshold"]) = (3.into(), json!(0.5));
    let cold = trial.post("ok", COMPLETIONS, &samples).await;
    assert_eq!(tried(&cold), ("engine", "rejected"));
    let texts = |reply: &serde_json::Value| {
        let choices = reply["choices"].as_array().unwrap();
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(texts(&cold.json()).len(), 3);
    trial.cluster.settle().await;
    let warm = trial.post("ok", COMPLETIONS, &samples).await;
    assert_eq!(tried(&warm), ("engine", "served"));
    assert_eq!(texts(&warm.json()), texts(&cold.json()));
    let chunks = trial.stream("ok", COMPLETIONS, &samples).await.chunks().await;
    for (i, text) in texts(&cold.json()).iter().enumerate() {
        assert_eq!(&streamed_text(&chunks, i as u64), text);
    }

    let mut batch = samples.clone();
    batch["n"] = 1.into();
    batch["prompt"] = json!([prompt(30, "samples"), prompt(30, "another")]);
    let reply = trial.post("ok", COMPLETIONS, &batch).await;
    let records = trial.cluster.decisions(reply.header("x-request-id")).await;
    let mut outcomes: Vec<_> =
        records.iter().map(|r| (r["prompt_index"].as_u64(), r["decode_try"].clone())).collect();
    outcomes.sort_by_key(|(index, _)| *index);
    assert_eq!(outcomes, [(Some(0), json!("served")), (Some(1), json!("rejected"))]);
    for (i, text) in texts(&reply.json()).iter().enumerate() {
        let single = completion(batch["prompt"][i].as_str().unwrap());
        assert_eq!(*text, reference.text(COMPLETIONS, &single).await);
    }
    trial.finish().await;
}

#[tokio::test]
async fn one_sample_that_is_turned_away_takes_the_others_with_it() {
    let ran = r#"{"choices":[{"index":0,"text":"leaked","finish_reason":null}]}"#;
    let away = r#"{"choices":[{"index":1,"text":"","finish_reason":"cache_threshold"}]}"#;
    let worker = Canned::start(Canned::events(&[ran, away, "[DONE]"]), Then::Close).await;
    let mut spec = only_canned(&worker, 1);
    spec.model += "\nrequest_flows: [decode_only]";
    let trial = Trial::start(spec).await;
    let mut body = streamed(&body(0, 100, Some(0.5)));
    body["n"] = 2.into();
    let headers = [("x-splitrail-flow", "decode_only")];
    let reply = trial.cluster.http.post_with(COMPLETIONS, &headers, body.to_string()).await;
    let said = reply.text();
    assert_eq!(said.matches(r#""finish_reason":"cache_threshold""#).count(), 2, "{said}");
    assert!(!said.contains("leaked") && said.ends_with("data: [DONE]\n\n"), "{said}");
    assert_eq!(worker.asked(), 1);
}

/// A cluster whose only decode worker says always the same.
fn only_canned(worker: &Canned, prefill: usize) -> Spec {
    Spec {
        prefill,
        decode: 0,
        extra_workers: vec![worker.worker("c0", "decode")],
        policy: "{ kind: round_robin }",
        ..asking()
    }
}

#[tokio::test]
async fn the_first_output_waits_for_nothing() {
    let output = r#"{"choices":[{"index":0,"text":"x","finish_reason":null}]}"#;
    // An event, and then silence for ever.
    let event = format!("data: {output}\n\n");
    let reply = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{event}",
        event.len() + 1000
    );
    let worker = Canned::start(reply, Then::Silence).await;
    let trial = Trial::start(only_canned(&worker, 1)).await;
    let body = streamed(&body(0, 100, Some(0.5)));
    let mut events = trial.cluster.http.stream(COMPLETIONS, &body).await;
    assert_eq!(events.next().await.as_deref(), Some(output));
}

#[tokio::test]
async fn after_its_first_output_an_answer_that_is_turned_away_is_a_lost_one() {
    let output = r#"{"choices":[{"index":0,"text":"x","finish_reason":null}]}"#;
    let away = r#"{"choices":[{"index":0,"text":"","finish_reason":"cache_threshold"}]}"#;
    let worker = Canned::start(Canned::events(&[output, away, "[DONE]"]), Then::Close).await;
    let trial = Trial::start(only_canned(&worker, 1)).await;
    let body = streamed(&body(0, 100, Some(0.5)));
    let mut events = trial.cluster.http.stream(COMPLETIONS, &body).await;
    let (chunks, error) = broken_off(&events.rest().await);
    assert_eq!(streamed_text(&chunks, 0), "x");
    assert_eq!(error["code"], "decode_lost");
}

#[tokio::test]
async fn an_attempt_that_fails_is_followed_by_prefill_and_decode_elsewhere() {
    let reference = Reference::start().await;
    let faults = [
        FaultKind::Status { status: 500 },
        FaultKind::Reset,
        FaultKind::DieMidStream { after_chunks: 0 },
    ];
    for kind in faults {
        let model = "gate: { kind: router }\nretries: { prefill: 0, decode: 1 }";
        let mut trial = Trial::start(Spec { decode: 2, ..with_model(model) }).await;
        let first = trial.post("ok", COMPLETIONS, &body(320, 320, Some(0.0))).await;
        let holder = first.route("decode").unwrap().to_owned();
        trial.cluster.settle().await;
        trial.fault(&holder, kind, Some(1));
        let body = body(320, 330, Some(0.9));
        let (text, reply) = answered(&mut trial, COMPLETIONS, &body, true).await;
        assert_eq!(text, reference.text(COMPLETIONS, &body).await);
        assert_eq!(tried(&reply), ("router", "failed"));
        assert_eq!(reply.route("prefill"), Some("p0"));
        assert_ne!(reply.route("decode"), Some(holder.as_str()));
        assert_eq!(trial.retries("decode").await, 1.0);
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_request_preempted_before_its_first_output_is_prefilled_again_so_often() {
    let model = "gate: { kind: engine, index_first: false, preemption_guard: 0.001 }\n\
                 retries: { prefill: 0, decode: 2 }";
    let mut trial = Trial::start(with_model(model)).await;
    let reference = Reference::start().await;
    for (turn, (path, stream)) in ways().into_iter().enumerate() {
        let body = text_body(path, &prompt(30, &format!("lost{turn}")), 0.5);
        trial.fault("d0", FaultKind::Preempt, Some(2));
        let before = trial.counts(["p0"])[0];
        let (text, _) = answered(&mut trial, path, &body, stream).await;
        assert_eq!(text, reference.text(path, &body).await);
        assert_eq!(trial.counts(["p0"])[0] - before, 3, "a new prefill each time");
    }
    let preempted = [("reason", "below_threshold")];
    assert_eq!(trial.cluster.metric("splitrail_retries_total", &preempted).await, 8.0);
    // The last attempt has no guard: a decode engine that always preempts prefills by itself then.
    trial.fault("d0", FaultKind::Preempt, None);
    let body = text_body(COMPLETIONS, &prompt(30, "ever"), 0.5);
    let (text, _) = answered(&mut trial, COMPLETIONS, &body, false).await;
    assert_eq!(text, reference.text(COMPLETIONS, &body).await);
    trial.finish().await;
}

#[tokio::test]
async fn an_attempt_whose_refusal_was_cut_short_has_wasted_nothing() {
    let model = "gate: { kind: engine, index_first: false }";
    let mut trial = Trial::start(Spec { decode: 2, ..with_model(model) }).await;
    for engine in ["d0", "d1"] {
        trial.fault(engine, FaultKind::TruncatedBody, Some(1));
    }
    // Of the first attempt the refusal is cut short, of the second one the answer.
    let reply = trial.post("engine_failed", COMPLETIONS, &body(0, 100, Some(0.5))).await;
    assert_eq!(reply.status, 502, "{}", reply.text());
    let refused = |name| trial.cluster.engine(name).state().totals.finished_cache_threshold;
    assert_eq!(refused("d0") + refused("d1"), 1);
    // Only the prefill of the second has done any work.
    let wasted = trial.cluster.metric("splitrail_wasted_prompt_tokens_total", &[]).await;
    assert_eq!(wasted, 100.0);
    trial.finish().await;
}
