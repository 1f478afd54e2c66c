//! Alerts fire by the fault that they are for, and by no other: a real Prometheus, and a router with
//! that very fault. The rules are ours without their waiting times.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use splitrail_sim::{PromptDialect, SimConfig};
use splitrail_tests::cluster::eventually;
use splitrail_tests::tls::fixture;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Cluster, Spec};
use tempfile::TempDir;

use crate::files::text;
use crate::server::Prometheus;

const CHAT: &str = "/v1/chat/completions";

/// Programs in the guide that need what is not here: a log file, a network, another program.
const ELSEWHERE: [&str; 11] = [
    "cat",
    "chronyc",
    "df",
    "grep",
    "journalctl",
    "kubectl",
    "nats",
    "nc",
    "openssl",
    "splitrail",
    "ulimit",
];

/// A cluster with a Prometheus beside it.
struct Watched {
    cluster: Cluster,
    prometheus: Prometheus,
    folder: TempDir,
}

impl Watched {
    async fn start(spec: Spec) -> Self {
        let cluster = Cluster::start(spec).await;
        let folder = tempfile::tempdir().unwrap();
        let rules = ["recording.yaml", "alerts.yaml"].map(|name| at_once(&folder, name));
        let target = cluster.running.addresses().admin.to_string();
        let prometheus = Prometheus::start(folder.path(), &target, &rules).await;
        eventually("the router is scraped", async || prometheus.query("up == 1").await.len() == 1)
            .await;
        Self { cluster, prometheus, folder }
    }

    /// Waits until exactly these alerts fire.
    async fn fires(&self, alerts: &[&str]) {
        let expected: BTreeSet<String> = alerts.iter().map(|alert| (*alert).to_owned()).collect();
        let mut firing = BTreeSet::new();
        eventually(&format!("{alerts:?} fire, and no others"), async || {
            firing = self.prometheus.firing().await;
            firing.is_superset(&expected)
        })
        .await;
        assert_eq!(firing, expected);
        assert!(self.folder.path().is_dir());
        for alert in alerts {
            self.follow(alert).await;
        }
    }

    /// Checks what the guide says is to be checked: commands succeed and say something, and one
    /// query at least has data.
    async fn follow(&self, alert: &str) {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guides/alerts.md");
        let guide = std::fs::read_to_string(path).unwrap();
        let section = guide.split(&format!("### {alert}\n")).nth(1).unwrap();
        let block = section.split("**Check**:").nth(1).unwrap().split("```").nth(1).unwrap();
        let labels = self.prometheus.labels(alert).await;
        let mut queries = Vec::new();
        for line in block.lines().filter(|line| !line.is_empty()) {
            let mut line = line.to_owned();
            for label in ["model", "worker", "tenant", "leg"] {
                let value = labels[label].as_str().unwrap_or_default();
                line = line.replace(&label.to_uppercase(), value);
            }
            let program = line.split_whitespace().next().unwrap();
            match program {
                program if ELSEWHERE.contains(&program) => {}
                _ if line.contains("ENGINE_URL") => {}
                "curl" => {
                    let admin = self.cluster.running.addresses().admin.to_string();
                    let command = line.replace("127.0.0.1:9090", &admin);
                    let shell = ["-c".to_owned(), command.clone()];
                    // The router runs in this thread.
                    let run = move || Command::new("sh").args(shell).output().unwrap();
                    let run = tokio::task::spawn_blocking(run).await.unwrap();
                    assert!(run.status.success() && !run.stdout.is_empty(), "{alert}: {command}");
                }
                _ => queries.push(line),
            }
        }
        eventually(&format!("a query of the section of {alert} has data"), async || {
            let mut is_any = queries.is_empty();
            for query in &queries {
                is_any |= !self.prometheus.query(query).await.is_empty();
            }
            is_any
        })
        .await;
    }

    async fn is_healthy(&self) {
        eventually("the rules are evaluated", async || {
            !self.prometheus.query("ALERTS or splitrail_build_info").await.is_empty()
        })
        .await;
        assert_eq!(self.prometheus.firing().await, BTreeSet::new());
    }
}

/// A copy of a file of rules in which alerts wait for no time.
fn at_once(folder: &TempDir, name: &str) -> PathBuf {
    let rules: String = text(name)
        .lines()
        .filter(|line| !line.trim_start().starts_with("for: "))
        .map(|line| format!("{line}\n"))
        .collect();
    let file = folder.path().join(name);
    std::fs::write(&file, rules).unwrap();
    file
}

fn chat(text: &str) -> Value {
    json!({
        "model": "sim", "max_tokens": 4, "messages": [{ "role": "user", "content": text }],
    })
}

#[tokio::test]
async fn a_worker_that_is_gone_fires_worker_down() {
    let watched = Watched::start(Spec::default()).await;
    watched.is_healthy().await;
    let yaml =
        watched.cluster.yaml.replace(&watched.cluster.engine("d1").url(), "http://127.0.0.1:1");
    assert_eq!(watched.cluster.reload(&yaml).await.status, 200);
    watched.fires(&["SplitrailWorkerDown"]).await;
}

