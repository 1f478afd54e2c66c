//! What a request's fields can reach: fields that steer an engine, and cache salts.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value, json};
use splitrail_sim::KvConnector;
use splitrail_tests::grpc::{grpc_client, text_request};
use splitrail_tests::scripted_server::{ReceivedRequest, ScriptedReply};
use splitrail_tests::solo::{Solo, whole_reply};
use splitrail_tests::{Cluster, Spec, dialect};

/// Each endpoint that reaches engines, by its name in the fixture, with the least body that it takes.
fn endpoints() -> Vec<(&'static str, &'static str, Value)> {
    let messages = json!([{"role": "user", "content": "hello"}]);
    vec![
        ("chat", "/v1/chat/completions", json!({"model": "sim", "messages": messages})),
        ("completions", "/v1/completions", json!({"model": "sim", "prompt": "hello"})),
        (
            "generate",
            "/inference/v1/generate",
            json!({"model": "sim", "token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}),
        ),
        ("responses", "/v1/responses", json!({"model": "sim", "input": "hello", "store": false})),
        (
            "messages",
            "/v1/messages",
            json!({"model": "sim", "max_tokens": 4, "messages": messages}),
        ),
        (
            "count_tokens",
            "/v1/messages/count_tokens",
            json!({"model": "sim", "messages": messages}),
        ),
        ("embeddings", "/v1/embeddings", json!({"model": "sim", "input": "hello"})),
        ("score", "/score", json!({"model": "sim", "text_1": "hello", "text_2": ["you"]})),
        ("rerank", "/rerank", json!({"model": "sim", "query": "hello", "documents": ["you"]})),
        ("classify", "/classify", json!({"model": "sim", "input": "hello"})),
        ("pooling", "/pooling", json!({"model": "sim", "input": "hello"})),
        ("tokenize", "/tokenize", json!({"model": "sim", "prompt": "hello"})),
        ("detokenize", "/detokenize", json!({"model": "sim", "tokens": [1]})),
    ]
}

/// Fields of the engines' schemas that no model opens, with a value that an engine would take.
fn router_only() -> Vec<(&'static str, Value)> {
    vec![
        ("kv_transfer_params", json!({"do_remote_prefill": true, "remote_host": "poison"})),
        ("ec_transfer_params", json!({"a": "poison"})),
        ("bootstrap_host", json!("poison")),
        ("bootstrap_port", json!(1)),
        ("bootstrap_room", json!(2)),
        ("bootstrap_pair_key", json!("poison")),
        ("request_id", json!("poison")),
        ("rid", json!("poison")),
        ("data_parallel_rank", json!(1)),
        ("data_parallel_rank_decode", json!(1)),
        ("routed_dp_rank", json!(1)),
        ("disagg_prefill_dp_rank", json!(1)),
        ("disaggregated_params", json!({"a": "poison"})),
        ("kv_hints", json!({"actions": ["poison"]})),
    ]
}

/// Fields of the engines' schemas that steer an engine, with a value that an engine would take.
fn steering() -> Vec<(&'static str, Value)> {
    vec![
        // Overtakes other clients in the engine's queue.
        ("priority", json!(-1000)),
        // Adapters and sessions that this client was not offered.
        ("lora_path", json!("poison")),
        ("lora_request", json!({"lora_name": "poison"})),
        ("session_id", json!("poison")),
        ("session_params", json!({"id": "poison"})),
        // A key of the prefix cache that the index does not know.
        ("extra_key", json!("poison")),
        // Code that runs in the engine.
        ("custom_logit_processor", json!("poison")),
        ("logits_processors", json!(["os.system"])),
        // Another prompt, or answer, than the one that the router placed.
        ("input_ids", json!([1, 2])),
        ("input_embeds", json!([[0.1]])),
        ("embed_overrides", json!([[[0.1]]])),
        ("embed_override_token_id", json!(1)),
        ("query_embed_overrides", json!([[0.1]])),
        ("item_embed_overrides", json!([[[0.1]]])),
        ("trace_decode_token_ids", json!([1])),
        // The model's inner states.
        ("return_hidden_states", json!(true)),
        ("return_pooled_hidden_states", json!(true)),
        ("return_routed_experts", json!(true)),
        ("routed_experts_prompt_start", json!(0)),
        ("routed_experts_start_len", json!(0)),
        // Work for images, and entries of the cache of images by hashes of the client's choice.
        ("mm_processor_kwargs", json!({"max_pixels": 1})),
        ("media_io_kwargs", json!({"image": {}})),
        ("max_dynamic_patch", json!(99)),
        ("min_dynamic_patch", json!(99)),
        ("images_config", json!({})),
        ("video_config", json!({})),
        ("features", json!({"mm_hashes": {"image": ["poison"]}, "mm_placeholders": {}})),
        ("allowed_media_domains", json!(["poison"])),
        // Whether an answer is marked as generated.
        ("watermark", json!({})),
        ("watermarking", json!(false)),
        // How many events, metrics and logs the engine makes of a request.
        ("kv_cache_report_mode", json!("full")),
        ("custom_labels", json!({"poison": "x"})),
        ("no_logs", json!(true)),
        // How the engine's own parts pass output to each other.
        ("output_kind", json!(0)),
        ("skip_clone", json!(true)),
        ("output_text_buffer_length", json!(9)),
    ]
}

fn engine(heard: &ReceivedRequest) -> ScriptedReply {
    match &*heard.target {
        "/v1/completions" if heard.text().contains("\"stream\":true") => {
            let chunk = json!({
                "id": "x", "object": "text_completion", "created": 1, "model": "sim",
                "choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            });
            ScriptedReply::events(&format!("data: {chunk}\n\ndata: [DONE]\n\n"))
        }
        "/v1/completions" => whole_reply(),
        _ => ScriptedReply::json(200, "{}"),
    }
}

/// What the engine was sent last on a path.
fn sent(solo: &Solo, path: &str) -> Map<String, Value> {
    let heard = solo.post.heard();
    let last = heard.iter().rfind(|heard| heard.is_inference() && heard.target == path);
    let body = &last.unwrap_or_else(|| panic!("nothing came at {path}")).body;
    serde_json::from_slice(body).unwrap()
}

fn names(members: &Map<String, Value>) -> BTreeSet<&str> {
    members.keys().map(String::as_str).collect()
}

fn put_all(body: &mut Value, fields: &[(&str, Value)]) {
    for (name, value) in fields {
        body[*name] = value.clone();
    }
}

/// The engines' request classes: made from their packages, not from the router's table. It also
/// says which fields are held back, and why.
fn fixture() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/engine_fields.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Engine, endpoint and fields of each class; those of forms are tried with forms
/// (`tests/tests/api/audio.rs`).
fn schemas(fixture: &Value) -> Vec<(&str, &str, BTreeSet<&str>)> {
    let mut all = Vec::new();
    for engine in fixture["engines"].as_array().unwrap() {
        for request in engine["requests"].as_array().unwrap() {
            let fields = request["fields"].as_array().unwrap().iter();
            let fields = fields.map(|field| field.as_str().unwrap()).collect();
            let engine = engine["engine"].as_str().unwrap();
            let endpoint = request["endpoint"].as_str().unwrap();
            if !["transcriptions", "translations"].contains(&endpoint) {
                all.push((engine, endpoint, fields));
            }
        }
    }
    assert!(all.len() >= 20);
    all
}

#[tokio::test]
async fn every_field_of_the_engines_schemas_passes_or_steers() {
    let solo = Solo::start("{}", engine).await;
    let fixture = fixture();
    let held_back = names(fixture["held_back"].as_object().unwrap());
    let tried: BTreeSet<&str> =
        steering().iter().chain(&router_only()).map(|(name, _)| *name).collect();
    assert!(held_back.is_subset(&tried), "all of them are tried below");
    for (engine, endpoint, fields) in schemas(&fixture) {
        let context = format!("{engine} {endpoint}");
        let expected: BTreeSet<&str> = fields.difference(&held_back).copied().collect();
        let (of, inside) = match endpoint {
            "generate.sampling_params" => ("generate", Some("sampling_params")),
            "stream_options" => ("chat", Some("stream_options")),
            of => (of, None),
        };
        let all = endpoints();
        let (_, path, mut body) = all.into_iter().find(|(name, ..)| *name == of).unwrap();
        if inside == Some("stream_options") {
            body["stream"] = true.into();
            body["stream_options"] = json!({"include_usage": true});
        }
        let target = match inside {
            Some(inside) => &mut body[inside],
            None => &mut body,
        };
        // `null` is the default of nearly all of them, and is sent on like any other value.
        for name in &fields {
            if target.get(*name).is_none() {
                target[*name] = Value::Null;
            }
        }
        let reply = solo.http.post(path, &body).await;
        assert_ne!(reply.status, 400, "{context}: {}", reply.text());
        let sent = sent(&solo, path);
        let members = inside.map_or(&sent, |inside| sent[inside].as_object().unwrap());
        let passed: BTreeSet<&str> =
            names(members).into_iter().filter(|name| fields.contains(*name)).collect();
        assert_eq!(
            passed, expected,
            "{context}: a field of the schema has no rule, or a wrong one"
        );
    }
}

#[tokio::test]
async fn no_field_that_steers_reaches_an_engine_on_any_endpoint() {
    let solo = Solo::start("{}", engine).await;
    let poison: Vec<_> = router_only().into_iter().chain(steering()).collect();
    for (name, path, least) in endpoints() {
        let mut body = least.clone();
        put_all(&mut body, &poison);
        put_all(&mut body, &[("KV_TRANSFER_PARAMS", json!(1)), ("kv_transfer_params ", json!(1))]);
        put_all(&mut body, &[("extra_body", json!({"rid": "poison"})), ("made_up", json!(1))]);
        if name == "generate" {
            put_all(&mut body["sampling_params"], &poison);
        }
        let nested: Map<String, Value> =
            poison.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        let nested = json!({"ok": 1, "in": [{"deep": nested.clone()}], "x": nested});
        put_all(&mut body, &[("vllm_xargs", nested.clone()), ("custom_params", json!([nested]))]);
        let text = body.to_string();
        // The same with keys that are written with escapes.
        let escaped = poison.iter().fold(text.clone(), |text, (name, _)| {
            let (first, rest) = name.split_at(1);
            let first = first.chars().next().unwrap() as u32;
            text.replace(&format!("\"{name}\":"), &format!("\"\\u{first:04x}{rest}\":"))
        });
        for text in [text, escaped] {
            let before = solo.post.heard().len();
            let reply = solo.http.post_with(path, &[], text).await;
            assert_ne!(reply.status, 400, "{name}: {}", reply.text());
            let heard = solo.post.heard();
            let asked: Vec<_> = heard[before..].iter().filter(|h| h.is_inference()).collect();
            assert!(!asked.is_empty(), "{name}");
            for heard in asked {
                let bytes = heard.text();
                assert!(!bytes.contains("poison"), "{name}: {bytes}");
                for (field, _) in &poison {
                    assert!(!bytes.contains(&format!("\"{field}\"")), "{name}: {bytes}");
                }
                let sent: Value = serde_json::from_slice(&heard.body).unwrap();
                for unknown in ["made_up", "extra_body", "KV_TRANSFER_PARAMS"] {
                    assert_eq!(sent.get(unknown), None, "{name}");
                }
                if let Some(extensions) = sent.get("vllm_xargs") {
                    assert_eq!(*extensions, json!({"ok": 1, "in": [{"deep": {}}], "x": {}}));
                }
            }
        }
    }
    for reason in ["router_only", "steers", "unknown"] {
        let labels = [("model", "sim"), ("reason", reason)];
        assert!(solo.metric("splitrail_removed_fields_total", &labels).await > 0.0, "{reason}");
    }
}

#[tokio::test]
async fn no_field_that_steers_reaches_an_engine_over_grpc() {
    let solo = Solo::start("{}", engine).await;
    let poison: Vec<_> = router_only().into_iter().chain(steering()).collect();
    let mut extra = json!({"made_up": 1, "user": "u"});
    put_all(&mut extra, &poison);
    extra["vllm_xargs"] = json!({"ok": 1, "kv_transfer_params": {}, "list": [{"rid": "poison"}]});
    let request = text_request("hello", &extra.to_string());
    let reply = grpc_client(solo.router.grpc).generate(request).await.unwrap();
    let removed = reply.metadata().get("x-splitrail-removed-fields").unwrap().to_str().unwrap();
    assert!(removed.contains("kv_transfer_params"), "{removed}");
    let sent = sent(&solo, "/v1/completions");
    for (field, _) in &poison {
        assert_eq!(sent.get(*field), None, "{field}");
    }
    assert_eq!((sent.get("made_up"), &sent["user"]), (None, &json!("u")));
    assert_eq!(sent["vllm_xargs"], json!({"ok": 1, "list": [{}]}));
}

#[tokio::test]
async fn a_model_opens_fields_by_name_and_removed_fields_are_reported() {
    let opened = "    pass_unknown: [priority, made_up]\n";
    let solo = Solo::start_with("{}", opened, engine).await;
    let body = json!({
        "model": "sim", "prompt": "hello", "priority": 3, "made_up": {"a": 1}, "lora_path": "x",
        "unheard_of": 1, "a b": 2, "user": "u",
    });
    let reply = solo.http.post("/v1/completions", &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("x-splitrail-removed-fields"), "lora_path, unheard_of; others=1");
    let sent = sent(&solo, "/v1/completions");
    assert_eq!((&sent["priority"], &sent["made_up"]), (&json!(3), &json!({"a": 1})));
    assert_eq!((sent.get("lora_path"), sent.get("unheard_of")), (None, None));
    let plain = json!({"model": "sim", "prompt": "hello", "user": "u"});
    let reply = solo.http.post("/v1/completions", &plain).await;
    assert_eq!(reply.header("x-splitrail-removed-fields"), "", "nothing was removed");
}

/// The blocks of one client's prompt serve no client with another salt, on any endpoint that has
/// a prefix cache: neither the engine nor the router finds them.
#[tokio::test]
async fn other_salts_find_nothing_on_any_endpoint() {
    let cluster = Cluster::start(Spec { prefill: 1, decode: 1, ..Spec::default() }).await;
    let text = "a secret that is long enough to fill several blocks of the cache ".repeat(4);
    let ids: Vec<u32> = (1..200).collect();
    let cases = [
        ("/v1/chat/completions", dialect::chat_of(&text, 2)),
        ("/v1/completions", json!({"model": "sim", "max_tokens": 2, "prompt": text})),
        (
            "/inference/v1/generate",
            json!({"model": "sim", "token_ids": ids, "sampling_params": {"max_tokens": 2}}),
        ),
        (dialect::RESPONSES, dialect::request(dialect::RESPONSES, &text, 2)),
        (dialect::MESSAGES, dialect::request(dialect::MESSAGES, &text, 2)),
    ];
    for (path, body) in cases {
        for (salt, found) in [("a", false), ("b", false), ("a", true)] {
            let mut salted = body.clone();
            salted["cache_salt"] = format!("{path} {salt}").into();
            let reply = cluster.http.post(path, &salted).await;
            assert_eq!(reply.status, 200, "{path}: {}", reply.text());
            let route = reply.header("x-splitrail-route").to_owned();
            assert_eq!(!route.contains("overlap_blocks=0"), found, "{path} {salt}: {route}");
            assert_eq!(!route.contains("cached_tokens=0"), found, "{path} {salt}: {route}");
            cluster.settle().await;
        }
    }
}

/// SGLang separates responses by their salt. It ignores that of messages and of what generates
/// nothing, and would share the blocks.
#[tokio::test]
async fn a_salt_is_refused_where_sglang_has_none() {
    let connector = KvConnector::Sglang;
    let cluster =
        Cluster::start(Spec { prefill: 1, decode: 1, connector, ..Spec::default() }).await;
    let responses = dialect::request(dialect::RESPONSES, &"an open text ".repeat(20), 2);
    for (salt, found) in [("a", false), ("b", false), ("a", true)] {
        let mut salted = responses.clone();
        salted["cache_salt"] = salt.into();
        let reply = cluster.http.post(dialect::RESPONSES, &salted).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.route("overlap_blocks") != Some("0"), found, "{salt}");
        assert_eq!(reply.route("cached_tokens") != Some("0"), found, "{salt}");
        cluster.settle().await;
    }
    let messages = dialect::request(dialect::MESSAGES, "a secret", 2);
    let embeddings = json!({"model": "sim", "input": "a secret"});
    for (path, mut body) in [(dialect::MESSAGES, messages), ("/v1/embeddings", embeddings)] {
        body["cache_salt"] = "a".into();
        let reply = cluster.http.post(path, &body).await;
        assert_eq!(reply.status, 400, "{path}: {}", reply.text());
        assert!(reply.text().contains("no `cache_salt`"), "{path}: {}", reply.text());
    }
    let asked = cluster.engines.iter().flat_map(|(_, engine)| engine.requests());
    let secrets = asked.filter(|seen| seen.body.to_string().contains("a secret"));
    assert_eq!(secrets.count(), 0, "no engine was asked");
}
