//! Three routers and a broker as processes, in front of a simulated engine.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use async_nats::jetstream;
use serde_json::{Value, json};
use splitrail_access::keys::{Grant, generate};
use splitrail_sim::{SimConfig, SimEngine, write_tokenizer};
use splitrail_tests::Client;
use splitrail_tests::broker::NatsServer;
use splitrail_tests::client::{Broken, Reply};
use splitrail_tests::process::Process;
use splitrail_tests::trial::{COMPLETIONS, token_ids};
use tempfile::TempDir;

/// Number of routers.
pub(crate) const ROUTERS: usize = 3;

/// A request of [`body`] counts this number of tokens when all weights are 1.
pub(crate) const REQUEST: u64 = PROMPT + OUTPUT;
const PROMPT: u64 = 80;
const OUTPUT: u64 = 20;

/// A part of a limit that can stay unused: less than one request for each router.
pub(crate) const REST_REQUESTS: u64 = ROUTERS as u64;
pub(crate) const REST_TOKENS: u64 = ROUTERS as u64 * REQUEST;

/// A tenant and its limits per minute.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limited {
    pub(crate) name: &'static str,
    pub(crate) requests: u64,
    pub(crate) tokens: u64,
}

/// A tenant whose requests of [`REQUEST`] tokens use up the limit on tokens first.
pub(crate) fn limited_by_tokens(name: &'static str, requests: u64) -> Limited {
    Limited { name, requests: 2 * requests, tokens: requests * REQUEST }
}

/// A tenant whose requests of [`REQUEST`] tokens use up the limit on requests first.
pub(crate) fn limited_by_requests(name: &'static str, requests: u64) -> Limited {
    Limited { name, requests, tokens: 2 * requests * REQUEST }
}

/// What to start.
pub(crate) struct Plan<'p> {
    pub(crate) tenants: &'p [Limited],
    /// The model's `token_weights`.
    pub(crate) weights: &'static str,
    pub(crate) engine: SimConfig,
}

impl Plan<'_> {
    /// All tokens count alike, and generation takes a moment.
    pub(crate) fn plain(tenants: &[Limited]) -> Plan<'_> {
        let weights = "{ uncached: 1, cached: 1, output: 1 }";
        let engine = SimConfig { decode_us_per_step: 1000, ..SimConfig::default() };
        Plan { tenants, weights, engine }
    }
}

/// The routers, with all that they need.
pub(crate) struct Routers {
    pub(crate) broker: NatsServer,
    /// `None` for a router that has ended.
    pub(crate) processes: Vec<Option<Process>>,
    /// The keys of the tenants, by name.
    keys: BTreeMap<&'static str, String>,
    weights: &'static str,
    engine: SimEngine,
    folder: TempDir,
    started: Instant,
}

impl Routers {
    pub(crate) async fn start(plan: Plan<'_>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_tokenizer(folder.path()).unwrap();
        let (mut keys, mut entries) = (BTreeMap::new(), Vec::new());
        for Limited { name, .. } in plan.tenants {
            let grant = Grant::Tenant((*name).into());
            let (key, entry) = generate(&grant, None, None, SystemTime::now()).unwrap();
            keys.insert(*name, key);
            entries.push(entry);
        }
        let file = folder.path().join("keys.yaml");
        std::fs::write(file, json!({ "keys": entries }).to_string()).unwrap();
        let mut routers = Self {
            broker: NatsServer::start().await,
            processes: Vec::new(),
            keys,
            weights: plan.weights,
            engine: SimEngine::start(plan.engine).await.unwrap(),
            folder,
            started: Instant::now(),
        };
        for place in 0..ROUTERS {
            let config = routers.configure(place, plan.tenants);
            let args = ["serve".to_owned(), "--config".into(), config.display().to_string()];
            let name = format!("r{place}");
            let process = Process::start(&name, routers.folder.path(), &args).await;
            routers.processes.push(Some(process));
        }
        for place in 0..ROUTERS {
            let client = routers.client(place);
            within(20, "a router is ready", async || client.get("/ready").await.status == 200)
                .await;
        }
        routers
    }

