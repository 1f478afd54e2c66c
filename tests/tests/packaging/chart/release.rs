//! What the chart deploys, as processes: routers, shims and simulated engines.

use std::fs;

use serde_json::{Value, json};
use splitrail_sim::{Role, SimConfig, SimEngine};
use splitrail_tests::Client;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::proc::signal;
use splitrail_tests::process::Process;
use splitrail_tests::trial::prompt;

use super::{Mounts, block, text};

/// The arguments of the shims of a pool, in a pod that is this host.
fn shim_args(rendered: &str, role: &str, engine: &str, fleet: &str) -> Vec<String> {
    let of_role = |document: &&str| {
        document.contains("kind: StatefulSet") && document.contains(&format!("--role={role}"))
    };
    let document = rendered.split("\n---\n").find(of_role).unwrap();
    let args = document.lines().map(str::trim).skip_while(|line| *line != "args:").skip(1);
    let args = args.map_while(|line| line.strip_prefix("- "));
    let args = args.map(|arg| {
        arg.replace("http://127.0.0.1:8000", engine)
            .replace("0.0.0.0:8001", "127.0.0.1:0")
            .replace("splitrail-fleet:8002", fleet)
            .replace("$(POD_NAME)", &format!("splitrail-{role}-0"))
    });
    // A pod advertises its own address; here, that of the listener is known only later.
    args.filter(|arg| !arg.starts_with("--advertise=")).collect()
}

/// A pod with an engine and its shim.
struct Pod {
    #[cfg_attr(not(feature = "prometheus"), allow(dead_code))]
    engine: SimEngine,
    shim: Process,
}

/// A router with a prefill pod and a decode pod, as in `deploy/kubernetes/splitrail.yaml`.
struct Release {
    #[cfg_attr(not(feature = "prometheus"), allow(dead_code))]
    mounts: Mounts,
    router: Process,
    http: Client,
    prefill: Pod,
    decode: Pod,
}

impl Release {
    async fn start() -> Self {
        let rendered = text("deploy/kubernetes/splitrail.yaml");
        let mounts = Mounts::new();
        let config = mounts.in_place(&block(&rendered, "splitrail.yaml"));
        let config = ["0.0.0.0:8000", "0.0.0.0:8002", "0.0.0.0:9091", "127.0.0.1:9090"]
            .iter()
            .fold(config, |config, address| config.replace(address, "127.0.0.1:0"))
            // Pods are in this network; here, everything is on this host.
            .replace("10.0.0.0/8", "127.0.0.0/8")
            .replace("drain_delay: 5s", "drain_delay: 100ms");
        let file = mounts.path().join("splitrail.yaml");
        fs::write(&file, config).unwrap();
        let args = ["serve", "--config", &file.display().to_string()].map(str::to_owned);
        let router = Process::start("router", mounts.path(), &args).await;
        let fleet = router.told("fleet").to_owned();
        let prefill = Self::pod(&mounts, &rendered, &fleet, Role::Prefill, "prefill").await;
        let decode = Self::pod(&mounts, &rendered, &fleet, Role::Decode, "decode").await;
        let http: Client = router.client("http");
        // Where the probe of the manifest asks.
        assert!(rendered.contains("path: /ready\n              port: metrics\n"));
        let probe: Client = router.client("metrics");
        eventually("the router is ready", async || probe.get("/ready").await.status == 200).await;
        Self { mounts, router, http, prefill, decode }
    }

    async fn pod(mounts: &Mounts, rendered: &str, fleet: &str, role: Role, name: &str) -> Pod {
        // As real engines do, it ignores a threshold: the shim applies it.
        let engine = SimConfig {
            role,
            model: "qwen3-8b".into(),
            honour_threshold: false,
            decode_us_per_step: 20_000,
            ..SimConfig::default()
        };
        let engine = SimEngine::start(engine).await.unwrap();
        let args = shim_args(rendered, name, &engine.url(), fleet);
        let token = fs::read_to_string(mounts.path().join(name)).unwrap();
        let env = [("SPLITRAIL_FLEET_TOKEN", token.as_str())];
        let shim = Process::shim_with(name, mounts.path(), &args, &env).await;
        Pod { engine, shim }
    }

    /// A prompt is prefilled and handed over; once the decode engine's events have arrived, it serves
    /// the prompt from its own cache, and its shim was the gate.
    async fn serves_a_decode_first_hit(&self) {
        let body = body("chart", 4);
        let first = self.http.post("/v1/completions", &body).await;
        assert_eq!(first.status, 200, "{}", first.text());
        assert_eq!(first.route("prefill"), Some("splitrail-prefill-0"));
        let mut last = first;
        eventually("a decode-first hit", async || {
            last = self.http.post("/v1/completions", &body).await;
            last.route("try") == Some("served")
        })
        .await;
        assert_eq!(last.route("decode"), Some("splitrail-decode-0"));
        assert_eq!(last.route("gate"), Some("shim"));
        assert!(last.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(0));
    }

    /// The figure of a metric of the router.
    async fn figure(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let metrics = self.router.client("metrics").get("/metrics").await.text();
        metric_in(&metrics, name, labels)
    }
}

