//! A simulated cluster with a real router in front, in this process.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;
use splitrail_router::assemble::assemble;
use splitrail_router::run::{Running, wait_ready};
use splitrail_sim::write_tokenizer;
use splitrail_sim::{KvConnector, Role, SharedStorage, SimConfig, SimEngine};
use tempfile::TempDir;

use crate::client::{Client, Reply};
use crate::ports::HeldPorts;
use crate::tls_server::{ServerCertificate, TlsServer};

/// How long a condition may take to become true.
const PATIENCE: Duration = Duration::from_secs(60);

/// The lease of engines that push, much shorter than [`PATIENCE`].
const PUSH_LEASE_MS: u64 = 5_000;

/// The configuration's name.
const CONFIG: &str = "splitrail.yaml";

/// What to start.
pub struct Spec {
    /// Prefill engines, `p0`, `p1`, ...
    pub prefill: usize,
    /// Decode engines, `d0`, ...
    pub decode: usize,
    /// Engines that do both, `w0`, ...
    pub both: usize,
    /// The model's `flow`.
    pub flow: &'static str,
    /// The model's `connector`, and the engines'; unused where `flow` is `aggregated`, except by
    /// peer fetches.
    pub connector: KvConnector,
    /// The model's `policy`, as YAML.
    pub policy: &'static str,
    /// The model's `block_size`.
    pub block_size: &'static str,
    /// Further keys of the model, as YAML lines without indentation.
    pub model: String,
    /// Further top-level keys, as YAML lines. Relative paths start at [`Cluster::files`].
    pub top: String,
    /// Whether the gRPC listener serves `Explain`.
    pub grpc_explain: bool,
    /// Further keys of `listen`, behind a comma.
    pub admin_access: &'static str,
    /// Whether shims can attach.
    pub fleet: bool,
    /// The `limits`, as a YAML flow mapping.
    pub limits: &'static str,
    /// Further workers as YAML items, for addresses at which nothing listens.
    pub extra_workers: Vec<String>,
    /// Another tokenizer's folder than the simulated model's.
    pub tokenizer: Option<PathBuf>,
    /// Further keys of the tokenizer, as they follow others: `, chat_template: "FILE"`.
    pub tokenizer_keys: String,
    /// Further keys of a worker, by name, as they follow others: `, shim: true`.
    pub worker: fn(&str) -> &'static str,
    /// Changes the engines' settings, by name.
    pub engine: fn(&str, &mut SimConfig),
    /// What the TLS servers in front of the engines present; without it, there are none.
    pub tls: Option<ServerCertificate>,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            prefill: 2,
            decode: 2,
            both: 0,
            flow: "prefill_first",
            connector: KvConnector::Nixl,
            policy: "{ kind: kv_overlap }",
            block_size: "16",
            model: String::new(),
            top: String::new(),
            grpc_explain: false,
            admin_access: "",
            fleet: false,
            limits: "{ drain_delay: 10ms, drain_grace: 5s }",
            extra_workers: Vec::new(),
            tokenizer: None,
            tokenizer_keys: String::new(),
            worker: |_| "",
            engine: |_, _| {},
            tls: None,
        }
    }
}

impl Spec {
    /// Aggregated serving on `workers` engines.
    pub fn aggregated(workers: usize) -> Self {
        Self { prefill: 0, decode: 0, both: workers, flow: "aggregated", ..Self::default() }
    }

    /// Requests wait in the router's queue for the only prefill engine, `p0`, which computes a token
    /// in a millisecond. `queue` is the keys of the model's `queue`, without braces.
    pub fn queued(queue: &str) -> Self {
        Self {
            prefill: 1,
            decode: 1,
            policy: "{ kind: predicted_ttft }",
            model: format!("queue: {{ {queue} }}\ncosts: {{ prefill_us_per_token: 1000 }}\n"),
            engine: |name, config| {
                if name == "p0" {
                    config.prefill_us_per_token = 1000;
                }
            },
            ..Self::default()
        }
    }
}

/// Running engines, and the configuration of a router in front of them.
pub struct Engines {
    /// The engines by name.
    pub engines: Vec<(String, SimEngine)>,
    /// The TLS servers in front of the engines, in the same order.
    pub tls: Vec<TlsServer>,
    /// The model's files, and the configuration's.
    pub files: TempDir,
    /// The configuration.
    pub yaml: String,
    ports: HeldPorts,
}

