//! What the two programs say when they start, or do not: exit codes, places, records.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use splitrail_tests::binary::{RouterProcess, built};
use splitrail_tests::cluster::eventually;
use splitrail_tests::{Client, Cluster, Spec};

const ROUTER: &str = "splitrail";
const SHIM: &str = "splitrail-shim";

const CONFIG: &str = "listen: { http: 127.0.0.1:0, admin: 127.0.0.1:0, grpc: 127.0.0.1:0 }
models:
  - name: sim
    block_size: 16
    tokenizer: { kind: none }
    flow: aggregated
    workers:
      - { id: w0, role: both, url: \"http://127.0.0.1:1\" }
";

fn run(program: &str, folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(built(program));
    command.args(arguments).current_dir(folder).env_remove("RUST_LOG").stdin(Stdio::null());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_configuration_of_this_folder_may_name_files_of_this_folder() {
    let files = tempfile::tempdir().unwrap();
    let lines = "ledger: { path: ledger.jsonl }\nrecord: { path: record.jsonl }\n";
    std::fs::write(files.path().join("live.yaml"), format!("{CONFIG}{lines}")).unwrap();
    for name in ["live.yaml", "./live.yaml"] {
        let output = run(ROUTER, files.path(), &["check", "--config", name]);
        assert_eq!(output.status.code(), Some(0), "{name}: {}", text(&output.stderr));
    }
}

#[test]
fn help_lists_options_under_their_own_headings() {
    let output = run(ROUTER, Path::new("."), &["replay", "--help"]);
    let help = text(&output.stdout);
    let (options, costs) = help.split_once("Cost model:").unwrap();
    for option in ["--losses", "--json", "--dump", "--svg"] {
        assert!(options.contains(option) && !costs.contains(option), "{option}");
    }
    assert!(costs.contains("--max-batch"), "{costs}");
}

#[test]
fn both_programs_end_with_the_same_code_for_the_same_mistake() {
    let files = tempfile::tempdir().unwrap();
    for (program, arguments) in [
        (ROUTER, &["check", "--config", "none.yaml"][..]),
        (ROUTER, &["serve", "--config", "none.yaml"]),
        (SHIM, &["check", "--config", "none.yaml"]),
        (SHIM, &["--config", "none.yaml"]),
    ] {
        let output = run(program, files.path(), arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(66), "{program} {arguments:?}: {said}");
        assert!(said.contains("none.yaml"), "{said}");
    }
    for program in [ROUTER, SHIM] {
        let output = run(program, files.path(), &["--frobnicate"]);
        assert_eq!(output.status.code(), Some(64), "{program}");
        std::fs::write(files.path().join("bad.yaml"), "nonsense: 1\n").unwrap();
        let output = run(program, files.path(), &["check", "--config", "bad.yaml"]);
        assert_eq!(output.status.code(), Some(78), "{program}");
    }
}

#[test]
fn a_broken_tokenizer_ends_check_and_serve_alike() {
    let files = tempfile::tempdir().unwrap();
    std::fs::write(files.path().join("tokenizer.json"), "{}").unwrap();
    let config = CONFIG.replace("kind: none", "kind: huggingface, path: .");
    std::fs::write(files.path().join("splitrail.yaml"), config).unwrap();
    for command in ["check", "serve"] {
        let output = run(ROUTER, files.path(), &[command, "--config", "splitrail.yaml"]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(78), "{command}: {said}");
        assert!(said.contains("tokenizer.json"), "{command}: {said}");
    }
}

#[tokio::test]
async fn the_configuration_that_runs_is_one_that_check_has_nothing_to_say_of() {
    let cluster = Cluster::start(Spec::default()).await;
    let shown = cluster.admin.get("/admin/config").await.text();
    std::fs::write(cluster.files.path().join("shown.yaml"), shown).unwrap();
    let output = run(ROUTER, cluster.files.path(), &["check", "--config", "shown.yaml"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    // The simulated model's folder has no `config.json`, which is another matter.
    let said: Vec<&str> = said.lines().filter(|line| !line.contains("tokenizer: ")).collect();
    assert_eq!(said, ["shown.yaml: ok"]);
}

#[test]
fn shell_variables_that_stay_unchanged_are_reported() {
    let files = tempfile::tempdir().unwrap();
    let config = CONFIG.replace("name: sim", "name: $MODEL");
    std::fs::write(files.path().join("splitrail.yaml"), config).unwrap();
    let output = run(ROUTER, files.path(), &["check", "--config", "splitrail.yaml"]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let warned: Vec<&str> = said.lines().filter(|line| line.starts_with("warning")).collect();
    let told =
        "warning: splitrail.yaml:3:11: `models[0].name` has `$MODEL`, which is taken as it is";
    assert_eq!(warned, [told]);
}

/// Every line is a JSON object.
fn records(log: &str) -> Vec<Value> {
    let records = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")));
    records.collect()
}

#[test]
fn mistakes_at_the_start_are_records_where_logs_are_json() {
    let files = tempfile::tempdir().unwrap();
    let config = CONFIG.replace("flow: aggregated", "flow: sideways").replace("16", "x");
    std::fs::write(files.path().join("bad.yaml"), config).unwrap();
    std::fs::write(files.path().join("shim.yaml"), "nonsense: 1\n").unwrap();
    for (program, arguments) in [
        (ROUTER, &["--log-format", "json", "serve", "--config", "bad.yaml"][..]),
        (SHIM, &["--log-format", "json", "--config", "shim.yaml"]),
    ] {
        let output = run(program, files.path(), arguments);
        assert_eq!(output.status.code(), Some(78));
        let records = records(&text(&output.stderr));
        let of = |record: &Value, key: &str| record["fields"][key].as_str().map(str::to_owned);
        let problems: Vec<_> = records
            .iter()
            .filter_map(|record| of(record, "place").zip(of(record, "hint")))
            .collect();
        assert!(problems.len() >= 2, "{records:?}");
        assert!(problems.iter().all(|(place, _)| place.contains(".yaml:")), "{problems:?}");
        assert_eq!(records.last().unwrap()["fields"]["exit_code"], 78);
    }
}

#[tokio::test]
async fn a_refused_reload_takes_one_line_of_the_log_for_each_mistake() {
    let files = tempfile::tempdir().unwrap();
    let log = files.path().join("log");
    let router = RouterProcess::serve(files.path(), CONFIG, &[], &log).await;
    let bad = CONFIG.replace("flow: aggregated", "flow: sideways");
    std::fs::write(files.path().join("splitrail.yaml"), bad).unwrap();
    let reply = Client::new(router.admin).post_with("/admin/reload", &[], "").await;
    assert!(!reply.status.is_success(), "{}", reply.text());
    // Lines are written after the reply.
    let read = || std::fs::read_to_string(&log).unwrap();
    eventually("the refusal is logged", async || read().contains("reload refused")).await;
    router.end();
    let log = read();
    let told: Vec<&str> = log.lines().filter(|line| line.contains("hint")).collect();
    assert_eq!(told.len(), 1, "{log}");
    assert!(told[0].contains("ERROR") && told[0].contains("splitrail.yaml:6:11"), "{log}");
    assert!(log.lines().all(|line| line.contains("Z ")), "a line without a time: {log}");
}

/// systemd waits for this message before it says that the service has started.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_service_manager_is_notified_once_a_program_is_bound() {
    let files = tempfile::tempdir().unwrap();
    let place = files.path().join("notify");
    let socket = UnixDatagram::bind(&place).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let told = || {
        let mut message = [0; 512];
        let length = socket.recv(&mut message).unwrap();
        text(&message[..length])
    };
    let place = place.display().to_string();
    let env = [("NOTIFY_SOCKET", &*place)];
    let log = files.path().join("log");
    let router = RouterProcess::serve(files.path(), CONFIG, &env, &log).await;
    let message = told();
    assert!(message.starts_with("READY=1\nSTATUS="), "{message}");
    assert!(message.contains(&router.http.to_string()), "{message}");

    let dead = "http://127.0.0.1:1";
    let arguments =
        ["--engine", dead, "--listen", "127.0.0.1:0", "--router", "127.0.0.1:1", "--role", "both"];
    let mut shim = Command::new(built(SHIM));
    shim.args(arguments).args(["--id", "w0"]).envs(env).stdin(Stdio::null());
    let mut shim = shim.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let message = told();
    shim.kill().unwrap();
    shim.wait().unwrap();
    assert!(message.starts_with("READY=1\nSTATUS=worker w0 on 127.0.0.1:"), "{message}");
}
