//! Alerts fire by the fault that they are for, and by no other: a real Prometheus, and a router with
//! that very fault. The rules are ours without their waiting times.

mod engines;
mod fleet;
mod load;
mod router;
mod watch;

use std::path::Path;

use serde_json::{Value, json};
use splitrail_sim::{Fault, FaultKind, PromptDialect, SimConfig};
use splitrail_tests::cluster::eventually;
use splitrail_tests::tls::fixture;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Cluster, Spec};

use watch::Watch;

use crate::files::rules;

const CHAT: &str = "/v1/chat/completions";

/// A cluster with a Prometheus beside it.
struct Watched {
    cluster: Cluster,
    watch: Watch,
}

impl Watched {
    async fn start(spec: Spec) -> Self {
        let cluster = Cluster::start(spec).await;
        let watch = Watch::of(&[cluster.running.addresses.admin]).await;
        Self { cluster, watch }
    }

    /// Waits until exactly these alerts fire, and follows their sections in the guide.
    async fn fires(&self, alerts: &[&str]) {
        self.watch.fires(alerts).await;
    }

    async fn is_healthy(&self) {
        self.watch.is_healthy().await;
    }
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
    watched.fires(&["SplitrailParityMismatch"]).await;
}

#[tokio::test]
async fn a_canary_that_does_not_end_fires_parity_pending() {
    let watched = Watched::start(Spec::aggregated(2)).await;
    watched.is_healthy().await;
    watched.cluster.engine("w1").set_fault(Fault { kind: FaultKind::Hang, times: None });
    let canary = "canary: { timeout: 10m, interval: 10m }";
    let yaml = watched.cluster.yaml.replace("canary: { enabled: false }", canary);
    assert_eq!(watched.cluster.reload(&yaml).await.status, 200);
    watched.fires(&["SplitrailParityPending"]).await;
}

