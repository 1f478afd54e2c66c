//! A pair of simulated engines, a configuration, and the program that checks them.

use std::process::{Command, Stdio};

use serde_json::Value;
use splitrail_sim::{Role, SimConfig, SimEngine, write_tokenizer};
use splitrail_tests::binary::built;
use tempfile::TempDir;

/// The result of a check.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) code: Option<i32>,
    pub(crate) json: Value,
}

/// What a program printed, and its exit code.
pub(crate) struct Printed {
    pub(crate) code: Option<i32>,
    pub(crate) text: String,
}

/// Writes the configuration beside the tokenizer, and runs `splitrail check FILE FLAGS`.
pub(crate) async fn printed(yaml: &str, flags: &[&str]) -> Printed {
    let files = folder();
    let path = files.path().join("splitrail.yaml");
    std::fs::write(&path, yaml).unwrap();
    let mut command = Command::new(built("splitrail"));
    command.arg("check").arg(&path).args(flags).stdin(Stdio::null());
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    Printed { code: output.status.code(), text: String::from_utf8(text).unwrap() }
}

/// Runs `splitrail check FILE --connect --json FLAGS`.
pub(crate) async fn checked_with(yaml: &str, flags: &[&str]) -> Checked {
    let printed = printed(yaml, &[&["--connect", "--json"], flags].concat()).await;
    let json = serde_json::from_str(&printed.text);
    let json = json.unwrap_or_else(|_| panic!("no JSON: {}", printed.text));
    Checked { code: printed.code, json }
}

/// Runs `splitrail check FILE --connect --json`.
pub(crate) async fn checked(yaml: &str) -> Checked {
    checked_with(yaml, &[]).await
}

impl Checked {
    /// All findings: the worker's id or nothing, and the kind; in order.
    pub(crate) fn kinds(&self) -> Vec<(Option<&str>, &str)> {
        let findings = self.findings();
        findings
            .into_iter()
            .map(|finding| (finding["worker"].as_str(), finding["kind"].as_str().unwrap()))
            .collect()
    }

    fn findings(&self) -> Vec<&Value> {
        let list = |value: &'static str, of: &'_ Value| of[value].as_array().cloned();
        assert!(list("models", &self.json).is_some(), "{:#}", self.json);
        let models = self.json["models"].as_array().unwrap();
        let of_workers = models.iter().flat_map(|model| {
            let workers = model["workers"].as_array().unwrap().iter();
            workers.flat_map(|worker| worker["findings"].as_array().unwrap())
        });
        let of_models = models.iter().flat_map(|model| model["findings"].as_array().unwrap());
        of_workers.chain(of_models).collect()
    }

    /// The finding of a kind, as `WHAT REMEDY`.
    pub(crate) fn words(&self, kind: &str) -> String {
        let found = self.findings().into_iter().find(|finding| finding["kind"] == kind);
        let found = found.unwrap_or_else(|| panic!("no {kind}: {:#}", self.json));
        format!("{} {}", found["what"].as_str().unwrap(), found["remedy"].as_str().unwrap())
    }

    /// What was found out about a worker.
    pub(crate) fn facts(&self, id: &str) -> &Value {
        let workers = self.json["models"][0]["workers"].as_array().unwrap();
        let worker = workers.iter().find(|worker| worker["id"] == id);
        &worker.unwrap_or_else(|| panic!("no {id}"))["facts"]
    }

    /// Asserts that there is exactly one fault, on one worker, and returns its words.
    #[track_caller]
    pub(crate) fn only(&self, worker: &str, kind: &str) -> String {
        assert_eq!(self.kinds(), [(Some(worker), kind)], "{:#}", self.json);
        self.words(kind)
    }
}

fn folder() -> TempDir {
    let files = tempfile::tempdir().unwrap();
    write_tokenizer(files.path()).unwrap();
    files
}

/// Settings of the prefill engine.
pub(crate) fn prefill() -> SimConfig {
    SimConfig { role: Role::Prefill, ..SimConfig::default() }
}

/// Settings of the decode engine.
pub(crate) fn decode() -> SimConfig {
    SimConfig { role: Role::Decode, ..SimConfig::default() }
}

/// A prefill and a decode engine.
pub(crate) struct Pair {
    pub(crate) prefill: SimEngine,
    pub(crate) decode: SimEngine,
}

impl Pair {
    pub(crate) async fn of(prefill: SimConfig, decode: SimConfig) -> Self {
        let prefill = SimEngine::start(prefill).await.unwrap();
        Self { prefill, decode: SimEngine::start(decode).await.unwrap() }
    }

    pub(crate) async fn sound() -> Self {
        Self::of(prefill(), decode()).await
    }

    /// The pair's configuration.
    pub(crate) fn yaml(&self) -> String {
        self.yaml_with("block_size: 16")
    }

    /// The pair's configuration with other keys of the model, as lines.
    pub(crate) fn yaml_with(&self, keys: &str) -> String {
        let workers =
            [worker("p0", "prefill", &self.prefill), worker("d0", "decode", &self.decode)];
        config(keys, &workers)
    }
}

/// A worker at an engine.
pub(crate) fn worker(id: &str, role: &str, engine: &SimEngine) -> String {
    let key = |name: &str, value: Option<&str>| {
        value.map(|value| format!(", {name}: \"{value}\"")).unwrap_or_default()
    };
    format!(
        "{{ id: {id}, role: {role}, url: \"{}\"{}{} }}",
        engine.url(),
        key("kv_events", engine.kv_events_endpoint()),
        key("kv_replay", engine.kv_replay_endpoint()),
    )
}

/// A P/D configuration with keys of the model, as lines, and workers.
pub(crate) fn config(keys: &str, workers: &[String]) -> String {
    let has = |key: &str| keys.lines().any(|line| line.trim_start().starts_with(key));
    let mut lines = String::new();
    for (key, default) in [
        ("tokenizer:", "tokenizer: { kind: huggingface, path: . }"),
        ("flow:", "flow: prefill_first"),
        ("connector:", "connector: nixl"),
    ] {
        if !has(key) {
            lines += &format!("    {default}\n");
        }
    }
    lines.extend(keys.lines().map(|line| format!("    {line}\n")));
    let workers: String = workers.iter().map(|worker| format!("      - {worker}\n")).collect();
    format!(
        "listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
models:
  - name: sim
{lines}    workers:
{workers}"
    )
}