#[tokio::test]
async fn events_that_are_cut_off_fire_events_cut_off() {
    let watched = Watched::start(Spec::default()).await;
    let events = watched.cluster.engine("p1").kv_events_endpoint().unwrap();
    let yaml = watched.cluster.yaml.replace(&events.to_string(), "tcp://127.0.0.1:1");
    assert_eq!(watched.cluster.reload(&yaml).await.status, 200);
    watched.fires(&["SplitrailIndexEventsCutOff"]).await;
}

#[tokio::test]
async fn another_tokenizer_fires_parity_mismatch() {
    let watched = Watched::start(Spec {
        model: "canary: { timeout: 5s, interval: 10m }".into(),
        engine: |_, config: &mut SimConfig| config.dialect = PromptDialect::OtherVocabulary,
        ..Spec::aggregated(1)
    })
    .await;
    // Without KV routing, the worker is among those whose index is not used.
    watched.fires(&["SplitrailParityMismatch", "SplitrailIndexDrifts"]).await;
}

#[tokio::test]
async fn a_refused_reload_fires_reload_refused() {
    let watched = Watched::start(Spec::default()).await;
    watched.is_healthy().await;
    assert_ne!(watched.cluster.reload("models: [").await.status, 200);
    watched.fires(&["SplitrailReloadRefused"]).await;
}

#[tokio::test]
async fn a_ledger_that_cannot_be_written_fires_ledger_not_written() {
    let top = "ledger: { path: ledger.jsonl, rotate: { size_max: 4096, files_max: 1 } }";
    let watched = Watched::start(Spec { top: top.into(), ..Spec::default() }).await;
    watched.is_healthy().await;
    // The full file cannot be renamed to a folder that is not empty.
    let files = watched.cluster.files.path();
    std::fs::create_dir_all(files.join("ledger.jsonl.1/full")).unwrap();
    let lost = [("result", "write_failed")];
    eventually("the ledger is full", async || {
        watched.cluster.http.post(CHAT, &chat("a line of the ledger")).await;
        watched.cluster.metric("splitrail_ledger_records_total", &lost).await > 0.0
    })
    .await;
    watched.fires(&["SplitrailLedgerNotWritten"]).await;
}

#[tokio::test]
async fn a_tenant_over_its_limit_fires_tenant_over_quota() {
    let top = "defaults: { tenant: acme }\ntenants:\n  - name: acme\n    limits: { requests_per_minute: 3 }";
    let watched = Watched::start(Spec { top: top.into(), ..Spec::default() }).await;
    watched.is_healthy().await;
    let mut statuses = Vec::new();
    eventually("requests are refused", async || {
        statuses.push(watched.cluster.http.post(CHAT, &chat("one more")).await.status.as_u16());
        statuses.iter().filter(|status| **status == 429).count() > 5
    })
    .await;
    watched.fires(&["SplitrailTenantOverQuota"]).await;
}

#[tokio::test]
async fn a_certificate_that_has_expired_fires_certificate_expires() {
    let folder = tempfile::tempdir().unwrap();
    for (from, to) in [("clients/expired.pem", "cert.pem"), ("clients/expired.key", "key.pem")] {
        std::fs::copy(fixture(from), folder.path().join(to)).unwrap();
    }
    let place = folder.path().display();
    let metrics = format!(
        ", metrics: {{ address: \"127.0.0.1:0\", tls: {{ cert: \"{place}/cert.pem\", key: \"{place}/key.pem\", plain_text: true }} }}"
    );
    let watched = Watched::start(Spec { admin_access: metrics.leak(), ..Spec::default() }).await;
    watched.fires(&["SplitrailCertificateExpires"]).await;
}

#[tokio::test]
async fn a_full_queue_fires_queue_saturated() {
    let watched = Watched::start(Spec {
        prefill: 1,
        decode: 1,
        policy: "{ kind: predicted_ttft }",
        model: "queue: { max_waiting: 2 }\ncosts: { prefill_us_per_token: 1000 }".into(),
        engine: |name, config| {
            if name == "p0" {
                config.prefill_us_per_token = 1000;
            }
        },
        ..Spec::default()
    })
    .await;
    watched.is_healthy().await;
    let mut waiting = tokio::task::JoinSet::new();
    for (name, depth) in [("a", 0.0), ("b", 1.0), ("c", 2.0)] {
        let client = watched.cluster.http.clone();
        // Each takes several seconds.
        let body = completion(&prompt(2000, name));
        waiting.spawn(async move { client.post(COMPLETIONS, &body).await });
        eventually("the request waits, or is at work", async || {
            watched.cluster.metric("splitrail_queue_depth", &[]).await == depth
                && watched.cluster.metric("splitrail_requests_in_flight", &[]).await == depth + 1.0
        })
        .await;
    }
    watched.fires(&["SplitrailQueueSaturated"]).await;
    waiting.shutdown().await;
}

#[cfg(feature = "nats")]
#[tokio::test]
async fn a_broker_that_is_gone_fires_broker_disconnected() {
    let mut broker = splitrail_tests::broker::NatsServer::start().await;
    let top = format!("events: {{ kind: nats, servers: [\"{}\"] }}", broker.url());
    let watched = Watched::start(Spec { top, ..Spec::default() }).await;
    watched.is_healthy().await;
    broker.kill();
    watched.fires(&["SplitrailBrokerDisconnected"]).await;
}
