//! Discovery from pods: how a router handles an API server's answers, byte for byte.
#![cfg(feature = "kubernetes")]
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use serde_json::{Value, json};
use splitrail_config::model::{KubernetesDiscovery, Role};
use splitrail_discovery::{FoundWorkers, Tally, kubernetes};
use splitrail_telemetry::Metrics;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

#[path = "fixtures/kubernetes/api_server.rs"]
mod api_server;

use api_server::{ApiServer, Watch};

const PODS: &str = include_str!("fixtures/kubernetes/pods.json");
const BOOKMARK: &str = include_str!("fixtures/kubernetes/bookmark.json");
const EXPIRED: &str = include_str!("fixtures/kubernetes/expired.json");
const EXPIRED_STATUS: &str = include_str!("fixtures/kubernetes/expired-status.json");
const FORBIDDEN: &str = include_str!("fixtures/kubernetes/forbidden.json");

/// A follower of an API server that the test simulates.
struct Followed {
    server: ApiServer,
    metrics: Metrics,
    found: mpsc::Receiver<FoundWorkers>,
    _task: JoinSet<()>,
}

impl Followed {
    async fn start() -> Self {
        let server = ApiServer::start().await;
        let metrics = Metrics::new().unwrap();
        let config: KubernetesDiscovery = serde_json::from_value(json!({
            "selector": "app=vllm", "port": "http", "kubeconfig": server.kubeconfig("http"),
        }))
        .unwrap();
        let (sink, found) = mpsc::channel(1);
        let mut task = JoinSet::new();
        task.spawn(kubernetes::run(config, sink, Tally::new(&metrics, "m", "s")));
        Self { server, metrics, found, _task: task }
    }

    /// A follower that has received its first list and begun its first watch.
    async fn watching() -> (Self, Watch) {
        let mut followed = Self::start().await;
        followed.server.asked_to_list().await.answer("200 OK", PODS).await;
        assert_eq!(followed.told().await, ["decode-0", "prefill-0"]);
        let watch = followed.server.asked_to_watch("48213").await.stream().await;
        (followed, watch)
    }

    async fn found(&mut self) -> FoundWorkers {
        timeout(Duration::from_secs(60), self.found.recv()).await.unwrap().unwrap()
    }

    /// The ids of the workers in its next list.
    async fn told(&mut self) -> Vec<String> {
        self.found().await.workers.into_iter().map(|worker| worker.id).collect()
    }

    fn errors(&self) -> u64 {
        self.metrics.discovery_errors.with_label_values(&["m", "s"]).get()
    }
}

fn items() -> Value {
    serde_json::from_str::<Value>(PODS).unwrap()["items"].take()
}

/// A line of a watch: something happened to the decode pod, with one value changed.
fn line(kind: &str, version: u32, place: &str, value: Value) -> String {
    let mut pod = items()[1].take();
    pod["kind"] = json!("Pod");
    pod["apiVersion"] = json!("v1");
    pod["metadata"]["resourceVersion"] = json!(version.to_string());
    let (parent, key) = place.rsplit_once('/').unwrap();
    let key = key.replace("~1", "/");
    match pod.pointer_mut(parent).unwrap() {
        Value::Array(list) => list[key.parse::<usize>().unwrap()] = value,
        parent => parent[&key] = value,
    }
    format!("{}\n", json!({ "type": kind, "object": pod }))
}

const LEAVING: &str = "/metadata/deletionTimestamp";
const READY: &str = "/status/conditions/0/status";

#[tokio::test]
async fn pods_are_listed_in_pages_by_selector_and_then_watched_from_there() {
    let mut followed = Followed::start().await;
    let pages = items();
    let page = |index: usize, next: &str| {
        json!({
            "kind": "PodList", "apiVersion": "v1", "items": [pages[index]],
            "metadata": { "resourceVersion": "48213", "continue": next },
        })
        .to_string()
    };
    let asked = followed.server.asked_to_list().await;
    assert!(asked.target.starts_with("/api/v1/namespaces/llm/pods?"), "{}", asked.target);
    assert!(asked.target.contains("labelSelector=app=vllm"), "{}", asked.target);
    asked.answer("200 OK", &page(0, "next-page")).await;
    let asked = followed.server.asked_to_list().await;
    assert!(asked.target.contains("continue=next-page"), "{}", asked.target);
    asked.answer("200 OK", &page(1, "")).await;
    let found = followed.found().await;
    let (decode, prefill) = (&found.workers[0], &found.workers[1]);
    assert_eq!((decode.role, prefill.role), (Role::Decode, Role::Prefill));
    assert_eq!(decode.url, "http://10.42.1.9:8000");
    assert_eq!(prefill.kv_events.as_deref(), Some("tcp://10.42.0.17:5557"));
    let asked = followed.server.asked_to_watch("48213").await;
    assert!(asked.target.contains("allowWatchBookmarks=true"), "{}", asked.target);
    assert_eq!(followed.metrics.discovery_workers.with_label_values(&["m", "s"]).get(), 2);
    assert_eq!(followed.errors(), 0);
}

