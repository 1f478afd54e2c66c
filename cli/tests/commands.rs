//! The command as users run it: processes of the built binary.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use serde_json::{Value, json};
use splitrail_sim::{Fault, FaultKind, SimConfig, SimEngine};
use splitrail_tests::Client;
use splitrail_tests::client::streamed_text;
use splitrail_tests::cluster::eventually;
use tempfile::TempDir;

const CHAT: &str = "/v1/chat/completions";

/// The built command.
fn binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_splitrail"))
}

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(binary());
    command.args(arguments).env_remove("RUST_LOG").stdin(Stdio::null());
    command.output().unwrap()
}

/// The output of a command on both channels.
fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8(text).unwrap()
}

/// A process that ends with the test.
struct Process {
    child: Child,
    files: TempDir,
}

impl Process {
    /// Starts the binary with a ready file and with its output in files.
    fn start(arguments: &[&str]) -> Self {
        let files = tempfile::tempdir().unwrap();
        let open = |name: &str| std::fs::File::create(files.path().join(name)).unwrap();
        let child = Command::new(binary())
            .args(arguments)
            .arg("--ready-file")
            .arg(files.path().join("ready.json"))
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(open("stdout"))
            .stderr(open("stderr"))
            .spawn()
            .unwrap();
        Self { child, files }
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.files.path().join(name)).unwrap()
    }

    /// The content of the ready file, once it exists.
    async fn ready(&mut self) -> Value {
        let path = self.files.path().join("ready.json");
        eventually("the ready file is there", async || {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", self.read("stderr"));
            path.exists()
        })
        .await;
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn terminate(&self) {
        self.signal("TERM");
    }

    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    async fn end(&mut self) -> ExitStatus {
        let mut status = None;
        eventually("the process ends", async || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        })
        .await;
        status.unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may already have ended.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn address(ready: &Value, key: &str) -> SocketAddr {
    let text = ready[key].as_str().unwrap_or_else(|| panic!("{key} of {ready}"));
    let address: SocketAddr = text.parse().unwrap();
    assert_ne!(address.port(), 0);
    address
}

fn quickstart(more: &[&str]) -> Process {
    let ports = ["--http-port", "0", "--grpc-port", "0", "--admin-port", "0"];
    Process::start(&[&["quickstart"], &ports[..], more].concat())
}

fn chat(max_tokens: u32) -> Value {
    json!({
        "model": "sim", "stream": true, "max_tokens": max_tokens,
        "stream_options": {"include_usage": true},
        "messages": [
            {"role": "system", "content": "You are a patient librarian."},
            {"role": "user", "content": "Where are the maps of the old town, please?"},
        ],
    })
}

/// A valid configuration file with one engine, which need not exist.
fn good_file(http: &str, engine: &str, events: &str) -> String {
    format!(
        "listen: {{ http: {http}, admin: 127.0.0.1:0 }}
limits: {{ drain_delay: 10ms }}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: none }}
    flow: aggregated
    workers:
      - {{ id: w0, role: both, url: \"{engine}\"{events} }}
"
    )
}

const FIVE_MISTAKES: &str = "listen:
  htpp: 127.0.0.1:0
models:
  - name: m
    block_size: \"16\"
    tokenizer: { kind: none }
    flow: agregated
    retries: { prefill: 99 }
    workers:
      - { id: w0, role: both, url: \"ftp://127.0.0.1:1\" }
";

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

/// Line and column of the first place of `text` in a file, from 1.
fn place(file: &str, text: &str) -> String {
    let at = file.find(text).unwrap();
    let line_start = file[..at].rfind('\n').map_or(0, |newline| newline + 1);
    let line = file[..at].matches('\n').count() + 1;
    format!("{line}:{}", at - line_start + 1)
}

fn check_five(path: &str, output: &Output) {
    assert_eq!(output.status.code(), Some(78));
    let text = said(output);
    let lines: Vec<_> = text.lines().collect();
    let located: Vec<_> = lines.iter().filter(|line| line.starts_with(path)).collect();
    assert_eq!(located.len(), 5, "{text}");
    let hints = lines.iter().filter(|line| line.trim_start().starts_with("hint: "));
    assert_eq!(hints.count(), 5, "{text}");
    for (mistake, named) in [
        ("htpp", "htpp"),
        ("\"16\"", "block_size"),
        ("agregated", "agregated"),
        ("99", "retries.prefill"),
        ("\"ftp:", "url"),
    ] {
        let start = format!("{path}:{}: ", place(FIVE_MISTAKES, mistake));
        let found = located.iter().any(|line| line.starts_with(&start) && line.contains(named));
        assert!(found, "{start} {named}\n{text}");
    }
    assert!(text.contains("did you mean `aggregated`?"), "{text}");
}

#[test]
fn check_prints_five_mistakes_with_places_and_hints() {
    let files = tempfile::tempdir().unwrap();
    let path = write(files.path(), "five.yaml", FIVE_MISTAKES);
    check_five(&path, &run(&["check", "--config", &path]));
    // `serve` refuses what `check` refuses, with the same messages.
    check_five(&path, &run(&["serve", "--config", &path]));
}

#[test]
fn check_confirms_that_a_file_is_valid() {
    let files = tempfile::tempdir().unwrap();
    let good = good_file("127.0.0.1:0", "http://127.0.0.1:1", "");
    let path = write(files.path(), "good.yaml", &good);
    let output = run(&["check", "--config", &path]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(said(&output).contains(&path));
    let missing = files.path().join("nowhere.yaml").display().to_string();
    for command in ["check", "serve"] {
        let output = run(&[command, "--config", &missing]);
        assert_eq!(output.status.code(), Some(66), "{command}");
        assert!(said(&output).contains(&missing), "{}", said(&output));
    }
}

/// Every object of a schema that lists its members accepts no others.
fn check_closed(schema: &Value, at: &str) -> usize {
    let mut closed = 0;
    match schema {
        Value::Object(members) => {
            if members.get("properties").is_some_and(Value::is_object) {
                assert_eq!(members.get("additionalProperties"), Some(&json!(false)), "{at}");
                closed += 1;
            }
            for (name, member) in members {
                closed += check_closed(member, &format!("{at}/{name}"));
            }
        }
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                closed += check_closed(item, &format!("{at}/{i}"));
            }
        }
        _ => {}
    }
    closed
}

#[test]
fn schema_is_a_json_schema_that_is_closed_at_every_level() {
    let output = run(&["schema"]);
    assert_eq!(output.status.code(), Some(0));
    let schema: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(schema["$schema"].as_str().unwrap().contains("json-schema.org"));
    for key in ["listen", "hash_seed", "limits", "models"] {
        assert!(schema["properties"][key].is_object(), "{key}");
    }
    assert!(check_closed(&schema, "") >= 5);
}

#[test]
fn the_configuration_reference_in_the_docs_is_what_the_command_prints() {
    let output = run(&["schema", "--markdown"]);
    assert_eq!(output.status.code(), Some(0));
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("`models[].workers[].kv_replay`"));
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/configuration.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    assert!(docs.contains(table.trim()));
}

