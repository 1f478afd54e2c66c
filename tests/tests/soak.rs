//! Random network faults between a router process and its engines, under load. A seed chooses among
//! latency, resets, truncated replies, black holes and partitions that lose KV events. In any case
//! every request ends, no reply is wrong, requests fail only because of a fault, and memory,
//! descriptors and metric series stay flat.
//!
//! `SPLITRAIL_SOAK_S` says for how many seconds (10 without it), `SPLITRAIL_SOAK_SEED` repeats a
//! run; the seed is printed. An hour:
//!
//!     SPLITRAIL_SOAK_S=3600 cargo test -p splitrail-tests --test soak -- --nocapture
#![allow(missing_docs, clippy::unwrap_used)]

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use splitrail_sim::write_tokenizer;
use splitrail_sim::{Role, SimConfig, SimEngine};
use splitrail_tests::Client;
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::fault_proxy::{FaultProxy, Hits, Schedule};
use splitrail_tests::proc::{memory, open_files};
use splitrail_tests::process_cluster::digest;
use splitrail_tests::traffic::Traffic;
use tempfile::TempDir;
use tokio::time::timeout;

/// Clients that ask one request after the other.
const CLIENTS: usize = 16;
/// Different prompts: more KV blocks than an engine holds, so that blocks come and go.
const PROMPTS: usize = 96;
/// KV blocks of an engine.
const KV_BLOCKS: u32 = 700;
/// Rounds after which memory and series are taken as those of a router that has been in use.
const WARM_ROUNDS: usize = 2;
/// What memory may grow by after that, in KiB. A leak of 24 bytes a request is more in an hour.
const GROWTH_MAX_KIB: u64 = 16 << 10;
/// Descriptors that more connections kept for reuse may take.
const FILES_GROWTH_MAX: usize = 2 * CLIENTS;
/// Metric series that faults may add which had not happened before, their histograms' among them.
const SERIES_GROWTH_MAX: usize = 200;
/// Of the requests that a fault hits before their answer begins, one in so many may fail: the
/// others must be served by another worker.
const RESCUED_BUT_ONE_IN: u64 = 5;
/// How long an index may take to agree with its engine, while nothing else happens.
const PATIENCE: Duration = Duration::from_secs(60);
/// Lines of the router's log that a failure shows.
const LOG_LINES: usize = 40;
/// Further failures that a short run may have by chance: two faults on one request.
const CHANCE: u64 = 4;

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

/// An engine, behind a proxy for requests and one for KV events.
struct Worker {
    id: &'static str,
    engine: SimEngine,
    http: FaultProxy,
    events: FaultProxy,
}

impl Worker {
    async fn start(id: &'static str, role: Role, schedule: Schedule) -> Self {
        let config =
            SimConfig { role, kv_blocks: KV_BLOCKS, lease_ms: 6_000, ..SimConfig::default() };
        let engine = SimEngine::start(config).await.unwrap();
        let events = engine.kv_events_endpoint().unwrap().strip_prefix("tcp://").unwrap();
        let events = FaultProxy::start(events.parse().unwrap(), None).await;
        let http = FaultProxy::start(engine.http_addr(), Some(schedule)).await;
        Self { id, engine, http, events }
    }

    /// The worker as a YAML item, at its proxies' addresses.
    fn yaml(&self) -> String {
        let role = if self.id.starts_with('p') { "prefill" } else { "decode" };
        format!(
            "{{ id: {}, role: {role}, url: \"http://{}\", kv_events: \"tcp://{}\", \
             kv_replay: \"{}\" }}",
            self.id,
            self.http.address(),
            self.events.address(),
            self.engine.kv_replay_endpoint().unwrap(),
        )
    }
}

/// What must stay flat.
#[derive(Clone, Copy, Debug)]
struct Sample {
    rss_kib: u64,
    files: usize,
    series: usize,
}

struct Soak {
    workers: Vec<Worker>,
    router: RouterProcess,
    admin: Client,
    log: PathBuf,
    _files: TempDir,
}

