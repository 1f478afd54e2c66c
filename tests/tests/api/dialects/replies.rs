//! Replies in every flow: the text is that of a chat, the usage is right, and all other members are
//! unchanged.

use splitrail_sim::{KvConnector, UsageReport};
use splitrail_tests::canned::{Canned, Then};
use splitrail_tests::client::whole_text;

use super::support::*;

fn pair(connector: KvConnector) -> Spec {
    Spec { connector, ..Spec::default() }
}

#[tokio::test]
async fn a_prompt_s_text_usage_and_cached_tokens_are_those_of_the_chat_it_stands_for() {
    let specs = [
        Spec::aggregated(2),
        pair(KvConnector::Nixl),
        pair(KvConnector::NixlPush),
        pair(KvConnector::Mooncake),
        pair(KvConnector::SharedStorage),
    ];
    let alone = Cluster::start(Spec::aggregated(1)).await;
    for (turn, spec) in specs.into_iter().enumerate() {
        let is_pair = spec.prefill > 0;
        let mut trial = Trial::start(spec).await;
        for path in BOTH {
            for stream in [false, true] {
                let text = prompt(30, &format!("t{turn}{}{stream}", &path[4..6]));
                let chat = alone.http.post(CHAT, &chat_of(&text, 12)).await.json();
                let tokens = chat["usage"]["prompt_tokens"].as_u64().unwrap();
                let mut body = request(path, &text, 12);
                body["stream"] = stream.into();
                for cached in [0, (tokens - 1) / 16 * 16] {
                    trial.expect("ok");
                    let (said, usage) = ask(&trial.cluster.http, path, &body).await;
                    assert_eq!(said, whole_text(&chat, 0), "{path}");
                    assert_eq!(usage["prompt_tokens"], tokens, "{path}");
                    assert_eq!(usage["completion_tokens"], 12, "{path}");
                    // The second goes to the holder: the router knows the very tokens.
                    let told = &usage["prompt_tokens_details"]["cached_tokens"];
                    assert_eq!(told, cached, "{path} {stream}");
                    trial.cluster.settle().await;
                }
            }
        }
        let unknown = "splitrail_untokenized_prompts_total";
        assert_eq!(trial.cluster.metric(unknown, &[]).await, 0.0);
        assert_eq!(
            trial.cluster.metric("splitrail_prompt_length_mismatches_total", &[]).await,
            0.0
        );
        for endpoint in ["responses", "messages"] {
            let labels = [("endpoint", endpoint), ("outcome", "ok")];
            assert_eq!(trial.cluster.metric("splitrail_requests_total", &labels).await, 4.0);
        }
        let remote = trial.cluster.metric("splitrail_prompt_tokens_total", &[("leg", "prefill")]);
        assert_eq!(remote.await > 0.0, is_pair);
        trial.finish().await;
    }
}

#[tokio::test]
async fn both_legs_are_asked_on_the_same_path_in_its_own_words() {
    let mut trial = Trial::start(Spec { prefill: 1, decode: 1, ..Spec::default() }).await;
    for path in BOTH {
        let mut body = streamed(&request(path, &prompt(30, path), 12));
        body["metadata"] = json!({"a": [1, 2]});
        body["kv_transfer_params"] = json!({"do_remote_prefill": true});
        body["vllm_xargs"] = json!({"kv_transfer_params": "x", "mine": 1});
        trial.expect("ok");
        let (_, usage) = ask(&trial.cluster.http, path, &body).await;
        assert_eq!(usage["completion_tokens"], 12);
        let [prefill, decode] = ["p0", "d0"].map(|name| trial.asked(name).pop().unwrap());
        assert_eq!((prefill.path.as_str(), decode.path.as_str()), (path, path));
        let limit = if path == RESPONSES { "max_output_tokens" } else { "max_tokens" };
        assert_eq!((&prefill.body[limit], &decode.body[limit]), (&json!(1), &json!(12)));
        assert_eq!(prefill.body["stream"], false);
        assert_eq!(prefill.body["kv_transfer_params"]["do_remote_decode"], true);
        let fetched = &decode.body["kv_transfer_params"];
        assert_eq!(fetched["do_remote_prefill"], true);
        assert!(fetched["remote_request_id"].is_string(), "the router's own: {fetched}");
        for leg in [&prefill.body, &decode.body] {
            assert_eq!(leg["metadata"], json!({"a": [1, 2]}));
            assert_eq!(leg["vllm_xargs"], json!({"mine": 1}));
            assert!(leg.get("stream_options").is_none());
            assert_eq!(leg.get("store").is_some(), path == RESPONSES, "engines keep none");
        }
    }
    let pulled = trial.cluster.engine("d0").state().totals.external_kv_transfer_tokens;
    assert!(pulled > 0, "the hand-off was fetched");
    trial.finish().await;
}

