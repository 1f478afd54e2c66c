//! The OpenAI face: shapes, names, namespaces, headers, and plain HTTP manners.

mod connections;

use std::collections::BTreeSet;

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use splitrail_sim::{RecordedRequest, SimConfig};
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::cluster::eventually;
use splitrail_tests::{Cluster, Reply, Spec};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn prompt(words: usize, salt: &str) -> String {
    (0..words).map(|i| format!("{salt}{i} ")).collect()
}

fn chat(text: &str) -> Value {
    json!({
        "model": "sim", "max_tokens": 8, "temperature": 0,
        "messages": [{"role": "user", "content": text}],
    })
}

fn completion(prompt: impl Into<Value>) -> Value {
    json!({"model": "sim", "max_tokens": 8, "temperature": 0, "prompt": prompt.into()})
}

fn with(mut body: Value, key: &str, value: impl Into<Value>) -> Value {
    body[key] = value.into();
    body
}

async fn start() -> Cluster {
    Cluster::start(Spec {
        model: "adapters: [my-lora]".into(),
        engine: |_, config: &mut SimConfig| config.adapters = vec!["my-lora".into()],
        ..Spec::default()
    })
    .await
}

/// Every request that any engine got for generation.
fn received(cluster: &Cluster) -> Vec<RecordedRequest> {
    let engines = cluster.engines.iter();
    let all = engines.flat_map(|(_, engine)| engine.requests());
    all.filter(|request| request.path.ends_with("completions")).collect()
}

fn cached(reply: &Reply) -> u64 {
    let usage = &reply.json()["usage"];
    let figure = &usage["prompt_tokens_details"]["cached_tokens"];
    figure.as_u64().unwrap_or_else(|| panic!("{usage}"))
}

/// OpenAI's error object, with the status that goes with it.
fn check_error(reply: &Reply, status: u16, param: Option<&str>, what: &str) {
    assert_eq!(reply.status, status, "{what}: {}", reply.text());
    assert_eq!(reply.header("content-type"), "application/json", "{what}");
    let error = &reply.json()["error"];
    let members: BTreeSet<_> = error.as_object().unwrap().keys().collect();
    for member in ["message", "type", "param", "code"] {
        assert!(members.contains(&member.to_owned()), "{what}: {error}");
    }
    assert!(!error["message"].as_str().unwrap().is_empty(), "{what}");
    assert!(error["type"].is_string(), "{what}");
    if let Some(param) = param {
        assert_eq!(error["param"], param, "{what}: {error}");
    }
    assert!(!reply.header("x-request-id").is_empty(), "{what}");
}

#[tokio::test]
async fn models_are_listed_by_all_their_names() {
    let cluster = start().await;
    let list = cluster.http.get("/v1/models").await;
    assert_eq!(list.status, 200);
    let list = list.json();
    assert_eq!(list["object"], "list");
    let names: BTreeSet<_> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(names, ["default", "my-lora", "sim"].map(str::to_owned).into());
    for name in &names {
        let one = cluster.http.get(&format!("/v1/models/{name}")).await;
        assert_eq!(one.status, 200);
        let one = one.json();
        assert_eq!((&one["id"], &one["object"]), (&json!(name), &json!("model")));
        assert!(one["created"].is_u64() && one["owned_by"].is_string());
        assert!(list["data"].as_array().unwrap().contains(&one));
    }
    let missing = cluster.http.get("/v1/models/nope").await;
    check_error(&missing, 404, None, "unknown model");
    assert_eq!(missing.json()["error"]["code"], "model_not_found");
}

#[tokio::test]
async fn a_model_whose_name_has_a_slash_is_shown_by_its_plain_path() {
    let spec = Spec {
        model: "adapters: [Qwen/Qwen3-8B]".into(),
        engine: |_, config| config.adapters = vec!["Qwen/Qwen3-8B".into()],
        ..Spec::aggregated(1)
    };
    let cluster = Cluster::start(spec).await;
    for path in ["/v1/models/Qwen/Qwen3-8B", "/v1/models/Qwen%2FQwen3-8B"] {
        let one = cluster.http.get(path).await;
        assert_eq!((one.status.as_u16(), one.json()["id"].as_str()), (200, Some("Qwen/Qwen3-8B")));
    }
    for path in [
        "/v1/models/",
        "/v1/models/sim/",
        "/v1/models//sim",
        "/v1/models/Qwen",
        "/v1/models/Qwen/",
        "/v1/models/Qwen//Qwen3-8B",
        "/v1/models/Qwen/Qwen3-8B/",
        "/v1/models/x/../sim",
    ] {
        check_error(&cluster.http.get(path).await, 404, None, path);
    }
}

