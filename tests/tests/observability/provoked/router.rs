//! Alerts about the router's process: its configuration, its files and what reads its output.

use std::fs::OpenOptions;
use std::process::Command;

use serde_json::json;
use splitrail_sim::{SimConfig, SimEngine};
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::cluster::{Engines, eventually, metric_in};
use splitrail_tests::front::Front;
use splitrail_tests::ports::HeldPort;
use splitrail_tests::proc::open_files;
use splitrail_tests::{Client, Cluster, Spec};
use tokio::net::TcpStream;

use super::watch::Watch;
use super::{CHAT, Watched, chat};
use crate::files::rules_at_once;
use crate::server::Prometheus;

#[tokio::test]
async fn a_router_that_is_gone_fires_down() {
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let front = Front::start("{}", "", &[engine.url()]).await;
    let watch = Watch::of(&[front.router.admin]).await;
    watch.is_healthy().await;
    front.router.end();
    watch.fires(&["SplitrailDown"]).await;
    assert_eq!(watch.prometheus.query("up == 0").await.len(), 1);
}

#[tokio::test]
async fn routers_that_discovery_does_not_find_fire_down() {
    let folder = tempfile::tempdir().unwrap();
    let rules = rules_at_once(folder.path());
    let prometheus = Prometheus::start(folder.path(), &[], &rules).await;
    prometheus.fires(&["SplitrailDown"]).await;
}

#[tokio::test]
async fn routers_with_different_configurations_fire_replicas_differ() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("router.log");
    let other = RouterProcess::serve(folder.path(), &cluster.yaml, &[], &log).await;
    let watch = Watch::of(&[cluster.running.addresses.admin, other.admin]).await;
    watch.is_healthy().await;
    let yaml = cluster.yaml.replace("kv_overlap", "least_loaded");
    assert_eq!(cluster.reload(&yaml).await.status, 200);
    watch.fires(&["SplitrailReplicasDiffer"]).await;
}

#[tokio::test]
async fn a_record_that_cannot_be_written_fires_records_not_written() {
    let top = "record: { path: record.jsonl, rotate: { size_max: 4096, files_max: 1 } }";
    let watched = Watched::start(Spec { top: top.into(), ..Spec::default() }).await;
    watched.is_healthy().await;
    // The full file cannot be renamed to a folder that is not empty.
    let files = watched.cluster.files.path();
    std::fs::create_dir_all(files.join("record.jsonl.1/full")).unwrap();
    let lost = [("result", "write_failed")];
    eventually("the record is full", async || {
        watched.cluster.http.post(CHAT, &chat("a line of the record")).await;
        watched.cluster.metric("splitrail_record_lines_total", &lost).await > 0.0
    })
    .await;
    watched.fires(&["SplitrailRecordsNotWritten"]).await;
}

#[tokio::test]
async fn a_log_that_nobody_reads_fires_log_lines_dropped() {
    let engines = Engines::start(&Spec::aggregated(1)).await;
    let folder = engines.files.path();
    let log = folder.join("router.log");
    assert!(Command::new("mkfifo").arg(&log).status().unwrap().success());
    // Who holds the pipe open, and does not read.
    let _reader = OpenOptions::new().read(true).write(true).open(&log).unwrap();
    // Lines for each connection.
    let env = [("RUST_LOG", "info,mio=trace")];
    let router = RouterProcess::serve(folder, &engines.yaml, &env, &log).await;
    let (http, admin) = (Client::new(router.http), Client::new(router.admin));
    eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
    let watch = Watch::of(&[router.admin]).await;
    watch.is_healthy().await;
    eventually("lines are dropped", async || {
        for _ in 0..500 {
            let connection = TcpStream::connect(router.http).await.unwrap();
            // Ports of connections that are reset are free at once.
            connection.set_zero_linger().unwrap();
        }
        let text = admin.get("/metrics").await.text();
        metric_in(&text, "splitrail_log_lines_dropped_total", &[]) > 0.0
    })
    .await;
    watch.fires(&["SplitrailLogLinesDropped"]).await;
}

