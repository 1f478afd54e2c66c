//! What a client sends steers no engine: paths, fields, headers, ids and
//! credentials that engines see are the router's own.

mod identity;

use std::collections::{BTreeSet, HashSet};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Map, Value, json};
use splitrail_sim::{Fault, FaultKind, RecordedRequest};
use splitrail_tests::cluster::eventually;
use splitrail_tests::grpc::{generate, text_request};
use splitrail_tests::raw::{exchange, request};
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::shape::error_object;
use splitrail_tests::{Cluster, Spec};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// All that an engine's request may carry besides its body.
const ENGINE_HEADERS: [&str; 6] =
    ["host", "content-type", "content-length", "x-request-id", "traceparent", "via"];

fn completion(text: &str) -> Value {
    json!({"model": "sim", "max_tokens": 4, "temperature": 0, "prompt": text})
}

/// A post that answers every request for inference, behind a router.
async fn behind_a_post(model: String) -> (ScriptedServer, Cluster) {
    let answer = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    })
    .to_string();
    let post = ScriptedServer::start(move |_| ScriptedReply::json(200, &answer)).await;
    let worker = format!("{{ id: post, role: both, url: \"{}\" }}", post.url());
    let cluster = Cluster::start(Spec {
        policy: "{ kind: round_robin }",
        extra_workers: vec![worker],
        model,
        ..Spec::aggregated(0)
    })
    .await;
    eventually("the post is up", async || cluster.metric("splitrail_worker_up", &[]).await == 1.0)
        .await;
    (post, cluster)
}