fn body(words: &str, max_tokens: u32) -> Value {
    json!({
        "model": "qwen3-8b", "prompt": prompt(200, words), "max_tokens": max_tokens,
        "temperature": 0, "ignore_eos": true,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_of_the_chart_serves_from_decode_caches_and_drains_with_a_request_in_flight() {
    let release = Release::start().await;
    release.serves_a_decode_first_hit().await;
    let queue = [("model", "qwen3-8b")];
    assert!(release.figure("splitrail_queue_max_waiting", &queue).await > 0.0, "it has the queue");

    let mut request = body("drain", 60);
    (request["stream"], request["stream_options"]) = (json!(true), json!({"include_usage": true}));
    let mut events = release.http.stream("/v1/completions", &request).await;
    assert!(events.next().await.is_some());
    // The stream stands still while everything is asked to stop.
    signal(release.decode.shim.pid(), "STOP");
    release.router.terminate();
    let serving = [("model", "qwen3-8b")];
    eventually("the router drains with a request in flight", async || {
        release.figure("splitrail_draining", &[]).await == 1.0
            && release.figure("splitrail_requests_in_flight", &serving).await == 1.0
    })
    .await;
    let Release { mut router, prefill, decode, .. } = release;
    let mut shims = [prefill.shim, decode.shim];
    shims.iter().for_each(Process::terminate);
    signal(shims[1].pid(), "CONT");
    let chunks = events.chunks().await;
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 60, "{chunks:?}");
    assert!(router.ended().await.success(), "{}", router.log());
    for shim in &mut shims {
        assert!(shim.ended().await.success(), "{}", shim.log());
    }
}

/// What a command that the guide about Kubernetes has in a step prints, with the port of the admin
/// listener in place of the one that `kubectl port-forward` opens.
#[cfg(feature = "prometheus")]
fn seen(step: u32, part: &str, admin: &str) -> Vec<Value> {
    let guide = splitrail_tests::page::Page::read("kubernetes");
    let command = guide.line(step, part).replace("127.0.0.1:9090", admin);
    let ran = std::process::Command::new("sh").args(["-c", &command]).output().unwrap();
    assert!(ran.status.success(), "{command}: {}", String::from_utf8_lossy(&ran.stderr));
    serde_json::Deserializer::from_slice(&ran.stdout).into_iter().map(Result::unwrap).collect()
}

#[cfg(feature = "prometheus")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_guide_shows_whether_what_the_chart_deploys_works() {
    let release = Release::start().await;
    release.serves_a_decode_first_hit().await;
    let admin = release.router.told("admin");
    eventually("each worker is as the guide says", async || {
        let workers = seen(4, "/admin/workers", admin);
        workers.len() == 2
            && workers.iter().all(|worker| {
                worker["state"] == "serving"
                    && worker["sources"] == json!(["shim"])
                    && worker["events_current"] == true
                    && worker["kv_routing"] == true
                    && worker["parity"] == "ok"
            })
    })
    .await;
}

#[cfg(feature = "prometheus")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prometheus_scrapes_what_the_chart_deploys_with_the_rules_of_the_chart() {
    use crate::prometheus::Prometheus;

    let release = Release::start().await;
    release.serves_a_decode_first_hit().await;
    let here = release.mounts.path();
    // The jobs, ports and paths of the chart's PodMonitors.
    let monitors = text("deploy/helm/golden/monitored.yaml");
    for monitor in ["jobLabel: app.kubernetes.io/name", "replacement: splitrail-engine }"] {
        assert!(monitors.contains(monitor), "{monitor}");
    }
    let shim = "    - port: shim\n      path: /splitrail/metrics\n";
    assert!(monitors.contains(shim) && monitors.contains("replacement: splitrail-shim }"));
    let pods = [&release.prefill, &release.decode];
    let shims = pods.map(|pod| pod.shim.told("http")).join("\", \"");
    let engines = pods.map(|pod| pod.engine.url().replace("http://", "")).join("\", \"");
    let router = release.router.told("metrics");
    for name in ["recording", "alerts"] {
        fs::write(here.join(format!("{name}.yaml")), super::rules(name)).unwrap();
    }
    let config = format!(
        "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}
rule_files: [recording.yaml, alerts.yaml]
scrape_configs:
  - job_name: splitrail
    static_configs: [{{ targets: [\"{router}\"] }}]
  - job_name: splitrail-shim
    metrics_path: /splitrail/metrics
    static_configs: [{{ targets: [\"{shims}\"] }}]
  - job_name: splitrail-engine
    static_configs: [{{ targets: [\"{engines}\"] }}]
"
    );
    let file = here.join("prometheus.yaml");
    fs::write(&file, config).unwrap();
    let args = [format!("--config.file={}", file.display())];
    let prometheus = Prometheus::run(here, &args).await;
    for (query, least) in [
        ("count(up == 1)", 5.0),
        ("sum(splitrail_decode_first_total{job=\"splitrail\", outcome=\"served\"})", 1.0),
        ("sum(splitrail_shim_requests_total{job=\"splitrail-shim\", outcome=\"gate_hit\"})", 1.0),
        ("count({job=\"splitrail-engine\", __name__=~\"vllm:.*\"})", 1.0),
        ("count(splitrail_cache_hit_blocks{of=\"best\"})", 1.0),
    ] {
        let what = format!("{query} is at least {least}");
        eventually(&what, async || {
            let values = prometheus.query(query).await;
            values.iter().any(|(_, value)| value.parse::<f64>().unwrap() >= least)
        })
        .await;
    }
    let rules = prometheus.api("rules").await["data"]["groups"].to_string();
    assert!(rules.contains("splitrail-slo") && rules.contains("splitrail-recorded"), "{rules}");
    assert!(prometheus.firing().await.is_empty());
}