impl Soak {
    async fn start(seed: u64) -> Self {
        let mut workers = Vec::new();
        let roles = [("p0", Role::Prefill), ("p1", Role::Prefill)];
        let roles = roles.into_iter().chain([("d0", Role::Decode), ("d1", Role::Decode)]);
        for ((id, role), link) in roles.zip(0..) {
            workers.push(Worker::start(id, role, Schedule { seed, link }).await);
        }
        let files = tempfile::tempdir().unwrap();
        write_tokenizer(files.path()).unwrap();
        let mut yaml = "listen: { http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }
models:
  - name: sim
    block_size: 16
    tokenizer: { kind: huggingface, path: . }
    flow: prefill_first
    connector: nixl
    policy: { kind: kv_overlap }
    canary: { enabled: false }
    breaker: { cooldown: 500ms }
    health: { probe_interval: 250ms, probe_timeout: 1s }
    timeouts: { connect: 1s, prefill: 3s, first_token: 3s, reply: 5s, stream_idle: 3s }
    workers:
"
        .to_owned();
        for worker in &workers {
            writeln!(yaml, "      - {}", worker.yaml()).unwrap();
        }
        let log = files.path().join("router.log");
        let router = RouterProcess::serve(files.path(), &yaml, &[], &log).await;
        let (http, admin) = (Client::new(router.http), Client::new(router.admin));
        eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
        Self { workers, router, admin, log, _files: files }
    }

    /// Cuts one worker off, its KV events or all of it, for the middle of a round.
    async fn partition(&self, rng: &mut StdRng, round: Duration) {
        let worker = &self.workers[rng.random_range(0..self.workers.len())];
        let is_whole = rng.random_bool(0.5);
        tokio::time::sleep(round / 4).await;
        worker.events.partition(true);
        worker.http.partition(is_whole);
        tokio::time::sleep(round / 2).await;
        worker.events.partition(false);
        worker.http.partition(false);
        tokio::time::sleep(round / 4).await;
    }