#[tokio::test]
#[allow(clippy::too_many_lines)] // One table of cases.
async fn only_listed_paths_reach_an_engine() {
    let (post, cluster) = behind_a_post(String::new()).await;
    let body = completion("x").to_string();
    let odd_paths = [
        "/",
        "/invocations",
        "/pause",
        "/resume",
        "/sleep",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/tokenize/",
        "/tokenizer_info",
        "/v2/embed",
        "/v1/load_lora_adapter",
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/v1/chat/completions/",
        "/v1/chat/completions//",
        "/v1%2fchat/completions",
        "/v1/chat%2Fcompletions",
        "/%76%31/chat/completions",
        "/v1/chat/completions/../../pause",
        "/v1/chat/completions/%2e%2e/%2e%2e/pause",
        "/v1/chat/completions/..%2f..%2fpause",
        "/v1/chat/completions%00",
        "/v1/chat/completions%2f",
        "/v1/chat/completions;/pause",
        "/./v1/chat/completions",
        "/%2e/v1/chat/completions",
        "/V1/chat/completions",
        "/v1/chat/completions%20",
        "/v1/models/../../pause",
        "/v1/models/..%2f..%2fpause",
        "/v1/models/%ff%fe",
        "/v1/models/sim/",
        "http://engine.invalid/pause",
        "http://engine.invalid//v1/chat/completions",
        "http://engine.invalid/v1/chat/completions/../../pause",
        // Of the admin listener.
        "/metrics",
        "/admin/decisions",
        "/admin/workers",
        "/admin/attention",
        "/admin/models",
        "/admin/requests",
        "/admin/config",
        "/admin/reload",
        "/admin/explain",
    ];
    let mut odd: Vec<(&str, &str)> = Vec::new();
    for path in odd_paths {
        odd.extend(["GET", "POST", "PUT", "DELETE"].map(|method| (method, path)));
    }
    for path in [CHAT, COMPLETIONS, "http://engine.invalid/v1/completions"] {
        let methods =
            ["GET", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "BREW", "post", "CONNECT"];
        odd.extend(methods.map(|method| (method, path)));
    }
    odd.extend([
        ("OPTIONS", "*"),
        ("CONNECT", "engine.invalid:80"),
        ("PRI", "*"),
        ("POST", "/v1/models"),
        ("POST", "/health"),
        ("TRACE", "/health"),
    ]);
    let mut wrong = Vec::new();
    let address = cluster.running.addresses.http;
    for (method, target) in odd {
        let raw = request(method, target, &[], body.as_bytes());
        let Some(reply) = exchange(address, &raw).await else {
            wrong.push(format!("{method} {target}: no reply"));
            continue;
        };
        let (status, text) = (reply.status(), reply.text());
        let shaped = std::panic::catch_unwind(|| error_object(&text)).is_ok();
        if !(400..500).contains(&status) || !shaped {
            wrong.push(format!("{method} {target}: {status} {text:?}"));
        }
    }
    let heard = post.heard();
    let reached: BTreeSet<_> = heard.iter().map(|h| (&*h.method, &*h.target)).collect();
    let polls = ["/health", "/kv_event_sources", "/metrics", "/v1/models"];
    let polls = polls.map(|path| ("GET", path)).into_iter().collect();
    assert!(reached.is_subset(&polls), "polls only: {reached:?}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn engines_are_called_by_the_routers_own_path_and_host() {
    let (post, cluster) = behind_a_post(String::new()).await;
    let body = completion("x").to_string();
    for target in [
        "http://engine.invalid/v1/completions",
        "/v1/completions?model=other&path=/pause",
        "/v1/completions?",
    ] {
        let raw = request("POST", target, &[], body.as_bytes());
        let reply = exchange(cluster.running.addresses.http, &raw).await.unwrap();
        assert_eq!(reply.status(), 200, "{target}: {}", reply.text());
    }
    let heard = post.heard();
    let asked: Vec<_> = heard.iter().filter(|heard| heard.is_inference()).collect();
    assert_eq!(asked.len(), 3);
    for heard in asked {
        assert_eq!(heard.target, COMPLETIONS);
        assert_eq!(format!("http://{}", heard.header("host")), post.url());
    }
}

#[tokio::test]
async fn the_grpc_listener_has_no_other_paths() {
    let (post, cluster) = behind_a_post(String::new()).await;
    let address = cluster.running.addresses.grpc.unwrap();
    for target in ["/pause", "/metrics", "/admin/workers", CHAT, COMPLETIONS] {
        let raw = request("POST", target, &[], completion("x").to_string().as_bytes());
        let reply = exchange(address, &raw).await.unwrap();
        assert!(reply.body.is_empty(), "{target}: {}", reply.text());
    }
    assert!(!post.heard().iter().any(|heard| heard.is_inference()));
}

const CARRIERS: [&str; 4] = ["sampling_params", "vllm_xargs", "extra_args", "extra_body"];

/// The one of them that engines have on both endpoints.
const EXTENSIONS: &str = "vllm_xargs";

const FORBIDDEN: [&str; 13] = [
    "kv_transfer_params",
    "ec_transfer_params",
    "disaggregated_params",
    "conversation_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "data_parallel_rank",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "request_id",
    "rid",
];

const HEADERS: [(&str, &str); 14] = [
    ("x-data-parallel-rank", "poison"),
    ("x-splitrail-gate", "poison:0:1:00"),
    ("x-request-id", "poison-id"),
    ("authorization", "Bearer poison"),
    ("proxy-authorization", "Basic poison"),
    ("cookie", "session=poison"),
    ("x-forwarded-for", "10.9.8.7"),
    ("x-forwarded-host", "poison.invalid"),
    ("forwarded", "for=poison"),
    ("x-real-ip", "10.9.8.7"),
    ("x-api-key", "poison"),
    ("x-prefiller-host-port", "poison:1"),
    ("x-session-id", "poison"),
    ("user-agent", "poison/1"),
];

#[derive(Clone, Debug)]
struct Case {
    /// Forbidden fields with the carriers around them.
    fields: Vec<(Vec<usize>, usize)>,
    value: Value,
    escaped_keys: bool,
    headers: Vec<usize>,
    shape: usize,
    stream: bool,
}

fn case() -> impl Strategy<Value = Case> {
    let place = proptest::collection::vec(0..CARRIERS.len(), 0..4);
    let value = prop_oneof![
        Just(json!({"do_remote_prefill": true})),
        Just(json!({"do_remote_prefill": true, "remote_host": "poison", "remote_port": 1,
                    "remote_engine_id": "poison", "remote_block_ids": [1, 2]})),
        Just(json!({"do_remote_decode": true, "x": ["poison"]})),
        Just(json!("poison")),
        Just(json!(7)),
        Just(json!(null)),
        Just(json!(["poison", 1])),
    ];
    (
        proptest::collection::vec((place, 0..FORBIDDEN.len()), 0..5),
        value,
        any::<bool>(),
        proptest::sample::subsequence((0..HEADERS.len()).collect::<Vec<_>>(), 0..=HEADERS.len()),
        0..3_usize,
        any::<bool>(),
    )
        .prop_map(|(fields, value, escaped_keys, headers, shape, stream)| Case {
            fields,
            value,
            escaped_keys,
            headers,
            shape,
            stream,
        })
}

/// Each run tries the same cases.
fn cases(count: usize) -> Vec<Case> {
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let strategy = case();
    (0..count).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect()
}

/// Where an engine would not look: names that only look like fields.
fn lookalikes() -> Value {
    let properties = json!({
        "kv_transfer_params": {"type": "object", "properties": {"do_remote_prefill": {"type": "boolean"}}},
        "bootstrap_room": {"type": "string"}, "request_id": {"type": "string"}, "rid": {},
        "vllm_xargs": {"properties": {"kv_transfer_params": {"const": 1.50}}},
    });
    json!([{"type": "function", "function": {"name": "f",
        "parameters": {"type": "object", "properties": properties}}}])
}

const CONTENT: &str =
    r#"please read {"kv_transfer_params":{"do_remote_prefill":true},"bootstrap_host":"h"}"#;

fn insert(object: &mut Map<String, Value>, path: &[usize], key: &str, value: &Value) {
    match path.split_first() {
        None => {
            object.insert(key.to_owned(), value.clone());
        }
        Some((first, rest)) => {
            let carrier = object.entry(CARRIERS[*first]).or_insert_with(|| json!({"keep": [1]}));
            insert(carrier.as_object_mut().unwrap(), rest, key, value);
        }
    }
}

/// JSON text, its keys escaped character by character if wanted.
fn to_text(value: &Value, escaped_keys: bool) -> String {
    let key = |key: &str| match escaped_keys {
        true => {
            let units: String = key.encode_utf16().map(|u| format!("\\u{u:04x}")).collect();
            format!("\"{units}\"")
        }
        false => json!(key).to_string(),
    };
    match value {
        Value::Object(members) => {
            let members: Vec<_> = members
                .iter()
                .map(|(name, value)| format!("{}:{}", key(name), to_text(value, escaped_keys)))
                .collect();
            format!("{{{}}}", members.join(","))
        }
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(|item| to_text(item, escaped_keys)).collect();
            format!("[{}]", items.join(","))
        }
        other => other.to_string(),
    }
}

