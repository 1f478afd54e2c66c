//! Files that the router writes, and the deployment examples.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use serde_json::Value;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::Node;
use splitrail_tests::binary::built;
use splitrail_tests::cluster::eventually;
use splitrail_tests::process::Process;

use super::support::{Site, arguments, engine, yaml};

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn bytes(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |file| file.len())
}

#[tokio::test]
async fn files_of_the_router_are_readable_by_its_user_only() {
    let files = tempfile::tempdir().unwrap();
    let path = |name: &str| files.path().join(name);
    // A file that is there keeps its permissions, for a group that is to read it.
    std::fs::write(path("record.jsonl"), "").unwrap();
    std::fs::set_permissions(path("record.jsonl"), PermissionsExt::from_mode(0o640)).unwrap();
    let engine = engine().await;
    let written = "ledger: { path: ledger.jsonl, rotate: { size_max: 4096 } }
record: { path: record.jsonl, rotate: { size_max: 4096 } }";
    let args = arguments(files.path(), &yaml(&engine.url(), written, ""));
    let ready_file = path("ready.json");
    // Another file in the place where a name could be guessed is neither followed nor changed.
    std::fs::write(path("precious"), "precious").unwrap();
    symlink(path("precious"), path("ready.partial")).unwrap();
    let mut shell = vec!["-c".to_owned(), "umask 0; exec \"$0\" \"$@\"".to_owned()];
    shell.extend([built("splitrail").display().to_string()]);
    shell.extend(args);
    shell.extend(["--ready-file".to_owned(), ready_file.display().to_string()]);
    let is_ready = || ready_file.is_file();
    let _router =
        Process::of(Path::new("/bin/sh"), "router", files.path(), &shell, &[], &is_ready).await;
    let ready: Value = serde_json::from_slice(&std::fs::read(&ready_file).unwrap()).unwrap();
    let http = splitrail_tests::Client::new(ready["http"].as_str().unwrap().parse().unwrap());
    let body = serde_json::json!({"model": "sim", "prompt": "once upon a time", "max_tokens": 2});
    eventually("both files were rotated", async || {
        let reply = http.post("/v1/completions", &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        path("ledger.jsonl.1").exists() && path("record.jsonl.1").exists()
    })
    .await;
    for (name, expected) in [
        ("ready.json", 0o600),
        ("ledger.jsonl", 0o600),
        ("ledger.jsonl.1", 0o600),
        ("record.jsonl", 0o640),
        ("record.jsonl.1", 0o640),
    ] {
        assert_eq!(mode(&path(name)), expected, "{name}");
    }
    assert_eq!(std::fs::read_to_string(path("precious")).unwrap(), "precious");
}

#[tokio::test]
async fn a_full_disk_and_folders_in_the_way_do_not_end_service() {
    let full = Site::start("ledger: { path: /dev/full }", "", tempfile::tempdir().unwrap()).await;
    full.prompts(10).await;
    let files = tempfile::tempdir().unwrap();
    let ledger = files.path().join("ledger.jsonl");
    for number in 1..4 {
        let folder = files.path().join(format!("ledger.jsonl.{number}"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("x"), "").unwrap();
    }
    let rotated = "ledger: { path: ledger.jsonl, rotate: { size_max: 4096, files_max: 3 } }";
    let blocked = Site::start(rotated, "", files).await;
    eventually("the file is full", async || {
        blocked.prompts(4).await;
        bytes(&ledger) > 2048
    })
    .await;
    blocked.prompts(20).await;
}

/// All documents of the example for Kubernetes, which the chart makes.
fn manifests() -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes");
    let text = std::fs::read_to_string(folder.join("splitrail.yaml")).unwrap();
    let documents =
        text.split("---\n").filter(|text| text.lines().any(|line| !line.starts_with('#')));
    documents.map(|text| parsed("splitrail.yaml", text)).collect()
}

/// The configuration of the routers in these documents.
fn router_config(documents: &[Value]) -> &str {
    let config = of_kind(documents, "ConfigMap", "splitrail");
    config["data"]["splitrail.yaml"].as_str().unwrap()
}

fn parsed(name: &str, text: &str) -> Value {
    const PLAIN: splitrail_settings::FileProfile = splitrail_settings::FileProfile {
        secret_keys: &[],
        hints: &[],
        empty: "",
        variables: false,
        too_large: "",
    };
    // No schema describes it: only what the text holds matters.
    let (any, mut read) = (serde_json::json!({}), None);
    let rules = |root: &mut Node, _: &mut ProblemReport| read = Some(root.to_json());
    let checked = splitrail_settings::file::parse::<Value>(name, text, &any, &PLAIN, rules);
    read.unwrap_or_else(|| panic!("{:?}", checked.err()))
}

fn list<'v>(value: &'v Value, pointer: &str) -> Vec<&'v Value> {
    value.pointer(pointer).and_then(Value::as_array).into_iter().flatten().collect()
}

fn of_kind<'v>(documents: &'v [Value], kind: &str, name: &str) -> &'v Value {
    let is_it =
        |document: &&Value| document["kind"] == kind && document["metadata"]["name"] == name;
    documents.iter().find(is_it).unwrap_or_else(|| panic!("no {kind} {name}"))
}

/// The port of a name in a workload's containers.
fn container_port(workload: &Value, name: &str) -> u64 {
    let containers = list(workload, "/spec/template/spec/containers");
    let mut ports = containers.into_iter().flat_map(|container| list(container, "/ports"));
    let port = ports.find(|port| port["name"] == name);
    port.unwrap_or_else(|| panic!("no port {name}"))["containerPort"].as_u64().unwrap()
}

