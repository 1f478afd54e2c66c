//! Lists of workers that change, and reloads while engines restart.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use splitrail_telemetry::Metrics;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use crate::models::{SharedParts, models};

/// A configuration with one model.
fn serving(model: &str, metrics: &Metrics, before: Option<&ServedModels>) -> ServedModels {
    let yaml = format!(
        "models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: none }}
    flow: aggregated
{model}
"
    );
    let loaded = splitrail_config::parse("test.yaml", &yaml, &std::env::temp_dir());
    let config = Arc::new(loaded.unwrap_or_else(|problems| panic!("{problems}")).config);
    let shared = SharedParts { memory: &Arc::default(), metrics };
    ServedModels::new(models(&config, shared, before).unwrap(), config)
}

fn fleet(model: &str) -> Arc<Fleet> {
    let metrics = Arc::new(Metrics::new().unwrap());
    let ServedModels { models, config, .. } = serving(model, &metrics, None);
    Fleet::start(Arc::new(Cluster::new(models, config, metrics))).unwrap()
}

fn listed(workers: &[[&str; 2]]) -> Vec<WorkerConfig> {
    let parse = |[id, url]: &[&str; 2]| {
        let json = serde_json::json!({"id": id, "role": "both", "url": url, "kv_events": "none"});
        serde_json::from_value(json).unwrap()
    };
    workers.iter().map(parse).collect()
}

/// The ids and URLs of all workers.
fn members(fleet: &Fleet) -> Vec<String> {
    let roster = fleet.cluster.serving().models[0].pool.roster();
    let mut members: Vec<_> =
        roster.iter().map(|worker| format!("{} {}", worker.id(), worker.config.url)).collect();
    members.sort();
    members
}

const A: &str = "http://127.0.0.1:1";
const B: &str = "http://127.0.0.1:2";

#[tokio::test]
async fn workers_whose_ids_are_renumbered_stay_in_the_fleet() {
    let fleet = fleet("    workers: [{ id: other, role: both, url: \"http://127.0.0.1:9\" }]");
    let set = |workers: &[[&str; 2]]| {
        fleet.set_source("sim", WorkerSource::Admin, &listed(workers)).unwrap();
        members(&fleet).into_iter().filter(|member| !member.starts_with("other")).collect()
    };
    let before: Vec<String> = set(&[["w1", A]]);
    assert_eq!(before, [format!("w1 {A}")]);
    let after: Vec<String> = set(&[["w0", A], ["w1", B]]);
    assert_eq!(after, [format!("w0 {A}"), format!("w1 {B}")]);
    let swapped: Vec<String> = set(&[["w1", A], ["w2", B]]);
    assert_eq!(swapped, [format!("w1 {A}"), format!("w2 {B}")]);
}

#[tokio::test]
async fn a_worker_with_a_new_id_and_a_refused_address_leaves() {
    let fleet = fleet("    workers: [{ id: other, role: both, url: \"http://127.0.0.1:9\" }]");
    fleet.set_source("sim", WorkerSource::Admin, &listed(&[["w0", A]])).unwrap();
    let mut renamed = listed(&[["w1", A]]);
    renamed[0].bootstrap = Some("http://192.0.2.1:1".into());
    let refused = fleet.set_source("sim", WorkerSource::Admin, &renamed);
    assert!(matches!(refused, Err(ClaimError::Outside { .. })), "{refused:?}");
    assert_eq!(members(&fleet), ["other http://127.0.0.1:9"]);
}

/// An engine that reports when it started, in seconds since 1970; nothing, at 0.
async fn engine(started_s: Arc<AtomicU64>, tasks: &mut JoinSet<()>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tasks.spawn(async move {
        loop {
            let (mut connection, _) = listener.accept().await.unwrap();
            let _asked = connection.read(&mut [0; 4096]).await;
            let started_s = started_s.load(Relaxed);
            if started_s == 0 {
                continue;
            }
            let body = format!("process_start_time_seconds {started_s}\n");
            let head =
                format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close", body.len());
            let _sent = connection.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await;
        }
    });
    address
}

