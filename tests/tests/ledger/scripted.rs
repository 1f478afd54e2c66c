//! Usage that engines report in unusual ways: replies that move, counts that cannot be read, and figures
//! at other places.

use serde_json::{Value, json};
use splitrail_tests::accounting::ledger_lines;
use splitrail_tests::cluster::eventually;
use splitrail_tests::raw_engine::{Asked, RawEngine, Turn, reply};
use splitrail_tests::trial::{COMPLETIONS, completion, prompt, streamed};
use splitrail_tests::{Cluster, Spec};

const MESSAGES: &str = "/v1/messages";
const EMBEDDINGS: &str = "/v1/embeddings";

/// The file of the ledger.
const LEDGER: &str = "l.jsonl";

/// Prompt tokens of a request that moves.
const PROMPT_TOKENS: u64 = 50;

async fn cluster(spec: Spec, engines: &[(&str, &RawEngine)]) -> Cluster {
    let worker = |(id, engine): &(&str, &RawEngine)| {
        let role = match id.as_bytes()[0] {
            b'p' => "prefill",
            b'd' => "decode",
            _ => "both",
        };
        format!("{{ id: {id}, role: {role}, url: \"{}\", kv_events: none }}", engine.url())
    };
    let extra_workers = engines.iter().map(worker).collect();
    let top = format!("ledger: {{ path: {LEDGER} }}");
    let policy = "{ kind: round_robin }";
    Cluster::start(Spec { extra_workers, top, policy, ..spec }).await
}

fn aggregated(model: &str) -> Spec {
    Spec { model: model.into(), ..Spec::aggregated(0) }
}

/// The line of the ledger of the only request.
async fn line(cluster: &Cluster) -> Value {
    let path = cluster.files.path().join(LEDGER);
    eventually("the line is there", async || !ledger_lines(&path).is_empty()).await;
    let lines = ledger_lines(&path);
    assert_eq!(lines.len(), 1);
    lines[0].clone()
}

fn body_of(asked: &Asked) -> Value {
    serde_json::from_slice(&asked.heard.body).unwrap()
}

fn event(members: Value) -> String {
    let mut event = json!({"id": "c", "object": "text_completion", "created": 1, "model": "sim"});
    event.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    format!("data: {event}\n\n")
}

fn choice(text: &str, is_last: bool) -> Value {
    let finish_reason = if is_last { json!("stop") } else { Value::Null };
    json!({"index": 0, "text": text, "finish_reason": finish_reason})
}

fn stream(events: &[String]) -> Turn {
    Turn::answer(reply(200, "text/event-stream", &events.concat()))
}

fn done() -> String {
    "data: [DONE]\n\n".to_owned()
}

/// An engine that breaks off after three tokens, and continues such a reply with `rest`.
async fn breaks_off(rest: impl Fn() -> Vec<String> + Send + Sync + 'static) -> RawEngine {
    RawEngine::start(move |asked| {
        let prompt = body_of(asked)["prompt"].as_array().unwrap().clone();
        if prompt.len() as u64 > PROMPT_TOKENS {
            return stream(&rest());
        }
        let token = |number: u64| {
            let mut choice = choice("x", false);
            choice["token_ids"] = json!([20 + number]);
            if number == 0 {
                choice["prompt_token_ids"] = prompt.clone().into();
            }
            event(json!({"choices": [choice]}))
        };
        let events: Vec<String> = (0..3).map(token).collect();
        let body = events.concat();
        let head =
            "HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ncontent-length: 9999\r\n\r\n";
        Turn::last(format!("{head}{body}"))
    })
    .await
}

/// What the client and the ledger are told of a reply that moves after three tokens.
async fn moved(
    rest: impl Fn() -> Vec<String> + Clone + Send + Sync + 'static,
) -> (Vec<Value>, Value) {
    let engines = [breaks_off(rest.clone()).await, breaks_off(rest).await];
    let workers = [("a", &engines[0]), ("b", &engines[1])];
    let cluster = cluster(aggregated("migrate: true"), &workers).await;
    let ids: Vec<u64> = (10..10 + PROMPT_TOKENS).collect();
    let mut body = completion("");
    body["prompt"] = ids.into();
    let mut body = streamed(&body);
    body["stream_options"] = json!({"include_usage": true});
    let chunks = cluster.http.stream(COMPLETIONS, &body).await.chunks().await;
    let line = line(&cluster).await;
    assert_eq!(line["outcome"], "ok", "{line}");
    (chunks, line)
}

fn with_ids(mut choice: Value) -> Value {
    choice["token_ids"] = json!([30]);
    choice
}

