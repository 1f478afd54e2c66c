//! The real binary, reloaded by SIGHUP again and again while clients keep it busy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use splitrail_sim::write_tokenizer;
use splitrail_sim::{Role, SimConfig, SimEngine};
use splitrail_tests::Client;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::process::Process;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use tokio::task::JoinSet;

const RELOADS: usize = 50;
const CLIENTS: usize = 6;

/// The file of a turn: workers come and go, policies, timeouts and pools change.
fn yaml(turn: usize, engines: &[(String, SimEngine)]) -> String {
    let workers: String = engines
        .iter()
        .filter(|(name, _)| !(turn % 3 == 1 && name == "p1" || turn % 4 == 2 && name == "d1"))
        .map(|(name, engine)| {
            let role = if name.starts_with('p') { "prefill" } else { "decode" };
            let (events, replay) =
                (engine.kv_events_endpoint().unwrap(), engine.kv_replay_endpoint().unwrap());
            format!(
                "      - {{ id: {name}, role: {role}, url: \"{}\", kv_events: \"{events}\", kv_replay: \"{replay}\" }}\n",
                engine.url()
            )
        })
        .collect();
    let policy = ["kv_overlap", "least_loaded", "round_robin"][turn % 3];
    let flow = ["prefill_first", "decode_first"][turn / 2 % 2];
    // Another `blocks_max` makes another pool.
    let blocks_max = 1000 + turn / 5;
    format!(
        "listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
limits: {{ drain_delay: 1ms, n_max: {} }}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: huggingface, path: . }}
    flow: {flow}
    connector: nixl
    policy: {{ kind: {policy} }}
    speculative_index: {{ blocks_max: {blocks_max} }}
    timeouts: {{ connect: {}ms }}
    workers:
{workers}",
        100 + turn,
        1500 + turn % 2
    )
}

async fn client(http: Client, place: usize, stop: Arc<AtomicBool>, done: Arc<AtomicUsize>) {
    for turn in 0.. {
        if stop.load(Relaxed) {
            return;
        }
        // Some share their beginnings, most do not.
        let salt = if turn % 3 == 0 { "shared".into() } else { format!("{place}x{turn}y") };
        let mut body = completion(&prompt(24, &salt));
        if turn % 2 == 0 {
            body["stream"] = true.into();
            let mut events = http.stream(COMPLETIONS, &body).await;
            assert_eq!(events.status, 200);
            assert!(!events.chunks().await.is_empty());
        } else {
            let reply = http.post(COMPLETIONS, &body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
        done.fetch_add(1, Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_reloads_by_sighup_under_load_fail_no_request() {
    let mut engines = Vec::new();
    for (name, role) in
        [("p0", Role::Prefill), ("p1", Role::Prefill), ("d0", Role::Decode), ("d1", Role::Decode)]
    {
        let config = SimConfig { role, ..SimConfig::default() };
        engines.push((name.to_owned(), SimEngine::start(config).await.unwrap()));
    }
    let folder = tempfile::tempdir().unwrap();
    write_tokenizer(folder.path()).unwrap();
    let file = folder.path().join("splitrail.yaml");
    std::fs::write(&file, yaml(0, &engines)).unwrap();
    let args = ["serve", "--config", file.to_str().unwrap()].map(str::to_owned);
    let router = Process::start("router", folder.path(), &args).await;
    let (http, admin) = (router.client("http"), router.client("admin"));
    eventually("it is ready", async || http.get("/ready").await.status == 200).await;

    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut clients = JoinSet::new();
    for place in 0..CLIENTS {
        clients.spawn(client(router.client("http"), place, Arc::clone(&stop), Arc::clone(&done)));
    }
    for turn in 1..=RELOADS {
        std::fs::write(&file, yaml(turn, &engines)).unwrap();
        router.hang_up();
        let before = done.load(Relaxed);
        eventually("the file is taken over and requests go on", async || {
            assert_eq!(http.get("/ready").await.status, 200, "turn {turn}: {}", router.log());
            let scrape = admin.get("/metrics").await.text();
            let taken = metric_in(&scrape, "splitrail_reloads_total", &[("result", "changed")]);
            taken >= turn as f64 && done.load(Relaxed) > before
        })
        .await;
    }
    stop.store(true, Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended.expect("no request fails");
    }
    let scrape = admin.get("/metrics").await.text();
    let (all, ok) = (
        metric_in(&scrape, "splitrail_requests_total", &[]),
        metric_in(&scrape, "splitrail_requests_total", &[("outcome", "ok")]),
    );
    assert_eq!((all, ok), (ok, done.load(Relaxed) as f64));
    assert_eq!(metric_in(&scrape, "splitrail_reloads_total", &[("result", "refused")]), 0.0);
    std::fs::write(&file, "models: [").unwrap();
    router.hang_up();
    eventually("a broken file is refused", async || {
        let scrape = admin.get("/metrics").await.text();
        metric_in(&scrape, "splitrail_reloads_total", &[("result", "refused")]) == 1.0
    })
    .await;
    eventually("the refusal is logged", async || router.log().contains("reload refused")).await;
    let log = router.log();
    assert!(log.contains("splitrail.yaml:2:1 "), "it says where: {log}");
    assert!(log.contains("models[sim].policy.kind"), "it says what changed: {log}");
}