#[cfg(feature = "otlp")]
#[tokio::test]
async fn a_collector_that_is_away_fires_spans_lost() {
    let top = "tracing: { otlp: { endpoint: \"http://127.0.0.1:1\", queue_spans_max: 512 } }";
    let watched = Watched::start(Spec { top: top.into(), ..Spec::aggregated(1) }).await;
    watched.is_healthy().await;
    let mut turn = 0;
    eventually("spans are dropped", async || {
        turn += 1;
        let reply = watched.cluster.http.post(CHAT, &chat(&format!("traced {turn}"))).await;
        assert_eq!(reply.status, 200);
        watched.cluster.metric("splitrail_spans_total", &[("result", "dropped")]).await > 0.0
    })
    .await;
    watched.fires(&["SplitrailSpansLost"]).await;
}

#[tokio::test]
async fn keys_that_cannot_be_read_any_more_fire_issuer_keys_unreadable() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("jwks.json");
    // The public key of RFC 8037, appendix A.2.
    let key = json!({
        "kty": "OKP", "kid": "known", "crv": "Ed25519",
        "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo",
    });
    std::fs::write(&file, json!({ "keys": [key] }).to_string()).unwrap();
    let issuer = format!(
        "{{ kind: jwt, issuer: \"https://id.example\", audience: splitrail, jwks: {:?} }}",
        file.display().to_string()
    );
    let top = format!("auth: [ {issuer} ]\ntenants: [ {{ name: acme }} ]");
    let watched = Watched::start(Spec { top, ..Spec::aggregated(1) }).await;
    watched.is_healthy().await;
    std::fs::remove_file(&file).unwrap();
    watched.fires(&["SplitrailIssuerKeysUnreadable"]).await;
}

#[tokio::test]
async fn keys_that_were_never_read_fire_issuer_without_keys() {
    let held = HeldPort::take();
    let issuer = format!(
        "{{ kind: jwt, issuer: \"https://id.example\", audience: splitrail, jwks: \"https://{}/keys\" }}",
        held.address()
    );
    // Clients may have keys as well: otherwise the router would not be ready.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.yaml");
    std::fs::write(&file, "keys: []\n").unwrap();
    let keys = format!("{{ kind: keys, file: {:?} }}", file.display().to_string());
    let top = format!("auth: [ {issuer}, {keys} ]\ntenants: [ {{ name: acme }} ]");
    let watched = Watched::start(Spec { top, ..Spec::aggregated(1) }).await;
    watched.fires(&["SplitrailIssuerKeysUnreadable", "SplitrailIssuerWithoutKeys"]).await;
}

#[tokio::test]
async fn a_file_of_keys_with_a_mistake_fires_key_file_unusable() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("keys.yaml");
    std::fs::write(&file, "keys: []\n").unwrap();
    let keys = format!("{{ kind: keys, file: {:?} }}", file.display().to_string());
    let top = format!("auth: [ {keys} ]\ntenants: [ {{ name: acme }} ]");
    let watched = Watched::start(Spec { top, ..Spec::aggregated(1) }).await;
    watched.is_healthy().await;
    std::fs::write(&file, "keys: [\n").unwrap();
    watched.fires(&["SplitrailKeyFileUnusable"]).await;
}

#[tokio::test]
async fn connections_that_take_most_file_descriptors_fire_open_files_run_out() {
    use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let front = Front::start("{}", "", &[engine.url()]).await;
    let watch = Watch::of(&[front.router.admin]).await;
    watch.is_healthy().await;
    let pid = front.router.pid();
    // Some are left for scrapes.
    let (all, most) = (200, 175);
    let limit = Rlimit { current: Some(all), ..getrlimit(Resource::Nofile) };
    let process = Pid::from_raw(i32::try_from(pid).unwrap());
    prlimit(process, Resource::Nofile, limit).unwrap();
    let mut held = Vec::new();
    for _ in open_files(pid)..most {
        held.push(TcpStream::connect(front.router.http).await.unwrap());
    }
    watch.fires(&["SplitrailOpenFilesRunOut"]).await;
}