#[tokio::test]
async fn a_moved_reply_s_usage_is_whole_whatever_the_second_engine_leaves_out() {
    let usage = || json!({"prompt_tokens": 53, "completion_tokens": 2, "total_tokens": 55});
    let partial = || json!({"prompt_tokens": 53, "completion_tokens": 2});
    let mut too_many = choice("y", false);
    too_many["token_ids"] = (20..60).collect();
    for (what, second, last, usage) in [
        ("all is there", with_ids(choice("y", false)), with_ids(choice("z", true)), usage()),
        ("no token ids", choice("y", false), choice("z", true), usage()),
        ("no token ids at first", choice("y", false), with_ids(choice("z", true)), usage()),
        ("more tokens than were asked for", too_many, with_ids(choice("z", true)), usage()),
        ("no total", with_ids(choice("y", false)), with_ids(choice("z", true)), partial()),
    ] {
        let rest = move || {
            vec![
                event(json!({"id": "other", "choices": [second]})),
                event(json!({"id": "other", "choices": [last]})),
                event(json!({"id": "other", "choices": [], "usage": usage})),
                done(),
            ]
        };
        let (chunks, line) = moved(rest).await;
        let told = &chunks.last().unwrap()["usage"];
        assert_eq!(
            (&told["prompt_tokens"], &told["completion_tokens"], &told["total_tokens"]),
            (&json!(50), &json!(5), &json!(55)),
            "{what}"
        );
        assert_eq!(line["prompt_tokens"], 50, "{what}: {line}");
        assert_eq!(line["completion_tokens"], 5, "{what}: {line}");
        for chunk in &chunks {
            assert_eq!(chunk["id"], chunks[0]["id"], "{what}");
            assert!(chunk["choices"][0]["token_ids"].is_null(), "{what}: {chunk}");
        }
    }
}

/// A prefill engine that reports 16 cached tokens, and a decode engine with this usage.
async fn handed_over(usage: &'static str) -> [RawEngine; 2] {
    let prefill = RawEngine::start(|_| {
        let told = json!({
            "id": "x", "object": "text_completion", "created": 1, "model": "sim",
            "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
            "usage": {
                "prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101,
                "prompt_tokens_details": {"cached_tokens": 16},
            },
            "kv_transfer_params": {
                "do_remote_prefill": true, "do_remote_decode": false,
                "remote_block_ids": [[1, 2, 3]], "remote_engine_id": "e", "tp_size": 1,
                "remote_request_id": "q", "remote_host": "127.0.0.1", "remote_port": 5600,
            },
        });
        Turn::answer(reply(200, "application/json", &told.to_string()))
    });
    let decode = RawEngine::start(move |asked| {
        if body_of(asked)["stream"] == true {
            let usage =
                event(json!({"choices": [], "usage": 0})).replace(":0}", &format!(":{usage}}}"));
            return stream(&[event(json!({"choices": [choice("x", true)]})), usage, done()]);
        }
        let told = json!({"id": "x", "choices": [choice("x", true)], "usage": 0});
        let told = told.to_string().replace("\"usage\":0", &format!("\"usage\":{usage}"));
        Turn::answer(reply(200, "application/json", &told))
    });
    [prefill.await, decode.await]
}

#[tokio::test]
async fn transferred_tokens_never_appear_as_cached_where_a_count_cannot_be_read() {
    for (usage, told) in [
        (
            r#"{"prompt_tokens":100,"completion_tokens":3.0,"prompt_tokens_details":{"cached_tokens":96}}"#,
            json!({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 16}}),
        ),
        (
            r#"{"prompt_tokens":100,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":-1}}"#,
            json!({
                "prompt_tokens": 100, "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 16},
            }),
        ),
        (
            r#"{"prompt_tokens":1e2,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":96}}"#,
            json!({"completion_tokens": 3, "prompt_tokens_details": {}}),
        ),
        (r#""96""#, Value::Null),
    ] {
        for is_streamed in [false, true] {
            let [prefill, decode] = handed_over(usage).await;
            let spec = Spec { prefill: 0, decode: 0, ..Spec::default() };
            let cluster = cluster(spec, &[("p0", &prefill), ("d0", &decode)]).await;
            let mut body = completion(&prompt(20, "a"));
            let client_usage = if is_streamed {
                body = streamed(&body);
                body["stream_options"] = json!({"include_usage": true});
                let chunks = cluster.http.stream(COMPLETIONS, &body).await.chunks().await;
                chunks.last().unwrap()["usage"].clone()
            } else {
                cluster.http.post(COMPLETIONS, &body).await.json()["usage"].clone()
            };
            assert_eq!(client_usage, told, "{usage}");
            let line = line(&cluster).await;
            assert_eq!((&line["outcome"], &line["flow"]), (&json!("ok"), &json!("prefill_first")));
            assert_eq!(line["cached_tokens"], 16, "{usage}: {line}");
            // A count that cannot be read is not taken for 0.
            let completion_tokens =
                told.get("completion_tokens").filter(|_| told.get("prompt_tokens").is_some());
            let completion_tokens = completion_tokens.unwrap_or(&Value::Null);
            assert_eq!(&line["completion_tokens"], completion_tokens, "{usage}: {line}");
        }
    }
}