    /// Waits until nothing is under way, booked or staged, and the index holds of each worker
    /// exactly what its engine holds.
    async fn recovered(&self, when: &str) {
        let nothing = |page: &str, name: &str| metric_in(page, name, &[]) == 0.0;
        eventually(&format!("{when}: nothing is under way or booked"), async || {
            let page = self.admin.get("/metrics").await.text();
            nothing(&page, "splitrail_requests_in_flight")
                && nothing(&page, "splitrail_worker_requests")
                && nothing(&page, "splitrail_worker_prefill_tokens")
        })
        .await;
        for worker in &self.workers {
            let id = worker.id;
            eventually(&format!("{when}: {id} holds nothing for a request"), async || {
                let state = worker.engine.state();
                (state.running, state.waiting, state.staged_hand_offs, state.blocks_pinned)
                    == (0, 0, 0, 0)
            })
            .await;
            let agrees = timeout(PATIENCE, async {
                while !self.agrees(worker).await {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            });
            if agrees.await.is_err() {
                panic!(
                    "{when}: the index does not agree with {id}: {}",
                    self.differs(worker).await
                );
            }
        }
    }

    /// What could explain that the index does not agree with an engine.
    async fn differs(&self, worker: &Worker) -> String {
        let page = self.admin.get("/metrics").await.text();
        let of_index =
            |line: &&str| line.starts_with("splitrail_index_") && line.contains(worker.id);
        let metrics: Vec<_> = page.lines().filter(of_index).collect();
        let log = std::fs::read_to_string(&self.log).unwrap();
        let log: Vec<_> = log.lines().filter(|line| line.contains(worker.id)).collect();
        let last = log.len().saturating_sub(LOG_LINES);
        let held = worker.engine.resident().len();
        format!("it holds {held} blocks\n{}\n{}", metrics.join("\n"), log[last..].join("\n"))
    }

    async fn agrees(&self, worker: &Worker) -> bool {
        let held: Vec<u64> = worker.engine.resident().into_iter().map(|(name, _)| name).collect();
        let index = self.admin.get(&format!("/admin/workers/{}/index", worker.id)).await;
        let rank = &index.json()["ranks"][0];
        let expected = match held.len() {
            0 => Value::Null,
            names => json!([names, format!("{:016x}", digest(held))]),
        };
        match rank["names"] {
            Value::Null => expected.is_null(),
            _ => expected == json!([rank["names"], rank["digest"]]),
        }
    }

    async fn sample(&self) -> Sample {
        let page = self.admin.get("/metrics").await.text();
        Sample {
            rss_kib: memory(self.router.pid()).now_kib,
            files: open_files(self.router.pid()),
            series: page.lines().filter(|line| !line.starts_with('#')).count(),
        }
    }

    fn hits(&self) -> Hits {
        self.workers.iter().map(|worker| worker.http.hits()).fold(Hits::default(), |sum, hits| {
            Hits {
                before_answer: sum.before_answer + hits.before_answer,
                in_answer: sum.in_answer + hits.in_answer,
            }
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_fail_only_where_a_fault_explains_it_and_nothing_grows() {
    let total = Duration::from_secs(setting("SPLITRAIL_SOAK_S").unwrap_or(10));
    let seed = setting("SPLITRAIL_SOAK_SEED").unwrap_or_else(rand::random);
    run(seed, total).await;
}

/// What it prints is shown where the test fails.
#[allow(clippy::print_stderr)]
async fn run(seed: u64, total: Duration) {
    eprintln!("SPLITRAIL_SOAK_SEED={seed} SPLITRAIL_SOAK_S={}", total.as_secs());
    let soak = Soak::start(seed).await;
    let routers: [SocketAddr; 1] = [soak.router.http];
    let traffic = Traffic::with_prompts(PROMPTS, &routers, CLIENTS, seed).await;
    let mut rng = StdRng::seed_from_u64(seed);
    let round = (total / 5).clamp(Duration::from_secs(2), Duration::from_secs(20));
    let (started, mut samples) = (Instant::now(), Vec::new());
    while started.elapsed() < total || samples.len() <= WARM_ROUNDS {
        traffic.go_on();
        soak.partition(&mut rng, round).await;
        traffic.pause().await;
        traffic.check();
        soak.recovered(&format!("round {}", samples.len())).await;
        let sample = soak.sample().await;
        eprintln!(
            "{:5} s {sample:?} {:?} {} right, {} failed",
            started.elapsed().as_secs(),
            soak.hits(),
            traffic.tally.right.load(Relaxed),
            traffic.tally.told.load(Relaxed),
        );
        samples.push(sample);
    }
    let log = std::fs::read_to_string(&soak.log).unwrap();
    assert!(!log.contains("panicked"), "{log}");
    within_budget(&traffic, soak.hits());
    flat(&samples);
}

/// A fault in an answer may cost that request. One before it costs another worker's time.
fn within_budget(traffic: &Traffic, hits: Hits) {
    let tally = &traffic.tally;
    let (right, failed) = (tally.right.load(Relaxed), tally.told.load(Relaxed));
    assert_eq!(tally.broken.load(Relaxed), 0, "connections of clients that the router broke");
    let allowed = hits.in_answer + hits.before_answer / RESCUED_BUT_ONE_IN + CHANCE;
    let reasons = tally.first_failures.lock().unwrap();
    assert!(failed <= allowed, "{failed} of {right} failed, {hits:?}: {reasons:#?}");
    assert!(right > 100 && hits.before_answer > 0, "{right} right answers, {hits:?}");
}

fn flat(samples: &[Sample]) {
    let (warm, later) = samples.split_at(WARM_ROUNDS);
    let (warm, last) = (warm[WARM_ROUNDS - 1], later[later.len() - 1]);
    let grown_kib = last.rss_kib.saturating_sub(warm.rss_kib);
    assert!(grown_kib <= GROWTH_MAX_KIB, "memory grew by {grown_kib} KiB: {samples:#?}");
    assert!(last.files <= warm.files + FILES_GROWTH_MAX, "descriptors: {samples:#?}");
    assert!(last.series <= warm.series + SERIES_GROWTH_MAX, "series: {samples:#?}");
}