#[test]
fn the_reference_shows_durations_with_units() {
    let table = String::from_utf8(run(&["schema", "--markdown"]).stdout).unwrap();
    let durations: Vec<_> = table.lines().filter(|row| row.contains("| duration |")).collect();
    assert!(durations.len() >= 5, "{table}");
    for row in durations {
        let default = row.split(" | ").nth(2).unwrap().trim_matches('`');
        let plain = default.chars().all(|c| c.is_ascii_alphanumeric());
        let is_duration = plain && default.ends_with(['s', 'm', 'h']);
        assert!(is_duration || default == "none", "{row}");
    }
}

#[test]
fn a_port_in_use_is_an_os_error_that_names_the_address() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let files = tempfile::tempdir().unwrap();
    let good = good_file(&address, "http://127.0.0.1:1", "");
    let path = write(files.path(), "taken.yaml", &good);
    let output = run(&["serve", "--config", &path]);
    assert_eq!(output.status.code(), Some(71), "{}", said(&output));
    assert!(said(&output).contains(&address), "{}", said(&output));
}

#[test]
fn quickstart_reports_a_port_in_use_alike() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let port = taken.local_addr().unwrap().port().to_string();
    let ports = ["--grpc-port", "0", "--admin-port", "0", "--http-port", &port];
    let output = run(&[&["quickstart"], &ports[..]].concat());
    assert_eq!(output.status.code(), Some(71), "{}", said(&output));
    assert!(said(&output).contains(&address), "{}", said(&output));
}