#[tokio::test]
async fn usage_on_the_last_part_of_a_stream_is_booked_and_told_at_the_end() {
    for asks in [true, false] {
        let engine = RawEngine::start(|_| {
            let total = |count: u64| {
                json!({
                    "prompt_tokens": 60, "completion_tokens": count, "total_tokens": 60 + count,
                    "prompt_tokens_details": {"cached_tokens": 16},
                })
            };
            stream(&[
                event(json!({"choices": [choice("x", false)], "usage": total(1)})),
                event(json!({"choices": [choice("y", true)], "usage": total(2)})),
                done(),
            ])
        })
        .await;
        let cluster = cluster(aggregated(""), &[("a", &engine)]).await;
        let mut body = streamed(&completion(&prompt(20, "a")));
        body["stream_options"] = json!({"include_usage": asks});
        let chunks = cluster.http.stream(COMPLETIONS, &body).await.chunks().await;
        let told: Vec<_> = chunks.iter().filter(|chunk| !chunk["usage"].is_null()).collect();
        assert_eq!(told.len(), usize::from(asks), "running totals were not asked for: {chunks:?}");
        if asks {
            assert_eq!(chunks.last().unwrap()["choices"], json!([]));
            assert_eq!(told[0]["usage"]["completion_tokens"], 2);
            assert_eq!(told[0]["usage"]["prompt_tokens_details"]["cached_tokens"], 16);
        }
        let line = line(&cluster).await;
        assert_eq!(
            (&line["prompt_tokens"], &line["completion_tokens"], &line["cached_tokens"]),
            (&json!(60), &json!(2), &json!(16)),
            "{line}"
        );
        assert_eq!(line["told"].is_null(), !asks, "{line}");
    }
}

#[tokio::test]
async fn a_message_whose_prompt_is_counted_at_its_start_only_is_billed_with_these_figures() {
    let named =
        |event: Value| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap());
    // The usage at the end, what the client is told there, and the tokens that are billed: those of
    // the prompt, those that were cached, and the generated ones.
    for (usage, told, billed) in [
        (
            json!({"output_tokens": 4}),
            json!({"input_tokens": 20, "cache_read_input_tokens": 32, "output_tokens": 4}),
            json!([52, 32, 4]),
        ),
        (
            json!({"input_tokens": 52, "output_tokens": 4}),
            json!({"input_tokens": 52, "output_tokens": 4}),
            json!([52, 0, 4]),
        ),
        // The figure of generated tokens at the start is none of the whole message.
        (Value::Null, Value::Null, json!([52, 32, null])),
    ] {
        let engine = RawEngine::start(move |_| {
            let start = json!({
                "id": "m", "type": "message", "role": "assistant", "content": [],
                "usage": {"input_tokens": 20, "cache_read_input_tokens": 32, "output_tokens": 1},
            });
            let delta = json!({"type": "text_delta", "text": "x"});
            stream(&[
                named(json!({"type": "message_start", "message": start})),
                named(json!({"type": "content_block_delta", "index": 0, "delta": delta})),
                named(json!({
                    "type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage,
                })),
                named(json!({"type": "message_stop"})),
            ])
        })
        .await;
        let model = "cached_tokens_fallback: omit";
        let cluster = cluster(aggregated(model), &[("a", &engine)]).await;
        let body = json!({
            "model": "sim", "max_tokens": 9, "stream": true,
            "messages": [{"role": "user", "content": prompt(20, "a")}],
        });
        let events = cluster.http.stream(MESSAGES, &body).await.rest_text().await;
        let data = events.lines().filter_map(|line| line.strip_prefix("data: "));
        let chunks: Vec<Value> = data.map(|data| serde_json::from_str(data).unwrap()).collect();
        let delta = chunks.iter().find(|chunk| chunk["type"] == "message_delta").unwrap();
        assert_eq!(delta["usage"], told);
        let line = line(&cluster).await;
        let figures = ["prompt_tokens", "cached_tokens", "completion_tokens"];
        assert_eq!(json!(figures.map(|figure| &line[figure])), billed, "{line}");
        assert_eq!(line["told"].is_null(), told.is_null(), "{line}");
    }
}

#[tokio::test]
async fn embeddings_are_billed_although_their_cached_figure_makes_no_sense() {
    for details in [json!({"cached_tokens": 80}), json!({"cached_tokens": 8}), Value::Null] {
        let engine = RawEngine::start(move |_| {
            let usage =
                json!({"prompt_tokens": 40, "total_tokens": 40, "prompt_tokens_details": details});
            let told = json!({
                "id": "e", "object": "list", "data": [{"index": 0, "embedding": [0.5]}],
                "usage": usage,
            });
            Turn::answer(reply(200, "application/json", &told.to_string()))
        })
        .await;
        let cluster = cluster(aggregated(""), &[("a", &engine)]).await;
        let body = json!({"model": "sim", "input": prompt(20, "a")});
        assert_eq!(cluster.http.post(EMBEDDINGS, &body).await.status, 200);
        let line = line(&cluster).await;
        assert_eq!(line["prompt_tokens"], 40, "{line}");
        assert_eq!(line["prompts"][0]["legs"][0]["local_cache_hit"], 0, "{line}");
        let workers = cluster.admin.get("/admin/workers").await.json();
        let audit = &workers["workers"][0]["audit"];
        assert_eq!(audit["usage"]["reported"], 1, "{audit}");
        assert_eq!(audit["cached_tokens"]["replies"], 0, "none are expected: {audit}");
    }
}
