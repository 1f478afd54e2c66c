//! What generates nothing: embeddings, texts to tokens and back, and how long a prompt is. One
//! worker does it whole.

use serde_json::{Value, json};
use splitrail_sim::{FaultKind, RecordedRequest};
use splitrail_tests::client::{Client, Reply};
use splitrail_tests::cluster::eventually;
use splitrail_tests::dialect::{MESSAGES, in_chat_words};
use splitrail_tests::ports::HeldPort;
use splitrail_tests::trial::{COMPLETIONS, Trial, completion, error_of, prompt};
use splitrail_tests::{Cluster, Spec};

const EMBEDDINGS: &str = "/v1/embeddings";
const TOKENIZE: &str = "/tokenize";
const DETOKENIZE: &str = "/detokenize";
const COUNT_TOKENS: &str = "/v1/messages/count_tokens";

/// So many engines that embed, and take turns.
fn embedding(workers: usize) -> Spec {
    Spec {
        policy: "{ kind: round_robin }",
        engine: |_, config| config.embeds = true,
        ..Spec::aggregated(workers)
    }
}

fn input(input: impl Into<Value>) -> Value {
    json!({"model": "sim", "input": input.into()})
}

/// A request for the length of a message's prompt.
fn counted(messages: Value) -> Value {
    json!({"model": "sim", "system": "Be brief.", "messages": messages})
}

/// The requests that an engine got at a path.
fn asked(trial: &Trial, engine: &str, path: &str) -> Vec<RecordedRequest> {
    let requests = trial.cluster.engine(engine).requests();
    requests.into_iter().filter(|request| request.path == path).collect()
}

fn counts<const N: usize>(trial: &Trial, engines: [&str; N], path: &str) -> [usize; N] {
    engines.map(|engine| asked(trial, engine, path).len())
}

/// The same request, to the engine itself.
async fn directly(trial: &Trial, engine: &str, path: &str, body: &Value) -> Reply {
    let url = trial.cluster.engine(engine).url();
    let address = url.strip_prefix("http://").unwrap().parse().unwrap();
    Client::new(address).post(path, body).await
}

#[tokio::test]
async fn embeddings_of_every_form_are_the_engines_own() {
    let trial = &mut Trial::start(embedding(1)).await;
    for (given, vectors, tokens) in [
        (json!("hello"), 1, 5),
        (json!(["a", "bc"]), 2, 3),
        (json!([7, 8, 9]), 1, 3),
        (json!([[7, 8], [9]]), 2, 3),
    ] {
        for format in [None, Some("float"), Some("base64")] {
            let mut body = input(given.clone());
            body["dimensions"] = 4.into();
            body["encoding_format"] = format.map_or(Value::Null, Into::into);
            let reply = trial.post("ok", EMBEDDINGS, &body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
            let (told, own) = (reply.json(), directly(trial, "w0", EMBEDDINGS, &body).await.json());
            assert_eq!((&told["data"], &told["usage"]), (&own["data"], &own["usage"]), "{body}");
            assert_eq!(told["data"].as_array().unwrap().len(), vectors);
            assert_eq!(told["data"][0]["embedding"].is_string(), format == Some("base64"));
            assert_eq!(told["usage"]["prompt_tokens"], tokens);
            assert_eq!(told["usage"]["prompt_tokens_details"], Value::Null, "none are cached");
        }
    }
    trial.check().await;
}

#[tokio::test]
async fn an_engine_gets_what_the_client_wrote_without_what_is_not_its_business() {
    let spec = Spec { model: "adapters: [my-lora]".into(), ..embedding(1) };
    let trial = &mut Trial::start(Spec {
        engine: |_, config| (config.embeds, config.adapters) = (true, vec!["my-lora".into()]),
        ..spec
    })
    .await;
    let further = r#""user": {"a" : 1.50, "b":"\u00e9"}"#;
    for (name, known_as) in [("default", "sim"), ("sim", "sim"), ("my-lora", "my-lora")] {
        trial.expect("ok");
        let body = format!(
            r#"{{"input":"x","model":"{name}",{further},"kv_transfer_params":{{"do_remote_prefill":
            true}},"request_id":"mine","rid":"mine","cache_hit_threshold":0.5}}"#
        );
        let headers = [("x-splitrail-flow", "aggregated"), ("x-request-id", "mine")];
        let reply = trial.cluster.http.post_with(EMBEDDINGS, &headers, body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.header("x-request-id"), "mine");
        assert_eq!((reply.route("flow"), reply.route("decode")), (Some("aggregated"), Some("w0")));
        assert_eq!((reply.route("cached_tokens"), reply.route("prefill")), (None, None));
        assert!(reply.header("server-timing").contains("first_token"));
        let seen = asked(trial, "w0", EMBEDDINGS).pop().unwrap();
        let expected = json!({"input": "x", "model": known_as, "user": {"a": 1.5, "b": "é"}});
        assert_eq!(seen.body, expected);
        assert_ne!(seen.header("x-request-id"), Some("mine"));
    }
    trial.check().await;
}

