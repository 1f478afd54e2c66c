//! An operator's mistakes in a configuration that is reloaded while clients are being served.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use serde_json::{Value, json};
use splitrail_sim::write_tokenizer;
use splitrail_tests::client::{Client, Reply};
use splitrail_tests::cluster::eventually;
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::process::Process;
use splitrail_tests::scripted_server::ScriptedServer;
use tempfile::TempDir;
use tokio::task::JoinSet;

use super::support::{HTTP1_STREAM_KIB, engine, is_full_size};

const COMPLETIONS: &str = "/v1/completions";
const ROUNDS: usize = 2;
const KEY: &str = "the-key-of-the-engine";
const NETWORKS: &str = "fleet: { networks: [127.0.0.0/8] }";
/// `limits.request_memory_max`.
const MEMORY_MIB: u64 = 4;

fn model(name: &str, engine: &str) -> String {
    format!(
        "  - name: {name}
    block_size: 16
    tokenizer: {{ kind: huggingface, path: . }}
    flow: aggregated
    canary: {{ enabled: false }}
    policy: {{ kind: round_robin }}
    engine_api_key: {{ kind: file, path: key }}
    workers: [{{ id: w0, role: both, url: \"{engine}\" }}]
"
    )
}

fn yaml(models: &[&str], engine: &str) -> String {
    let models: String = models.iter().map(|name| model(name, engine)).collect();
    format!(
        "listen: {{ http: 127.0.0.1:0, fleet: 127.0.0.1:0, admin: 127.0.0.1:0 }}
{NETWORKS}
limits: {{ request_memory_max: {MEMORY_MIB}MiB, body_size_max: 1MiB }}
models:
{models}"
    )
}

/// Clients of one model that ask again and again, each for as long as the load lasts.
struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    not_found: Arc<AtomicUsize>,
    clients: JoinSet<()>,
}

impl Load {
    fn start(router: &Process, model: &'static str, clients: usize, may_be_absent: bool) -> Self {
        let mut load = Self {
            stop: Arc::default(),
            answered: Arc::default(),
            not_found: Arc::default(),
            clients: JoinSet::new(),
        };
        for place in 0..clients {
            let http = router.client("http");
            let (stop, answered) = (Arc::clone(&load.stop), Arc::clone(&load.answered));
            let not_found = Arc::clone(&load.not_found);
            load.clients.spawn(async move {
                for turn in 0.. {
                    if stop.load(Relaxed) {
                        return;
                    }
                    let reply = ask(&http, model, &format!("{place} asks {turn}")).await;
                    match reply.status.as_u16() {
                        200 => answered.fetch_add(1, Relaxed),
                        404 if may_be_absent => not_found.fetch_add(1, Relaxed),
                        status => panic!("{model}: {status} {}", reply.text()),
                    };
                }
            });
        }
        load
    }

    /// Waits for so many answers of this kind that are begun and ended from now on.
    async fn goes_on(&mut self, kind: &str) {
        let counter = if kind == "answered" { &self.answered } else { &self.not_found };
        let before = counter.load(Relaxed);
        eventually(&format!("requests are {kind}"), async || {
            // A client that failed says why.
            if let Some(Err(failed)) = self.clients.try_join_next() {
                std::panic::resume_unwind(failed.into_panic());
            }
            counter.load(Relaxed) >= before + 2 * self.clients.len()
        })
        .await;
    }

    async fn end(mut self) {
        self.stop.store(true, Relaxed);
        while let Some(ended) = self.clients.join_next().await {
            ended.expect("no request fails");
        }
    }
}

async fn ask(http: &Client, model: &str, prompt: &str) -> Reply {
    http.post(COMPLETIONS, &json!({"model": model, "prompt": prompt, "max_tokens": 2})).await
}

/// Files of the router's folder, and what each of them holds.
type Files = Vec<(&'static str, String)>;

/// Mistakes, each of which is to be found out before anything changes: the file that has it, and a
/// word of the report.
fn mistakes(engine: &str, tokenizer: &str) -> Vec<(Files, &'static str)> {
    let both = yaml(&["sim", "other"], engine);
    let config = |yaml: String| vec![("splitrail.yaml", yaml)];
    vec![
        (vec![("tokenizer.json", tokenizer[..tokenizer.len() / 2].to_owned())], "tokenizer"),
        (vec![("tokenizer.json", String::new())], "tokenizer"),
        (vec![("key", String::new())], "engine_api_key"),
        (vec![("key", "\n".to_owned())], "engine_api_key"),
        (config(both.replace(NETWORKS, "fleet: { networks: [10.0.0.0/8] }")), "fleet.networks"),
        (config(both.replace(NETWORKS, "")), "fleet.networks"),
        (config("models: [".to_owned()), "splitrail.yaml"),
        (config(String::new()), "the file is empty"),
        (config(both.replace("round_robin", "nonsense")), "policy"),
        (config(both.replace("name: other", "name: sim")), "sim"),
    ]
}

fn write(folder: &Path, files: &Files) {
    for (name, text) in files {
        std::fs::write(folder.join(name), text).unwrap();
    }
}

async fn reload(admin: &Client) -> Reply {
    admin.post("/admin/reload", &json!({})).await
}

/// A router with two models, its engine and its files.
struct Site {
    engine: ScriptedServer,
    router: Process,
    folder: TempDir,
    /// The files that it was started with.
    sound: Files,
    tokenizer: String,
}

impl Site {
    async fn start() -> Self {
        let engine = engine().await;
        let folder = tempfile::tempdir().unwrap();
        write_tokenizer(folder.path()).unwrap();
        let tokenizer = std::fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
        let sound: Files = vec![
            ("splitrail.yaml", yaml(&["sim", "other"], &engine.url())),
            ("tokenizer.json", tokenizer.clone()),
            ("key", KEY.to_owned()),
        ];
        write(folder.path(), &sound);
        let config = folder.path().join("splitrail.yaml").display().to_string();
        let args = ["serve".to_owned(), "--config".into(), config];
        let router = Process::start("router", folder.path(), &args).await;
        let http = router.client("http");
        eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
        Self { engine, router, folder, sound, tokenizer }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_files_and_models_that_come_and_go_cost_clients_of_others_nothing() {
    let site = Site::start().await;
    let Site { engine, folder, router, sound, tokenizer, .. } = &site;
    let (folder, http, admin) = (folder.path(), router.client("http"), router.client("admin"));
    let mut sim = Load::start(router, "sim", 3, false);
    let mut other = Load::start(router, "other", 2, true);
    for round in 0..ROUNDS {
        for (mistake, named) in mistakes(&engine.url(), tokenizer) {
            write(folder, &mistake);
            let reply = reload(&admin).await;
            let text = reply.text();
            assert_eq!(reply.status, 422, "{named} in round {round}: {text}");
            assert!(text.contains(named), "{named} in round {round}: {text}");
            write(folder, sound);
            // What was served before is served as it was, both models of it.
            sim.goes_on("answered").await;
            other.goes_on("answered").await;
        }
        assert_eq!(other.not_found.load(Relaxed), 0, "no mistake removed a model");
        write(folder, &vec![("splitrail.yaml", yaml(&["sim"], &engine.url()))]);
        assert_eq!(reload(&admin).await.status, 200);
        other.goes_on("not found").await;
        sim.goes_on("answered").await;
        let error: Value = ask(&http, "other", "a model that is gone").await.json();
        assert_eq!(error["error"]["code"], "model_not_found", "{error}");
        write(folder, sound);
        assert_eq!(reload(&admin).await.status, 200);
        other.goes_on("answered").await;
        other.not_found.store(0, Relaxed);
    }
    sim.end().await;
    other.end().await;
    // The engine never saw a request without its key.
    let heard = engine.heard().into_iter().filter(|heard| heard.is_inference());
    let keys: Vec<String> = heard.map(|heard| heard.header("authorization").to_owned()).collect();
    assert!(keys.iter().all(|key| *key == format!("Bearer {KEY}")), "{keys:?}");
}

/// A model that goes and comes again with another tokenizer, and a mistake between.
async fn reload_in_turn(site: &Site, admin: &Client, turn: usize) {
    let folder = site.folder.path();
    let tokenizer = ("tokenizer.json", site.tokenizer.clone() + &" ".repeat(turn % 7));
    let with = |models: &[&str]| vec![("splitrail.yaml", yaml(models, &site.engine.url()))];
    for (files, status) in [
        (with(&["sim"]), 200),
        (vec![("tokenizer.json", "{".to_owned())], 422),
        ([with(&["sim", "other"]), vec![tokenizer]].concat(), 200),
    ] {
        write(folder, &files);
        let reply = reload(admin).await;
        assert_eq!(reply.status, status, "turn {turn}: {}", reply.text());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_flat_however_often_a_configuration_is_reloaded_under_load() {
    const CLIENTS: usize = 4;
    let turns = if is_full_size() { 3000 } else { 4 };
    let site = Site::start().await;
    let (pid, admin) = (site.router.pid(), site.router.client("admin"));
    let start_kib = memory(pid).now_kib;
    let mut sim = Load::start(&site.router, "sim", CLIENTS, false);
    let mut peaks_kib = Vec::new();
    // The first turns are those of a router that has not done anything yet.
    for _ in 0..3 {
        reset_peak(pid);
        for turn in 0..turns {
            reload_in_turn(&site, &admin, turn).await;
        }
        sim.goes_on("answered").await;
        peaks_kib.push(memory(pid).peak_kib);
    }
    sim.end().await;
    // What may differ between two windows is what requests happen to hold: what is charged to
    // `request_memory_max`, and a stream for each client.
    let requests_kib = (MEMORY_MIB << 10) + CLIENTS as u64 * HTTP1_STREAM_KIB;
    let [_, early_kib, late_kib] = peaks_kib[..] else { unreachable!("three windows") };
    assert!(late_kib <= early_kib + requests_kib, "{peaks_kib:?}");
    // No more than two configurations are there at a time: the one that serves, and the next one.
    assert!(late_kib <= 2 * start_kib + requests_kib, "{start_kib}, then {peaks_kib:?}");
}
