//! A router process in front of one engine, with a fleet listener and files of its own.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};
use splitrail_tests::Client;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::process::Process;
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::solo::whole_reply;
use tempfile::TempDir;

/// What a stream over HTTP/1.1 takes, with its connection, in KiB; docs/limits.md.
pub(super) const HTTP1_STREAM_KIB: u64 = 45;

/// What a stream over HTTP/2 takes.
pub(super) const HTTP2_STREAM_KIB: u64 = 27;

/// What a stream over HTTP/1.1 takes whose client does not read it.
pub(super) const UNREAD_STREAM_KIB: u64 = HTTP1_STREAM_KIB + 200;

/// What may be added to a bound of resident memory for all that does not grow with requests: code
/// that runs for the first time, metrics, and what the allocator keeps of what was given back.
pub(super) const REST_KIB: u64 = 16 << 10;

/// The router, and the engine that is written down as `w0`.
pub(super) struct Site {
    pub(super) engine: ScriptedServer,
    pub(super) http: Client,
    pub(super) admin: Client,
    /// The fleet listener.
    pub(super) fleet_address: SocketAddr,
    pub(super) admin_at: SocketAddr,
    process: Process,
    _files: TempDir,
}

/// An engine that answers everything.
pub(super) async fn engine() -> ScriptedServer {
    const MODELS: &str = r#"{"data":[{"id":"sim"},{"id":"other"}]}"#;
    ScriptedServer::start(|heard| match heard.is_inference() {
        true => whole_reply(),
        false => ScriptedReply::json(200, MODELS),
    })
    .await
}

/// A configuration with further lines, and further lines of its model.
pub(super) fn yaml(engine: &str, top: &str, model: &str) -> String {
    format!(
        "listen: {{ http: 127.0.0.1:0, fleet: 127.0.0.1:0, admin: 127.0.0.1:0 }}
{top}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: none }}
    flow: aggregated
    policy: {{ kind: round_robin }}
    engine_api_key: {{ kind: file, path: key }}
    workers: [{{ id: w0, role: both, url: \"{engine}\" }}]
{model}
"
    )
}

/// Writes the configuration and the key that it names; the arguments of the router.
pub(super) fn arguments(folder: &Path, yaml: &str) -> Vec<String> {
    let config = folder.join("splitrail.yaml");
    std::fs::write(folder.join("key"), "the-key-of-the-engine").unwrap();
    std::fs::write(&config, yaml).unwrap();
    vec!["serve".to_owned(), "--config".into(), config.display().to_string()]
}

impl Site {
    /// `top` holds further lines of the file, `model` further lines of its model.
    pub(super) async fn start(top: &str, model: &str, files: TempDir) -> Self {
        let engine = engine().await;
        let yaml = yaml(&engine.url(), top, model);
        Self::serve(engine, &yaml, files).await
    }

    /// A router with this configuration, whose worker is the engine.
    pub(super) async fn serve(engine: ScriptedServer, yaml: &str, files: TempDir) -> Self {
        let args = arguments(files.path(), yaml);
        let process = Process::start("router", files.path(), &args).await;
        let address = |key| process.told(key).parse().unwrap();
        let (http, admin) = (process.client("http"), process.client("admin"));
        let (fleet_address, admin_at) = (address("fleet"), address("admin"));
        let site = Self { engine, http, admin, fleet_address, admin_at, process, _files: files };
        eventually("the router is ready", async || site.http.get("/ready").await.status == 200)
            .await;
        site
    }

    /// The id of the router's process.
    pub(super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// What the router shows of a worker; null if it is not there.
    pub(super) async fn worker(&self, id: &str) -> Value {
        let shown = self.admin.get("/admin/workers").await.json();
        let mut workers = shown["workers"].as_array().unwrap().iter();
        workers.find(|worker| worker["id"] == id).cloned().unwrap_or_default()
    }

    /// The sum of a metric's series whose labels contain all of `labels`.
    pub(super) async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        metric_in(&self.admin.get("/metrics").await.text(), name, labels)
    }

    /// Sends prompts, all of which must be answered.
    pub(super) async fn prompts(&self, count: usize) {
        let body = json!({"model": "sim", "prompt": "once upon a time", "max_tokens": 2});
        for _ in 0..count {
            let reply = self.http.post("/v1/completions", &body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
    }
}

/// Whether attacks have the size that they were found with, and not the one that a quick run has.
pub(super) fn is_full_size() -> bool {
    std::env::var_os("SPLITRAIL_FULL_SIZE").is_some()
}