impl Engines {
    /// Starts them.
    pub async fn start(spec: &Spec) -> Self {
        let files = tempfile::tempdir().expect("a temporary folder");
        write_tokenizer(files.path()).expect("tokenizer files");
        let named = |prefix: &str, count: usize, role: Role| {
            (0..count).map(|i| (format!("{prefix}{i}"), role)).collect::<Vec<_>>()
        };
        let roles = [
            named("p", spec.prefill, Role::Prefill),
            named("d", spec.decode, Role::Decode),
            named("w", spec.both, Role::Both),
        ];
        let mut engines = Vec::new();
        let storage = SharedStorage::default();
        let mut ports = HeldPorts::default();
        for (name, role) in roles.concat() {
            let (connector, storage) = (spec.connector, storage.clone());
            let mut config = SimConfig { role, connector, storage, ..SimConfig::default() };
            if connector == KvConnector::NixlPush {
                // The question who an engine is leaves a block until the end of the lease.
                config.lease_ms = PUSH_LEASE_MS;
            }
            (spec.engine)(&name, &mut config);
            hold_ports(&mut config, &mut ports);
            engines.push((name, SimEngine::start(config).await.expect("an engine")));
        }
        let mut tls = Vec::new();
        if let Some(certificate) = spec.tls {
            for (_, engine) in &engines {
                tls.push(TlsServer::start(engine.http_addr(), certificate).await);
            }
        }
        let tokenizer = spec.tokenizer.clone().unwrap_or_else(|| files.path().to_owned());
        let yaml = yaml(spec, &engines, &tls, &tokenizer);
        Self { engines, tls, files, yaml, ports }
    }

    /// An engine by name.
    pub fn engine(&self, name: &str) -> &SimEngine {
        engine_named(&self.engines, name)
    }
}

fn engine_named<'a>(engines: &'a [(String, SimEngine)], name: &str) -> &'a SimEngine {
    let found = engines.iter().find(|(other, _)| other == name);
    &found.unwrap_or_else(|| panic!("no engine {name}")).1
}

/// Has an engine listen on held ports, where nobody else listens when it is gone.
fn hold_ports(config: &mut SimConfig, ports: &mut HeldPorts) {
    for port in [&mut config.http_port, &mut config.side_port] {
        *port = ports.take();
    }
    for port in [&mut config.kv_events_port, &mut config.kv_replay_port].into_iter().flatten() {
        *port = ports.take_run(config.data_parallel);
    }
}

/// An engine again, as another process on the same ports, with other settings.
pub async fn restarted(engine: SimEngine, change: impl FnOnce(&mut SimConfig)) -> SimEngine {
    let port = |endpoint: Option<&str>| {
        endpoint.and_then(|text| text.rsplit(':').next()?.parse::<u16>().ok())
    };
    let mut config = SimConfig {
        http_port: engine.http_addr().port(),
        kv_events_port: port(engine.kv_events_endpoint()),
        kv_replay_port: port(engine.kv_replay_endpoint()),
        ..engine.config().clone()
    };
    change(&mut config);
    engine.shutdown().await;
    SimEngine::start(config).await.expect("the same ports")
}

/// A running cluster. Dropping it ends everything.
pub struct Cluster {
    /// The router.
    pub running: Running,
    /// The engines by name.
    pub engines: Vec<(String, SimEngine)>,
    /// The TLS servers in front of the engines, in the same order.
    pub tls: Vec<TlsServer>,
    /// A client of the front door.
    pub http: Client,
    /// A client of the admin listener.
    pub admin: Client,
    /// The model's files, and the configuration's.
    pub files: TempDir,
    /// The configuration that it was started with.
    pub yaml: String,
    _ports: HeldPorts,
}

impl Cluster {
    /// Starts engines and router, and waits until it is ready.
    pub async fn start(spec: Spec) -> Self {
        let Engines { engines, tls, files, yaml, ports } = Engines::start(&spec).await;
        let file = files.path().join(CONFIG);
        std::fs::write(&file, &yaml).expect("a configuration file");
        let loaded = splitrail_config::load(&file, splitrail_config::Parts::ALL);
        let loaded = loaded.unwrap_or_else(|problems| panic!("{problems}\n{yaml}"));
        let listen = loaded.config.listen.clone();
        let core = assemble(loaded.config, None).expect("a core");
        let running = Running::start_from(Some(file), core, &listen).await.expect("a router");
        let cluster = Self {
            http: Client::new(running.addresses.http),
            admin: Client::new(running.addresses.admin),
            running,
            engines,
            tls,
            files,
            yaml,
            _ports: ports,
        };
        if spec.extra_workers.is_empty() {
            let unready = wait_ready(&cluster.running.core, PATIENCE).await;
            assert_eq!(unready, None, "ready in time");
        }
        cluster
    }

    /// Has the router reload this configuration.
    pub async fn reload(&self, yaml: &str) -> Reply {
        std::fs::write(self.files.path().join(CONFIG), yaml).expect("a configuration file");
        self.admin.post_with("/admin/reload", &[], "").await
    }

    /// An engine by name.
    pub fn engine(&self, name: &str) -> &SimEngine {
        engine_named(&self.engines, name)
    }

    /// Restarts an engine on the same ports.
    pub async fn restart(&mut self, name: &str) {
        let place = self.engines.iter().position(|(other, _)| other == name);
        let place = place.unwrap_or_else(|| panic!("no engine {name}"));
        let (name, engine) = self.engines.remove(place);
        self.engines.insert(place, (name, restarted(engine, |_| {}).await));
    }