#[tokio::test]
async fn an_unknown_model_is_a_404_that_names_it_and_reaches_no_engine() {
    let cluster = start().await;
    for (path, body) in [(CHAT, chat("hi")), (COMPLETIONS, completion("hi"))] {
        let reply = cluster.http.post(path, &with(body, "model", "gpt-9")).await;
        check_error(&reply, 404, None, path);
        let error = &reply.json()["error"];
        assert_eq!(error["code"], "model_not_found");
        assert!(error["message"].as_str().unwrap().contains("gpt-9"));
    }
    assert!(received(&cluster).is_empty());
    // A client's string is never a label.
    let text = cluster.admin.get("/metrics").await.text();
    assert!(!text.contains("gpt-9"));
    cluster.quiet().await;
}

#[tokio::test]
async fn mistakes_in_a_body_are_named_and_no_engine_is_asked() {
    let cluster = start().await;
    let cases = [
        (CHAT, json!({"messages": []}), "model"),
        (CHAT, json!({"model": "sim"}), "messages"),
        (CHAT, with(chat("x"), "model", 3), "model"),
        (CHAT, with(chat("x"), "messages", "hi"), "messages"),
        (CHAT, with(chat("x"), "messages", json!([])), "messages"),
        (CHAT, with(chat("x"), "stream", "yes"), "stream"),
        (CHAT, with(chat("x"), "n", 0), "n"),
        (CHAT, with(chat("x"), "n", "two"), "n"),
        (CHAT, with(chat("x"), "max_tokens", -1), "max_tokens"),
        (CHAT, with(chat("x"), "max_completion_tokens", "eight"), "max_completion_tokens"),
        (CHAT, with(chat("x"), "cache_salt", 5), "cache_salt"),
        (CHAT, with(chat("x"), "stream_options", json!([])), "stream_options"),
        (COMPLETIONS, json!({"model": "sim"}), "prompt"),
        (COMPLETIONS, completion(json!([])), "prompt"),
        (COMPLETIONS, completion(json!({})), "prompt"),
        (COMPLETIONS, completion(7), "prompt"),
        (COMPLETIONS, completion(json!([1, "a"])), "prompt"),
        (COMPLETIONS, completion(json!([-1])), "prompt"),
        (COMPLETIONS, completion(json!([1.5])), "prompt"),
        (COMPLETIONS, with(completion("x"), "prompt", Value::Null), "prompt"),
    ];
    for (path, body, param) in cases {
        let reply = cluster.http.post(path, &body).await;
        check_error(&reply, 400, Some(param), &body.to_string());
    }
    for text in ["", "nonsense", "[]", "\"text\"", "{\"model\":\"sim\",}", "null"] {
        let reply = cluster.http.post_with(CHAT, &[], text).await;
        check_error(&reply, 400, None, text);
    }
    assert!(received(&cluster).is_empty());
    cluster.quiet().await;
}

#[tokio::test]
async fn an_engines_refusal_is_relayed_as_the_clients_mistake_and_not_retried() {
    let cluster = start().await;
    for (body, param) in [
        (with(chat("x"), "messages", json!(["hi"])), "messages"),
        (with(chat("x"), "messages", json!([{"content": "hi"}])), "messages"),
        (with(chat("x"), "max_tokens", 1_000_000), "max_tokens"),
        (with(chat("x"), "min_tokens", 20), "min_tokens"),
        (with(chat("x"), "cache_salt", ""), "cache_salt"),
    ] {
        let reply = cluster.http.post(CHAT, &body).await;
        check_error(&reply, 400, Some(param), &body.to_string());
        let streamed = with(body.clone(), "stream", true).to_string();
        let reply = cluster.http.post_with(CHAT, &[], streamed).await;
        check_error(&reply, 400, Some(param), &body.to_string());
    }
    assert_eq!(cluster.metric("splitrail_retries_total", &[]).await, 0.0);
    cluster.quiet().await;
}

#[tokio::test]
async fn a_stop_of_the_wrong_type_is_refused_before_any_prompt_is_computed() {
    let cluster = start().await;
    for stop in [json!(5), json!({}), json!([5]), json!(true)] {
        let reply = cluster.http.post(CHAT, &with(chat("x"), "stop", stop.clone())).await;
        check_error(&reply, 400, Some("stop"), &stop.to_string());
        assert_eq!(received(&cluster).len(), 0, "{stop}");
    }
}

