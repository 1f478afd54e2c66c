//! Replies against recorded ones, usage, prompt forms, errors.

use serde_json::{Value, json};
use splitrail_sim::{SimConfig, UsageReport, tokenizer};

use crate::support::*;

fn recorded() -> Value {
    serde_json::from_str(include_str!("../fixtures/http-vllm-0.32.0.json")).unwrap()
}

/// Keys in their order and types of values: what a strict client depends on.
fn shape(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) => "bool".to_owned(),
        Value::Number(_) => "number".to_owned(),
        Value::String(_) => "string".to_owned(),
        Value::Array(items) => format!("[{}]", items.first().map(shape).unwrap_or_default()),
        Value::Object(fields) => {
            let fields: Vec<_> = fields.iter().map(|(k, v)| format!("{k}: {}", shape(v))).collect();
            format!("{{{}}}", fields.join(", "))
        }
    }
}

fn messages() -> Value {
    json!([{"role": "user", "content": "tell me of the sea"}])
}

#[tokio::test]
async fn whole_replies_have_the_recorded_shape() {
    let engine = start(SimConfig::default()).await;
    let completion = complete(&engine, &prompt(1, 40), 4).await;
    assert_eq!(shape(&completion), shape(&recorded()["completion"]));
    let body = json!({"messages": messages(), "max_tokens": 4});
    let chat = post(&engine, "/v1/chat/completions", body).await.json();
    assert_eq!(shape(&chat), shape(&recorded()["chat"]));
    assert_eq!(chat["usage"]["completion_tokens"], 4);
    assert_eq!(chat["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn streams_have_the_recorded_shape() {
    let engine = start(SimConfig::default()).await;
    let options = json!({"include_usage": true});
    let body = json!({"prompt": "sea", "max_tokens": 4, "stream": true, "stream_options": options});
    let reply = post(&engine, "/v1/completions", body).await;
    assert_eq!(reply.headers["content-type"], "text/event-stream; charset=utf-8");
    compare_chunks(&reply.chunks(), &recorded()["completion_stream"]);
    let body =
        json!({"messages": messages(), "max_tokens": 4, "stream": true, "stream_options": options});
    let chunks = post(&engine, "/v1/chat/completions", body).await.chunks();
    compare_chunks(&chunks, &recorded()["chat_stream"]);
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = json!({"prompt": "sea", "max_tokens": 4, "stream": true, "stream_options": options});
    let chunks = post(&engine, "/v1/completions", body).await.chunks();
    compare_chunks(&chunks, &recorded()["continuous_stream"]);
}

/// Compares the first, the second, the last chunk with text, and the last chunk.
fn compare_chunks(chunks: &[Value], recorded: &Value) {
    let last = chunks.len() - 1;
    for (ours, theirs) in [0, 1, last - 1, last].into_iter().zip(recorded.as_array().unwrap()) {
        assert_eq!(shape(&chunks[ours]), shape(theirs));
    }
}

#[tokio::test]
async fn a_stream_without_include_usage_has_no_usage() {
    let engine = start(SimConfig::default()).await;
    let body = json!({"prompt": "sea", "max_tokens": 4, "stream": true});
    let chunks = post(&engine, "/v1/completions", body).await.chunks();
    assert_eq!(chunks.len(), 4);
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test]
async fn a_stream_has_the_content_of_the_unstreamed_reply() {
    let engine = start(SimConfig::default()).await;
    for (endpoint, input) in
        [("/v1/completions", json!("the sea")), ("/v1/chat/completions", messages())]
    {
        let field = if endpoint.contains("chat") { "messages" } else { "prompt" };
        let body = json!({field: input, "max_tokens": 20, "n": 2});
        let whole = post(&engine, endpoint, body.clone()).await.json();
        let mut body = body;
        body["stream"] = json!(true);
        let mut texts = [String::new(), String::new()];
        for chunk in post(&engine, endpoint, body).await.chunks() {
            let choice = &chunk["choices"][0];
            let text = choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap();
            texts[choice["index"].as_u64().unwrap() as usize].push_str(text);
        }
        for (index, text) in texts.iter().enumerate() {
            let choice = &whole["choices"][index];
            let said = choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap();
            assert_eq!(text, said);
            assert_eq!(text.len(), 20);
        }
        assert_ne!(texts[0], texts[1], "samples of one prompt differ");
    }
}

#[tokio::test]
async fn cached_tokens_leave_the_last_token_to_compute() {
    let engine = start(SimConfig::default()).await;
    let tokens = prompt(1, 64);
    assert_eq!(cached_tokens(&complete(&engine, &tokens, 1).await), 0);
    assert_eq!(cached_tokens(&complete(&engine, &tokens, 1).await), 48);
    let longer = [tokens, prompt(2, 1)].concat();
    assert_eq!(cached_tokens(&complete(&engine, &longer, 1).await), 64);
}

#[tokio::test]
async fn a_salt_or_an_adapter_shares_no_cache() {
    let config = SimConfig { adapters: vec!["pirate".to_owned()], ..SimConfig::default() };
    let engine = start(config).await;
    let plain = complete(&engine, &prompt(1, 64), 8).await;
    let ask = |extra: Value| {
        let mut body = json!({"prompt": prompt(1, 64), "max_tokens": 8});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        post(&engine, "/v1/completions", body)
    };
    let salted = ask(json!({"cache_salt": "t1"})).await.json();
    assert_eq!((cached_tokens(&salted), text_of(&salted)), (0, text_of(&plain)));
    assert_eq!(cached_tokens(&ask(json!({"cache_salt": "t1"})).await.json()), 48);
    let adapted = ask(json!({"model": "pirate"})).await.json();
    assert_eq!(cached_tokens(&adapted), 0);
    assert_ne!(text_of(&adapted), text_of(&plain));
}

#[tokio::test]
async fn usage_details_follow_the_configuration() {
    for (usage_report, whole, in_stream) in [
        (UsageReport::Details, Some(true), true),
        (UsageReport::Null, Some(false), false),
        (UsageReport::Absent, None, false),
    ] {
        let engine = start(SimConfig { usage_report, ..SimConfig::default() }).await;
        let body = complete(&engine, &prompt(1, 20), 2).await;
        let details = body["usage"].get("prompt_tokens_details");
        assert_eq!(details.map(|details| !details.is_null()), whole);
        let options = json!({"include_usage": true});
        let body =
            json!({"prompt": "x", "max_tokens": 2, "stream": true, "stream_options": options});
        let chunks = post(&engine, "/v1/completions", body).await.chunks();
        let usage = &chunks.last().unwrap()["usage"];
        assert_eq!(usage["completion_tokens"], 2);
        assert_eq!(usage.get("prompt_tokens_details").is_some(), in_stream);
    }
}

#[tokio::test]
async fn all_prompt_forms_mean_the_same() {
    let engine = start(SimConfig::default()).await;
    let ids = tokenizer::encode("a sea");
    let mut texts = Vec::new();
    for form in [json!("a sea"), json!(["a sea"]), json!(ids), json!([ids])] {
        let body = json!({"prompt": form, "max_tokens": 12});
        texts.push(text_of(&post(&engine, "/v1/completions", body).await.json()).to_owned());
    }
    assert!(texts.iter().all(|text| text == &texts[0]), "{texts:?}");
    let body = json!({"prompt": ["a sea", "a hill"], "max_tokens": 12});
    let both = post(&engine, "/v1/completions", body).await.json();
    assert_eq!(both["choices"][0]["text"], texts[0]);
    assert_ne!(both["choices"][1]["text"], texts[0]);
    assert_eq!(both["usage"]["prompt_tokens"], "a seaa hill".len());
}

#[tokio::test]
async fn a_stop_string_ends_the_answer_and_is_not_part_of_it() {
    let engine = start(SimConfig::default()).await;
    let body = json!({"prompt": "sea", "max_tokens": 40});
    let full = text_of(&post(&engine, "/v1/completions", body).await.json()).to_owned();
    let stop = &full[10..13];
    let kept = &full[..full.find(stop).unwrap()];
    let body = json!({"prompt": "sea", "max_tokens": 40, "stop": [stop, "\u{7f}"]});
    let whole = post(&engine, "/v1/completions", body.clone()).await.json();
    assert_eq!(text_of(&whole), kept);
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    assert_eq!(whole["choices"][0]["stop_reason"], stop);
    let mut body = body;
    body["stream"] = json!(true);
    let chunks = post(&engine, "/v1/completions", body).await.chunks();
    let text: String = chunks.iter().map(text_of).collect();
    assert_eq!(text, kept);
}

#[tokio::test]
async fn the_eos_token_ends_answers_unless_it_is_ignored() {
    let engine = start(SimConfig { eos_one_in: 4, ..SimConfig::default() }).await;
    let body = json!({"prompt": "sea", "max_tokens": 500});
    let whole = post(&engine, "/v1/completions", body).await.json();
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let body = json!({"prompt": "sea", "max_tokens": 500, "ignore_eos": true});
    let whole = post(&engine, "/v1/completions", body).await.json();
    assert_eq!(whole["usage"]["completion_tokens"], 500);
    let body = json!({"prompt": "sea", "max_tokens": 500, "min_tokens": 100});
    let whole = post(&engine, "/v1/completions", body).await.json();
    assert!(whole["usage"]["completion_tokens"].as_u64().unwrap() >= 100);
}

#[tokio::test]
async fn errors_are_openai_shaped() {
    let engine = start(SimConfig { max_model_len: 100, ..SimConfig::default() }).await;
    for (body, status, param) in [
        (json!({"model": "other", "prompt": "x"}), 404, json!("model")),
        (json!({"prompt": prompt(1, 101)}), 400, json!("input_tokens")),
        (json!({"prompt": prompt(1, 90), "max_tokens": 11}), 400, json!("max_tokens")),
        (json!({"prompt": {"a": 1}}), 400, json!("prompt")),
        (json!({"prompt": ""}), 400, json!("prompt")),
        (json!({"prompt": "x", "max_tokens": 0}), 400, json!("max_tokens")),
    ] {
        let reply = post(&engine, "/v1/completions", body.clone()).await;
        assert_eq!(reply.status, status, "{body}");
        let error = &reply.json()["error"];
        assert_eq!(error["param"], param, "{body}");
        assert_eq!(error["code"], status);
        assert!(error["message"].is_string() && error["type"].is_string());
    }
    assert_eq!(engine.state().blocks_used, 0);
}

#[tokio::test]
async fn unknown_fields_are_ignored_and_the_request_id_is_kept() {
    let engine = start(SimConfig::default()).await;
    let body = json!({"prompt": "x", "max_tokens": 1, "foo": {"bar": 1}}).to_string();
    let headers = [("x-request-id", "abc")];
    let reply = send(&engine, http::Method::POST, "/v1/completions", &headers, body).await.unwrap();
    assert_eq!(reply.json()["id"], "cmpl-abc");
    let seen = engine.requests();
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].header("x-request-id"), Some("abc"));
    assert_eq!(seen[0].body["foo"]["bar"], 1);
    assert_eq!(get(&engine, "/sim/requests").await.json()[0]["path"], "/v1/completions");
}

