//! Prometheus of deploy/compose: its service's arguments and its configuration file, with the paths and
//! the address that only containers have replaced, read a router.

use std::path::Path;

use splitrail_tests::cluster::eventually;
use splitrail_tests::process::Process;

use super::files::path;
use super::server::Prometheus;

/// The arguments of the service, which are written in one line.
fn arguments(compose: &str) -> Vec<String> {
    let service = compose.split("\n  prometheus:").nth(1).unwrap();
    let command = service.split("command: [").nth(1).unwrap().split(']').next().unwrap();
    command.split(", ").map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prometheus_of_the_compose_file_reads_the_router_and_its_rules() {
    let files = tempfile::tempdir().unwrap();
    let config = files.path().join("splitrail.yaml");
    let yaml = "listen: { http: 127.0.0.1:0, admin: 127.0.0.1:0, metrics: 127.0.0.1:0 }\n\
                models: [{ name: sim, tokenizer: none, workers: ['http://127.0.0.1:1'] }]\n";
    std::fs::write(&config, yaml).unwrap();
    let args = ["serve", "--config", &config.display().to_string()].map(str::to_owned);
    let router = Process::start("router", files.path(), &args).await;

    // What the volumes of the service put side by side.
    for file in ["recording.yaml", "alerts.yaml"] {
        std::fs::copy(path(file), files.path().join(file)).unwrap();
    }
    let told = std::fs::read_to_string(path("../compose/prometheus.yaml")).unwrap();
    let target = "router:9091";
    assert!(told.contains(target), "{told}");
    let told = told.replace(target, router.told("metrics"));
    std::fs::write(files.path().join("prometheus.yaml"), told).unwrap();

    let compose = std::fs::read_to_string(path("../compose/compose.yaml")).unwrap();
    let folder = files.path().display().to_string();
    let given = arguments(&compose);
    let args: Vec<String> = given
        .iter()
        .filter(|arg| !arg.starts_with("--storage.tsdb.path="))
        .map(|arg| arg.replace("/etc/prometheus", &folder))
        .collect();
    assert_eq!(args.len() + 1, given.len());
    assert!(args.iter().any(|arg| arg.ends_with("/prometheus.yaml")), "{args:?}");
    let prometheus = Prometheus::run(Path::new(&folder), &args).await;
    eventually("Prometheus reads the router", async || {
        let up = prometheus.query("up{job=\"splitrail\"}").await;
        up.iter().any(|(_, value)| value == "1")
    })
    .await;
    let groups = prometheus.api("rules").await["data"]["groups"].as_array().cloned().unwrap();
    let rules: usize = groups.iter().map(|group| group["rules"].as_array().unwrap().len()).sum();
    assert!(rules > 20, "recording rules and alerts: {groups:?}");
}