impl Case {
    fn body(&self, user: &str) -> Map<String, Value> {
        let mut body = json!({
            "model": "sim", "max_tokens": 3, "temperature": 0, "user": user,
            "stream": self.stream, "tools": lookalikes(),
        });
        match self.shape {
            0 => body["messages"] = json!([{"role": "user", "content": CONTENT}]),
            1 => body["prompt"] = json!(CONTENT),
            _ => body["prompt"] = json!([format!("{CONTENT}0"), format!("{CONTENT}1")]),
        }
        let Value::Object(mut body) = body else { unreachable!("an object") };
        for (path, field) in &self.fields {
            insert(&mut body, path, FORBIDDEN[*field], &self.value);
        }
        body
    }

    fn path(&self) -> &'static str {
        if self.shape == 0 { CHAT } else { COMPLETIONS }
    }
}

fn forbidden_keys(value: &Value) -> Vec<String> {
    match value {
        Value::Object(members) => members
            .iter()
            .flat_map(|(key, value)| {
                let own = FORBIDDEN.contains(&key.as_str()).then(|| key.clone());
                own.into_iter().chain(forbidden_keys(value))
            })
            .collect(),
        Value::Array(items) => items.iter().flat_map(forbidden_keys).collect(),
        _ => Vec::new(),
    }
}