    /// Writes the configuration of a router.
    fn configure(&self, place: usize, tenants: &[Limited]) -> PathBuf {
        let tenants: String = tenants
            .iter()
            .map(|Limited { name, requests, tokens }| {
                format!(
                    "  - {{ name: {name}, limits: {{ requests_per_minute: {requests}, tokens_per_minute: {tokens} }} }}\n"
                )
            })
            .collect();
        let yaml = format!(
            "listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
quotas: {{ kind: nats, servers: [\"{}\"], lease: 20s }}
auth: [ {{ kind: keys, file: keys.yaml }} ]
limits: {{ drain_delay: 50ms, drain_grace: 20s }}
ledger: {{ path: r{place}.ledger.jsonl }}
tenants:
{tenants}models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: huggingface, path: . }}
    flow: aggregated
    connector: none
    token_weights: {}
    canary: {{ enabled: false }}
    workers:
      - {{ id: w0, role: both, url: \"{}\", kv_events: \"{}\", kv_replay: \"{}\" }}
",
            self.broker.url(),
            self.weights,
            self.engine.url(),
            self.engine.kv_events_endpoint().unwrap(),
            self.engine.kv_replay_endpoint().unwrap(),
        );
        let path = self.folder.path().join(format!("r{place}.yaml"));
        std::fs::write(&path, yaml).unwrap();
        path
    }

    fn process(&self, place: usize) -> &Process {
        self.processes[place].as_ref().unwrap()
    }

    /// A client of a router, with connections of its own.
    pub(crate) fn client(&self, place: usize) -> Client {
        self.process(place).client("http")
    }

    /// The value of the header `authorization` for a tenant.
    pub(crate) fn authorization(&self, tenant: &str) -> String {
        format!("Bearer {}", self.keys[tenant])
    }

    /// The time since the routers were started, in milliseconds.
    pub(crate) fn now_ms(&self) -> u64 {
        millis(self.started)
    }

    /// When the routers were started.
    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    /// Gives all routers other limits.
    pub(crate) async fn reload(&self, tenants: &[Limited]) {
        for place in 0..ROUTERS {
            self.configure(place, tenants);
            let admin = self.process(place).client("admin");
            let reply = admin.post_with("/admin/reload", &[], "").await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
    }

    /// SIGTERM, and waits for a good end.
    pub(crate) async fn stop(&mut self, place: usize) {
        let mut process = self.processes[place].take().unwrap();
        process.terminate();
        let status = process.ended().await;
        assert!(status.success(), "{status}: {}", process.log());
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self, place: usize) {
        self.processes[place].take().unwrap().kill();
    }

    /// Sends a body for a tenant.
    pub(crate) async fn post(&self, place: usize, tenant: &str, body: &Value) -> Reply {
        post(&self.client(place), &self.authorization(tenant), body).await.unwrap()
    }

    /// What a router tells a tenant about a limit; 0 if there is no such header.
    pub(crate) async fn told(&self, place: usize, tenant: &str, header: &str) -> u64 {
        let authorization = self.authorization(tenant);
        let headers = [("authorization", authorization.as_str())];
        let reply = self.client(place).get_with("/v1/models", &headers).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.header(header).parse().unwrap_or(0)
    }

    /// The shares of all routers of a tenant's tokens per minute, as the broker has them.
    pub(crate) async fn shares(&self, tenant: &str) -> Vec<u64> {
        let client = async_nats::connect(self.broker.url()).await.unwrap();
        let context = jetstream::new(client);
        let Ok(store) = context.get_key_value("splitrail-quotas").await else { return Vec::new() };
        let Ok(Some(bytes)) = store.get(format!("v1.{tenant}")).await else { return Vec::new() };
        let record: Value = serde_json::from_slice(&bytes).unwrap();
        let entries = record["replicas"].as_object().unwrap().values();
        entries.filter_map(|entry| entry["tokens_per_minute"]["share"].as_u64()).collect()
    }

    /// The ledger file of a router.
    pub(crate) fn ledger(&self, place: usize) -> PathBuf {
        self.folder.path().join(format!("r{place}.ledger.jsonl"))
    }
}

/// Milliseconds since a moment.
pub(crate) fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap()
}

/// A request of [`REQUEST`] tokens.
pub(crate) fn body(salt: u32) -> Value {
    let prompt = token_ids(u32::try_from(PROMPT).unwrap(), salt);
    json!({ "model": "sim", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0 })
}

/// Sends a body with a header `authorization`.
pub(crate) async fn post(
    client: &Client,
    authorization: &str,
    body: &Value,
) -> Result<Reply, Broken> {
    client.try_post_with(COMPLETIONS, &[("authorization", authorization)], body).await
}

/// A member of a reply's `usage`.
pub(crate) fn usage(reply: &Reply, pointer: &str) -> u64 {
    let body = reply.json();
    let value = body["usage"].pointer(pointer).and_then(Value::as_u64);
    value.unwrap_or_else(|| panic!("no {pointer} in {body}"))
}

/// Waits until a condition is true, for at most so many seconds.
pub(crate) async fn within(seconds: u64, what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < Duration::from_secs(seconds), "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
