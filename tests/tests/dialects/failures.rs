//! What goes wrong before an answer shows is tried elsewhere, and what goes wrong after it is
//! said in the dialect's own error event. Promise 25.

use splitrail_sim::FaultKind;

use crate::support::*;

fn in_turn() -> Spec {
    Spec { policy: "{ kind: round_robin }", ..Spec::default() }
}

#[tokio::test]
async fn p25_what_fails_before_the_first_text_is_tried_elsewhere_and_nobody_sees_it() {
    let alone = Cluster::start(Spec::aggregated(1)).await;
    let faults = [
        ("p0", FaultKind::Status { status: 500 }),
        ("p0", FaultKind::NoHandoff),
        ("p0", FaultKind::TruncatedBody),
        ("p0", FaultKind::RefusePulls),
        ("d0", FaultKind::Status { status: 503 }),
        ("d0", FaultKind::Reset),
        ("d0", FaultKind::DieMidStream { after_chunks: 0 }),
        ("d0", FaultKind::DieMidStream { after_chunks: 1 }),
    ];
    for path in BOTH {
        let keys = "breaker: { failures: 0 }\nretries: { prefill: 3, decode: 3 }";
        let spec =
            Spec { model: keys.into(), engine: |_, config| config.lease_ms = 1_000, ..in_turn() };
        let mut trial = Trial::start(spec).await;
        for (turn, (engine, fault)) in faults.iter().cycle().take(2 * faults.len()).enumerate() {
            let text = prompt(30, &format!("f{turn}{}", &path[4..6]));
            let (expected, _) = ask(&alone.http, path, &request(path, &text, 9)).await;
            trial.fault(engine, fault.clone(), Some(1));
            trial.expect("ok");
            let body = streamed(&request(path, &text, 9));
            let (said, usage) = ask(&trial.cluster.http, path, &body).await;
            assert_eq!(said, expected, "{path} {fault:?}");
            assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0, "{path} {fault:?}");
            trial.cluster.engine(engine).clear_faults();
        }
        assert!(trial.retries("prefill").await > 0.0, "no fault was met");
        assert!(trial.retries("decode").await > 0.0, "no fault was met");
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn p25_a_stream_that_breaks_off_ends_with_the_dialect_s_error_event() {
    let mut trial = Trial::start(in_turn()).await;
    for path in BOTH {
        for _ in 0..2 {
            trial.fault("d0", FaultKind::DieMidStream { after_chunks: 6 }, None);
            trial.fault("d1", FaultKind::DieMidStream { after_chunks: 6 }, None);
            let body = request(path, &prompt(30, path), 20);
            let events = trial.stream("decode_lost", path, &body).await.named().await;
            assert_eq!(events.len(), 7, "what came is passed on: {events:?}");
            let (name, error) = events.last().unwrap();
            assert_eq!((name.as_str(), &error["type"]), ("error", &json!("error")));
            assert_eq!(error["error"]["code"], "decode_lost", "{error}");
            let message = error["error"]["message"].as_str().unwrap();
            assert!(message.starts_with("the answer broke off"), "{message}");
            if path == RESPONSES {
                assert_eq!(
                    (&error["code"], &error["message"]),
                    (&json!("decode_lost"), &json!(message))
                );
            } else {
                assert_eq!(error["error"]["type"], "api_error");
            }
        }
    }
    trial.finish().await;
}

#[tokio::test]
async fn p25_an_end_without_the_last_event_is_not_taken_for_the_end() {
    for path in BOTH {
        let mut trial = Trial::start(Spec::aggregated(1)).await;
        let body = request(path, &prompt(10, "end"), 3);
        let all = trial.stream("ok", path, &body).await.named().await.len();
        trial.fault("w0", FaultKind::DieMidStream { after_chunks: all - 1 }, Some(1));
        let events = trial.stream("decode_lost", path, &body).await.named().await;
        assert_eq!(events.len(), all);
        assert_eq!(events.last().unwrap().0, "error");
        trial.finish().await;
    }
}

#[tokio::test]
async fn p26_a_client_that_leaves_frees_everything() {
    for path in BOTH {
        let spec =
            Spec { engine: |_, config| config.decode_us_per_step = 20_000, ..Spec::default() };
        let mut trial = Trial::start(spec).await;
        let body = streamed(&request(path, &prompt(30, "leave"), 400));
        trial.expect("cancelled");
        let mut events = trial.cluster.http.stream(path, &body).await;
        assert!(events.first_bytes().await.starts_with("event: "));
        drop(events);
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_message_that_ends_with_its_first_token_has_no_hand_off_and_is_served_all_the_same() {
    // A prefill leg cannot be asked to go on past an end: messages have no member for that.
    let spec = Spec { engine: |_, config| config.eos_one_in = 1, ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    for (path, ended) in [(MESSAGES, 1.0), (RESPONSES, 1.0)] {
        let reply = trial.post("ok", path, &request(path, &prompt(20, path), 9)).await;
        assert_eq!(reply.route("local"), (path == MESSAGES).then_some("prefill_ended"));
        let usage = in_chat_words(path, &reply.json()["usage"]);
        assert_eq!(usage["completion_tokens"], 1);
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
        let labels = [("reason", "prefill_ended")];
        let counted = trial.cluster.metric("splitrail_local_prefills_total", &labels).await;
        assert_eq!(counted, ended);
    }
    trial.finish().await;
}

#[tokio::test]
async fn an_engine_that_has_no_place_for_a_hand_off_is_not_blamed_for_it() {
    let spec = Spec {
        prefill: 1,
        decode: 1,
        engine: |_, config| config.lease_ms = 500,
        ..Spec::default()
    };
    let mut trial = Trial::start(spec).await;
    // A message's reply leaves out what is null, and so has no member for it at all.
    for (path, local) in [(MESSAGES, "no_hand_off"), (RESPONSES, "no_prefill")] {
        trial.fault("p0", FaultKind::NoHandoff, Some(1));
        let reply = trial.post("ok", path, &request(path, &prompt(30, path), 9)).await;
        assert_eq!((reply.status.as_u16(), reply.route("local")), (200, Some(local)));
        let usage = in_chat_words(path, &reply.json()["usage"]);
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    }
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}