#[tokio::test]
async fn the_tokens_of_embeddings_are_in_the_books_and_none_of_them_is_cached() {
    let trial = &mut Trial::start(embedding(1)).await;
    for _ in 0..2 {
        trial.post("ok", EMBEDDINGS, &input(prompt(20, "a"))).await;
    }
    let headers = [("x-splitrail-usage", "detail"), ("x-request-id", "detailed")];
    trial.expect("ok");
    let body = input("hello").to_string();
    let reply = trial.cluster.http.post_with(EMBEDDINGS, &headers, body).await.json();
    let detail = &reply["usage"]["splitrail"]["prompts"][0];
    assert_eq!(detail["prompt_tokens"], 5, "{reply}");
    let tokens = prompt(20, "a").len() * 2 + 5;
    let metric = async |name: &str, labels: &[(&str, &str)]| {
        trial.cluster.metric(&format!("splitrail_{name}"), labels).await as usize
    };
    let computed = [("leg", "decode"), ("source", "local_compute")];
    assert_eq!(metric("prompt_tokens_total", &computed).await, tokens);
    assert_eq!(metric("prompt_tokens_total", &[]).await, tokens);
    assert_eq!(metric("requests_total", &[("endpoint", "embeddings")]).await, 3);
    for none in [
        "cached_tokens_total",
        "prefix_cache_requests_total",
        "generation_tokens_total",
        "ttft_seconds_count",
        "untokenized_prompts_total",
    ] {
        assert_eq!(metric(none, &[]).await, 0, "{none}");
    }
    let decision = &trial.cluster.decisions("detailed").await[0];
    assert_eq!(decision["outcome"], "ok");
    assert_eq!(decision["decode_worker"], "w0");
    assert_eq!(decision["candidates"][0]["worker"], "w0");
    trial.check().await;
}

#[tokio::test]
async fn mistakes_in_auxiliary_requests_are_named_before_an_engine_is_asked() {
    let limits = "{ drain_delay: 1ms, embedding_inputs_max: 2, body_size_max: 4096 }";
    let trial = &mut Trial::start(Spec { limits, ..embedding(1) }).await;
    for (path, body, param) in [
        (EMBEDDINGS, json!({"input": "x"}), "model"),
        (EMBEDDINGS, json!({"model": "sim"}), "input"),
        (EMBEDDINGS, input(json!([])), "input"),
        (EMBEDDINGS, input(json!(["a", 1])), "input"),
        (EMBEDDINGS, input(json!(["a", "b", "c"])), "input"),
        (
            EMBEDDINGS,
            json!({"model": "sim", "input": "x", "encoding_format": "bytes"}),
            "encoding_format",
        ),
        (EMBEDDINGS, json!({"model": "sim", "input": "x", "dimensions": 0}), "dimensions"),
        (TOKENIZE, json!({"model": "sim"}), "prompt"),
        (TOKENIZE, json!({"prompt": 5}), "prompt"),
        (DETOKENIZE, json!({"tokens": "1"}), "tokens"),
    ] {
        let reply = trial.post("invalid_request", path, &body).await;
        assert_eq!(
            (reply.status.as_u16(), &error_of(&reply.json())["param"]),
            (400, &json!(param))
        );
    }
    let reply = trial.post("model_not_found", TOKENIZE, &json!({"model": "x", "prompt": ""})).await;
    assert_eq!(reply.status, 404);
    let reply = trial.post("body_too_large", EMBEDDINGS, &input("x".repeat(5000))).await;
    assert_eq!(reply.status, 413);
    for path in [EMBEDDINGS, TOKENIZE, DETOKENIZE] {
        assert_eq!(counts(trial, ["w0"], path), [0]);
    }
    trial.check().await;
}

