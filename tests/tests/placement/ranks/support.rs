//! What these suites share.

use serde_json::Value;
use splitrail_fleet::ranks::rank_key;
use splitrail_sim::{RecordedRequest, SimConfig};
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Cluster, Reply, Trial};

/// Tokens per block.
pub(crate) const BLOCK: usize = 16;

/// Two ranks.
pub(crate) fn two(_: &str, config: &mut SimConfig) {
    config.data_parallel = 2;
}

/// Every worker as it is shown.
pub(crate) async fn workers(cluster: &Cluster) -> Vec<Value> {
    let shown = cluster.admin.get("/admin/workers").await.json();
    shown["workers"].as_array().unwrap().clone()
}

/// Waits until it is known of every worker how many ranks it has, whether they can be chosen,
/// and what they hold.
pub(crate) async fn known(cluster: &Cluster, pins: bool) {
    eventually("the ranks are known", async || {
        workers(cluster).await.iter().all(|worker| {
            let ranks = worker["ranks"].as_array().unwrap();
            let current = ranks.iter().all(|rank| rank["events_current"] == true);
            ranks.len() == 2 && current && worker["takes_rank_header"] == pins
        })
    })
    .await;
}

/// Blocks that the index holds of each rank of a worker.
pub(crate) fn indexed(cluster: &Cluster, worker: &str) -> Vec<usize> {
    let serving = cluster.running.core.serving();
    let pool = &serving.models[0].pool;
    let worker = pool.roster().named(worker).cloned().unwrap();
    let index = pool.index();
    let count = |rank| index.block_counts(rank_key(worker.index, rank)).iter().sum();
    (0..worker.ranks.count()).map(count).collect()
}

/// Waits until the index holds of each rank as much as that rank does.
pub(crate) async fn in_step(cluster: &Cluster) {
    for (name, engine) in &cluster.engines {
        eventually(&format!("the index of {name}'s ranks is in step"), async || {
            let ranks = 0..usize::from(engine.config().data_parallel);
            let held: Vec<_> = ranks.map(|rank| engine.rank_resident(rank).len()).collect();
            indexed(cluster, name) == held
        })
        .await;
    }
}

/// A prompt of 40 words that shares no block with another number's.
pub(crate) fn text(number: usize) -> String {
    prompt(40, &format!("n{number}-"))
}

/// Tokens of a prompt that is cached as far as any engine caches it.
pub(crate) fn whole_hit(prompt_tokens: usize) -> usize {
    (prompt_tokens - 1) / BLOCK * BLOCK
}

pub(crate) fn cached(reply: &Reply) -> usize {
    assert_eq!(reply.status, 200, "{}", reply.text());
    let details = &reply.json()["usage"]["prompt_tokens_details"];
    details["cached_tokens"].as_u64().unwrap_or_else(|| panic!("{}", reply.text())) as usize
}

/// Sends a prompt; gives its reply and its decision.
pub(crate) async fn ask(trial: &mut Trial, text: &str) -> (Reply, Value) {
    let reply = trial.post("ok", COMPLETIONS, &completion(text)).await;
    let decision = trial.cluster.decisions(reply.header("x-request-id")).await.remove(0);
    (reply, decision)
}

/// The requests that an engine got, but for the one by which it is asked whether it can be
/// told the rank.
pub(crate) fn served(trial: &Trial, engine: &str) -> Vec<RecordedRequest> {
    let asked = trial.asked(engine).into_iter();
    asked.filter(|request| request.body["prompt"] != "splitrail").collect()
}

/// The rank to which a request was pinned.
pub(crate) fn pinned(request: &RecordedRequest) -> Option<u32> {
    request.header("x-data-parallel-rank").map(|rank| rank.parse().unwrap())
}

/// Sends a prompt to a rank of an engine, past the router.
pub(crate) async fn direct(cluster: &Cluster, engine: &str, rank: &str, text: &str) {
    let client = splitrail_tests::Client::new(cluster.engine(engine).http_addr());
    let body = completion(text).to_string();
    let headers = [("content-type", "application/json"), ("x-data-parallel-rank", rank)];
    let reply = client.post_with(COMPLETIONS, &headers, body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}