/// What a stream of another engine may look like.
const MESSAGE: &str = ": hello\n\nevent: message_start\ndata: {\"type\": \"message_start\", \"message\": {\"id\":\"m\",\"usage\":{\"input_tokens\":50,\"output_tokens\":1}}}\n\nevent: ping\ndata: {\"type\": \"ping\"}\n\nid: 7\nevent: content_block_delta\ndata: {\"type\":\"content_block_delta\",  \"delta\":{\"text\":\"message_stop\"}, \"x\":1.50}\n\nevent: of_tomorrow\nretry: 5\ndata: {\"type\":\"of_tomorrow\",\ndata: \"y\":[1 ,2]}\n\nevent: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"input_tokens\":18,\"output_tokens\":4,\"cache_read_input_tokens\":32,\"z\":1}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";

const RESPONSE: &str = "event: response.created\ndata: {\"response\":{\"usage\":null},\"type\":\"response.created\"}\n\nevent: response.output_text.delta\ndata: {\"delta\":\"response.completed\",  \"type\":\"response.output_text.delta\",\"x\":1.50}\n\nid: 7\nevent: response.incomplete\ndata: {\"type\":\"response.incomplete\",\"response\":{\"z\":[1 ,2],\"usage\":{\"input_tokens\":50,\"input_tokens_details\":{\"cached_tokens\":32,\"k\":1},\"output_tokens\":4}}}\n\n";

#[tokio::test]
async fn events_are_relayed_with_their_names_byte_for_byte() {
    for (path, stream) in [(MESSAGES, MESSAGE), (RESPONSES, RESPONSE)] {
        let engine = Canned::start(Canned::reply("text/event-stream", stream), Then::Close).await;
        let spec = Spec {
            both: 0,
            extra_workers: vec![engine.worker("x0", "both")],
            ..Spec::aggregated(0)
        };
        let mut trial = Trial::start(spec).await;
        let body = request(path, "hello", 5);
        let mut events = trial.stream("ok", path, &body).await;
        let got = events.rest_text().await;
        // The engine's figures are right as they are; a comment is nobody's.
        assert_eq!(got, stream.trim_start_matches(": hello\n\n"));
        trial.finish().await;
    }
}

#[tokio::test]
async fn the_first_event_of_a_message_has_the_figures_of_the_prefill_leg() {
    let mut trial = Trial::start(Spec { prefill: 1, decode: 1, ..Spec::default() }).await;
    let body = request(MESSAGES, &prompt(30, "first"), 5);
    for warm in [false, true] {
        let mut events = trial.stream("ok", MESSAGES, &body).await;
        let events = events.named().await;
        let [first, last] =
            [&events[0].1["message"]["usage"], &events[events.len() - 2].1["usage"]];
        let read = &last["cache_read_input_tokens"];
        assert_eq!(read != &json!(0), warm, "{last}");
        assert_eq!(&first["cache_read_input_tokens"], read);
        let prompts = [first, last].map(|usage| in_chat_words(MESSAGES, usage));
        assert_eq!(prompts[0]["prompt_tokens"], prompts[1]["prompt_tokens"], "{first} {last}");
    }
    trial.finish().await;
}

#[tokio::test]
async fn an_engine_s_silence_is_filled_as_in_chats() {
    for fallback in ["estimate", "omit"] {
        let mut trial = Trial::start(Spec {
            model: format!("cached_tokens_fallback: {fallback}"),
            engine: |_, config| config.usage_report = UsageReport::Absent,
            ..Spec::aggregated(1)
        })
        .await;
        let body = request(MESSAGES, &prompt(30, "silent"), 5);
        for warm in [false, true] {
            let reply = trial.post("ok", MESSAGES, &body).await.json();
            let usage = &reply["usage"];
            let told = usage.get("cache_read_input_tokens").and_then(Value::as_u64);
            assert_eq!(told.is_some(), fallback == "estimate", "{usage}");
            assert_eq!(told.unwrap_or(0) > 0, warm && fallback == "estimate", "{usage}");
            trial.cluster.settle().await;
        }
        trial.finish().await;
    }
}