#[tokio::test]
async fn a_refusal_by_the_engine_is_relayed_and_not_retried() {
    let trial = &mut Trial::start(embedding(2)).await;
    let mut body = input("x");
    body["dimensions"] = 99.into();
    let reply = trial.post("engine_rejected", EMBEDDINGS, &body).await;
    let error = reply.json();
    let error = error_of(&error);
    assert_eq!((reply.status.as_u16(), &error["param"]), (400, &json!("dimensions")));
    assert!(error["message"].as_str().unwrap().contains("16 dimensions"));
    let [one, other] = counts(trial, ["w0", "w1"], EMBEDDINGS);
    assert_eq!(one + other, 1);
    trial.check().await;
}

#[tokio::test]
async fn a_worker_that_fails_is_replaced_and_then_left_alone() {
    let model = "timeouts: { reply: 3s }\nbreaker: { failures: 3, cooldown: 60s }";
    let trial = &mut Trial::start(Spec { model: model.into(), ..embedding(2) }).await;
    for fault in [
        FaultKind::Status { status: 500 },
        FaultKind::Status { status: 502 },
        FaultKind::Reset,
        FaultKind::Hang,
    ] {
        trial.fault("w0", fault.clone(), Some(1));
        for _ in 0..2 {
            let reply = trial.post("ok", EMBEDDINGS, &input("x")).await;
            assert_eq!(reply.status, 200, "{fault:?}: {}", reply.text());
        }
    }
    assert_eq!(trial.retries("decode").await, 4.0);
    trial.fault("w0", FaultKind::Status { status: 500 }, None);
    for _ in 0..8 {
        trial.post("ok", EMBEDDINGS, &input("x")).await;
    }
    let before = counts(trial, ["w0"], EMBEDDINGS);
    for _ in 0..4 {
        assert_eq!(trial.post("ok", EMBEDDINGS, &input("x")).await.route("decode"), Some("w1"));
    }
    assert_eq!(counts(trial, ["w0"], EMBEDDINGS), before);
    trial.check().await;
}

#[tokio::test]
async fn an_auxiliary_request_whose_client_leaves_frees_everything() {
    let trial = &mut Trial::start(embedding(1)).await;
    trial.fault("w0", FaultKind::Hang, Some(1));
    trial.expect("cancelled");
    let client = trial.cluster.http.clone();
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move { client.post(EMBEDDINGS, &input("x")).await });
    eventually("the engine has it", async || counts(trial, ["w0"], EMBEDDINGS) == [1]).await;
    tasks.shutdown().await;
    trial.check().await;
}

#[tokio::test]
async fn a_drain_waits_for_them() {
    let limits = "{ drain_delay: 1ms, drain_grace: 20s }";
    let Cluster { running, http, engines, .. } =
        Cluster::start(Spec { limits, ..embedding(1) }).await;
    let slow = FaultKind::SlowFirstByte { delay_ms: 300 };
    engines[0].1.set_fault(splitrail_sim::Fault { kind: slow, times: None });
    let core = running.core.clone();
    let body = input("x");
    let (cut, reply) = tokio::join!(
        async {
            eventually("it is in flight", async || core.live.len() == 1).await;
            running.drain().await
        },
        http.post(EMBEDDINGS, &body)
    );
    assert_eq!((cut, reply.status.as_u16()), (0, 200));
}

#[tokio::test]
async fn a_worker_that_is_drained_is_spared() {
    let trial = &mut Trial::start(embedding(2)).await;
    let drained = trial.cluster.admin.post("/admin/workers/w0/drain", &json!({})).await;
    assert_eq!(drained.status, 200);
    for (path, body) in [(EMBEDDINGS, input("x")), (TOKENIZE, json!({"prompt": "x"}))] {
        for _ in 0..3 {
            assert_eq!(trial.post("ok", path, &body).await.route("decode"), Some("w1"));
        }
    }
    trial.check().await;
}

#[tokio::test]
async fn engines_that_generate_have_no_embeddings_and_are_not_held_at_fault() {
    let model = "breaker: { failures: 1, cooldown: 60s }\nretries: { decode: 0 }";
    let trial = &mut Trial::start(Spec { model: model.into(), ..Spec::default() }).await;
    for _ in 0..3 {
        let reply = trial.post("not_offered", EMBEDDINGS, &input("x")).await;
        let error = reply.json();
        let error = error_of(&error);
        assert_eq!((reply.status.as_u16(), &error["code"]), (404, &json!("not_offered")));
        assert_eq!(error["type"], "not_found_error");
        assert!(error["message"].as_str().unwrap().contains("/v1/embeddings"), "{error}");
    }
    // Each has said so once, and needed no retry for it.
    assert_eq!(counts(trial, ["p0", "p1", "d0", "d1"], EMBEDDINGS), [1; 4]);
    assert_eq!(trial.retries("decode").await, 0.0);
    assert_eq!(trial.cluster.metric("splitrail_worker_breaker_open", &[]).await, 0.0);
    let reply = trial.post("ok", COMPLETIONS, &completion(&prompt(30, "a"))).await;
    assert_eq!((reply.status.as_u16(), reply.route("flow")), (200, Some("prefill_first")));
    trial.check().await;
}