#[tokio::test]
async fn a_canary_without_a_clear_result_fires_parity_unknown() {
    let watched = Watched::start(Spec {
        model: "canary: { timeout: 500ms, interval: 10m }".into(),
        engine: |_, config: &mut SimConfig| {
            config.faults.push(Fault { kind: FaultKind::Hang, times: None });
        },
        ..Spec::aggregated(1)
    })
    .await;
    watched.fires(&["SplitrailParityUnknown"]).await;
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
    let watched = Watched::start(Spec::queued("max_waiting: 2")).await;
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

/// A configuration without the workers whose id begins with this letter.
fn without(yaml: &str, letter: char) -> String {
    let worker = format!("- {{ id: {letter}");
    let lines = yaml.lines().filter(|line| !line.trim_start().starts_with(&worker));
    lines.map(|line| format!("{line}\n")).collect()
}

#[tokio::test]
async fn a_role_whose_workers_have_all_left_fires_no_worker() {
    for (letter, alert) in [('p', "SplitrailNoPrefillWorker"), ('d', "SplitrailNoDecodeWorker")] {
        // Another source may still report workers, so that this is no mistake of the configuration.
        let model = "discovery: [{ kind: shim }]".to_owned();
        let watched = Watched::start(Spec { model, fleet: true, ..Spec::default() }).await;
        watched.is_healthy().await;
        let reloaded = watched.cluster.reload(&without(&watched.cluster.yaml, letter)).await;
        assert_eq!(reloaded.status, 200, "{}", reloaded.text());
        watched.fires(&[alert]).await;
    }
}

#[tokio::test]
async fn prefill_workers_that_all_drain_fire_no_prefill_worker() {
    let watched = Watched::start(Spec::default()).await;
    for worker in ["p0", "p1"] {
        let path = format!("/admin/workers/{worker}/drain");
        assert_eq!(watched.cluster.admin.post_with(&path, &[], "").await.status, 200);
    }
    watched.fires(&["SplitrailNoPrefillWorker"]).await;
}

#[tokio::test]
async fn prefill_workers_that_fail_fire_no_prefill_worker_where_nothing_replaces_them() {
    let watched = Watched::start(Spec {
        prefill: 1,
        model: "on_no_prefill: fail\nbreaker: { failures: 2, cooldown: 1h }".into(),
        ..Spec::default()
    })
    .await;
    watched.is_healthy().await;
    let kind = FaultKind::Status { status: 500 };
    watched.cluster.engine("p0").set_fault(Fault { kind, times: None });
    eventually("the breaker is open", async || {
        let body = completion(&prompt(40, "fails"));
        assert_ne!(watched.cluster.http.post(COMPLETIONS, &body).await.status, 200);
        watched.cluster.metric("splitrail_worker_breaker_open", &[("worker", "p0")]).await == 1.0
    })
    .await;
    // It answers probes.
    let p0 = [("worker", "p0")];
    assert_eq!(watched.cluster.metric("splitrail_worker_up", &p0).await, 1.0);
    let failing = [
        "SplitrailNoPrefillWorker",
        "SplitrailBreakerOpen",
        "SplitrailErrorBudgetBurnsFast",
        "SplitrailErrorBudgetBurnsSlowly",
    ];
    watched.fires(&failing).await;
}

#[tokio::test]
async fn streams_that_begin_late_burn_the_budget_of_the_first_token() {
    let watched = Watched::start(Spec::aggregated(1)).await;
    watched.is_healthy().await;
    let kind = FaultKind::SlowFirstByte { delay_ms: 2_500 };
    watched.cluster.engine("w0").set_fault(Fault { kind, times: None });
    let mut streams = tokio::task::JoinSet::new();
    for client in 0..4 {
        let http = watched.cluster.http.clone();
        streams.spawn(async move {
            for turn in 0.. {
                let mut body = completion(&prompt(10, &format!("c{client}t{turn}")));
                body["stream"] = true.into();
                http.stream(COMPLETIONS, &body).await.rest().await;
            }
        });
    }
    watched.fires(&["SplitrailTtftBudgetBurnsFast", "SplitrailTtftBudgetBurnsSlowly"]).await;
    streams.shutdown().await;
}

#[tokio::test]
async fn requests_that_hang_fill_the_router_and_fire_in_flight_saturated() {
    let limits = "{ in_flight_max: 4, drain_delay: 10ms, drain_grace: 1s }";
    let watched = Watched::start(Spec { limits, ..Spec::aggregated(1) }).await;
    watched.is_healthy().await;
    watched.cluster.engine("w0").set_fault(Fault { kind: FaultKind::Hang, times: None });
    let mut hanging = tokio::task::JoinSet::new();
    for client in 0..4 {
        let (http, body) = (watched.cluster.http.clone(), chat(&format!("hangs {client}")));
        hanging.spawn(async move { http.post(CHAT, &body).await });
    }
    watched.fires(&["SplitrailInFlightSaturated"]).await;
    hanging.shutdown().await;
}

/// Places are for prompts, of which a request may have many.
#[tokio::test]
async fn one_batch_that_takes_nearly_all_places_fires_in_flight_saturated() {
    let limits = "{ in_flight_max: 10, drain_delay: 10ms, drain_grace: 1s }";
    let watched = Watched::start(Spec { limits, ..Spec::aggregated(1) }).await;
    watched.is_healthy().await;
    watched.cluster.engine("w0").set_fault(Fault { kind: FaultKind::Hang, times: None });
    let mut body = completion("");
    body["prompt"] = (0..10).map(|place| format!("prompt {place} hangs")).collect();
    let mut hanging = tokio::task::JoinSet::new();
    let http = watched.cluster.http.clone();
    hanging.spawn(async move { http.post(COMPLETIONS, &body).await });
    watched.fires(&["SplitrailInFlightSaturated"]).await;
    hanging.shutdown().await;
}

#[tokio::test]
async fn a_router_that_is_full_burns_the_budget_for_errors() {
    let limits = "{ in_flight_max: 1, drain_delay: 10ms, drain_grace: 1s }";
    let watched = Watched::start(Spec { limits, ..Spec::aggregated(1) }).await;
    watched.is_healthy().await;
    watched.cluster.engine("w0").set_fault(Fault { kind: FaultKind::Hang, times: None });
    let mut hanging = tokio::task::JoinSet::new();
    let (http, body) = (watched.cluster.http.clone(), chat("hangs"));
    hanging.spawn(async move { http.post(CHAT, &body).await });
    eventually("the router is full", async || {
        watched.cluster.metric("splitrail_requests_in_flight", &[]).await == 1.0
    })
    .await;
    for turn in 0..20 {
        let reply = watched.cluster.http.post(CHAT, &chat(&format!("too many {turn}"))).await;
        assert_eq!(reply.status, 503, "{}", reply.text());
    }
    let full = [
        "SplitrailErrorBudgetBurnsFast",
        "SplitrailErrorBudgetBurnsSlowly",
        "SplitrailRequestsShed",
        "SplitrailInFlightSaturated",
    ];
    watched.fires(&full).await;
    hanging.shutdown().await;
}

#[cfg(feature = "nats")]
#[tokio::test]
async fn a_broker_that_is_gone_fires_broker_disconnected() {
    let mut broker = splitrail_tests::broker::NatsServer::start().await;
    let top = format!("quotas: {{ kind: nats, servers: [\"{}\"] }}", broker.url());
    let watched = Watched::start(Spec { top, ..Spec::default() }).await;
    watched.is_healthy().await;
    broker.kill();
    watched.fires(&["SplitrailBrokerDisconnected"]).await;
}

/// Each alert is expected by a test in which a router has its fault.
#[test]
fn each_alert_is_provoked() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/observability");
    let files = ["provoked", "guides"].into_iter().flat_map(|name| {
        let modules =
            std::fs::read_dir(folder.join(name)).unwrap().map(|file| file.unwrap().path());
        modules.chain([folder.join(format!("{name}.rs"))])
    });
    let tests: String = files.map(|file| std::fs::read_to_string(file).unwrap()).collect();
    let is_missing = |name: &String| !tests.contains(&format!("\"{name}\""));
    let missing: Vec<_> =
        rules("alerts.yaml").into_iter().map(|alert| alert.name).filter(is_missing).collect();
    assert_eq!(missing, [] as [String; 0]);
}
