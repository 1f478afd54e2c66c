//! deploy/compose: what its files say is run as processes, because containers cannot be had in a test.
//! `deploy/compose/check` has Compose read the files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;
use splitrail_sim::write_tokenizer;
use splitrail_tests::binary::built;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::process::Process;
use splitrail_tests::trial::prompt;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/compose")
}

fn text(name: &str) -> String {
    fs::read_to_string(folder().join(name)).unwrap()
}

/// The commands of the services of a file, which are written in one line each.
fn commands(file: &str) -> BTreeMap<String, Vec<String>> {
    let (mut commands, mut service) = (BTreeMap::new(), String::new());
    for line in text(file).lines() {
        if let Some(name) = line.strip_prefix("  ").and_then(|line| line.strip_suffix(':')) {
            name.clone_into(&mut service);
        }
        let list = line.trim().strip_prefix("command: [").and_then(|line| line.strip_suffix(']'));
        if let Some(list) = list {
            let command = list.split(", ").map(str::to_owned).collect();
            commands.insert(service.trim().to_owned(), command);
        }
    }
    commands
}

/// Runs the health check of a service of `compose.yaml`, whose address there is `url`, at `address`.
fn check_health(url: &str, path: &str, address: &str) {
    let flag = format!("--url=http://{url}/{path}");
    let check = format!("test: [CMD, /usr/local/bin/splitrail, health, {flag}]");
    assert!(text("compose.yaml").contains(&check), "{check}");
    let flag = flag.replace(url, address);
    let checked = Command::new(built("splitrail")).args(["health", &flag]).status().unwrap();
    assert!(checked.success(), "{flag}");
}

/// A configuration whose listeners take any port of the loopback and whose model is in `model`.
fn in_place(config: &str, model: &Path) -> String {
    let model = model.display().to_string();
    let config = config.replace("/models/sim", &model).replace("/models/model", &model);
    let listeners = ["0.0.0.0:8000", "0.0.0.0:8001", "0.0.0.0:9090", "0.0.0.0:9091"];
    listeners.iter().fold(config, |config, address| config.replace(address, "127.0.0.1:0"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_simulated_cluster_serves_from_decode_caches_and_has_what_prometheus_reads() {
    let files = tempfile::tempdir().unwrap();
    let commands = commands("compose.yaml");
    let mut config = in_place(&text("splitrail.yaml"), &folder().join("model"));
    let mut engines = Vec::new();
    for (name, command) in commands.iter().filter(|(_, command)| command[0] == "sim-engine") {
        let port_of = |flag: &str| {
            let prefix = format!("{flag}=");
            command.iter().find_map(|arg| arg.strip_prefix(&prefix)).unwrap()
        };
        let args: Vec<String> = command
            .iter()
            .map(|arg| match arg.split_once('=') {
                Some(("--host", host)) => {
                    assert_eq!(host, name, "an engine listens on its own address");
                    "--host=localhost".to_owned()
                }
                Some((flag, _)) if flag.ends_with("-port") => format!("{flag}=0"),
                _ => arg.clone(),
            })
            .collect();
        let engine = Process::start(name, files.path(), &args).await;
        for (address, flag, key) in [
            ("http", "--http-port", "http"),
            ("tcp", "--kv-events-port", "kv_events"),
            ("tcp", "--kv-replay-port", "kv_replay"),
        ] {
            let in_compose = format!("{address}://{name}:{}", port_of(flag));
            let told = engine.told(key);
            let told = format!("{address}://{}", told.strip_prefix("tcp://").unwrap_or(told));
            assert!(config.contains(&in_compose), "{in_compose} is not in splitrail.yaml");
            config = config.replace(&in_compose, &told);
        }
        check_health(&format!("{name}:8000"), "health", engine.told("http"));
        engines.push(engine);
    }
    assert_eq!(engines.len(), 4, "engines");

    let file = files.path().join("splitrail.yaml");
    fs::write(&file, config).unwrap();
    let mut args = commands["router"].clone();
    let place = args.iter().position(|arg| arg == "/etc/splitrail/splitrail.yaml").unwrap();
    args[place] = file.display().to_string();
    let router = Process::start("router", files.path(), &args).await;
    let http = router.client("http");
    eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
    check_health("127.0.0.1:8000", "ready", router.told("http"));

    let body = json!({
        "model": "default", "prompt": prompt(200, "compose"), "max_tokens": 4, "temperature": 0,
    });
    let first = http.post("/v1/completions", &body).await;
    assert_eq!(first.status, 200, "{}", first.text());
    assert!(first.route("prefill").is_some_and(|worker| worker.starts_with('p')));
    let mut last = first;
    eventually("a decode-first hit", async || {
        last = http.post("/v1/completions", &body).await;
        last.route("try") == Some("served")
    })
    .await;
    assert!(last.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(0));

    // Prometheus reads the listener for metrics, under the name that dashboard and alerts select.
    assert!(text("splitrail.yaml").contains("metrics: 0.0.0.0:9091"));
    assert!(text("prometheus.yaml").contains("job_name: splitrail"));
    assert!(text("prometheus.yaml").contains(r#"targets: ["router:9091"]"#));
    let scraped = router.client("metrics").get("/metrics").await.text();
    let outcome = [("model", "sim"), ("outcome", "served")];
    assert!(metric_in(&scraped, "splitrail_decode_first_total", &outcome) >= 1.0);
}

#[test]
fn the_router_of_the_vllm_pair_has_a_valid_configuration_and_the_engines_addresses() {
    let model = tempfile::tempdir().unwrap();
    write_tokenizer(model.path()).unwrap();
    let config = text("splitrail-vllm.yaml");
    let parsed = splitrail_config::parse(
        "splitrail-vllm.yaml",
        &in_place(&config, model.path()),
        model.path(),
    );
    if let Err(problems) = parsed {
        panic!("{problems}");
    }
    let services = text("vllm.yaml");
    for address in ["172.30.77.11", "172.30.77.12"] {
        assert!(services.contains(&format!("ipv4_address: {address}")), "{address}");
        assert!(services.contains(&format!("VLLM_NIXL_SIDE_CHANNEL_HOST: {address}")), "{address}");
        assert!(config.contains(&format!("http://{address}:8000")), "{address}");
        assert!(config.contains(&format!("tcp://{address}:5557")), "{address}");
    }
}

#[test]
fn the_model_is_that_of_the_simulated_engines() {
    let expected = tempfile::tempdir().unwrap();
    write_tokenizer(expected.path()).unwrap();
    for file in fs::read_dir(expected.path()).unwrap() {
        let file = file.unwrap();
        let name = file.file_name();
        let ours = fs::read_to_string(folder().join("model").join(&name)).unwrap();
        assert!(ours == fs::read_to_string(file.path()).unwrap(), "{} differs", name.display());
    }
}

#[test]
fn the_images_have_the_version_of_this_tree() {
    let image = format!("${{SPLITRAIL_IMAGE:-splitrail:{}}}", env!("CARGO_PKG_VERSION"));
    for file in ["compose.yaml", "vllm.yaml"] {
        let text = text(file);
        let images = text.lines().filter(|line| line.contains("SPLITRAIL_IMAGE"));
        let images: Vec<&str> = images.collect();
        assert!(!images.is_empty(), "{file}");
        for line in images {
            assert!(line.ends_with(&image), "{file}: {line}");
        }
    }
}