#[tokio::test]
async fn auxiliary_requests_go_to_workers_that_support_their_endpoint() {
    let spec = Spec { engine: |name, config| config.embeds = name == "w2", ..embedding(3) };
    let trial = &mut Trial::start(spec).await;
    for _ in 0..4 {
        let reply = trial.post("ok", EMBEDDINGS, &input("x")).await;
        assert_eq!((reply.status.as_u16(), reply.route("decode")), (200, Some("w2")));
    }
    let [one, other] = counts(trial, ["w0", "w1"], EMBEDDINGS);
    assert!(one <= 1 && other <= 1, "{one} {other}");
    trial.check().await;
}

#[tokio::test]
async fn tokens_and_texts_are_the_engines_own_byte_for_byte() {
    let trial = &mut Trial::start(Spec::default()).await;
    let messages = json!([{"role": "user", "content": "hé"}]);
    for (path, body) in [
        (
            TOKENIZE,
            json!({"model": "sim", "prompt": "hello <|im_end|>", "return_token_strs": true}),
        ),
        (TOKENIZE, json!({"model": "sim", "messages": messages})),
        (TOKENIZE, json!({"prompt": ""})),
        (DETOKENIZE, json!({"model": "sim", "tokens": [107, 104, 0, 111]})),
        (DETOKENIZE, json!({"tokens": []})),
    ] {
        let reply = trial.post("ok", path, &body).await;
        let own = directly(trial, "d0", path, &body).await;
        assert_eq!((reply.status.as_u16(), &reply.body), (200, &own.body), "{body}");
        assert!(["d0", "d1"].contains(&reply.route("decode").unwrap()), "those that generate");
    }
    for (metric, count) in [
        ("splitrail_prompt_tokens_total", 0.0),
        ("splitrail_ttft_seconds_count", 0.0),
        ("splitrail_prefix_cache_requests_total", 0.0),
        ("splitrail_requests_total", 5.0),
    ] {
        assert_eq!(trial.cluster.metric(metric, &[]).await, count, "{metric}");
    }
    trial.check().await;
}

#[tokio::test]
async fn a_message_s_tokens_are_counted_as_it_will_be_served() {
    let trial = &mut Trial::start(Spec::default()).await;
    let body = counted(json!([
        {"role": "user", "content": "h\u{e9}llo"},
        {"role": "assistant", "content": [{"type": "text", "text": "so"}]},
        {"role": "user", "content": prompt(20, "a")},
    ]));
    let reply = trial.post("ok", COUNT_TOKENS, &body).await;
    let own = directly(trial, "d0", COUNT_TOKENS, &body).await;
    assert_eq!((reply.status.as_u16(), &reply.body), (200, &own.body));
    assert_eq!(reply.route("flow"), Some("aggregated"));
    assert!(["d0", "d1"].contains(&reply.route("decode").unwrap()));
    for (metric, count) in [
        ("splitrail_requests_total", 1.0),
        ("splitrail_ttft_seconds_count", 0.0),
        ("splitrail_untokenized_prompts_total", 0.0),
    ] {
        assert_eq!(trial.cluster.metric(metric, &[]).await, count, "{metric}");
    }
    let mut message = body.clone();
    message["max_tokens"] = 3.into();
    let message = trial.post("ok", MESSAGES, &message).await.json();
    let usage = in_chat_words(MESSAGES, &message["usage"]);
    assert_eq!(reply.json(), json!({"input_tokens": usage["prompt_tokens"]}), "{message}");

    // What only the router may say does not get through, and nobody else's header either.
    let mut meddling = body.clone();
    meddling["kv_transfer_params"] = json!({"do_remote_prefill": true});
    meddling["request_id"] = "mine".into();
    meddling["cache_hit_threshold"] = 0.5.into();
    let headers = [("x-request-id", "mine"), ("x-api-key", "secret")];
    trial.expect("ok");
    let reply = trial.cluster.http.post_with(COUNT_TOKENS, &headers, meddling.to_string()).await;
    assert_eq!((reply.status.as_u16(), reply.header("x-request-id")), (200, "mine"));
    let seen = ["d0", "d1"].map(|engine| asked(trial, engine, COUNT_TOKENS)).concat();
    assert!(seen.iter().all(|seen| seen.body == body), "{seen:?}");
    assert!(seen.iter().all(|seen| seen.header("x-api-key").is_none()));
    assert!(seen.iter().all(|seen| seen.header("x-request-id") != Some("mine")));
    trial.check().await;
}