#[tokio::test]
async fn a_request_that_only_decode_refuses_leaves_no_blocks_pinned() {
    // The prefill leg never sees what decode will object to; its staged blocks are
    // held for a decode that will not come.
    let cluster = start().await;
    let body = with(chat(&prompt(40, "r")), "min_tokens", 20);
    let reply = cluster.http.post(CHAT, &body).await;
    check_error(&reply, 400, Some("min_tokens"), "min_tokens above max_tokens");
    eventually("no prefill engine keeps blocks for a refused request", async || {
        let mut engines = cluster.engines.iter();
        engines.all(|(_, engine)| engine.state().blocks_pinned == 0)
    })
    .await;
}

#[tokio::test]
async fn an_empty_prompt_is_the_clients_mistake_and_no_workers() {
    let cluster = start().await;
    for body in [completion(""), completion(json!(["", "x"])), completion(json!([[]]))] {
        let reply = cluster.http.post(COMPLETIONS, &body).await;
        check_error(&reply, 400, None, &body.to_string());
    }
    assert_eq!(cluster.metric("splitrail_retries_total", &[]).await, 0.0);
    let after = cluster.http.post(COMPLETIONS, &completion("x")).await;
    assert_eq!(after.status, 200);
    cluster.quiet().await;
}

#[tokio::test]
async fn a_prompt_of_token_ids_is_the_same_prompt_as_its_text() {
    let cluster = start().await;
    let text = prompt(30, "t");
    let ids: Vec<u32> = text.bytes().map(|byte| u32::from(byte) + 3).collect();
    let by_text = cluster.http.post(COMPLETIONS, &completion(text)).await;
    cluster.settle().await;
    for ids in [json!(ids), json!([ids])] {
        let by_ids = cluster.http.post(COMPLETIONS, &completion(ids)).await;
        assert_eq!(by_ids.status, 200, "{}", by_ids.text());
        assert_eq!(whole_text(&by_ids.json(), 0), whole_text(&by_text.json(), 0));
        assert_eq!(by_ids.route("prefill"), by_text.route("prefill"));
        assert!(cached(&by_ids) > 0);
    }
}

#[tokio::test]
async fn content_in_parts_is_the_same_chat_as_its_text() {
    let cluster = start().await;
    let text = prompt(30, "p");
    let plain = cluster.http.post(CHAT, &chat(&text)).await;
    cluster.settle().await;
    let mut parts = chat("");
    parts["messages"][0]["content"] = json!([{"type": "text", "text": text}]);
    let reply = cluster.http.post(CHAT, &parts).await;
    assert_eq!(whole_text(&reply.json(), 0), whole_text(&plain.json(), 0));
    assert_eq!(reply.route("prefill"), plain.route("prefill"));
    assert!(cached(&reply) > 0);
    parts["messages"][0]["content"] =
        json!([{"type": "text", "text": prompt(30, "q")}, {"type": "text", "text": "more"}]);
    let several = cluster.http.post(CHAT, &parts).await;
    assert_eq!(several.status, 200);
    let decision = &cluster.decisions(several.header("x-request-id")).await[0];
    assert_eq!(decision["prompt_tokens"], several.json()["usage"]["prompt_tokens"]);
}

