//! No prompt, completion, token id or key is in logs, metrics or admin pages, at
//! any level, on any path. A router process runs with everything at TRACE while
//! marked requests take every way there is; then all it said is searched.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Value, json};
use splitrail_proto::v1;
use splitrail_sim::write_tokenizer;
use splitrail_sim::{Fault, FaultKind, Role, SimConfig, SimEngine};
use splitrail_tests::Client;
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::cluster::eventually;
use splitrail_tests::grpc::{generate, grpc_client, text_request};
use splitrail_tests::leaks::{leaks, spelled};
use splitrail_tests::scripted_server::{ReceivedRequest, ScriptedReply, ScriptedServer};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

const PROMPT: &str = "Zq1PromptMarkerXk";
const CONTENT: &str = "Zq2ContentMarkerXk";
const TOOL: &str = "Zq3ToolMarkerXk";
const STOP: &str = "Zq4StopMarkerXk";
const SALT: &str = "Zq5SaltMarkerXk";
const USER: &str = "Zq6UserMarkerXk";
const MODEL: &str = "Zq7ModelMarkerXk";
const HEADER: &str = "Zq8HeaderMarkerXk";
const CLIENT_KEY: &str = "Zq9ClientKeyMarkerXk";
const FILE_KEY: &str = "Zq10FileKeyMarkerXk";
const ENV_KEY: &str = "Zq11EnvKeyMarkerXk";
const COMPLETION: &str = "Zq12CompletionMarkerXk";
const ENGINE_ERROR: &str = "Zq13EngineErrorMarkerXk";
const HAND_OFF: &str = "Zq14HandOffMarkerXk";
const FIELD: &str = "Zq15FieldMarkerXk";
const FORBIDDEN: &str = "Zq16ForbiddenMarkerXk";
const GRPC: &str = "Zq17GrpcMarkerXk";
const FIRST_TOKEN: u32 = 987_654_301;

/// Keys: not even in a reply to whoever sent them.
const KEYS: [&str; 3] = [CLIENT_KEY, FILE_KEY, ENV_KEY];

const MARKERS: [&str; 17] = [
    PROMPT,
    CONTENT,
    TOOL,
    STOP,
    SALT,
    USER,
    MODEL,
    HEADER,
    CLIENT_KEY,
    FILE_KEY,
    ENV_KEY,
    COMPLETION,
    ENGINE_ERROR,
    HAND_OFF,
    FIELD,
    FORBIDDEN,
    GRPC,
];

/// The request's `seed` selects the reply of the engine.
const SCRIPTS: [(u64, u16); 10] = [
    (1, 200),
    (2, 400),
    (3, 502),
    (4, 502),
    (5, 502),
    (6, 502),
    (7, 200),
    (8, 502),
    (9, 429),
    (10, 502),
];