#[tokio::test]
async fn a_pod_s_life_is_followed() {
    let (mut followed, mut watch) = Followed::watching().await;
    watch.send(&line("MODIFIED", 48300, READY, json!("False"))).await;
    assert_eq!(followed.told().await, ["prefill-0"]);
    watch.send(&line("MODIFIED", 48301, READY, json!("True"))).await;
    assert_eq!(followed.told().await, ["decode-0", "prefill-0"]);
    watch.send(&line("MODIFIED", 48302, "/status/podIP", json!("10.42.1.77"))).await;
    let found = followed.found().await;
    assert_eq!(found.workers[0].id, "decode-0");
    assert_eq!(found.workers[0].url, "http://10.42.1.77:8000");
    let label = "/metadata/labels/splitrail.io~1role";
    watch.send(&line("MODIFIED", 48303, label, json!("both"))).await;
    assert_eq!(followed.found().await.workers[0].role, Role::Both);
    watch.send(&line("MODIFIED", 48304, LEAVING, json!("2026-10-01T09:00:00Z"))).await;
    assert_eq!(followed.told().await, ["prefill-0"]);
    watch.send(&line("DELETED", 48305, LEAVING, json!("2026-10-01T09:00:00Z"))).await;
    watch.send(&line("ADDED", 48306, READY, json!("True"))).await;
    assert_eq!(followed.told().await, ["decode-0", "prefill-0"]);
}

#[tokio::test]
async fn a_watch_that_ends_or_is_cut_in_mid_line_goes_on_where_it_was() {
    let (mut followed, mut watch) = Followed::watching().await;
    // A bookmark advances the version; a line may arrive in pieces.
    watch.send(BOOKMARK).await;
    watch.end().await;
    let mut watch = followed.server.asked_to_watch("48999").await.stream().await;
    let not_ready = line("MODIFIED", 49100, READY, json!("False"));
    let (one, other) = not_ready.split_at(not_ready.len() / 2);
    watch.send(one).await;
    watch.send(other).await;
    assert_eq!(followed.told().await, ["prefill-0"]);
    // A truncated event is ignored, and sent again.
    let ready = line("MODIFIED", 49200, READY, json!("True"));
    watch.send(&ready[..ready.len() / 2]).await;
    drop(watch);
    let mut watch = followed.server.asked_to_watch("49100").await.stream().await;
    watch.send(&ready).await;
    assert_eq!(followed.told().await, ["decode-0", "prefill-0"]);
}

#[tokio::test]
async fn after_410_gone_pods_are_listed_again_and_who_left_meanwhile_is_gone() {
    let (mut followed, mut watch) = Followed::watching().await;
    watch.send(EXPIRED).await;
    let mut list: Value = serde_json::from_str(PODS).unwrap();
    list["metadata"]["resourceVersion"] = json!("51900");
    list["items"].as_array_mut().unwrap().remove(0);
    followed.server.asked_to_list().await.answer("200 OK", &list.to_string()).await;
    assert_eq!(followed.told().await, ["decode-0"]);
    // The same error as a reply to the start of the watch.
    let asked = followed.server.asked_to_watch("51900").await;
    asked.answer("410 Gone", EXPIRED_STATUS).await;
    followed.server.asked_to_list().await.answer("200 OK", PODS).await;
    assert_eq!(followed.told().await, ["decode-0", "prefill-0"]);
    assert_eq!(followed.errors(), 2);
}

#[tokio::test]
async fn an_api_server_that_is_away_or_refuses_changes_nothing_and_is_counted() {
    let mut followed = Followed::start().await;
    drop(followed.server.asked_to_list().await);
    followed.server.asked_to_list().await.answer("403 Forbidden", FORBIDDEN).await;
    followed.server.asked_to_list().await.answer("200 OK", PODS).await;
    assert_eq!(followed.told().await, ["decode-0", "prefill-0"]);
    let refused = followed.errors();
    assert!(refused >= 2, "{refused}");
    // A known list is kept until another one arrives.
    let mut watch = followed.server.asked_to_watch("48213").await.stream().await;
    watch.send(EXPIRED).await;
    followed.server.asked_to_list().await.answer("403 Forbidden", FORBIDDEN).await;
    let mut list: Value = serde_json::from_str(PODS).unwrap();
    list["items"].as_array_mut().unwrap().remove(1);
    followed.server.asked_to_list().await.answer("200 OK", &list.to_string()).await;
    assert_eq!(followed.told().await, ["prefill-0"]);
}

#[tokio::test]
async fn an_api_server_behind_tls_is_greeted_with_a_handshake() {
    let server = ApiServer::start().await;
    let config: KubernetesDiscovery = serde_json::from_value(json!({
        "selector": "app=vllm", "port": "http", "kubeconfig": server.kubeconfig("https"),
    }))
    .unwrap();
    let metrics = Metrics::new().unwrap();
    let (sink, _found) = mpsc::channel(1);
    let mut task = JoinSet::new();
    task.spawn(kubernetes::run(config, sink, Tally::new(&metrics, "m", "s")));
    // A record of type handshake, of TLS 1.0 as all versions write it at first.
    assert_eq!(server.first_bytes().await, [22, 3, 1]);
}

#[tokio::test]
async fn discovery_ends_when_its_receiver_is_dropped() {
    let (mut followed, mut watch) = Followed::watching().await;
    followed.found.close();
    watch.send(&line("MODIFIED", 48300, READY, json!("False"))).await;
    timeout(Duration::from_secs(60), followed._task.join_next()).await.unwrap().unwrap().unwrap();
}
