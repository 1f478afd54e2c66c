//! `/inference/v1/generate`: token ids in, token ids out, by every way.

use serde_json::{Value, json};
use splitrail_sim::KvConnector;
use splitrail_tests::trial::{COMPLETIONS, GENERATE, generate, generated_ids, token_ids};
use splitrail_tests::{Cluster, Spec, Trial};

/// The token ids that a completion of these token ids has, served by one engine.
async fn expected(ids: &[u32]) -> Vec<u64> {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let body = json!({
        "model": "sim", "prompt": ids, "max_tokens": 12, "temperature": 0, "return_token_ids": true,
    });
    let reply = cluster.http.post(COMPLETIONS, &body).await.json();
    generated_ids(&[reply], 0)
}

#[tokio::test]
async fn a_pair_gives_the_tokens_of_one_engine_streamed_and_not() {
    let ids = token_ids(100, 1);
    let expected = expected(&ids).await;
    let mut trial = Trial::start(Spec::default()).await;
    let reply = trial.post("ok", GENERATE, &generate(&ids)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.route("flow"), Some("prefill_first"));
    let json = reply.json();
    assert_eq!(generated_ids(std::slice::from_ref(&json), 0), expected);
    assert_eq!(json["usage"]["prompt_tokens"], 100);
    assert_eq!(json["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(json["kv_transfer_params"], Value::Null);
    trial.cluster.settle().await;
    let mut events = trial.stream("ok", GENERATE, &generate(&ids)).await;
    let chunks = events.chunks().await;
    assert_eq!(generated_ids(&chunks, 0), expected);
    assert!(chunks.iter().all(|chunk| chunk["usage"].is_null()), "usage was not asked for");
    let mut body = generate(&ids);
    body["stream_options"] = json!({"include_usage": true});
    let chunks = trial.stream("ok", GENERATE, &body).await.chunks().await;
    let usage = &chunks.last().unwrap()["usage"];
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 96);
    assert_eq!(usage["completion_tokens"], 12);
    trial.finish().await;
}

#[tokio::test]
async fn engines_of_sglang_are_not_asked_for_what_they_do_not_offer() {
    for spec in [Spec::default(), Spec::aggregated(1)] {
        let mut trial = Trial::start(Spec { connector: KvConnector::Sglang, ..spec }).await;
        let reply = trial.post("not_offered", GENERATE, &generate(&token_ids(100, 1))).await;
        assert_eq!(reply.status, 404);
        let error = &reply.json()["error"];
        assert_eq!(error["code"], "not_offered");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("SGLang") && message.contains(COMPLETIONS), "{message}");
        let asked = trial.cluster.engines.iter().flat_map(|(_, engine)| engine.requests());
        assert_eq!(asked.filter(|seen| seen.path == GENERATE).count(), 0);
        trial.finish().await;
    }
}

#[tokio::test]
async fn each_leg_is_sent_its_sampling_parameters_and_no_id_of_the_client() {
    let trial = &mut Trial::start(Spec { prefill: 1, decode: 1, ..Spec::default() }).await;
    let mut body = generate(&token_ids(100, 2));
    body["request_id"] = "mine".into();
    body["priority"] = 3.into();
    body["sampling_params"]["extra_args"] = json!({
        "kv_transfer_params": {"do_remote_prefill": true}, "keep": [1.50],
    });
    body["sampling_params"]["min_tokens"] = 2.into();
    assert_eq!(trial.post("ok", GENERATE, &body).await.status, 200);
    let prefill = &trial.asked("p0")[0];
    let decode = &trial.asked("d0")[0];
    assert_eq!(
        prefill.body["sampling_params"],
        json!({"max_tokens": 1, "temperature": 0, "extra_args": {"keep": [1.5]}, "ignore_eos": true})
    );
    assert_eq!(
        decode.body["sampling_params"],
        json!({"max_tokens": 12, "temperature": 0, "extra_args": {"keep": [1.5]}, "min_tokens": 2})
    );
    for leg in [prefill, decode] {
        assert_eq!(leg.path, GENERATE);
        assert_eq!((&leg.body["request_id"], &leg.body["priority"]), (&Value::Null, &Value::Null));
    }
    trial.check().await;
}

#[tokio::test]
async fn mistakes_are_named_before_any_engine_is_asked() {
    let mut trial = Trial::start(Spec::default()).await;
    for (body, param) in [
        (json!({"model": "sim", "sampling_params": {}}), "token_ids"),
        (json!({"model": "sim", "prompt": "x", "sampling_params": {}}), "token_ids"),
        (json!({"model": "sim", "token_ids": [1]}), "sampling_params"),
        (json!({"model": "sim", "token_ids": [1], "sampling_params": {"n": 0}}), "n"),
        (json!({"model": "sim", "token_ids": [[1]], "sampling_params": {}}), "token_ids"),
    ] {
        let reply = trial.post("invalid_request", GENERATE, &body).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["error"]["param"]), (400, &json!(param)));
    }
    assert_eq!(trial.counts(["p0", "p1", "d0", "d1"]), [0; 4]);
    trial.finish().await;
}

#[tokio::test]
async fn a_miss_of_decode_only_is_reported() {
    let spec = Spec { model: "request_flows: [decode_only]".into(), ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    let mut body = generate(&token_ids(100, 4));
    body["sampling_params"]["n"] = 2.into();
    let headers = [("x-splitrail-flow", "decode_only"), ("content-type", "application/json")];
    for stream in [false, true] {
        body["stream"] = stream.into();
        trial.expect("ok");
        let reply = trial.cluster.http.post_with(GENERATE, &headers, body.to_string()).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let replies: Vec<Value> = match stream {
            false => vec![reply.json()],
            true => reply
                .text()
                .lines()
                .filter_map(|line| line.strip_prefix("data: ")?.starts_with('{').then_some(line))
                .map(|line| serde_json::from_str(&line[6..]).unwrap())
                .collect(),
        };
        let choices: Vec<&Value> =
            replies.iter().flat_map(|reply| reply["choices"].as_array().unwrap()).collect();
        assert_eq!(choices.len(), 2);
        for (index, choice) in choices.iter().enumerate() {
            assert_eq!((&choice["index"], &choice["token_ids"]), (&json!(index), &json!([])));
            assert_eq!(choice["finish_reason"], "cache_threshold");
        }
        assert!(replies.iter().all(|reply| reply["request_id"].is_string()));
    }
    trial.finish().await;
}

#[tokio::test]
async fn a_second_turn_goes_to_the_holder() {
    let cluster = Cluster::start(Spec { prefill: 3, decode: 1, ..Spec::default() }).await;
    let ids = token_ids(200, 3);
    let first = cluster.http.post(GENERATE, &generate(&ids)).await;
    cluster.settle().await;
    let holder = first.route("prefill").unwrap().to_owned();
    for _ in 0..3 {
        let again = cluster.http.post(GENERATE, &generate(&ids)).await;
        assert_eq!(again.route("prefill"), Some(holder.as_str()));
        assert_eq!(again.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 192);
    }
    cluster.quiet().await;
}