#[tokio::test]
async fn mistakes_in_a_token_count_are_reported_in_anthropics_format() {
    let trial = &mut Trial::start(Spec::aggregated(1)).await;
    let good = counted(json!([{"role": "user", "content": "x"}]));
    for (key, value, outcome, status, kind) in [
        ("model", Value::Null, "invalid_request", 400, "invalid_request_error"),
        ("model", json!("x"), "model_not_found", 404, "not_found_error"),
        ("messages", json!("x"), "invalid_request", 400, "invalid_request_error"),
        // What the engine refuses is in its words.
        ("messages", json!([{"role": "nobody"}]), "engine_rejected", 400, "invalid_request_error"),
    ] {
        let mut body = good.clone();
        body[key] = value;
        let reply = trial.post(outcome, COUNT_TOKENS, &body).await;
        let error = reply.json();
        assert_eq!((reply.status.as_u16(), &error["type"]), (status, &json!("error")), "{error}");
        assert_eq!(error["error"]["type"], kind, "{error}");
    }
    trial.check().await;
}

#[tokio::test]
async fn a_prefill_worker_tokenises_if_no_other_worker_is_up() {
    let nobody = HeldPort::take();
    let spec = Spec {
        prefill: 1,
        decode: 0,
        extra_workers: vec![nobody.worker("dead", "decode")],
        ..Spec::default()
    };
    let trial = &mut Trial::start(spec).await;
    for _ in 0..3 {
        let reply = trial.post("ok", TOKENIZE, &json!({"prompt": "x"})).await;
        assert_eq!((reply.status.as_u16(), reply.route("prefill")), (200, Some("p0")));
    }
    trial.check().await;
}

#[tokio::test]
async fn without_a_tokenizer_endpoint_that_is_said() {
    let spec = Spec { engine: |_, config| config.offers_tokenize = false, ..Spec::aggregated(2) };
    let trial = &mut Trial::start(spec).await;
    for (path, body) in [
        (TOKENIZE, json!({"prompt": "x"})),
        (DETOKENIZE, json!({"tokens": [9]})),
        (COUNT_TOKENS, counted(json!([{"role": "user", "content": "x"}]))),
    ] {
        for _ in 0..2 {
            let reply = trial.post("not_offered", path, &body).await;
            assert_eq!(reply.status, 404, "{}", reply.text());
            assert_eq!(reply.json()["error"]["code"], "not_offered", "{}", reply.text());
        }
        assert_eq!(counts(trial, ["w0", "w1"], path), [1, 1], "each has said so once");
    }
    trial.check().await;
}

#[tokio::test]
async fn auxiliary_requests_can_be_explained() {
    let cluster = Cluster::start(embedding(2)).await;
    let headers = [("content-type", "application/json")];
    let ask = async |query: &str, body: Value| {
        let path = format!("/admin/explain{query}");
        let reply = cluster.admin.post_with(&path, &headers, body.to_string()).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()["explanation"].clone()
    };
    for (query, body, endpoint) in [
        ("?endpoint=/v1/embeddings", input("x"), "embeddings"),
        ("?endpoint=/tokenize", json!({"prompt": "x"}), "tokenize"),
        ("", json!({"tokens": [1]}), "detokenize"),
        ("?endpoint=/v1/messages/count_tokens", counted(json!([])), "count_tokens"),
    ] {
        let told = ask(query, body).await;
        assert_eq!(told["endpoint"], endpoint);
        let prompt = &told["prompts"][0];
        assert_eq!((&prompt["flow"], &prompt["stops"]), (&json!("aggregated"), &Value::Null));
        let step = &prompt["steps"][0];
        assert_eq!(step["candidates"].as_array().unwrap().len(), 2, "{step}");
    }
}

#[tokio::test]
async fn a_fleet_that_embeds_is_ready_with_canaries_too() {
    let spec = Spec { model: "canary: { enabled: true }".into(), ..embedding(2) };
    let trial = &mut Trial::start(spec).await;
    assert_eq!(trial.post("ok", EMBEDDINGS, &input("x")).await.status, 200);
    trial.check().await;
}