#[tokio::test]
async fn replies_have_the_shape_that_openai_clients_parse() {
    let cluster = start().await;
    let reply = cluster.http.post(CHAT, &chat("hello you")).await.json();
    assert_eq!(reply["object"], "chat.completion");
    assert!(reply["id"].is_string() && reply["created"].is_u64());
    let choice = &reply["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["finish_reason"], "length");
    let reply = cluster.http.post(COMPLETIONS, &completion("hello")).await;
    assert_eq!(reply.json()["object"], "text_completion");
    for (path, body, object) in [
        (CHAT, chat("hello"), "chat.completion.chunk"),
        (COMPLETIONS, completion("hello"), "text_completion"),
    ] {
        let mut events = cluster.http.stream(path, &with(body, "stream", true)).await;
        let kind = events.headers["content-type"].to_str().unwrap().to_owned();
        assert!(kind.starts_with("text/event-stream"), "{kind}");
        let chunks = events.chunks().await;
        let ids: BTreeSet<_> = chunks.iter().map(|c| c["id"].to_string()).collect();
        assert_eq!(ids.len(), 1, "one answer has one id");
        assert!(chunks.iter().all(|chunk| chunk["object"] == object));
        let ends: Vec<_> =
            chunks.iter().filter(|chunk| !chunk["choices"][0]["finish_reason"].is_null()).collect();
        assert_eq!(ends.len(), 1);
    }
}

#[tokio::test]
async fn a_clients_own_limits_decide_where_an_answer_ends() {
    let cluster = start().await;
    for path in [CHAT, COMPLETIONS] {
        let body = match path {
            CHAT => chat(&prompt(30, "s")),
            _ => completion(prompt(30, "s")),
        };
        let body = with(body, "max_tokens", 24);
        let full = whole_text(&cluster.http.post(path, &body).await.json(), 0);
        // The stop is met after the first token, which the prefill leg computes, and later.
        for at in [0, 9] {
            let stop = &full[at..at + 2];
            let expected = &full[..full.find(stop).unwrap()];
            let stopping = with(body.clone(), "stop", json!([stop]));
            let reply = cluster.http.post(path, &stopping).await.json();
            assert_eq!(whole_text(&reply, 0), expected);
            assert_eq!(reply["choices"][0]["finish_reason"], "stop");
            let streaming = with(stopping, "stream", true);
            let chunks = cluster.http.stream(path, &streaming).await.chunks().await;
            assert_eq!(streamed_text(&chunks, 0), expected);
        }
    }
    let mut body = chat(&prompt(30, "s"));
    body.as_object_mut().unwrap().remove("max_tokens");
    for tokens in [1, 5] {
        let body = with(body.clone(), "max_completion_tokens", tokens);
        let reply = cluster.http.post(CHAT, &body).await.json();
        assert_eq!(reply["usage"]["completion_tokens"], tokens);
        assert_eq!(reply["choices"][0]["finish_reason"], "length");
    }
    cluster.quiet().await;
}

#[tokio::test]
async fn stream_options_null_is_none_at_all() {
    let cluster = start().await;
    for stream in [true, false] {
        let body = with(chat("hello"), "stream_options", Value::Null);
        let body = with(body, "stream", stream);
        if stream {
            let chunks = cluster.http.stream(CHAT, &body).await.chunks().await;
            assert!(chunks.iter().all(|chunk| chunk["usage"].is_null()));
            assert!(!streamed_text(&chunks, 0).is_empty());
        } else {
            assert_eq!(cluster.http.post(CHAT, &body).await.status, 200);
        }
    }
}

#[tokio::test]
async fn aliases_are_the_model_and_adapters_are_worlds_of_their_own() {
    let cluster = start().await;
    let body = completion(prompt(40, "n"));
    let base = cluster.http.post(COMPLETIONS, &body).await;
    assert_eq!(cached(&base), 0);
    cluster.settle().await;
    let by_alias = with(body.clone(), "model", "default");
    let alias = cluster.http.post(COMPLETIONS, &by_alias).await;
    assert!(cached(&alias) > 0, "the alias shares the model's cache");
    assert!(received(&cluster).iter().all(|r| r.body["model"] == "sim"));

    let adapted = with(body.clone(), "model", "my-lora");
    let cold = cluster.http.post(COMPLETIONS, &adapted).await;
    assert_eq!(cached(&cold), 0);
    assert_eq!(cold.route("overlap_blocks"), Some("0"));
    assert_ne!(whole_text(&cold.json(), 0), whole_text(&base.json(), 0));
    let names = received(&cluster);
    let adapter_legs = names.iter().filter(|r| r.body["model"] == "my-lora");
    assert_eq!(adapter_legs.count(), 2, "both legs run under the adapter");
    cluster.settle().await;
    let warm = cluster.http.post(COMPLETIONS, &adapted).await;
    assert!(cached(&warm) > 0);
    assert_eq!(whole_text(&warm.json(), 0), whole_text(&cold.json(), 0));
    assert_eq!(warm.route("prefill"), cold.route("prefill"));
}

#[tokio::test]
async fn salts_share_no_cache() {
    let cluster = start().await;
    let body = completion(prompt(40, "z"));
    let salted = |salt: &str| with(body.clone(), "cache_salt", salt);
    let (a, b) = (salted("tenant a"), salted("tenant b"));
    for (cold, what) in [(&a, "a"), (&b, "b"), (&body, "none")] {
        let reply = cluster.http.post(COMPLETIONS, cold).await;
        assert_eq!(cached(&reply), 0, "salt {what}");
        assert_eq!(reply.route("overlap_blocks"), Some("0"), "salt {what}");
        cluster.settle().await;
        let again = cluster.http.post(COMPLETIONS, cold).await;
        assert!(cached(&again) > 0, "salt {what}");
        cluster.settle().await;
    }
    let legs = received(&cluster);
    let with_salt = legs.iter().filter(|r| r.body["cache_salt"] == "tenant a");
    assert_eq!(with_salt.count(), 4, "engines are told the salt on every leg");
}

#[tokio::test]
async fn thresholds_are_validated_everywhere_and_kept_from_engines() {
    let cluster = start().await;
    const HEADER: &str = "x-splitrail-cache-hit-threshold";
    let good = [json!(0), json!(0.5), json!(1), json!(1.0), Value::Null];
    for (i, threshold) in good.into_iter().enumerate() {
        let body = completion(prompt(30, &format!("good{i}-")));
        let body = with(body, "cache_hit_threshold", threshold.clone());
        let reply = cluster.http.post(COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{threshold}: {}", reply.text());
        let finish = reply.json()["choices"][0]["finish_reason"].clone();
        assert_eq!(finish, "length", "{threshold}");
    }
    for value in ["0", "0.25", "1"] {
        let body = completion("header").to_string();
        let headers = [(HEADER, value)];
        let reply = cluster.http.post_with(COMPLETIONS, &headers, body);
        assert_eq!(reply.await.status, 200, "{value}");
    }
    let asked = received(&cluster);
    for request in &asked {
        assert!(request.body.get("cache_hit_threshold").is_none());
        let ours = |(name, _): &&(String, String)| name.starts_with("x-splitrail");
        assert_eq!(request.headers.iter().find(ours), None);
    }
    let bad = [json!(1.01), json!(-0.1), json!("0.5"), json!(true), json!([0.5])];
    for threshold in bad {
        for (path, body) in [(CHAT, chat("x")), (COMPLETIONS, completion("x"))] {
            let body = with(body, "cache_hit_threshold", threshold.clone());
            let reply = cluster.http.post(path, &body).await;
            check_error(&reply, 400, Some("cache_hit_threshold"), &body.to_string());
        }
    }
    for value in ["1.01", "-1", "nan", "inf", "abc", ""] {
        let body = completion("x").to_string();
        let headers = [(HEADER, value)];
        let reply = cluster.http.post_with(COMPLETIONS, &headers, body);
        check_error(&reply.await, 400, None, value);
    }
    assert_eq!(received(&cluster).len(), asked.len(), "refused before any engine");
}

#[tokio::test]
async fn request_ids_are_kept_if_sane_and_engines_get_others() {
    let cluster = start().await;
    let ask = async |id: &str| {
        let body = completion(prompt(30, "i")).to_string();
        cluster.http.post_with(COMPLETIONS, &[("x-request-id", id)], body).await
    };
    let kept = ask("my-id_1.2:3").await;
    assert_eq!(kept.header("x-request-id"), "my-id_1.2:3");
    assert_eq!(cluster.decisions("my-id_1.2:3").await.len(), 1);
    let legs = received(&cluster);
    assert_eq!(legs.len(), 2);
    let id = legs[0].header("x-request-id").unwrap();
    assert_eq!(legs[1].header("x-request-id"), Some(id), "one id for both legs");
    assert!(!id.contains("my-id"));
    for bad in ["a b", "\"quoted\"", &"x".repeat(500), ""] {
        let reply = ask(bad).await;
        let made = reply.header("x-request-id");
        assert!(!made.is_empty() && made != bad, "{bad:?}");
    }
    let refused =
        cluster.http.post_with(COMPLETIONS, &[("x-request-id", "mine")], "nonsense").await;
    assert_eq!(refused.header("x-request-id"), "mine");
    let ids: BTreeSet<_> = received(&cluster)
        .iter()
        .map(|leg| leg.header("x-request-id").unwrap().to_owned())
        .collect();
    assert_eq!(ids.len(), 5, "each attempt has its own");
}

#[tokio::test]
async fn server_timing_says_where_the_time_went() {
    let cluster = start().await;
    let body = with(chat(&prompt(40, "v")), "stream", true);
    let whole = cluster.http.post(CHAT, &chat(&prompt(40, "v"))).await;
    let mut streamed = cluster.http.stream(CHAT, &body).await;
    let stages = [
        "receive",
        "tokenize",
        "admit",
        "match",
        "pick",
        "decode_try",
        "prefill",
        "first_token",
        "failed",
    ];
    for header in
        [whole.header("server-timing"), streamed.headers["server-timing"].to_str().unwrap()]
    {
        let mut seen = BTreeSet::new();
        for entry in header.split(", ") {
            let (stage, duration) = entry.split_once(";dur=").unwrap();
            assert!(stages.contains(&stage), "{header}");
            assert!(duration.parse::<f64>().unwrap() >= 0.0, "{header}");
            assert!(seen.insert(stage), "{stage} is there twice: {header}");
        }
        for stage in ["receive", "tokenize", "match", "pick", "prefill", "first_token"] {
            assert!(seen.contains(stage), "{stage} is missing: {header}");
        }
    }
    streamed.rest().await;
}
