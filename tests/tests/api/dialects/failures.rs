//! A failure before the first text of a reply is retried on another worker; a failure after it is
//! reported in the error event of the dialect.

use splitrail_sim::FaultKind;

use super::support::*;

fn in_turn() -> Spec {
    Spec { policy: "{ kind: round_robin }", ..Spec::default() }
}

#[tokio::test]
async fn a_failure_before_the_first_text_is_retried_and_the_client_sees_nothing() {
    let alone = Cluster::start(Spec::aggregated(1)).await;
    let faults = [
        ("p0", FaultKind::Status { status: 500 }),
        ("p0", FaultKind::NoHandOff),
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
        // Who has handed over and then does not is asked again, like whoever fails.
        for engine in ["p0", "p1"] {
            let reply = trial.post("ok", path, &request(path, &prompt(30, engine), 9)).await;
            assert_eq!(reply.route("prefill"), Some(engine), "{path}");
        }
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
async fn a_broken_stream_ends_with_the_error_event_of_its_dialect() {
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
            assert!(message.starts_with("the reply broke off"), "{message}");
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
async fn a_stream_without_its_last_event_is_an_error() {
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
async fn a_client_that_leaves_frees_everything() {
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
        trial.fault("p0", FaultKind::NoHandOff, Some(1));
        let reply = trial.post("ok", path, &request(path, &prompt(30, path), 9)).await;
        assert_eq!((reply.status.as_u16(), reply.route("local")), (200, Some(local)));
        let usage = in_chat_words(path, &reply.json()["usage"]);
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    }
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

/// Prefill engines of a release that knows hand-offs in chats alone.
fn without_names(name: &str, config: &mut splitrail_sim::SimConfig) {
    config.names_hand_offs = !name.starts_with('p');
}

#[tokio::test]
async fn one_prefill_finds_out_for_all_requests_that_hand_offs_are_missing() {
    const REQUESTS: usize = 12;
    for flow in ["prefill_first", "decode_first"] {
        let spec = Spec { prefill: 1, flow, engine: without_names, ..in_turn() };
        let mut trial = Trial::start(spec).await;
        for path in BOTH {
            let before = trial.counts(["p0"])[0];
            for turn in 0..REQUESTS {
                let body = request(path, &prompt(30, &format!("n{turn}{}", &path[4..6])), 9);
                let reply = trial.post("ok", path, &body).await;
                assert_eq!(reply.route("local"), Some("no_hand_off"), "{path} {turn}");
                assert_eq!(reply.route("prefill"), None, "{path} {turn}");
                assert_eq!(reply.route("flow"), Some("aggregated"), "{path} {turn}");
            }
            assert_eq!(trial.counts(["p0"])[0] - before, 1, "{path} prefilled in vain");
        }
        let labels = [("reason", "no_hand_off")];
        let counted = trial.cluster.metric("splitrail_local_prefills_total", &labels).await;
        assert_eq!(counted, 2.0 * REQUESTS as f64);
        // Of chats nothing was seen, and they go as before.
        let chat = chat_of(&prompt(30, "chat"), 9);
        assert_eq!(trial.post("ok", CHAT, &chat).await.route("prefill"), Some("p0"));
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_worker_from_which_no_hand_off_comes_is_passed_over_for_one_from_which_it_does() {
    let spec = Spec {
        engine: |name, config| config.names_hand_offs = name != "p0",
        model: "on_no_prefill: fail".into(),
        ..in_turn()
    };
    let mut trial = Trial::start(spec).await;
    for turn in 0..8 {
        let body = request(MESSAGES, &prompt(30, &format!("m{turn}")), 9);
        let reply = trial.post("ok", MESSAGES, &body).await;
        let both_ways = [(Some("no_hand_off"), None), (None, Some("p1"))];
        let way = (reply.route("local"), reply.route("prefill"));
        assert!(both_ways.contains(&way), "{way:?}");
    }
    assert_eq!(trial.counts(["p0"]), [1]);
    let admin = &trial.cluster.admin;
    let workers = admin.get("/admin/workers").await.json();
    let workers = workers["workers"].as_array().unwrap();
    let of = |id: &str| &workers.iter().find(|worker| worker["id"] == id).unwrap()["no_hand_off"];
    assert_eq!((of("p0"), of("p1")), (&json!(["messages"]), &json!([])));

    let body = request(MESSAGES, &prompt(30, "explained"), 9);
    let json = [("content-type", "application/json")];
    let told = admin.post_with("/admin/explain?endpoint=/v1/messages", &json, body.to_string());
    let told = told.await.json();
    let told = &told["explanation"]["prompts"][0];
    assert_eq!((&told["local_reason"], &told["steps"][0]["chosen"]), (&Value::Null, &json!("p1")));
    let vetoed = told["steps"][0]["vetoed"].as_array().unwrap();
    assert!(vetoed.contains(&json!({"worker": "p0", "reasons": ["no_hand_off"]})), "{vetoed:?}");

    // Nobody is left from whom one would come: as if it had been tried.
    trial.fault("p1", FaultKind::Status { status: 500 }, None);
    let reply = trial.post("ok", MESSAGES, &body).await;
    assert_eq!((reply.status.as_u16(), reply.route("local")), (200, Some("no_hand_off")));
    trial.finish().await;
}

#[tokio::test]
async fn missing_hand_offs_of_an_engine_are_forgotten_with_its_process() {
    let spec = Spec { prefill: 1, engine: without_names, ..in_turn() };
    let mut trial = Trial::start(spec).await;
    let mut asked = Vec::new();
    for turn in 0..4 {
        let body = request(MESSAGES, &prompt(30, &format!("a{turn}")), 9);
        assert_eq!(trial.post("ok", MESSAGES, &body).await.route("local"), Some("no_hand_off"));
        asked.extend(trial.counts(["p0"]));
        if turn == 1 {
            let core = &trial.cluster.running.core;
            let roster = core.serving().models[0].pool.roster();
            roster.iter().for_each(|worker| worker.becomes_another());
        }
    }
    assert_eq!(asked, [1, 1, 2, 2]);
    trial.finish().await;
}