#[test]
fn unknown_arguments_are_refused_with_a_hint() {
    for arguments in [
        &["--nope"][..],
        &["frobnicate"],
        &["serve"],
        &["serve", "--confg", "x"],
        &["check"],
        &["quickstart", "--prefill", "many"],
        &["quickstart", "--prefill", "0"],
        &["quickstart", "--flow", "sideways"],
        &["quickstart", "--http-port", "70000"],
        &["schema", "extra"],
        &["--log-format", "xml", "schema"],
        &[],
    ] {
        let output = run(arguments);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}: {text}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        let way_on = ["--help", "Usage", "possible values"];
        assert!(way_on.iter().any(|hint| text.contains(hint)), "{arguments:?}: {text}");
    }
    for arguments in [&["--help"][..], &["--version"], &["serve", "--help"]] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert!(output.stderr.is_empty());
    }
}

/// The number of blocks in the index that engines which compute prompts hold.
async fn blocks_of_prompts(admin: &Client) -> u64 {
    let text = admin.get("/metrics").await.text();
    let blocks = text.lines().filter_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        let by_prefill = ["worker=\"p", "worker=\"w"].iter().any(|w| series.contains(w));
        let is_counted = series.starts_with("splitrail_index_blocks{") && by_prefill;
        is_counted.then(|| value.parse::<u64>().unwrap())
    });
    blocks.sum()
}

async fn second_turn_is_cached(http: &Client, admin: &Client) {
    let mut told = Vec::new();
    // Of the canary's prompts there are blocks already.
    let before = blocks_of_prompts(admin).await;
    for _turn in 0..2 {
        let mut events = http.stream(CHAT, &chat(8)).await;
        assert_eq!(events.status, 200);
        let chunks = events.chunks().await;
        assert_eq!(streamed_text(&chunks, 0).len(), 8);
        let usage = &chunks.last().unwrap()["usage"];
        told.push(usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap());
        eventually("the turn's blocks are known", async || blocks_of_prompts(admin).await > before)
            .await;
    }
    assert_eq!(told[0], 0);
    assert!(told[1] > 0, "{told:?}");
}

#[tokio::test]
async fn quickstart_answers_reuses_the_cache_for_a_second_turn_and_ends_on_a_signal() {
    for (more, flow) in [
        (&[][..], "decode_first"),
        (&["--flow", "aggregated"], "aggregated"),
        (&["--flow", "prefill_first"], "prefill_first"),
    ] {
        let mut process = quickstart(more);
        let ready = process.ready().await;
        let keys: BTreeSet<_> = ready.as_object().unwrap().keys().cloned().collect();
        assert_eq!(keys, ["admin", "grpc", "http", "models"].map(str::to_owned).into());
        assert_eq!(ready["models"], json!(["sim"]));
        let (http, admin) = (address(&ready, "http"), address(&ready, "admin"));
        address(&ready, "grpc");
        let (http, admin) = (Client::new(http), Client::new(admin));
        assert_eq!(http.get("/ready").await.status, 200);
        second_turn_is_cached(&http, &admin).await;
        let metrics = admin.get("/metrics").await.text();
        assert!(metrics.contains(&format!("flow=\"{flow}\",model=\"sim\",outcome=\"ok\"}} 2")));
        let hints = process.read("stdout");
        assert!(hints.contains(ready["http"].as_str().unwrap()), "{hints}");
        assert!(hints.contains("curl "), "{hints}");
        process.terminate();
        assert_eq!(process.end().await.code(), Some(0), "{}", process.read("stderr"));
    }
}