fn script(heard: &ReceivedRequest) -> ScriptedReply {
    if !heard.is_inference() {
        return ScriptedReply::json(200, "");
    }
    let body: Value = serde_json::from_str(&heard.text()).unwrap();
    let chunk = json!({"id": "x", "object": "text_completion", "created": 1, "model": "raw",
        "choices": [{"index": 0, "text": COMPLETION, "finish_reason": null}]});
    let said = json!({"error": {"message": format!("{ENGINE_ERROR}: {PROMPT}"),
        "type": "BadRequestError", "param": ENGINE_ERROR, "code": 400}});
    if body["kv_transfer_params"].is_object() {
        let mut whole = chunk.clone();
        whole["usage"] = json!({"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4});
        whole["kv_transfer_params"] = match body["seed"].as_u64() {
            Some(1) => json!(HAND_OFF),
            Some(2) => json!({"do_remote_prefill": true, "remote_block_ids": HAND_OFF,
                "remote_engine_id": HAND_OFF, "remote_host": "h", "remote_port": 1}),
            Some(3) => json!({"do_remote_prefill": HAND_OFF}),
            Some(4) => json!({"do_remote_prefill": true, "remote_block_ids": [1],
                "remote_engine_id": HAND_OFF, "remote_host": HAND_OFF, "remote_port": HAND_OFF}),
            _ => {
                json!({"do_remote_prefill": true, "remote_block_ids": [1], "transfer_mode": HAND_OFF,
                "remote_engine_id": HAND_OFF, "remote_host": HAND_OFF, "remote_port": 1})
            }
        };
        return ScriptedReply::json(200, &whole.to_string());
    }
    let stream = body["stream"] == true;
    match body["seed"].as_u64() {
        Some(2) => ScriptedReply::json(400, &said.to_string()),
        Some(3) => ScriptedReply::json(500, &said.to_string()),
        // Cut off, no JSON, an error in place of the first event.
        Some(4) if stream => ScriptedReply::events(&format!("data: {chunk}\n\n")),
        Some(4) => ScriptedReply::json(200, &chunk.to_string()[..60]),
        Some(5) if stream => {
            ScriptedReply::events(&format!("data: {COMPLETION}\n\ndata: {{\"{COMPLETION}\n\n"))
        }
        Some(5) => ScriptedReply::json(200, COMPLETION),
        Some(6) if stream => ScriptedReply::events(&format!("data: {said}\n\n")),
        Some(6) => ScriptedReply::Bytes(COMPLETION.into()),
        // Usage that makes no sense.
        Some(7) => {
            let mut odd = chunk.clone();
            odd["usage"] = json!({"prompt_tokens": COMPLETION, "completion_tokens": -1});
            match stream {
                true => ScriptedReply::events(&format!("data: {odd}\n\ndata: [DONE]\n\n")),
                false => ScriptedReply::json(200, &odd.to_string()),
            }
        }
        Some(8) => ScriptedReply::json(401, &said.to_string()),
        Some(9) => ScriptedReply::json(429, &said.to_string()),
        Some(10) => {
            ScriptedReply::Bytes(format!("HTTP/1.1 200 OK\r\n{COMPLETION}\0\r\n\r\n").into())
        }
        _ if stream => {
            ScriptedReply::events(&format!("data: {chunk}\n\ndata: {chunk}\n\ndata: [DONE]\n\n"))
        }
        _ => ScriptedReply::json(200, &chunk.to_string()),
    }
}

struct World {
    router: RouterProcess,
    engines: Vec<SimEngine>,
    _post: ScriptedServer,
    http: Client,
    admin: Client,
    /// Everything that clients were told, with what was asked.
    told: Vec<(String, String)>,
    /// Completions, as clients got them.
    completions: Vec<String>,
}

async fn engine(role: Role) -> SimEngine {
    // One of them serves another model as well.
    let config = SimConfig { role, adapters: vec!["rawpd".into()], ..SimConfig::default() };
    SimEngine::start(config).await.unwrap()
}

impl World {
    async fn start(folder: &Path, log: &Path) -> Self {
        write_tokenizer(folder).unwrap();
        std::fs::write(folder.join("key"), FILE_KEY).unwrap();
        let engines = vec![
            engine(Role::Prefill).await,
            engine(Role::Prefill).await,
            engine(Role::Decode).await,
            engine(Role::Decode).await,
        ];
        let post = ScriptedServer::start(script).await;
        let mut workers = String::new();
        for (id, engine) in engines.iter().enumerate() {
            let role = if id < 2 { "prefill" } else { "decode" };
            let (events, replay) = (engine.kv_events_endpoint(), engine.kv_replay_endpoint());
            let (url, events, replay) = (engine.url(), events.unwrap(), replay.unwrap());
            writeln!(
                workers,
                "      - {{ id: w{id}, role: {role}, url: \"{url}\", kv_events: \"{events}\", kv_replay: \"{replay}\" }}"
            )
            .unwrap();
        }
        let (raw, decode) = (post.url(), engines[2].url());
        let yaml = format!(
            "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }}
limits: {{ body_size_max: 65536 }}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: huggingface, path: . }}
    flow: prefill_first
    connector: nixl
    policy: {{ kind: kv_overlap }}
    engine_api_key: {{ kind: env, name: CANARY_ENGINE_KEY }}
    workers:
{workers}
  - name: raw
    block_size: 16
    tokenizer: {{ kind: none }}
    flow: aggregated
    engine_api_key: {{ kind: file, path: key }}
    workers:
      - {{ id: r0, role: both, url: \"{raw}\" }}
  - name: rawpd
    block_size: 16
    tokenizer: {{ kind: none }}
    flow: prefill_first
    connector: nixl
    workers:
      - {{ id: rp, role: prefill, url: \"{raw}\" }}
      - {{ id: rd, role: decode, url: \"{decode}\" }}
"
        );
        let env = [("RUST_LOG", "trace"), ("CANARY_ENGINE_KEY", ENV_KEY), ("NO_COLOR", "1")];
        let router = RouterProcess::serve(folder, &yaml, &env, log).await;
        let world = Self {
            http: Client::new(router.http),
            admin: Client::new(router.admin),
            router,
            engines,
            _post: post,
            told: Vec::new(),
            completions: Vec::new(),
        };
        eventually("the router is ready", async || world.admin.get("/ready").await.status == 200)
            .await;
        world
    }

    async fn post(&mut self, path: &str, body: impl Into<Vec<u8>>) -> u16 {
        let headers = [
            ("authorization", format!("Bearer {CLIENT_KEY}")),
            ("cookie", format!("session={HEADER}")),
            ("x-custom", HEADER.to_owned()),
        ];
        let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let body = body.into();
        let asked: String = String::from_utf8_lossy(&body).chars().take(300).collect();
        let reply = self.http.post_with(path, &headers, body).await;
        self.keep_completions(&reply.text());
        let told = format!("{:?}\n{}", reply.headers, reply.text());
        self.told.push((asked, told));
        reply.status.as_u16()
    }

    fn keep_completions(&mut self, text: &str) {
        let Ok(reply) = serde_json::from_str::<Value>(text) else {
            return;
        };
        for choice in reply["choices"].as_array().into_iter().flatten() {
            let text = choice["text"].as_str().or(choice["message"]["content"].as_str());
            let long = text.filter(|text| text.len() >= 12 && *text != COMPLETION);
            self.completions.extend(long.map(str::to_owned));
        }
    }

    fn fault(&self, kind: FaultKind, times: u32) {
        for engine in &self.engines {
            engine.set_fault(Fault { kind: kind.clone(), times: Some(times) });
        }
    }
}

fn completion(model: &str) -> Value {
    json!({
        "model": model, "max_tokens": 24, "temperature": 0, "user": USER, "cache_salt": SALT,
        "prompt": format!("{PROMPT} is what this is about, at some length: {PROMPT}"),
        "stop": [STOP], FIELD: FIELD,
        "kv_transfer_params": {"do_remote_prefill": true, "remote_host": FORBIDDEN},
        "vllm_xargs": {"kv_transfer_params": FORBIDDEN},
    })
}

fn chat() -> Value {
    json!({
        "model": "sim", "max_tokens": 24, "temperature": 0, "user": USER, "cache_salt": SALT,
        "messages": [{"role": "system", "content": CONTENT}, {"role": "user", "content": format!("{CONTENT} {CONTENT}")}],
        "tools": [{"type": "function", "function": {"name": TOOL, "parameters": {"properties": {TOOL: {}}}}}],
        "stop": STOP, "chat_template_kwargs": {FIELD: FIELD},
    })
}

fn tokens() -> Value {
    let ids: Vec<u32> = (FIRST_TOKEN..FIRST_TOKEN + 40).collect();
    json!({"model": "sim", "max_tokens": 4, "temperature": 0, "prompt": ids})
}

fn streamed(mut body: Value) -> Value {
    body["stream"] = true.into();
    body
}

async fn successes(world: &mut World) {
    let mut batch = completion("sim");
    batch["prompt"] = json!([format!("{PROMPT} a"), format!("{PROMPT} b")]);
    for (path, body) in [
        (COMPLETIONS, completion("sim")),
        (COMPLETIONS, batch),
        (COMPLETIONS, tokens()),
        (CHAT, chat()),
    ] {
        assert_eq!(world.post(path, body.to_string()).await, 200, "{body}");
        assert_eq!(world.post(path, streamed(body).to_string()).await, 200);
    }
    let ids: Vec<u32> = (FIRST_TOKEN..FIRST_TOKEN + 40).collect();
    for (path, body) in [
        ("/tokenize", json!({"model": "sim", "prompt": PROMPT, FIELD: FIELD, "user": USER})),
        ("/tokenize", json!({"model": "sim", "messages": chat()["messages"]})),
        ("/detokenize", json!({"model": "sim", "tokens": ids, FIELD: FIELD})),
        (
            "/v1/messages/count_tokens",
            json!({"model": "sim", "system": PROMPT, "messages": chat()["messages"], FIELD: FIELD}),
        ),
    ] {
        assert_eq!(world.post(path, body.to_string()).await, 200, "{path}");
    }
    for input in [json!(PROMPT), json!([PROMPT, CONTENT]), json!(ids)] {
        let body = json!({"model": "sim", "input": input, "user": USER, FIELD: FIELD});
        assert_eq!(world.post("/v1/embeddings", body.to_string()).await, 404, "not offered");
    }
    // Off the reactor.
    let mut long = completion("sim");
    long["prompt"] = format!("{PROMPT} ").repeat(400).into();
    assert_eq!(world.post(COMPLETIONS, long.to_string()).await, 200);
    let mut request = text_request(GRPC, &json!({FIELD: FIELD, "user": USER}).to_string());
    request.cache_salt = Some(SALT.into());
    let mut call = tonic::Request::new(request);
    let key = format!("Bearer {CLIENT_KEY}").parse().unwrap();
    call.metadata_mut().insert("authorization", key);
    call.metadata_mut().insert("x-custom", HEADER.parse().unwrap());
    let mut events = grpc_client(world.router.grpc).generate(call).await.unwrap().into_inner();
    while events.message().await.unwrap().is_some() {}
}

/// From the environment, and never the client's own. (A file's: `security.rs`.)
fn no_credential_is_shown_anywhere(world: &World) {
    let own = format!("Bearer {ENV_KEY}");
    let seen: Vec<_> = world.engines.iter().flat_map(SimEngine::requests).collect();
    assert!(seen.len() > 10);
    for seen in &seen {
        assert_eq!(seen.header("authorization"), Some(own.as_str()));
        assert!(!format!("{:?}", seen.headers).contains(CLIENT_KEY));
    }
}

async fn mistakes(world: &mut World) {
    let with = |member: &str| format!("{{\"model\":\"sim\",\"prompt\":\"{PROMPT}\",{member}}}");
    for body in [
        format!("{{\"prompt\":\"{PROMPT}"),
        PROMPT.to_owned(),
        with(&format!("\"{FIELD}\":1,\"{FIELD}\":2")),
        with("\"temperature\":1e999"),
        with(&format!("\"n\":\"{FIELD}\"")),
        with(&format!("\"stop\":{{\"{STOP}\":\"{STOP}\"}}")),
        with(&format!("\"stream\":\"{FIELD}\"")),
        with(&format!("\"stream_options\":\"{FIELD}\"")),
        with(&format!("\"cache_salt\":[\"{SALT}\"]")),
        with(&format!("\"cache_hit_threshold\":\"{FIELD}\"")),
        with(&format!("\"max_tokens\":\"{FIELD}\"")),
        with(&format!("\"add_special_tokens\":\"{FIELD}\"")),
        with(&format!("\"tools\":\"{}\"", TOOL.repeat(2000))),
        with("\"max_tokens\":1000000"),
        format!("{{\"model\":\"{MODEL}\",\"prompt\":\"{PROMPT}\"}}"),
        format!("{{\"model\":\"sim\",\"prompt\":{{\"{PROMPT}\":1}}}}"),
        format!("{{\"model\":\"sim\",\"prompt\":[{FIRST_TOKEN},\"{PROMPT}\"]}}"),
        format!("{{\"model\":\"sim\",\"prompt\":[{FIRST_TOKEN},-{FIRST_TOKEN}]}}"),
        format!("{{\"model\":\"sim\",\"prompt\":\"{}\"}}", PROMPT.repeat(3000)),
        format!("{{\"model\":\"sim\",\"prompt\":\"{}\"}}", PROMPT.repeat(5000)),
    ] {
        let status = world.post(COMPLETIONS, body.clone()).await;
        assert!(status == 200 || (400..500).contains(&status), "{status}");
    }
    world.post(COMPLETIONS, [b"{\"", PROMPT.as_bytes(), b"\":\"\xff\"}"].concat()).await;
    for messages in [
        json!(CONTENT),
        json!([]),
        json!([{"role": CONTENT}]),
        json!([{"content": CONTENT}]),
        json!([CONTENT]),
        json!([{"role": "user", "content": {CONTENT: CONTENT}}]),
        json!([{"role": "user", "content": [{"type": CONTENT, "text": CONTENT}]}]),
        json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": CONTENT}}]}]),
        json!([{"role": "assistant", "tool_calls": [{"function": {"name": TOOL, "arguments": TOOL}}]}]),
    ] {
        let mut body = chat();
        body["messages"] = messages;
        world.post(CHAT, body.to_string()).await;
    }
    for (key, value) in [
        ("tools", json!(TOOL)),
        ("tools", json!([{TOOL: TOOL}])),
        ("chat_template_kwargs", json!(FIELD)),
        ("chat_template", json!(format!("{{{{ {FIELD} "))),
        ("tool_choice", json!({TOOL: TOOL})),
    ] {
        let mut body = chat();
        body[key] = value;
        world.post(CHAT, body.to_string()).await;
    }
    world.post("/pause", PROMPT).await;
    world.http.get(&format!("/v1/models/{MODEL}")).await;
    for extra in [
        format!("{{\"{FIELD}\":{FIELD}"),
        format!("{{\"prompt\":\"{PROMPT}\"}}"),
        json!({"n": FIELD}).to_string(),
    ] {
        assert!(generate(world.router.grpc, text_request(GRPC, &extra)).await.is_err());
    }
    let unknown = v1::GenerateRequest { model: MODEL.into(), ..text_request(GRPC, "") };
    assert!(generate(world.router.grpc, unknown).await.is_err());
}

async fn engine_failures(world: &mut World) {
    for (seed, expected) in SCRIPTS {
        let mut body = completion("raw");
        body["seed"] = seed.into();
        let status = world.post(COMPLETIONS, body.to_string()).await;
        assert_eq!(status, expected, "script {seed}");
        world.post(COMPLETIONS, streamed(body).to_string()).await;
        let mut body = completion("rawpd");
        body["seed"] = seed.into();
        world.post(COMPLETIONS, body.to_string()).await;
    }
    for kind in [
        FaultKind::Status { status: 400 },
        FaultKind::Status { status: 500 },
        FaultKind::Reset,
        FaultKind::DieMidStream { after_chunks: 2 },
        FaultKind::TruncatedBody,
        FaultKind::NoHandOff,
        FaultKind::RefusePulls,
    ] {
        for body in [completion("sim"), streamed(completion("sim")), tokens()] {
            world.fault(kind.clone(), 1);
            world.post(COMPLETIONS, body.to_string()).await;
            world.engines.iter().for_each(SimEngine::clear_faults);
        }
    }
    // A client that leaves in mid-stream.
    let mut endless = streamed(completion("sim"));
    endless["max_tokens"] = 20_000.into();
    let mut events = world.http.stream(COMPLETIONS, &endless).await;
    assert!(events.next().await.is_some());
    drop(events);
    // Events: with marked token ids, lost, and garbage.
    world.fault(FaultKind::DropEventBatches, 1);
    world.post(COMPLETIONS, tokens().to_string()).await;
    world.fault(FaultKind::GarbageEvents, 3);
    for i in 0..6 {
        let mut body = completion("sim");
        body["prompt"] = format!("{i} {PROMPT} to fill a block or two").into();
        world.post(COMPLETIONS, body.to_string()).await;
    }
    let router = &world.admin;
    eventually("a resync is counted", async || {
        let page = router.get("/metrics").await.text();
        let resyncs =
            page.lines().filter(|line| line.starts_with("splitrail_index_resyncs_total{"));
        resyncs.count() > 0
    })
    .await;
    world.engines[3].die();
    world.post(COMPLETIONS, completion("sim").to_string()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_prompt_completion_token_id_or_key_is_shown_anywhere() {
    let files = tempfile::tempdir().unwrap();
    let log = files.path().join("router.log");
    let mut world = World::start(files.path(), &log).await;
    successes(&mut world).await;
    no_credential_is_shown_anywhere(&world);
    mistakes(&mut world).await;
    engine_failures(&mut world).await;
    let mut found = Vec::new();
    let mut secrets: Vec<String> = MARKERS.map(str::to_owned).to_vec();
    secrets.extend((0..40).step_by(13).map(|i| (FIRST_TOKEN + i).to_string()));
    assert!(world.completions.len() > 3, "{:?}", world.completions);
    secrets.append(&mut world.completions);
    for page in [
        "/metrics",
        "/admin/decisions?limit=1000",
        "/admin/workers",
        "/admin/attention",
        "/admin/models",
        "/admin/requests",
    ] {
        let reply = world.admin.get(page).await;
        assert_eq!(reply.status, 200, "{page}");
        leaks(page, &reply.text(), &secrets, &mut found);
    }
    let keys = KEYS.map(str::to_owned);
    for (asked, told) in std::mem::take(&mut world.told) {
        leaks(&format!("the reply to {asked}"), &told, &keys, &mut found);
    }
    world.router.end();
    let log = std::fs::read(&log).unwrap();
    let log = String::from_utf8_lossy(&log);
    for source in ["splitrail_router::", "hyper_util::", "h2::"] {
        let traced = log.lines().any(|line| line.contains("TRACE") && line.contains(source));
        let spoke = traced || log.contains(&format!(" {source}"));
        assert!(spoke, "{source} is not in a log of everything");
    }
    leaks("the log", &log, &secrets, &mut found);
    leaks("the log, letter by letter,", &spelled(&log), &secrets, &mut found);
    assert!(found.is_empty(), "{}", found.join("\n"));
}