/// The value of a flag `--NAME=VALUE`.
fn flag<'v>(container: &'v Value, name: &str) -> &'v str {
    let mut args = list(container, "/args").into_iter().filter_map(Value::as_str);
    args.find_map(|arg| arg.strip_prefix(name)?.strip_prefix('=')).unwrap_or_default()
}

#[test]
fn shims_of_the_kubernetes_example_find_a_listener_that_takes_their_tokens() {
    let documents = manifests();
    let router = parsed("splitrail.yaml", router_config(&documents));
    let deployment = of_kind(&documents, "Deployment", "splitrail");
    let fleet = of_kind(&documents, "Service", "splitrail-fleet");
    // The router listens where the Service sends to, beyond loopback.
    let listens = router["listen"]["fleet"].as_str().unwrap();
    let port = container_port(deployment, "fleet");
    assert_eq!(listens, format!("0.0.0.0:{port}"));
    let served = list(fleet, "/spec/ports");
    assert_eq!(served[0]["targetPort"], "fleet");
    let address = format!("splitrail-fleet:{}", served[0]["port"]);
    let sources = list(&router, "/models/0/discovery");
    assert!(sources.iter().any(|source| source["kind"] == "shim"), "{sources:?}");
    // The Secret is mounted where the file reads tokens from.
    let volumes = list(deployment, "/spec/template/spec/volumes");
    let secret = volumes.iter().find(|volume| volume["secret"].is_object()).unwrap();
    let mounts = list(deployment, "/spec/template/spec/containers/0/volumeMounts");
    let mounted = mounts.iter().find(|mount| mount["name"] == secret["name"]).unwrap();
    let tokens = list(&router, "/fleet/tokens");
    for role in ["prefill", "decode"] {
        let workload = of_kind(&documents, "StatefulSet", &format!("splitrail-{role}"));
        let containers = list(workload, "/spec/template/spec/containers");
        let named = |name: &str| *containers.iter().find(|one| one["name"] == name).unwrap();
        let (shim, engine) = (named("shim"), named("engine"));
        assert_eq!(flag(shim, "--router"), address);
        assert_eq!(flag(shim, "--role"), role);
        // Requests go to the port on which the shim listens and which it advertises.
        let at = container_port(workload, "shim");
        assert!(flag(shim, "--listen").ends_with(&format!(":{at}")));
        assert!(flag(shim, "--advertise").ends_with(&format!(":{at}")));
        assert!(flag(shim, "--engine").ends_with(&container_port(workload, "engine").to_string()));
        // Its token is the one that the router takes for workers of its names.
        let env = list(shim, "/env");
        let token = env.iter().find(|one| one["name"] == "SPLITRAIL_FLEET_TOKEN").unwrap();
        let reference = &token["valueFrom"]["secretKeyRef"];
        assert_eq!(reference["name"], secret["secret"]["secretName"]);
        let path: PathBuf = mounted["mountPath"].as_str().unwrap().into();
        let path = path.join(reference["key"].as_str().unwrap()).display().to_string();
        let bound = tokens.iter().find(|one| one["token"]["path"] == *path).unwrap();
        assert_eq!(bound["workers"], serde_json::json!([format!("splitrail-{role}-*")]));
        // The engine outlives the shim: it waits before it stops, and within the grace period.
        let stop = &engine["lifecycle"]["preStop"]["exec"]["command"][2];
        assert!(stop.as_str().unwrap().contains(&format!("127.0.0.1:{at}/splitrail/health")));
        assert!(workload.pointer("/spec/template/spec/initContainers").is_none());
        let grace = workload.pointer("/spec/template/spec/terminationGracePeriodSeconds").unwrap();
        assert!(grace.as_u64().unwrap() > 120, "longer than the shim's drain.grace");
    }
    let metrics = container_port(deployment, "metrics");
    assert_eq!(router["listen"]["metrics"], format!("0.0.0.0:{metrics}"));
    // Only engines' pods reach the fleet listener, and everyone reaches the front door and metrics.
    let policy = of_kind(&documents, "NetworkPolicy", "splitrail");
    for rule in list(policy, "/spec/ingress") {
        let open = rule["from"].is_null();
        let is_public = |port: &Value| port["port"] == "http" || port["port"] == "metrics";
        assert!(list(rule, "/ports").into_iter().all(|port| is_public(port) == open), "{rule}");
    }
}

#[test]
fn the_router_of_the_kubernetes_example_is_warned_of_open_doors_and_clear_text() {
    let documents = manifests();
    let text = router_config(&documents);
    let files = tempfile::tempdir().unwrap();
    splitrail_sim::write_tokenizer(files.path()).unwrap();
    for name in ["prefill", "decode"] {
        std::fs::write(files.path().join(name), format!("token-of-{name}")).unwrap();
    }
    let here = files.path().display().to_string();
    let text =
        text.replace("/models/qwen3-8b", &here).replace("/run/secrets/splitrail-fleet", &here);
    let loaded = splitrail_config::parse("splitrail.yaml", &text, files.path());
    let warnings = loaded.unwrap_or_else(|problems| panic!("{problems}")).warnings;
    let told: Vec<&str> = warnings.iter().map(|warning| warning.message.as_str()).collect();
    let [clear, open] = told[..] else { panic!("{told:?}") };
    assert!(open.starts_with("anyone who reaches 0.0.0.0:8000"), "{told:?}");
    assert!(clear.contains("travels in clear text"), "{told:?}");
}
