//! Router processes in front of the same simulated engines, and the commands.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use splitrail_sim::{Role, SimConfig, SimEngine, write_tokenizer};
use splitrail_tests::Client;
use splitrail_tests::binary::{RouterProcess, built};
use splitrail_tests::client::Events;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt, streamed};
use tempfile::TempDir;

/// A number of tokens that no test waits for.
const ENDLESS_TOKENS: u32 = 100_000;

/// Routers and their engines. Dropping it ends everything.
pub(crate) struct Routers {
    pub(crate) routers: Vec<RouterProcess>,
    pub(crate) files: Vec<TempDir>,
    _engines: Vec<SimEngine>,
    _tokenizer: TempDir,
}

/// The configuration file of a router with these workers; `top` has further keys, as lines.
fn yaml(listen: &str, top: &str, tokenizer: &Path, workers: &str) -> String {
    let tokenizer = tokenizer.display();
    format!(
        "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, {listen} }}
{top}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: huggingface, path: \"{tokenizer}\" }}
    flow: prefill_first
    connector: nixl
    canary: {{ enabled: false }}
    policy: {{ kind: kv_overlap }}
    workers:
{workers}"
    )
}

/// The listener for operators, on any port.
pub(crate) const ADMIN: &str = "admin: 127.0.0.1:0";

impl Routers {
    /// Starts two prefill engines, two decode engines and so many routers, and waits until each
    /// router is ready.
    pub(crate) async fn start(count: usize) -> Self {
        Self::start_with(count, ADMIN, |_| String::new()).await
    }

    /// The same with these keys of `listen` and further keys of the configuration, as lines, by the
    /// place of the router.
    pub(crate) async fn start_with(
        count: usize,
        listen: &str,
        top: impl Fn(usize) -> String,
    ) -> Self {
        let (engines, workers) = engines().await;
        let tokenizer = tempfile::tempdir().unwrap();
        write_tokenizer(tokenizer.path()).unwrap();
        let mut routers = Vec::new();
        let mut files = Vec::new();
        for place in 0..count {
            let folder = tempfile::tempdir().unwrap();
            let yaml = yaml(listen, &top(place), tokenizer.path(), &workers);
            let log = folder.path().join("log");
            let router = RouterProcess::serve(folder.path(), &yaml, &[], &log).await;
            let http = Client::new(router.http);
            eventually("the router is ready", async || http.get("/ready").await.status == 200)
                .await;
            routers.push(router);
            files.push(folder);
        }
        Self { routers, files, _engines: engines, _tokenizer: tokenizer }
    }

    /// Waits until all workers are in full service on all routers.
    pub(crate) async fn until_serving(&self) {
        eventually("all workers are in service", async || {
            let mut all = Vec::new();
            for place in 0..self.routers.len() {
                all.extend(self.workers(place).await);
            }
            all.iter().all(|worker| worker["state"] == "serving")
        })
        .await;
    }

    /// The addresses of all routers, as `--admin` has them.
    pub(crate) fn admins(&self) -> String {
        let all: Vec<_> = self.routers.iter().map(|router| router.admin.to_string()).collect();
        all.join(",")
    }

    /// A router's name in the output.
    pub(crate) fn name(&self, place: usize) -> String {
        self.routers[place].admin.to_string()
    }

    /// The path of a router's configuration file.
    pub(crate) fn config(&self, place: usize) -> PathBuf {
        self.files[place].path().join("splitrail.yaml")
    }

    /// The workers as a router has them.
    pub(crate) async fn workers(&self, place: usize) -> Vec<Value> {
        let reply = Client::new(self.routers[place].admin).get("/admin/workers").await.json();
        reply["workers"].as_array().unwrap().clone()
    }

    /// The state of a worker on a router.
    pub(crate) async fn state(&self, place: usize, id: &str) -> String {
        let workers = self.workers(place).await;
        let worker = workers.iter().find(|worker| worker["id"] == id).unwrap();
        worker["state"].as_str().unwrap().to_owned()
    }

    /// Starts a stream through a router that does not end by itself, and returns it with the id of
    /// its decode worker.
    pub(crate) async fn endless(&self, place: usize) -> (Events, String) {
        let mut body = streamed(&completion(&prompt(40, "endless")));
        body["max_tokens"] = ENDLESS_TOKENS.into();
        body["ignore_eos"] = true.into();
        let mut events = Client::new(self.routers[place].http).stream(COMPLETIONS, &body).await;
        assert_eq!(events.status, 200);
        events.next().await.unwrap();
        let mut decode = String::new();
        eventually("a decode worker has the stream", async || {
            let workers = self.workers(place).await;
            let busy = workers.iter().find(|w| w["role"] == "decode" && w["requests"] == 1);
            decode = busy.map_or(String::new(), |worker| worker["id"].as_str().unwrap().to_owned());
            busy.is_some()
        })
        .await;
        (events, decode)
    }
}

/// Two prefill and two decode engines, and their description in a configuration.
pub(crate) async fn engines() -> (Vec<SimEngine>, String) {
    let mut engines = Vec::new();
    let mut workers = String::new();
    for (id, role, word) in [
        ("p0", Role::Prefill, "prefill"),
        ("p1", Role::Prefill, "prefill"),
        ("d0", Role::Decode, "decode"),
        ("d1", Role::Decode, "decode"),
    ] {
        let config = SimConfig {
            role,
            kv_blocks: 16_384,
            max_model_len: 200_000,
            decode_us_per_step: 10_000,
            ..SimConfig::default()
        };
        let engine = SimEngine::start(config).await.unwrap();
        workers += &format!(
            "      - {{ id: {id}, role: {word}, url: \"{}\", kv_events: \"{}\", kv_replay: \"{}\" }}\n",
            engine.url(),
            engine.kv_events_endpoint().unwrap(),
            engine.kv_replay_endpoint().unwrap(),
        );
        engines.push(engine);
    }
    (engines, workers)
}

/// What a command did.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    pub(crate) fn new(output: &Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The line of the output that starts like this.
    pub(crate) fn line(&self, start: &str) -> &str {
        let found = self.stdout.lines().find(|line| line.starts_with(start));
        found.unwrap_or_else(|| panic!("no line starts with {start:?}: {self:?}"))
    }
}

/// The program with arguments, and without the variables of the person who runs the test.
pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(built("splitrail"));
    command.args(arguments).stdin(Stdio::null());
    for name in ["RUST_LOG", "SPLITRAIL_ADMIN", "SPLITRAIL_ADMIN_KEY"] {
        command.env_remove(name);
    }
    command
}

/// Runs the program to its end.
pub(crate) async fn run(arguments: &[&str]) -> Ran {
    let mut command = command(arguments);
    let ended = tokio::task::spawn_blocking(move || command.output().unwrap()).await;
    Ran::new(&ended.unwrap())
}