/// What every request to an engine must be, whatever the client sent.
fn check_engine_request(seen: &RecordedRequest, engines: &HashSet<String>, prompts: &[Value]) {
    let context = format!("{seen:?}");
    for (name, value) in &seen.headers {
        assert!(ENGINE_HEADERS.contains(&name.as_str()), "{name} in {context}");
        assert!(!value.contains("poison"), "{name} in {context}");
    }
    assert_eq!(seen.header("x-request-id").unwrap().len(), 32, "{context}");
    let mut body = seen.body.as_object().unwrap().clone();
    let carried = body.remove("kv_transfer_params");
    if let Some(params) = carried.filter(|params| *params != *PREFILL_PARAMS) {
        let from = params["remote_engine_id"].as_str().unwrap();
        assert!(engines.contains(from), "{context}");
    }
    if let Some(tools) = body.remove("tools") {
        assert_eq!(tools, lookalikes(), "{context}");
    }
    let prompt = body.remove("prompt").or(body.remove("messages")).unwrap();
    assert!(prompts.contains(&prompt), "{context}");
    let rest = Value::Object(body);
    assert_eq!(forbidden_keys(&rest), [""; 0], "{context}");
    assert!(!rest.to_string().contains("poison"), "{context}");
}

static PREFILL_PARAMS: std::sync::LazyLock<Value> =
    std::sync::LazyLock::new(|| json!({"do_remote_decode": true, "do_remote_prefill": false}));

fn prompts_of(body: &Map<String, Value>) -> Vec<Value> {
    match body.get("prompt") {
        Some(Value::Array(prompts)) => prompts.clone(),
        Some(prompt) => vec![prompt.clone()],
        None => vec![body["messages"].clone()],
    }
}

/// The members of carriers that are nobody's business arrive.
fn harmless(value: &Value) -> Value {
    match value {
        Value::Object(members) => members
            .iter()
            .filter(|(key, _)| !FORBIDDEN.contains(&key.as_str()))
            .map(|(key, value)| (key.clone(), harmless(value)))
            .collect(),
        other => other.clone(),
    }
}

async fn inject_everywhere(spec: Spec, legs_per_prompt: usize) {
    let cluster = Cluster::start(spec).await;
    let ids: HashSet<_> =
        cluster.engines.iter().map(|(_, engine)| engine.state().engine_id).collect();
    for (number, case) in cases(150).iter().enumerate() {
        let user = format!("case-{number}");
        let body = case.body(&user);
        let text = to_text(&Value::Object(body.clone()), case.escaped_keys);
        let headers: Vec<_> = case.headers.iter().map(|i| HEADERS[*i]).collect();
        let reply = cluster.http.post_with(case.path(), &headers, text).await;
        assert_eq!(reply.status, 200, "{case:?}: {}", reply.text());
        assert!(!reply.text().contains("poison"), "{case:?}");
        assert!(!reply.text().contains("\"error\""), "{case:?}: {}", reply.text());
        let kept = headers.iter().any(|(name, _)| *name == "x-request-id");
        assert_eq!(reply.header("x-request-id") == "poison-id", kept);
        let prompts = prompts_of(&body);
        let seen: Vec<_> = cluster
            .engines
            .iter()
            .flat_map(|(_, engine)| engine.requests())
            .filter(|seen| seen.body["user"] == user.as_str())
            .collect();
        assert_eq!(seen.len(), prompts.len() * legs_per_prompt, "{case:?}");
        for seen in &seen {
            check_engine_request(seen, &ids, &prompts);
            if case.shape == 0 {
                assert_eq!(seen.body["tools"], lookalikes(), "{case:?}");
            }
            for carrier in CARRIERS {
                let sent = body.get(carrier).filter(|_| carrier == EXTENSIONS).map(harmless);
                assert_eq!(seen.body.get(carrier), sent.as_ref(), "{case:?}");
            }
        }
    }
    for (name, engine) in &cluster.engines {
        assert!(!engine.state().dead, "{name} has died");
    }
    cluster.quiet().await;
}

#[tokio::test]
async fn client_hand_off_fields_never_reach_an_engine_prefill_first() {
    inject_everywhere(Spec::default(), 2).await;
}

#[tokio::test]
async fn client_hand_off_fields_never_reach_an_engine_aggregated() {
    inject_everywhere(Spec::aggregated(2), 1).await;
}