/// Waits for a condition.
async fn eventually(what: &str, is_met: impl Fn() -> bool) {
    let met = async {
        while !is_met() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let patience = Duration::from_secs(20);
    assert!(tokio::time::timeout(patience, met).await.is_ok(), "it never came about: {what}");
}

#[tokio::test]
async fn a_restart_of_an_engine_during_a_reload_ends_its_quarantine() {
    let (started_s, mut tasks) = (Arc::new(AtomicU64::new(1000)), JoinSet::new());
    let address = engine(Arc::clone(&started_s), &mut tasks).await;
    let model = |health: &str| {
        format!(
            "    health: {{ probe_interval: 10ms, unhealthy_threshold: {health} }}
    workers: [{{ id: w0, role: both, url: \"http://{address}\", kv_events: none }}]"
        )
    };
    let fleet = fleet(&model("3"));
    let worker = fleet.known("sim", "w0").unwrap().worker;
    eventually("it is known", || worker.is_probed() && worker.is_up()).await;
    worker.quarantine("a test");
    started_s.store(0, Relaxed);
    let before = fleet.cluster.serving();
    let reloaded = serving(&model("4"), &fleet.cluster.metrics, Some(&before));
    fleet.serve(Arc::new(reloaded)).unwrap();
    started_s.store(2000, Relaxed);
    eventually("it is in service", || !worker.is_quarantined() && !worker.is_draining()).await;
}

/// Reloads the model of a fleet.
fn reload(fleet: &Fleet, model: &str) {
    let before = fleet.cluster.serving();
    let reloaded = serving(model, &fleet.cluster.metrics, Some(&before));
    fleet.serve(Arc::new(reloaded)).unwrap();
}

#[tokio::test]
async fn a_source_that_a_reload_moves_is_not_asked_again_and_keeps_its_workers() {
    let kept = "{ kind: dns, name: localhost, port: 1, role: both, refresh_interval: 1h }";
    let added = "{ kind: dns, name: localhost, port: 2, role: both, refresh_interval: 1h }";
    let fleet = fleet(&format!("    discovery: [{kept}]"));
    let is_there = |id: &str| fleet.known("sim", id).is_some();
    eventually("the first source has reported", || is_there("localhost-127.0.0.1-1")).await;
    // A worker that a new lookup would not find: the last address of a name that has none now.
    let mut found = listed(&[["localhost-127.0.0.1-1", A], ["gone", "http://127.0.0.9:1"]]);
    found.iter_mut().for_each(|worker| worker.kv_events = None);
    fleet.set_source("sim", WorkerSource::Dns(0), &found).unwrap();
    let before = fleet.known("sim", "gone").unwrap().worker;
    reload(&fleet, &format!("    discovery: [{added}, {kept}]"));
    eventually("the new source has reported", || is_there("localhost-127.0.0.1-2")).await;
    let after = fleet.known("sim", "gone").unwrap();
    assert!(Arc::ptr_eq(&before, &after.worker));
    assert_eq!(after.sources, [WorkerSource::Dns(1)]);
    reload(&fleet, &format!("    discovery: [{added}]"));
    assert!(!is_there("gone") && !is_there("localhost-127.0.0.1-1"));
    assert!(is_there("localhost-127.0.0.1-2"));
}

#[tokio::test]
async fn a_model_that_is_closed_to_shims_keeps_those_of_listed_workers_alone() {
    let listed_worker = format!("    workers: [{{ id: w0, role: both, url: \"{A}\" }}]");
    let fleet = fleet(&format!("{listed_worker}\n    discovery: [{{ kind: shim }}]"));
    let [own, other] = [["w0", A], ["s0", B]].map(|one| listed(&[one]).remove(0));
    fleet.claim("sim", WorkerSource::Shim, own.clone()).unwrap();
    fleet.claim("sim", WorkerSource::Shim, other.clone()).unwrap();
    let before = fleet.known("sim", "w0").unwrap().worker;
    reload(&fleet, &listed_worker);
    let after = fleet.known("sim", "w0").unwrap();
    assert!(Arc::ptr_eq(&before, &after.worker));
    assert_eq!(after.sources, [WorkerSource::Shim, WorkerSource::Config]);
    assert!(fleet.known("sim", "s0").is_none());
    // Nor does the session of its shim bring it back.
    let refused = fleet.claim("sim", WorkerSource::Shim, other).err();
    assert_eq!(refused, Some(ClaimError::ClosedToShims("sim".into())));
    // A worker that is listed no more goes with its shim.
    reload(&fleet, "    workers: [{ id: w1, role: both, url: \"http://127.0.0.1:3\" }]");
    assert!(fleet.known("sim", "w0").is_none());
}

#[tokio::test]
async fn the_task_that_watches_over_a_models_health_outlives_a_panic() {
    let model = "    workers: [{ id: w0, role: both, url: \"http://127.0.0.1:9\" }]";
    let fleet = fleet(model);
    let mut models = serving(model, &fleet.cluster.metrics, None).models;
    let mut served = Arc::into_inner(models.remove(0)).unwrap();
    // No instant is this late.
    served.config.health.ejection.interval = Duration::MAX;
    let mut watching = fleet.watch(&Arc::new(served));
    let ended = tokio::time::timeout(Duration::from_secs(1), watching.join_next()).await;
    assert!(ended.is_err(), "{ended:?}");
}
