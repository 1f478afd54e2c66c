//! What each leg's engine is sent.

use std::collections::HashSet;

use serde_json::{Value, json};
use splitrail_sim::{KvConnector, SimEngine};
use splitrail_tests::Spec;
use splitrail_tests::trial::{COMPLETIONS, Trial, completion, prompt};

use super::{CONNECTORS, known, pd, replace, requests};

#[tokio::test]
async fn fields_that_a_model_opens_travel_in_both_legs_of_every_connector() {
    for connector in CONNECTORS {
        let spec = Spec { model: "pass_unknown: [x_unknown]".into(), ..pd(connector, 1, 1) };
        let mut trial = Trial::start(spec).await;
        for (path, mut body) in requests(connector, 11) {
            body["x_unknown"] = json!({"kept": [1.50, null, "\u{e9}"]});
            assert_eq!(trial.post("ok", path, &body).await.status, 200, "{connector:?}");
        }
        for engine in ["p0", "d0"] {
            let asked = trial.asked(engine);
            assert_eq!(asked.len(), requests(connector, 11).len(), "{connector:?}");
            for request in asked {
                assert_eq!(request.body["x_unknown"], json!({"kept": [1.5, null, "\u{e9}"]}));
            }
        }
        trial.finish().await;
    }
}

#[tokio::test]
async fn shared_storage_adds_nothing() {
    let mut trial = Trial::start(pd(KvConnector::SharedStorage, 1, 1)).await;
    let body = completion(&prompt(40, "plain"));
    trial.post("ok", COMPLETIONS, &body).await;
    let sent = |engine: &str| trial.asked(engine)[0].body.clone();
    assert_eq!(sent("d0"), body);
    let mut cut = body;
    cut["max_tokens"] = 1.into();
    cut["stream"] = false.into();
    cut["ignore_eos"] = true.into();
    assert_eq!(sent("p0"), cut);
    trial.finish().await;
}

#[tokio::test]
async fn sglang_legs_are_the_client_s_request_with_a_room() {
    let mut trial = Trial::start(pd(KvConnector::Sglang, 1, 1)).await;
    let mut body = completion(&prompt(40, "room"));
    body["min_tokens"] = 3.into();
    body["stop"] = json!(["never"]);
    body["seed"] = 5.into();
    trial.post("ok", COMPLETIONS, &body).await;
    trial.stream("ok", COMPLETIONS, &body).await.chunks().await;
    let (prefill, decode) = (trial.asked("p0"), trial.asked("d0"));
    assert_eq!((prefill.len(), decode.len()), (2, 2));
    for (prefill, decode) in prefill.iter().zip(&decode) {
        for key in ["prompt", "max_tokens", "min_tokens", "stop", "seed", "temperature"] {
            assert_eq!(prefill.body[key], body[key], "{key}");
            assert_eq!(decode.body[key], body[key], "{key}");
        }
        for key in ["bootstrap_host", "bootstrap_port", "bootstrap_room"] {
            assert_eq!(prefill.body[key], decode.body[key]);
        }
        assert!(prefill.body["bootstrap_room"].as_i64().unwrap() >= 0);
        assert_eq!(prefill.body["stream"], false);
        assert!(prefill.body["stream_options"].is_null());
        assert_eq!(prefill.header("x-request-id"), decode.header("x-request-id"));
    }
    trial.finish().await;
}

#[tokio::test]
async fn transfer_ids_are_the_routers_and_never_repeat() {
    const REQUESTS: usize = 60;
    for (connector, name) in
        [(KvConnector::Mooncake, "transfer_id"), (KvConnector::Sglang, "bootstrap_room")]
    {
        let mut trial = Trial::start(pd(connector, 2, 2)).await;
        for turn in 0..REQUESTS {
            let mut body = completion(&prompt(10, &format!("id{turn}z")));
            body["kv_transfer_params"] = json!({"transfer_id": "mine", "do_remote_decode": true});
            body["bootstrap_room"] = 7.into();
            assert_eq!(trial.post("ok", COMPLETIONS, &body).await.status, 200);
        }
        let name_in = |request: &Value| match connector {
            KvConnector::Mooncake => request["kv_transfer_params"][name].to_string(),
            _ => request[name].to_string(),
        };
        let mut legs = [HashSet::new(), HashSet::new()];
        for (leg, engines) in [["p0", "p1"], ["d0", "d1"]].iter().enumerate() {
            let names = engines.iter().flat_map(|engine| trial.asked(engine));
            legs[leg].extend(names.map(|request| name_in(&request.body)));
        }
        assert_eq!(legs[0].len(), REQUESTS);
        assert_eq!(legs[0], legs[1]);
        assert!(legs[0].iter().all(|name| !["\"mine\"", "7"].contains(&name.as_str())));
        trial.finish().await;
    }
}

fn queries(engine: &SimEngine) -> usize {
    engine.requests().iter().filter(|request| request.path == "/query").count()
}

#[tokio::test]
async fn a_bootstrap_server_is_asked_once_until_its_engine_is_another() {
    // The engine comes back on the same ports, with another id.
    let mut trial = Trial::start(pd(KvConnector::Mooncake, 1, 1)).await;
    for turn in 0..5 {
        let body = completion(&prompt(30, &format!("ask{turn}z")));
        assert_eq!(trial.post("ok", COMPLETIONS, &body).await.status, 200);
    }
    assert_eq!(queries(trial.cluster.engine("p0")), 1);
    replace(&mut trial.cluster, "p0").await;
    known(&trial.cluster, "p0", 1.0).await;
    let body = completion(&prompt(30, "after"));
    let reply = trial.post("ok", COMPLETIONS, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.route("prefill"), Some("p0"), "{:?}", reply.headers);
    assert_eq!(queries(trial.cluster.engine("p0")), 1);
    trial.finish().await;
}

#[tokio::test]
async fn concurrent_requests_ask_a_bootstrap_server_once() {
    let trial = Trial::start(pd(KvConnector::Mooncake, 1, 2)).await;
    let bodies: Vec<Value> =
        (0..12).map(|turn| completion(&prompt(30, &format!("many{turn}z")))).collect();
    let http = &trial.cluster.http;
    let replies = bodies.iter().map(|body| http.post(COMPLETIONS, body));
    for reply in futures_util::future::join_all(replies).await {
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(queries(trial.cluster.engine("p0")), 1);
    trial.staged_blocks_are_freed().await;
}

#[tokio::test]
async fn without_a_bootstrap_server_nothing_is_handed_over() {
    let spec = Spec { model: "on_no_prefill: fail".into(), ..pd(KvConnector::Mooncake, 1, 1) };
    let mut trial = Trial::start(spec).await;
    // Its bootstrap server goes with it; the engine's own port does not answer either.
    let place = trial.cluster.engines.iter().position(|(name, _)| name == "p0").unwrap();
    trial.cluster.engines.remove(place).1.shutdown().await;
    let body = completion(&prompt(30, "gone"));
    let reply = trial.post("no_worker", COMPLETIONS, &body).await;
    assert_eq!(reply.status, 503, "{}", reply.text());
    assert_eq!(trial.counts(["d0"]), [0]);
    trial.finish().await;
}
