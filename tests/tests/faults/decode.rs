//! Decode workers that fail before the first byte: another one answers, with a
//! hand-off of its own.

use splitrail_sim::FaultKind;
use splitrail_tests::Spec;
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::cluster::eventually;
use splitrail_tests::raw_engine::{RawEngine, Turn, reply};
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, Reference, SHORT_LEASE, Trial, chat, completion, either, error_of, prompt,
};

/// Decode workers in turn: the one that fails is the first to be asked.
fn in_turn(decode: usize, model: &str) -> Spec {
    Spec {
        prefill: 2,
        decode,
        policy: "{ kind: round_robin }",
        model: model.to_owned(),
        engine: |_, config| config.lease_ms = SHORT_LEASE.as_millis() as u64,
        ..Spec::default()
    }
}

/// Hand-offs that were sent to these engines.
fn hand_offs(trial: &Trial, engines: &[&str]) -> Vec<String> {
    let requests = engines.iter().flat_map(|engine| trial.asked(engine));
    requests
        .map(|request| request.body["kv_transfer_params"]["remote_request_id"].to_string())
        .collect()
}

#[tokio::test]
async fn a_decode_that_fails_before_its_first_byte_is_retried_with_a_new_prefill() {
    let reference = Reference::start().await;
    // A worker that fails so often would otherwise be left alone.
    let mut trial = Trial::start(in_turn(2, "breaker: { failures: 0 }")).await;
    let faults = [
        FaultKind::Status { status: 500 },
        FaultKind::Status { status: 502 },
        FaultKind::Reset,
        // A stream's headers, and a whole reply's first half, are not yet an answer.
        FaultKind::DieMidStream { after_chunks: 0 },
    ];
    for (turn, fault) in faults.into_iter().enumerate() {
        let (path, body) = either(turn, &prompt(40, &format!("b{turn}-")));
        let expected = reference.text(path, &body).await;
        for stream in [false, true] {
            let before = trial.counts(["p0", "p1", "d0", "d1"]);
            let retries = trial.retries("decode").await;
            trial.fault("d0", fault.clone(), Some(1));
            if stream {
                let mut events = trial.stream("ok", path, &body).await;
                assert_eq!(events.status, 200, "{fault:?}");
                assert_eq!(streamed_text(&events.chunks().await, 0), expected, "{fault:?}");
            } else {
                let reply = trial.post("ok", path, &body).await;
                assert_eq!(reply.status, 200, "{fault:?}: {}", reply.text());
                assert_eq!(reply.route("decode"), Some("d1"), "{fault:?}");
                assert_eq!(whole_text(&reply.json(), 0), expected, "{fault:?}");
            }
            let after = trial.counts(["p0", "p1", "d0", "d1"]);
            let prefills = after[0] + after[1] - before[0] - before[1];
            assert_eq!(prefills, 2, "{fault:?}: a new prefill for the second attempt");
            assert_eq!(after[2..], [before[2] + 1, before[3] + 1], "{fault:?}: once each");
            assert_eq!(trial.retries("decode").await, retries + 1.0, "{fault:?}");
            trial.check().await;
        }
    }
    assert_eq!(trial.retries("prefill").await, 0.0);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn an_incomplete_reply_is_not_relayed() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(in_turn(2, "")).await;
    trial.fault("d0", FaultKind::TruncatedBody, Some(1));
    let body = chat(&prompt(40, "half"));
    let reply = trial.post("ok", CHAT, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(whole_text(&reply.json(), 0), reference.text(CHAT, &body).await);
    assert_eq!(trial.counts(["d0", "d1"]), [1, 1]);
    trial.finish().await;
}

#[tokio::test]
async fn usage_after_a_retry_is_that_of_the_attempt_that_answered() {
    let mut trial = Trial::start(in_turn(2, "")).await;
    let body = chat(&prompt(40, "usage"));
    trial.fault("d0", FaultKind::Status { status: 500 }, Some(1));
    let reply = trial.post("ok", CHAT, &body).await.json();
    let prompt_tokens = reply["usage"]["prompt_tokens"].as_u64().unwrap();
    // Prefilled cold on p0, then cold again on p1.
    assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(reply["usage"]["completion_tokens"], 12);
    let metric = |name: &'static str| trial.cluster.metric(name, &[]);
    assert_eq!(metric("splitrail_wasted_prompt_tokens_total").await, prompt_tokens as f64);
    assert_eq!(metric("splitrail_generation_tokens_total").await, 12.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_refused_transfer_is_retried_with_a_new_hand_off() {
    let reference = Reference::start().await;
    // Early headers: the refusal is an event inside a stream that began with 200.
    for early in [false, true] {
        let spec = Spec {
            engine: match early {
                false => |_, config| config.lease_ms = SHORT_LEASE.as_millis() as u64,
                true => |_, config| {
                    config.lease_ms = SHORT_LEASE.as_millis() as u64;
                    config.early_stream_headers = true;
                },
            },
            ..in_turn(2, "")
        };
        let mut trial = Trial::start(spec).await;
        for (turn, refusing) in ["p0", "p0"].into_iter().enumerate() {
            let (path, body) = either(turn, &prompt(40, &format!("pull{turn}-")));
            let expected = reference.text(path, &body).await;
            trial.fault(refusing, FaultKind::RefusePulls, Some(1));
            let mut events = trial.stream("ok", path, &body).await;
            assert_eq!(events.status, 200);
            assert_eq!(streamed_text(&events.chunks().await, 0), expected, "early: {early}");
        }
        assert_eq!(trial.retries("decode").await, 2.0);
        assert_eq!(hand_offs(&trial, &["d0", "d1"]).len(), 4);
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_prefill_worker_from_which_no_decode_worker_can_pull_is_named_and_left_out() {
    let mut trial = Trial::start(in_turn(2, "")).await;
    trial.fault("p0", FaultKind::RefusePulls, None);
    let hand_offs = async || {
        let found = trial.cluster.admin.get("/admin/attention").await.json();
        let found = found["needs_attention"].as_array().unwrap().clone();
        let named = found.into_iter().find(|one| one["kind"] == "no_hand_off");
        named.map(|one| one["workers"].to_string())
    };
    assert_eq!(hand_offs().await, None);
    for turn in 0..6 {
        let body = completion(&prompt(40, &format!("nobody{turn}-")));
        let reply = trial.cluster.http.post(COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.route("prefill"), Some("p1"), "turn {turn}");
    }
    assert_eq!(hand_offs().await.as_deref(), Some(r#"["p0"]"#));
    assert!(trial.counts(["p0"])[0] <= 3, "it is left out");
    (0..6).for_each(|_| trial.expect("ok"));
    trial.finish().await;
}

#[tokio::test]
async fn a_prefill_worker_that_dies_between_the_legs_is_replaced() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(in_turn(2, "")).await;
    let body = chat(&prompt(40, "between"));
    let expected = reference.text(CHAT, &body).await;
    trial.fault("d0", FaultKind::SlowFirstByte { delay_ms: 600 }, Some(1));
    trial.expect("ok");
    let client = trial.cluster.http.clone();
    let answer = client.post(CHAT, &body);
    let death = async {
        // d0 has its hand-off, but has not fetched anything yet.
        eventually("d0 is asked", async || trial.asked("d0").len() == 1).await;
        assert_eq!(trial.counts(["p0", "p1"]), [1, 0]);
        let place = trial.cluster.engines.iter().position(|(name, _)| name == "p0");
        let (_, engine) = trial.cluster.engines.remove(place.unwrap());
        engine.shutdown().await;
    };
    let (reply, ()) = tokio::join!(answer, death);
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(whole_text(&reply.json(), 0), expected);
    assert_eq!(reply.route("prefill"), Some("p1"));
    assert_eq!(reply.route("decode"), Some("d1"));
    trial.finish().await;
}

#[tokio::test]
async fn each_decode_worker_is_tried_at_most_once_and_no_more_than_configured() {
    let mut trial = Trial::start(in_turn(4, "retries: { decode: 2 }")).await;
    for engine in ["d0", "d1", "d2", "d3"] {
        trial.fault(engine, FaultKind::Status { status: 502 }, None);
    }
    for turn in 1..=3 {
        let before = trial.counts(["d0", "d1", "d2", "d3"]);
        let body = completion(&prompt(30, &format!("e{turn}-")));
        let reply = trial.post("engine_failed", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 502, "{}", reply.text());
        assert_eq!(error_of(&reply.json())["type"], "engine_error");
        let after = trial.counts(["d0", "d1", "d2", "d3"]);
        let tries: Vec<usize> = after.iter().zip(before).map(|(a, b)| a - b).collect();
        assert_eq!(tries.iter().sum::<usize>(), 3, "one try and two retries: {tries:?}");
        assert!(tries.iter().all(|n| *n <= 1), "each at most once: {tries:?}");
    }
    let prefills: usize = trial.counts(["p0", "p1"]).iter().sum();
    assert_eq!(prefills, 9, "a prefill per attempt");
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_single_decode_worker_that_fails_is_a_typed_error() {
    let mut trial = Trial::start(in_turn(1, "")).await;
    let body = chat(&prompt(30, "single"));
    for (fault, outcome) in [
        (FaultKind::Status { status: 500 }, "engine_failed"),
        (FaultKind::Reset, "engine_failed"),
        (FaultKind::DieMidStream { after_chunks: 0 }, "engine_failed"),
        (FaultKind::TruncatedBody, "engine_failed"),
    ] {
        trial.fault("d0", fault.clone(), Some(1));
        let reply = trial.post(outcome, CHAT, &body).await;
        assert_eq!(reply.status, 502, "{fault:?}: {}", reply.text());
        let reply = reply.json();
        assert_eq!(error_of(&reply)["code"], outcome, "{fault:?}");
        trial.check().await;
    }
    // Too busy is not broken: the client may come back.
    trial.fault("d0", FaultKind::Status { status: 429 }, Some(1));
    let reply = trial.post("engine_full", CHAT, &body).await;
    assert_eq!(reply.status, 429, "{}", reply.text());
    assert!(reply.header("retry-after").parse::<u32>().unwrap() > 0);
    error_of(&reply.json());
    // And nothing of it stays: the next one is served.
    assert_eq!(trial.post("ok", CHAT, &body).await.status, 200);
    assert_eq!(trial.retries("decode").await, 0.0, "there was nobody else");
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_decode_whose_first_byte_is_late_is_retried() {
    let reference = Reference::start().await;
    let timeouts = "timeouts: { first_token: 4s, reply: 4s }";
    let mut trial = Trial::start(in_turn(2, timeouts)).await;
    let late = FaultKind::SlowFirstByte { delay_ms: 60_000 };
    let body = chat(&prompt(40, "late"));
    let expected = reference.text(CHAT, &body).await;
    trial.fault("d0", late, Some(1));
    let mut events = trial.stream("ok", CHAT, &body).await;
    assert_eq!(streamed_text(&events.chunks().await, 0), expected);
    trial.fault("d0", FaultKind::Hang, Some(1));
    let reply = trial.post("ok", CHAT, &body).await;
    assert_eq!(whole_text(&reply.json(), 0), expected);
    assert_eq!(trial.counts(["d0", "d1"]), [2, 2]);
    assert_eq!(trial.retries("decode").await, 2.0);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_single_decode_worker_that_is_late_is_a_gateway_timeout() {
    let timeouts = "timeouts: { first_token: 300ms, reply: 300ms }";
    let mut trial = Trial::start(in_turn(1, timeouts)).await;
    trial.fault("d0", FaultKind::Hang, None);
    for body in [chat("late"), splitrail_tests::trial::streamed(&chat("late"))] {
        let reply = trial.post("engine_timeout", CHAT, &body).await;
        assert_eq!(reply.status, 504, "{}", reply.text());
        error_of(&reply.json());
    }
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_second_attempt_without_a_prefill_uses_nothing_of_the_first() {
    let reference = Reference::start().await;
    for (on_no_prefill, outcome) in [("local", "ok"), ("fail", "no_worker")] {
        let model = format!("on_no_prefill: {on_no_prefill}");
        let mut trial = Trial::start(in_turn(2, &model)).await;
        let body = chat(&prompt(40, "second"));
        // d0 fails when both prefill workers have stopped to serve.
        trial.fault("d0", FaultKind::SlowFirstByte { delay_ms: 300 }, Some(1));
        trial.fault("d0", FaultKind::Status { status: 500 }, Some(1));
        trial.expect(outcome);
        let client = trial.cluster.http.clone();
        let outage = async {
            eventually("d0 is asked", async || trial.asked("d0").len() == 1).await;
            for engine in ["p0", "p1"] {
                trial.fault(engine, FaultKind::Status { status: 502 }, None);
            }
        };
        let (reply, ()) = tokio::join!(client.post(CHAT, &body), outage);
        let hand_offs = hand_offs(&trial, &["d0", "d1"]);
        if outcome == "ok" {
            assert_eq!(reply.status, 200, "{}", reply.text());
            let route = ["local", "prefill", "decode"].map(|key| reply.route(key));
            assert_eq!(route, [Some("no_prefill"), None, Some("d1")]);
            let expected = reference.text(CHAT, &body).await;
            assert_eq!(whole_text(&reply.json(), 0), expected);
            let usage = &reply.json()["usage"]["prompt_tokens_details"];
            assert_eq!(usage["cached_tokens"], 0, "d1 computed it all: {usage}");
            assert_eq!(hand_offs[1], "null", "{hand_offs:?}");
        } else {
            assert_eq!(reply.status, 503, "{}", reply.text());
            error_of(&reply.json());
            assert_eq!(hand_offs.len(), 1, "{hand_offs:?}");
        }
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

/// A decode leg is not written to a second connection, since its hand-off is used once. An engine may be
/// gone of which a connection was kept: finding that out must not use up the attempts.
#[tokio::test]
async fn a_kept_connection_that_has_ended_takes_none_of_the_attempts() {
    let engine = RawEngine::start(|asked| match asked.before {
        0 => {
            let choice = r#"{"index":0,"text":"a","finish_reason":"length"}"#;
            let usage = r#"{"prompt_tokens":40,"completion_tokens":1,"total_tokens":41}"#;
            let body = format!(r#"{{"choices":[{choice}],"usage":{usage}}}"#);
            Turn::answer(reply(200, "application/json", &body))
        }
        _ => Turn::last(""),
    })
    .await;
    let url = engine.url();
    let worker = format!("{{ id: d9, role: decode, url: \"{url}\", kv_events: none }}");
    let model = "retries: { decode: 0 }";
    let spec = Spec { extra_workers: vec![worker], ..in_turn(0, model) };
    let mut trial = Trial::start(spec).await;
    for turn in 0..3 {
        let body = completion(&prompt(40, &format!("kept{turn}-")));
        let reply = trial.post("ok", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(engine.heard().len(), 5, "two had a further attempt");
    let stale = [("leg", "decode"), ("reason", "stale_connection")];
    assert_eq!(trial.cluster.metric("splitrail_retries_total", &stale).await, 2.0);
}
