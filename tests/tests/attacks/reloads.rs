//! An operator's mistakes in a configuration that is reloaded while clients are being served.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use serde_json::{Value, json};
use splitrail_sim::write_tokenizer;
use splitrail_tests::client::{Client, Reply};
use splitrail_tests::cluster::eventually;
use splitrail_tests::process::Process;
use tokio::task::JoinSet;

use super::support::engine;

const COMPLETIONS: &str = "/v1/completions";
const ROUNDS: usize = 2;
const KEY: &str = "the-key-of-the-engine";
const NETWORKS: &str = "fleet: { networks: [127.0.0.0/8] }";

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_files_and_models_that_come_and_go_cost_clients_of_others_nothing() {
    let engine = engine().await;
    let files = tempfile::tempdir().unwrap();
    let folder = files.path();
    write_tokenizer(folder).unwrap();
    let tokenizer = std::fs::read_to_string(folder.join("tokenizer.json")).unwrap();
    let sound: Files = vec![
        ("splitrail.yaml", yaml(&["sim", "other"], &engine.url())),
        ("tokenizer.json", tokenizer.clone()),
        ("key", KEY.to_owned()),
    ];
    write(folder, &sound);
    let config = folder.join("splitrail.yaml").display().to_string();
    let router =
        Process::start("router", folder, &["serve".to_owned(), "--config".into(), config]).await;
    let (http, admin) = (router.client("http"), router.client("admin"));
    eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
    let mut sim = Load::start(&router, "sim", 3, false);
    let mut other = Load::start(&router, "other", 2, true);
    for round in 0..ROUNDS {
        for (mistake, named) in mistakes(&engine.url(), &tokenizer) {
            write(folder, &mistake);
            let reply = reload(&admin).await;
            let text = reply.text();
            assert_eq!(reply.status, 422, "{named} in round {round}: {text}");
            assert!(text.contains(named), "{named} in round {round}: {text}");
            write(folder, &sound);
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
        write(folder, &sound);
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