#[tokio::test]
async fn requested_usage_details_are_beside_the_usage() {
    let mut trial = Trial::start(Spec::default()).await;
    let headers = [("x-splitrail-usage", "detail")];
    for path in BOTH {
        let body = request(path, &prompt(30, path), 5);
        trial.expect("ok");
        let whole = trial.cluster.http.post_with(path, &headers, body.to_string()).await.json();
        assert_eq!(whole["usage"]["splitrail"]["prompts"][0]["cached_tokens"], 0, "{whole}");
        trial.expect("ok");
        let mut events = trial.cluster.http.stream_with(path, &headers, &streamed(&body)).await;
        let (_, usage) = of_events(path, &events.named().await);
        let legs = usage["splitrail"]["prompts"][0]["legs"].as_array().unwrap();
        assert_eq!(legs.len(), 2, "{usage}");
    }
    trial.finish().await;
}

#[tokio::test]
async fn a_decode_worker_that_holds_enough_serves_alone_by_the_index() {
    let spec = Spec {
        prefill: 1,
        decode: 1,
        flow: "decode_first",
        model: "request_flows: [decode_only]\ncache_hit_threshold: 0.5".into(),
        ..Spec::default()
    };
    let mut trial = Trial::start(spec).await;
    for path in BOTH {
        let body = request(path, &prompt(30, path), 5);
        for (gate, tried) in [("router", "skipped"), ("router", "served")] {
            let reply = trial.post("ok", path, &body).await;
            assert_eq!((reply.route("gate"), reply.route("try")), (Some(gate), Some(tried)));
            assert!(!text_of(path, &reply.json()).is_empty());
            trial.cluster.settle().await;
        }
        assert!(
            trial.asked("d0").iter().all(|seen| {
                seen.path != path || seen.body.get("cache_hit_threshold").is_none()
            })
        );
    }
    trial.finish().await;
}

#[tokio::test]
async fn a_miss_of_decode_only_is_reported_in_the_dialect_of_the_request() {
    let spec = Spec { model: "request_flows: [decode_only]".into(), ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    let headers = [("x-splitrail-flow", "decode_only")];
    for path in BOTH {
        let body = request(path, &prompt(30, "only"), 5);
        trial.expect("ok");
        let whole = trial.cluster.http.post_with(path, &headers, body.to_string()).await.json();
        trial.expect("ok");
        let mut events = trial.cluster.http.stream_with(path, &headers, &streamed(&body)).await;
        let events = events.named().await;
        let last = &events[events.len() - if path == MESSAGES { 2 } else { 1 }].1;
        let (said, streamed, usage) = match path {
            MESSAGES => (&whole["stop_reason"], &last["delta"]["stop_reason"], &last["usage"]),
            _ => (
                &whole["incomplete_details"]["reason"],
                &last["response"]["incomplete_details"]["reason"],
                &last["response"]["usage"],
            ),
        };
        assert_eq!((said, streamed), (&json!("cache_threshold"), &json!("cache_threshold")));
        assert_eq!(in_chat_words(path, usage)["prompt_tokens_details"]["cached_tokens"], 0);
        assert_eq!(usage, &whole["usage"]);
    }
    trial.finish().await;
}

#[tokio::test]
async fn explaining_knows_the_endpoints() {
    let cluster = Cluster::start(Spec::default()).await;
    let json = [("content-type", "application/json")];
    for (path, query, name) in [
        (MESSAGES, "?endpoint=/v1/messages", "messages"),
        (RESPONSES, "?endpoint=/v1/responses", "responses"),
        (RESPONSES, "", "responses"),
    ] {
        let body = request(path, &prompt(30, "why"), 5).to_string();
        let told = cluster.admin.post_with(&format!("/admin/explain{query}"), &json, body).await;
        let told = &told.json()["explanation"];
        assert_eq!(told["endpoint"], name, "{told}");
        assert!(told["prompts"][0]["prompt_blocks"].as_u64().unwrap() > 0, "{told}");
    }
}