    /// The sum of a metric's series whose labels contain all of `labels`.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        metric_in(&self.admin.get("/metrics").await.text(), name, labels)
    }

    /// The decisions of a request, newest first.
    pub async fn decisions(&self, request_id: &str) -> Vec<Value> {
        let reply = self.admin.get(&format!("/admin/decisions?request_id={request_id}")).await;
        reply.json()["decisions"].as_array().cloned().unwrap_or_default()
    }

    /// Waits until the index holds, for each engine with events, as many blocks as
    /// the engine has resident: everything published so far is applied.
    pub async fn settle(&self) {
        for (name, engine) in &self.engines {
            if engine.kv_events_endpoint().is_none() {
                continue;
            }
            let what = format!("the index of {name} is in step");
            eventually(&what, async || {
                let labels = [("worker", name.as_str()), ("tier", "device")];
                let indexed = self.metric("splitrail_index_blocks", &labels).await;
                let ranks = 0..usize::from(engine.config().data_parallel);
                let held: usize = ranks.map(|rank| engine.rank_resident(rank).len()).sum();
                indexed == held as f64
            })
            .await;
        }
    }

    /// Waits until nothing is booked, in flight, running or pinned anywhere.
    pub async fn quiet(&self) {
        eventually("bookings and requests in flight return to zero", async || {
            self.metric("splitrail_requests_in_flight", &[]).await == 0.0
                && self.metric("splitrail_worker_requests", &[]).await == 0.0
                && self.metric("splitrail_worker_prefill_tokens", &[]).await == 0.0
                && self.running.core.live.is_empty()
        })
        .await;
        eventually("engines have nothing left to do", async || {
            self.engines.iter().all(|(_, engine)| {
                let state = engine.state();
                (state.running, state.waiting, state.orphans) == (0, 0, 0)
            })
        })
        .await;
    }
}

/// The sum of a metric's series in a scrape whose labels contain all of `labels`.
pub fn metric_in(text: &str, name: &str, labels: &[(&str, &str)]) -> f64 {
    let matching = text.lines().filter(|line| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
            && labels.iter().all(|(k, v)| line.contains(&format!("{k}=\"{v}\"")))
    });
    matching.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// Waits until a condition holds; fails by name if it does not.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < PATIENCE, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn yaml(
    spec: &Spec,
    engines: &[(String, SimEngine)],
    tls: &[TlsServer],
    tokenizer: &std::path::Path,
) -> String {
    let mut workers = spec.extra_workers.clone();
    for (at, (name, engine)) in engines.iter().enumerate() {
        let role = match engine.config().role {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Both => "both",
        };
        let url = tls.get(at).map_or_else(|| engine.url(), TlsServer::url);
        let mut item = format!("{{ id: {name}, role: {role}, url: \"{url}\"");
        if let Some(endpoint) = engine.kv_events_endpoint() {
            item += &format!(", kv_events: \"{endpoint}\"");
        }
        if let Some(endpoint) = engine.kv_replay_endpoint() {
            item += &format!(", kv_replay: \"{endpoint}\"");
        }
        let meets = matches!(spec.connector, KvConnector::Mooncake | KvConnector::Sglang);
        if meets && role == "prefill" {
            item += &format!(", bootstrap: \"{}\"", engine.bootstrap_url());
        }
        workers.push(item + (spec.worker)(name) + " }");
    }
    let workers: String = workers.iter().map(|item| format!("      - {item}\n")).collect();
    let mut extra: String = spec.model.lines().map(|line| format!("    {line}\n")).collect();
    // Tests that count what engines do ask for no canary unless they are about it.
    if !extra.contains("canary:") {
        extra += "    canary: { enabled: false }\n";
    }
    let connector = match spec.connector {
        // Workers that do both fetch prefixes from each other by hand-offs.
        _ if spec.flow == "aggregated" && !extra.contains("peer_fetch") => "none",
        KvConnector::Nixl => "nixl",
        KvConnector::NixlPush => "nixl_push",
        KvConnector::SharedStorage => "shared_storage",
        KvConnector::Mooncake => "mooncake",
        KvConnector::Sglang => "sglang",
        KvConnector::None => "none",
    };
    // A connector says whose engines have it.
    if spec.connector == KvConnector::Sglang && connector == "none" && !extra.contains("engine:") {
        extra += "    engine: sglang\n";
    }
    if connector == "sglang" && !extra.contains("on_no_prefill") {
        extra += "    on_no_prefill: fail\n";
    }
    let fleet = if spec.fleet { ", fleet: 127.0.0.1:0" } else { "" };
    let explain = if spec.grpc_explain { ", grpc_explain: true" } else { "" };
    format!(
        "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0{fleet}{explain}{} }}
hash_seed: 7
limits: {}
{}
models:
  - name: sim
    aliases: [default]
    block_size: {}
    tokenizer: {{ kind: huggingface, path: {:?}{} }}
    flow: {}
    connector: {connector}
    policy: {}
{extra}    workers:
{workers}",
        spec.admin_access,
        spec.limits,
        spec.top,
        spec.block_size,
        tokenizer.display().to_string(),
        spec.tokenizer_keys,
        spec.flow,
        spec.policy,
    )
}
