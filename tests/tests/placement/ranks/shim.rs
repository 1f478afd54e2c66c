//! The same through shims, as processes.

use serde_json::Value;
use splitrail_tests::Client;
use splitrail_tests::process_cluster::{Plan, ProcessCluster, ProcessKind};
use splitrail_tests::trial::{COMPLETIONS, completion};

use super::support::text;

const PROMPTS: usize = 8;

async fn hits(stand: &ProcessCluster, engine: &str) -> Vec<f64> {
    let at = stand.place(ProcessKind::Engine, engine);
    let metrics = Client::new(stand.posts[at].http).get("/metrics").await.text();
    let hits = |rank: usize| {
        let rank = format!("vllm:prefix_cache_hits_total{{engine=\"{rank}\",");
        let line = metrics.lines().find(|line| line.starts_with(&rank)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    vec![hits(0), hits(1)]
}

/// A shim gates the rank that the router has chosen, and its mirror of either is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_rank_behind_a_shim_is_gated_and_found_again() {
    let engine = ["--honour-threshold", "false", "--decode-us-per-step", "0"];
    let engine = engine.map(str::to_owned).to_vec();
    let model = "canary: { enabled: false }\ngate: { kind: shim }".to_owned();
    let plan =
        Plan { prefill: 1, decode: 2, routers: 1, ranks: 2, engine, model, ..Plan::default() };
    let mut stand = ProcessCluster::start(plan).await;
    let router = stand.posts[stand.of(ProcessKind::Router)[0]].http;
    let admin = Client::new(stand.posts[stand.of(ProcessKind::Router)[0]].admin);
    let client = Client::new(router);
    splitrail_tests::cluster::eventually("shims have told all", async || {
        let shown = admin.get("/admin/workers").await.json();
        let shown = shown["workers"].as_array().unwrap().clone();
        shown.iter().all(|worker| {
            worker["ranks"].as_array().unwrap().len() == 2 && worker["takes_rank_header"] == true
        })
    })
    .await;
    let send = async |number| {
        let reply = client.post(COMPLETIONS, &completion(&text(number))).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let route = ["gate", "try"].map(|key| reply.route(key).unwrap_or("-").to_owned());
        (route, reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].clone())
    };
    for number in 0..PROMPTS {
        send(number).await;
    }
    stand.true_picture("prompts have come").await;
    let before = [hits(&stand, "d0").await, hits(&stand, "d1").await].concat();
    for number in 0..PROMPTS {
        let (route, cached) = send(number).await;
        assert_eq!(route, ["shim", "served"], "{number}");
        let tokens = text(number).len() as u64;
        assert_eq!(cached, Value::from((tokens - 1) / 16 * 16));
    }
    let after = [hits(&stand, "d0").await, hits(&stand, "d1").await].concat();
    let found: f64 = after.iter().zip(&before).map(|(after, before)| after - before).sum();
    let expected: usize = (0..PROMPTS).map(|number| (text(number).len() - 1) / 16 * 16).sum();
    assert_eq!(found, expected as f64, "{before:?} {after:?}");
    // A new engine has none of it, on any rank.
    let at = stand.place(ProcessKind::Engine, "d0");
    stand.kill(at);
    stand.run(at).await;
    stand.true_picture("an engine was killed").await;
}
