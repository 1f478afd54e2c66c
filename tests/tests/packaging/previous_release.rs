//! The previous release beside this one, as during an upgrade: its router with our shim, our router
//! with its shim, and the files that it has written. Its programs, `splitrail` and `splitrail-shim`, are
//! in the folder that `SPLITRAIL_PREVIOUS_BIN_DIR` names; without it, these tests say that they prove
//! nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use splitrail_sim::{Role, SimConfig, SimEngine, write_tokenizer};
use splitrail_tests::binary::built;
use splitrail_tests::cluster::eventually;
use splitrail_tests::process::Process;
use splitrail_tests::trial::prompt;

/// The programs of a release.
struct Programs {
    router: PathBuf,
    shim: PathBuf,
}

impl Programs {
    fn ours() -> Self {
        Self { router: built("splitrail"), shim: built("splitrail-shim") }
    }

    /// Those of the previous release, if a folder is named.
    fn previous() -> Option<Self> {
        let Some(folder) = std::env::var_os("SPLITRAIL_PREVIOUS_BIN_DIR").map(PathBuf::from) else {
            let mut stderr = std::io::stderr();
            let text =
                b"SKIPPED: SPLITRAIL_PREVIOUS_BIN_DIR names no programs of the previous release\n";
            std::io::Write::write_all(&mut stderr, text).unwrap();
            return None;
        };
        let programs =
            Self { router: folder.join("splitrail"), shim: folder.join("splitrail-shim") };
        for program in [&programs.router, &programs.shim] {
            assert!(program.is_file(), "{} is missing", program.display());
        }
        Some(programs)
    }
}

/// Engines with their shims, attached to a router that knows no worker itself.
struct Deployment {
    router: Process,
    shims: Vec<Process>,
    _engines: Vec<SimEngine>,
}

impl Deployment {
    async fn start(router: &Path, shim: &Path, folder: &Path, top: &str) -> Self {
        write_tokenizer(folder).unwrap();
        let config = folder.join("splitrail.yaml");
        // In words that both releases know.
        let yaml = format!(
            "listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0, fleet: 127.0.0.1:0 }}
hash_seed: 7
limits: {{ drain_delay: 100ms, drain_grace: 20s }}
{top}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: huggingface, path: . }}
    flow: decode_first
    connector: nixl
    policy: {{ kind: kv_overlap }}
    discovery: [{{ kind: shim }}]
"
        );
        fs::write(&config, yaml).unwrap();
        let args = ["serve", "--config", &config.display().to_string()].map(str::to_owned);
        let router = Process::run(router, "router", folder, &args, &[]).await;
        let (mut engines, mut shims) = (Vec::new(), Vec::new());
        for (role, name, id) in [(Role::Prefill, "prefill", "p0"), (Role::Decode, "decode", "d0")] {
            // As real engines do, it ignores a threshold: the shim applies it.
            let config = SimConfig { role, honour_threshold: false, ..SimConfig::default() };
            let engine = SimEngine::start(config).await.unwrap();
            let args = [
                format!("--engine={}", engine.url()),
                "--listen=127.0.0.1:0".to_owned(),
                format!("--router={}", router.told("fleet")),
                format!("--role={name}"),
                format!("--id={id}"),
            ];
            shims.push(Process::run(shim, id, folder, &args, &[]).await);
            engines.push(engine);
        }
        let http = router.client("http");
        eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
        Self { router, shims, _engines: engines }
    }

    /// A prompt is prefilled and handed over; then the decode engine serves it from its own cache.
    async fn serves_a_decode_first_hit(&self) {
        let http = self.router.client("http");
        let body = json!({
            "model": "sim", "prompt": prompt(200, "upgrade"), "max_tokens": 4, "temperature": 0,
        });
        let first = http.post("/v1/completions", &body).await;
        assert_eq!(first.status, 200, "{}", first.text());
        assert_eq!(first.route("prefill"), Some("p0"));
        assert_eq!(first.route("decode"), Some("d0"));
        let text = first.json()["choices"][0]["text"].clone();
        let mut last = first;
        eventually("a decode-first hit", async || {
            last = http.post("/v1/completions", &body).await;
            last.route("try") == Some("served")
        })
        .await;
        assert_eq!(last.route("gate"), Some("shim"));
        assert_eq!(last.json()["choices"][0]["text"], text);
        let cached = &last.json()["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert!(cached.as_u64() > Some(0), "{}", last.text());
    }

    /// A drained shim leaves, and both programs end well.
    async fn ends(mut self) {
        for shim in &mut self.shims {
            shim.terminate();
            assert!(shim.ended().await.success(), "{}", shim.log());
        }
        let admin = self.router.client("admin");
        eventually("no worker is left in service", async || {
            let workers = admin.get("/admin/workers").await.json();
            let workers = workers["workers"].as_array().unwrap();
            workers.iter().all(|worker| worker["state"] != "serving")
        })
        .await;
        self.router.terminate();
        assert!(self.router.ended().await.success(), "{}", self.router.log());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_and_shims_of_the_previous_release_serve_a_decode_first_hit() {
    let Some(previous) = Programs::previous() else { return };
    let folder = tempfile::tempdir().unwrap();
    let ours = Programs::ours();
    let deployment = Deployment::start(&ours.router, &previous.shim, folder.path(), "").await;
    deployment.serves_a_decode_first_hit().await;
    deployment.ends().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shims_and_a_router_of_the_previous_release_serve_a_decode_first_hit() {
    let Some(previous) = Programs::previous() else { return };
    let folder = tempfile::tempdir().unwrap();
    let ours = Programs::ours();
    let deployment = Deployment::start(&previous.router, &ours.shim, folder.path(), "").await;
    deployment.serves_a_decode_first_hit().await;
    deployment.ends().await;
}

/// What a command prints; it must succeed.
fn output(program: &Path, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_and_a_roll_back_continue_the_ledger_and_the_record() {
    let Some(previous) = Programs::previous() else { return };
    let ours = Programs::ours();
    let folder = tempfile::tempdir().unwrap();
    let top = "ledger: { path: ledger.jsonl }\nrecord: { path: record.jsonl }";
    // A drain writes everything that is in the queues.
    for programs in [&previous, &ours, &previous] {
        let deployment =
            Deployment::start(&programs.router, &programs.shim, folder.path(), top).await;
        deployment.serves_a_decode_first_hit().await;
        deployment.ends().await;
    }
    let lines_of = |name: &str| -> Vec<Value> {
        let text = fs::read_to_string(folder.path().join(name)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let path = |name: &str| folder.path().join(name).display().to_string();
    let lines = lines_of("ledger.jsonl");
    assert!(lines.len() >= 6 && lines.iter().all(|line| line["version"] == 1), "{lines:?}");
    let usage = output(&ours.router, &["usage", "--ledger", &path("ledger.jsonl"), "--json"]);
    let usage: Value = serde_json::from_str(&usage).unwrap();
    assert_eq!(usage["usage"][0]["requests"], lines.len(), "{usage}");
    assert_eq!(usage["unreadable_lines"], 0, "{usage}");

    let lines = lines_of("record.jsonl");
    assert!(lines.len() >= 6 && lines.iter().all(|line| line["version"] == 1), "{lines:?}");
    let replayed =
        output(&ours.router, &["replay", "--trace", &path("record.jsonl"), "--json", "-"]);
    let replayed: Value = serde_json::from_str(&replayed).unwrap();
    assert_eq!(replayed[0]["requests"], lines.len(), "{replayed}");
}
