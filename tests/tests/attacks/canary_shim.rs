//! No prompt, completion, token id or key is in the shim's log at TRACE, on any path. A shim
//! process runs in front of an engine, attached to a router, while marked requests take every path
//! through both; then the whole log is searched.

use std::path::Path;

use serde_json::{Value, json};
use splitrail_sim::write_tokenizer;
use splitrail_sim::{Fault, FaultKind, SimConfig, SimEngine};
use splitrail_tests::Client;
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::cluster::eventually;
use splitrail_tests::leaks::{leaks, spelled};
use splitrail_tests::process::Process;
use splitrail_tests::raw::{exchange, request};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

const PROMPT: &str = "Zq1PromptMarkerXk";
const SALT: &str = "Zq2SaltMarkerXk";
const USER: &str = "Zq3UserMarkerXk";
const FIELD: &str = "Zq4FieldMarkerXk";
const HEADER: &str = "Zq5HeaderMarkerXk";
const ENGINE_KEY: &str = "Zq6EngineKeyMarkerXk";
const FLEET_TOKEN: &str = "Zq7FleetTokenMarkerXkWithEnoughBytes";
const PATH: &str = "Zq8PathMarkerXk";
const MARKERS: [&str; 8] = [PROMPT, SALT, USER, FIELD, HEADER, ENGINE_KEY, FLEET_TOKEN, PATH];
const FIRST_TOKEN: u32 = 987_654_301;

struct World {
    engine: SimEngine,
    shim: Process,
    router: RouterProcess,
    http: Client,
    completions: Vec<String>,
}

impl World {
    async fn start(folder: &Path) -> Self {
        write_tokenizer(folder).unwrap();
        std::fs::write(folder.join("token"), FLEET_TOKEN).unwrap();
        let engine = SimEngine::start(SimConfig::default()).await.unwrap();
        let yaml = "listen: { http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0, fleet: 127.0.0.1:0 }
fleet: { token: { kind: file, path: token } }
models:
  - name: sim
    block_size: 16
    tokenizer: { kind: huggingface, path: . }
    flow: aggregated
    policy: { kind: kv_overlap }
    engine_api_key: { kind: env, name: CANARY_ENGINE_KEY }
    discovery: [ { kind: shim } ]
";
        let log = folder.join("router.log");
        let env = [("CANARY_ENGINE_KEY", ENGINE_KEY)];
        let router = RouterProcess::serve(folder, yaml, &env, &log).await;
        let fleet = router.fleet.unwrap().to_string();
        let token = folder.join("token").display().to_string();
        let args = [
            ["--engine", &engine.url()],
            ["--listen", "127.0.0.1:0"],
            ["--router", &fleet],
            ["--role", "both"],
            ["--id", "s0"],
            ["--token-file", &token],
        ];
        let args = args.concat().into_iter().map(str::to_owned).collect::<Vec<_>>();
        let env = [("RUST_LOG", "trace"), ("NO_COLOR", "1")];
        let shim = Process::shim_with("shim", folder, &args, &env).await;
        let http = Client::new(router.http);
        eventually("the shim has joined", async || http.get("/ready").await.status == 200).await;
        Self { engine, shim, router, http, completions: Vec::new() }
    }

    async fn post(&mut self, path: &str, body: &Value) -> u16 {
        let headers = [
            ("content-type", "application/json"),
            ("authorization", "Bearer none"),
            ("x-custom", HEADER),
        ];
        let reply = self.http.post_with(path, &headers, body.to_string()).await;
        if let Ok(whole) = serde_json::from_slice::<Value>(&reply.body) {
            let choices = whole["choices"].as_array().into_iter().flatten();
            let texts = choices.filter_map(|choice| {
                choice["text"].as_str().or(choice["message"]["content"].as_str())
            });
            self.completions.extend(texts.filter(|text| text.len() >= 12).map(str::to_owned));
        }
        reply.status.as_u16()
    }

    /// To the shim itself, as a router or anyone else who reaches it may.
    async fn directly(&self, method: &str, target: &str, body: &str) {
        let shim = self.shim.told("http").parse().unwrap();
        let key = format!("Bearer {ENGINE_KEY}");
        let gate = format!("{FIELD},{FIRST_TOKEN},{PROMPT}");
        let headers = [
            ("content-type", "application/json"),
            ("authorization", key.as_str()),
            ("x-custom", HEADER),
            ("x-splitrail-gate", gate.as_str()),
        ];
        let _refused_or_not =
            exchange(shim, &request(method, target, &headers, body.as_bytes())).await;
    }
}

