//! A real Prometheus scrapes the shipped router under load, and another one with shims and a broker:
//! every query of the dashboard returns data, and exemplars lead to traces.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Value, json};
use splitrail_sim::{Role, SimConfig, SimEngine, write_tokenizer};
use splitrail_tests::Client;
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::broker::NatsServer;
use splitrail_tests::cluster::eventually;
use splitrail_tests::process_cluster::{Plan, ProcessCluster, ProcessKind};
use splitrail_tests::tls::fixture;
use tokio::task::JoinSet;

use crate::files::{panels, path};
use crate::server::Prometheus;

const CHAT: &str = "/v1/chat/completions";

/// The configuration of a router with everything that has a panel, except for shims and a broker.
fn configuration(folder: &Path, engines: &[(&str, SimEngine)]) -> String {
    let mut workers = String::new();
    for (id, engine) in engines {
        let role = if id.starts_with('p') { "prefill" } else { "decode" };
        let (url, events) = (engine.url(), engine.kv_events_endpoint().unwrap());
        let replay = engine.kv_replay_endpoint().unwrap();
        writeln!(
            workers,
            "      - {{ id: {id}, role: {role}, url: \"{url}\", kv_events: \"{events}\", kv_replay: \"{replay}\" }}"
        )
        .unwrap();
    }
    let (cert, key) = (fixture("router.pem"), fixture("router.key"));
    let (cert, key, folder) = (cert.display(), key.display(), folder.display());
    format!(
        "listen:
  http: 127.0.0.1:0
  grpc: {{ address: 127.0.0.1:0, tls: {{ cert: {cert:?}, key: {key:?}, plain_text: true }} }}
  admin: 127.0.0.1:0
  metrics: 127.0.0.1:0
hash_seed: 7
limits: {{ drain_delay: 10ms, drain_grace: 1s }}
ledger: {{ path: \"{folder}/ledger.jsonl\" }}
defaults: {{ tenant: acme }}
tenants:
  - name: acme
    limits: {{ requests_in_flight: 1000, requests_per_minute: 1000000, tokens_per_minute: 1000000000, tokens_per_day: 1000000000 }}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: huggingface, path: \"{folder}\" }}
    flow: prefill_first
    connector: nixl
    read_back: true
    queue: {{}}
    cache_loss_tracking: {{}}
    workers:
{workers}"
    )
}

/// A client that repeats streams and whole requests, with prompts that share a beginning.
async fn load(client: Client, number: usize) {
    let shared: String = (0..120).map(|word| format!("shared{} ", word / 40)).collect();
    for turn in 0.. {
        let text = format!("{shared} and {number} asks {turn}");
        let stream = turn % 3 != 0;
        let body = json!({
            "model": "sim", "max_tokens": 12, "stream": stream,
            "messages": [{ "role": "user", "content": text }],
        });
        let trace = format!("00-{:032x}-{:016x}-01", 0xabc0_0000 + number, 1 + turn);
        if stream {
            let headers = [("traceparent", trace.as_str())];
            client.stream_with(CHAT, &headers, &body).await.chunks().await;
        } else {
            client.post(CHAT, &body).await;
        }
    }
}

/// The query's values, without those that are no number.
async fn numbers(prometheus: &Prometheus, query: &str) -> usize {
    prometheus.query(query).await.iter().filter(|(_, value)| value != "NaN").count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_query_of_the_dashboard_returns_data_of_a_router_under_load() {
    let folder = tempfile::tempdir().unwrap();
    write_tokenizer(folder.path()).unwrap();
    let mut engines = Vec::new();
    for id in ["p0", "p1", "d0", "d1"] {
        let role = if id.starts_with('p') { Role::Prefill } else { Role::Decode };
        let config = SimConfig { role, ..SimConfig::default() };
        engines.push((id, SimEngine::start(config).await.unwrap()));
    }
    let yaml = configuration(folder.path(), &engines);
    let log = folder.path().join("router.log");
    let router = RouterProcess::serve(folder.path(), &yaml, &[], &log).await;
    let http = Client::new(router.http);
    eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
    let broker = NatsServer::start().await;
    let top = format!("quotas: {{ kind: nats, servers: [\"{}\"] }}", broker.url());
    let plan = Plan { top, prefill: 1, decode: 1, routers: 1, ..Plan::default() };
    let stand = ProcessCluster::start(plan).await;
    let with_broker = stand.posts[stand.place(ProcessKind::Router, "r0")].admin;
    let targets = [router.metrics.unwrap(), with_broker];
    let rules = ["recording.yaml", "alerts.yaml"].map(|name| path(name).canonicalize().unwrap());
    let prometheus = Prometheus::start(folder.path(), &targets, &rules).await;
    eventually("both are scraped", async || numbers(&prometheus, "up == 1").await == 2).await;
    let mut clients = JoinSet::new();
    for number in 0..4 {
        clients.spawn(load(http.clone(), number));
    }
    // The dashboard marks when a configuration was loaded.
    router.signal("HUP");
    for panel in panels() {
        for query in &panel.queries {
            let what = format!("{}: {query} returns data", panel.title);
            eventually(&what, async || numbers(&prometheus, query).await > 0).await;
        }
    }
    let firing = prometheus.firing().await;
    assert!(firing.is_empty(), "healthy routers: {firing:?}");
    exemplars_lead_to_traces(&prometheus).await;
    clients.shutdown().await;
}

/// Prometheus asks for OpenMetrics and stores the exemplars.
async fn exemplars_lead_to_traces(prometheus: &Prometheus) {
    let mut found = Value::Null;
    eventually("there are exemplars", async || {
        let query = "query_exemplars?query=splitrail_ttft_seconds_bucket&start=0&end=9999999999";
        found = prometheus.api(query).await["data"].clone();
        found.as_array().is_some_and(|series| !series.is_empty())
    })
    .await;
    let exemplar = &found[0]["exemplars"][0];
    let trace = exemplar["labels"]["trace_id"].as_str().unwrap();
    assert!(trace.len() == 32 && trace.contains("abc0000"), "{exemplar}");
}