#[tokio::test]
async fn tokenize_and_usage_count_the_same_prompt_tokens() {
    let engine = start(SimConfig::default()).await;
    let tokenized = json!({"messages": messages(), "return_token_strs": true});
    let tokenized = post(&engine, "/tokenize", tokenized).await.json();
    assert_eq!(shape(&tokenized), shape(&recorded()["tokenize"]));
    let body = json!({"messages": messages(), "max_tokens": 1, "return_token_ids": true});
    let chat = post(&engine, "/v1/chat/completions", body).await.json();
    assert_eq!(chat["usage"]["prompt_tokens"], tokenized["count"]);
    assert_eq!(chat["prompt_token_ids"], tokenized["tokens"]);
    let text = post(&engine, "/detokenize", json!({"tokens": tokenized["tokens"]})).await.json();
    assert_eq!(
        text["prompt"],
        "<|im_start|>user\ntell me of the sea<|im_end|>\n<|im_start|>assistant\n"
    );
}

#[tokio::test]
async fn service_endpoints_answer() {
    let engine = start(SimConfig { model: "tiny".to_owned(), ..SimConfig::default() }).await;
    assert_eq!(get(&engine, "/health").await.status, 200);
    assert_eq!(get(&engine, "/version").await.json()["version"], "0.32.0");
    let models = get(&engine, "/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "tiny");
    complete(&engine, &prompt(1, 64), 3).await;
    complete(&engine, &prompt(1, 64), 3).await;
    let page = get(&engine, "/metrics").await.text();
    let by_source = "vllm:prompt_tokens_by_source_total";
    assert_eq!(metric(&page, by_source, "local_compute"), 80.0);
    assert_eq!(metric(&page, by_source, "local_cache_hit"), 48.0);
    assert_eq!(metric(&page, "vllm:prefix_cache_queries_total", ""), 128.0);
    assert_eq!(metric(&page, "vllm:prefix_cache_hits_total", ""), 48.0);
    assert_eq!(metric(&page, "vllm:cache_config_info", "block_size=\"16\""), 1.0);
    assert_eq!(metric(&page, "vllm:kv_cache_usage_perc", ""), 0.0);
}

#[tokio::test]
async fn more_requests_than_slots_and_blocks_are_all_served() {
    let config = SimConfig { kv_blocks: 12, max_num_seqs: 3, ..SimConfig::default() };
    let engine = start(config).await;
    let asks = (0..20).map(|seed| {
        let engine = &engine;
        async move { complete(engine, &prompt(seed, 40), 30).await }
    });
    for body in futures_util::future::join_all(asks).await {
        assert_eq!(body["usage"]["completion_tokens"], 30);
    }
    let state = engine.state();
    assert_eq!((state.running, state.waiting, state.blocks_used), (0, 0, 0));
    assert_eq!(state.totals.finished_length, 20);
}