#[tokio::test]
async fn quickstart_starts_the_requested_number_of_engines() {
    let mut process = quickstart(&["--prefill", "3", "--decode", "1"]);
    let admin = Client::new(address(&process.ready().await, "admin"));
    let workers = admin.get("/admin/workers").await.json();
    let roles = workers["workers"].as_array().unwrap().iter();
    let roles: Vec<_> = roles.map(|worker| worker["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["prefill", "prefill", "prefill", "decode"]);
}

#[tokio::test]
async fn quickstart_says_first_where_to_send_a_request_and_ends_with_its_terminal() {
    let mut process = quickstart(&[]);
    process.ready().await;
    assert!(process.read("stdout").starts_with("Splitrail is up"));
    assert_eq!(process.read("stderr"), "", "no line stands before the banner");
    process.signal("HUP");
    assert_eq!(process.end().await.code(), Some(0), "{}", process.read("stderr"));
}

#[tokio::test]
async fn the_first_sigterm_lets_a_stream_finish_and_the_second_ends_at_once() {
    let mut patient = quickstart(&[]);
    let http = Client::new(address(&patient.ready().await, "http"));
    let mut events = http.stream(CHAT, &chat(40)).await;
    events.next().await.unwrap();
    patient.terminate();
    // The stream ends with usage and `[DONE]`.
    let chunks = events.chunks().await;
    assert!(chunks.last().unwrap()["usage"]["completion_tokens"] == 40);
    assert_eq!(patient.end().await.code(), Some(0));

    let mut urgent = quickstart(&[]);
    let ready = urgent.ready().await;
    let [http, admin] = ["http", "admin"].map(|listener| Client::new(address(&ready, listener)));
    // Longer than the test waits.
    let mut events = http.stream(CHAT, &chat(20_000)).await;
    events.next().await.unwrap();
    urgent.terminate();
    eventually("the drain has begun", async || admin.get("/ready").await.status == 503).await;
    urgent.terminate();
    urgent.end().await;
    while let Some(event) = events.next().await {
        assert_ne!(event, "[DONE]", "a cut answer looks complete");
    }
}

#[tokio::test]
async fn sim_engine_serves_without_a_router() {
    let mut process = Process::start(&[
        "sim-engine",
        "--role",
        "prefill",
        "--http-port",
        "0",
        "--kv-events-port",
        "0",
        "--kv-replay-port",
        "0",
        "--model",
        "tiny",
        "--block-size",
        "32",
        "--kv-blocks",
        "100",
    ]);
    let ready = process.ready().await;
    assert_eq!(ready["models"], json!(["tiny"]));
    let engine = Client::new(address(&ready, "http"));
    let models = engine.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "tiny");
    let body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 2});
    assert_eq!(engine.post("/v1/completions", &body).await.status, 200);
    process.terminate();
    assert_eq!(process.end().await.code(), Some(0));
}

/// The lines of a log, each of which must be a JSON object.
fn json_lines(text: &str) -> Vec<Value> {
    let lines = text.lines().map(|line| {
        let value: Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(value["level"].is_string() && value["timestamp"].is_string(), "{line}");
        value
    });
    lines.collect()
}

#[tokio::test]
async fn json_logs_are_lines_of_json_on_stderr_and_report_malformed_events() {
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let files = tempfile::tempdir().unwrap();
    let events = format!(
        ", kv_events: \"{}\", kv_replay: \"{}\"",
        engine.kv_events_endpoint().unwrap(),
        engine.kv_replay_endpoint().unwrap()
    );
    let config = good_file("127.0.0.1:0", &engine.url(), &events);
    let path = write(files.path(), "serve.yaml", &config);
    let mut process = Process::start(&["--log-format", "json", "serve", "--config", &path]);
    let ready = process.ready().await;
    assert!(ready.get("grpc").is_none(), "a listener that is not configured: {ready}");
    let http = Client::new(address(&ready, "http"));
    eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
    engine.set_fault(Fault { kind: FaultKind::GarbageEvents, times: None });
    let body = json!({"model": "sim", "max_tokens": 4, "prompt": "canary ".repeat(20)});
    eventually("garbage is logged", async || {
        assert_eq!(http.post("/v1/completions", &body).await.status, 200);
        let about_garbage = |line: &Value| {
            line["level"] == "WARN"
                && line["fields"]["worker"] == "w0"
                && line["fields"]["message"].as_str().unwrap().contains("KV event")
        };
        let text = process.read("stderr");
        // The last line may be incomplete.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        json_lines(whole).iter().any(about_garbage)
    })
    .await;
    process.terminate();
    assert_eq!(process.end().await.code(), Some(0));
    let log = process.read("stderr");
    assert!(!json_lines(&log).is_empty());
    assert!(!log.contains("canary"), "no prompt is ever logged");
    let access_log = process.read("stdout");
    let outcome = |line| serde_json::from_str::<Value>(line).unwrap()["outcome"].clone();
    assert!(!access_log.is_empty() && access_log.lines().all(|line| outcome(line) == "ok"));
}