#[tokio::test]
async fn client_hand_off_fields_never_reach_an_engine_over_grpc() {
    let cluster = Cluster::start(Spec::default()).await;
    let address = cluster.running.addresses.grpc.unwrap();
    let ids: HashSet<_> =
        cluster.engines.iter().map(|(_, engine)| engine.state().engine_id).collect();
    for (number, case) in cases(60).iter().enumerate() {
        let user = format!("case-{number}");
        let mut extra = case.body(&user);
        for own in ["model", "prompt", "messages", "stream", "max_tokens", "temperature", "tools"] {
            extra.remove(own);
        }
        let extra = to_text(&Value::Object(extra), case.escaped_keys);
        let mut request = text_request(CONTENT, &extra);
        request.request_id = "poison-id".into();
        let mut call = tonic::Request::new(request);
        for (name, value) in case.headers.iter().map(|i| HEADERS[*i]) {
            call.metadata_mut().insert(name, value.parse().unwrap());
        }
        let mut client = splitrail_tests::grpc::grpc_client(address);
        let mut events = client.generate(call).await.unwrap().into_inner();
        while events.message().await.unwrap().is_some() {}
        let all = cluster.engines.iter().flat_map(|(_, engine)| engine.requests());
        let seen: Vec<_> = all.filter(|seen| seen.body["user"] == user.as_str()).collect();
        assert_eq!(seen.len(), 2, "{case:?}");
        for seen in &seen {
            check_engine_request(seen, &ids, &[json!(CONTENT)]);
        }
    }
    assert!(cluster.engines.iter().all(|(_, engine)| !engine.state().dead));
}

#[tokio::test]
async fn the_field_that_kills_a_bare_decode_server_changes_nothing() {
    for spec in [Spec::default(), Spec::aggregated(1)] {
        let cluster = Cluster::start(spec).await;
        let clean = cluster.http.post(COMPLETIONS, &completion("same text")).await.json();
        for poison in [
            r#""kv_transfer_params":{"do_remote_prefill":true}"#,
            r#""kv\u005ftransfer_params":{"do_remote_prefill":true}"#,
            r#""do_remote_prefill":true"#,
            r#""vllm_xargs":{"kv_transfer_params":{"do_remote_prefill":true}}"#,
            r#""sampling_params":{"extra_args":{"kv_transfer_params":{"do_remote_prefill":true}}}"#,
        ] {
            let body = completion("same text").to_string();
            let body = format!("{{{poison},{}", body.strip_prefix('{').unwrap());
            let reply = cluster.http.post_with(COMPLETIONS, &[], body).await;
            assert_eq!(reply.status, 200, "{poison}: {}", reply.text());
            assert_eq!(reply.json()["choices"], clean["choices"], "{poison}");
        }
        assert!(cluster.engines.iter().all(|(_, engine)| !engine.state().dead));
    }
}

#[tokio::test]
async fn hop_by_hop_headers_end_at_the_router() {
    let (post, cluster) = behind_a_post(String::new()).await;
    let headers = [
        ("connection", "x-smuggled, keep-alive"),
        ("x-smuggled", "poison"),
        ("keep-alive", "timeout=9"),
        ("te", "trailers, poison"),
        ("trailer", "x-poison"),
        ("upgrade", "poison/1"),
        ("proxy-connection", "poison"),
        ("expect", "100-continue"),
        ("x-data-parallel-rank", "1"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("via", "1.1 poison, 1.1 splitrail-poison"),
    ];
    let raw = request("POST", COMPLETIONS, &headers, completion("x").to_string().as_bytes());
    let reply = exchange(cluster.running.addresses.http, &raw).await.unwrap();
    assert!([100, 200].contains(&reply.status()), "{}", reply.head);
    eventually("the engine is asked", async || {
        post.heard().iter().any(|heard| heard.is_inference())
    })
    .await;
    for heard in post.heard().iter().filter(|heard| heard.is_inference()) {
        for (name, value) in &heard.headers {
            assert!(ENGINE_HEADERS.contains(&name.as_str()), "{name}: {value}");
            assert!(!value.contains("poison"), "{name}: {value}");
        }
        assert_eq!(heard.header("traceparent"), headers[9].1, "the trace goes on");
    }
}