fn completion() -> Value {
    json!({
        "model": "sim", "max_tokens": 24, "temperature": 0, "user": USER, "cache_salt": SALT,
        "prompt": format!("{PROMPT} is what this is about, at some length: {PROMPT}"), FIELD: FIELD,
    })
}

fn bodies() -> Vec<(&'static str, Value)> {
    let messages = json!([{"role": "user", "content": format!("{PROMPT} {PROMPT} {PROMPT}")}]);
    let chat = json!({"model": "sim", "max_tokens": 24, "messages": messages, "cache_salt": SALT});
    let ids: Vec<u32> = (FIRST_TOKEN..FIRST_TOKEN + 40).collect();
    let tokens = json!({"model": "sim", "max_tokens": 4, "temperature": 0, "prompt": ids});
    let mut bodies = vec![(COMPLETIONS, completion()), (CHAT, chat), (COMPLETIONS, tokens)];
    for at in 0..3 {
        let (path, mut streamed) = bodies[at].clone();
        streamed["stream"] = true.into();
        bodies.push((path, streamed));
    }
    bodies
}

async fn failures(world: &mut World) {
    for kind in [
        FaultKind::Status { status: 400 },
        FaultKind::Status { status: 500 },
        FaultKind::Reset,
        FaultKind::DieMidStream { after_chunks: 2 },
        FaultKind::TruncatedBody,
        FaultKind::GarbageEvents,
        FaultKind::DropEventBatches,
        FaultKind::StrangeParents,
    ] {
        for (path, body) in bodies() {
            world.engine.set_fault(Fault { kind: kind.clone(), times: Some(1) });
            world.post(path, &body).await;
            world.engine.clear_faults();
        }
    }
    // A client that leaves in mid-stream.
    let mut endless = completion();
    (endless["stream"], endless["max_tokens"]) = (true.into(), 20_000.into());
    let mut events = world.http.stream(COMPLETIONS, &endless).await;
    assert!(events.next().await.is_some());
    drop(events);
}

async fn odd_requests(world: &World) {
    for (method, target, body) in [
        ("POST", COMPLETIONS.to_owned(), completion().to_string()),
        ("POST", COMPLETIONS.to_owned(), format!("{{\"prompt\":\"{PROMPT}")),
        ("POST", format!("/{PATH}?q={PATH}"), PROMPT.to_owned()),
        ("GET", format!("/{PATH}"), String::new()),
        ("DELETE", format!("/splitrail/{PATH}"), PROMPT.to_owned()),
    ] {
        world.directly(method, &target, &body).await;
    }
    let shim = world.shim.told("http").parse().unwrap();
    for bytes in [
        format!("POST /{PATH} HTTP/1.1\r\nhost: x\r\n{HEADER}\r\n\r\n{PROMPT}"),
        format!("{PROMPT}\r\n\r\n"),
        format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {PROMPT}\r\n\r\n"),
        format!(
            "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{PROMPT}\r\n"
        ),
    ] {
        let _refused = exchange(shim, bytes.as_bytes()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_prompt_completion_token_id_or_key_is_in_the_shims_log() {
    let files = tempfile::tempdir().unwrap();
    let mut world = World::start(files.path()).await;
    for (path, body) in bodies() {
        assert_eq!(world.post(path, &body).await, 200, "{body}");
    }
    failures(&mut world).await;
    odd_requests(&world).await;
    // A death of the engine is seen as well.
    world.engine.die();
    world.post(COMPLETIONS, &completion()).await;
    assert!(world.engine.requests().iter().any(|seen| {
        seen.header("authorization") == Some(format!("Bearer {ENGINE_KEY}").as_str())
    }));
    let mut secrets: Vec<String> = MARKERS.map(str::to_owned).to_vec();
    secrets.extend((0..40).step_by(13).map(|i| (FIRST_TOKEN + i).to_string()));
    assert!(world.completions.len() > 2, "{:?}", world.completions);
    secrets.append(&mut world.completions);
    let mut found = Vec::new();
    let shim = Client::new(world.shim.told("http").parse().unwrap());
    for page in ["/splitrail/metrics", "/splitrail/status"] {
        leaks(page, &shim.get(page).await.text(), &secrets, &mut found);
    }
    world.router.end();
    world.shim.kill();
    let log = world.shim.log();
    assert!(log.contains("TRACE") && log.contains("splitrail_shim::"), "a log of everything");
    leaks("the log", &log, &secrets, &mut found);
    leaks("the log, letter by letter,", &spelled(&log), &secrets, &mut found);
    assert!(found.is_empty(), "{}", found.join("\n"));
}
