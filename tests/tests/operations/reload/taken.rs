//! What a reload takes over, and what it leaves as it is.

use std::sync::Arc;

use serde_json::{Value, json};
use splitrail_sim::{SimConfig, SimEngine};
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Cluster, Spec};

use super::support::{but, served, taken, without};

#[tokio::test]
async fn an_unchanged_file_changes_nothing() {
    let cluster = Cluster::start(Spec::default()).await;
    let before = cluster.running.core.serving();
    let report = taken(&cluster, &format!("# A comment.\n{}", cluster.yaml)).await;
    assert_eq!((&report["result"], &report["changes"]), (&json!("unchanged"), &json!([])));
    let after = cluster.running.core.serving();
    assert!(Arc::ptr_eq(&before.models[0], &after.models[0]));
    assert_eq!(cluster.metric("splitrail_reloads_total", &[("result", "unchanged")]).await, 1.0);
}

#[tokio::test]
async fn a_changed_policy_keeps_index_and_workers() {
    let cluster = Cluster::start(Spec::aggregated(2)).await;
    for turn in 0..4 {
        served(&cluster, &format!("a{turn}")).await;
    }
    cluster.settle().await;
    let before = cluster.running.core.serving().models[0].clone();
    let held = cluster.metric("splitrail_index_blocks", &[]).await;
    assert!(held > 0.0);
    let yaml = but(&cluster.yaml, "kind: kv_overlap", "kind: kv_overlap, load_weight: 2.5");
    let report = taken(&cluster, &yaml).await;
    let change = json!({"path": "models[sim].policy.load_weight", "old": 1.0, "new": 2.5});
    assert_eq!(report["changes"], json!([change]));
    let after = cluster.running.core.serving().models[0].clone();
    assert!(!Arc::ptr_eq(&before, &after));
    // At once, not some time later: nothing was forgotten and read again.
    assert_eq!(cluster.metric("splitrail_index_blocks", &[]).await, held);
    assert_eq!(before.pool.roster().iter().count(), after.pool.roster().iter().count());
    for (was, is) in before.pool.roster().iter().zip(after.pool.roster().iter()) {
        assert!(Arc::ptr_eq(was, is) && is.events_are_current());
    }
    let tokenizer = |served: &splitrail_fleet::ServedModel| served.prompt.clone().unwrap();
    assert!(Arc::ptr_eq(&tokenizer(&before), &tokenizer(&after)));
    // The index still follows: what is computed from now on gets there.
    served(&cluster, "b").await;
    cluster.settle().await;
}

#[tokio::test]
async fn workers_come_go_and_change_by_name() {
    let cluster = Cluster::start(Spec::aggregated(3)).await;
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let number = |id: &str| {
        let roster = cluster.running.core.serving().models[0].pool.roster();
        roster.named(id).map(|worker| worker.index)
    };
    let before = ["w0", "w1", "w2"].map(number);
    let yaml = without(&cluster.yaml, "id: w1,");
    let yaml = but(&yaml, cluster.engine("w2").url().as_str(), &engine.url());
    let new = "      - { id: w3, role: both, url: \"http://127.0.0.1:1\" }\n";
    let report = taken(&cluster, &format!("{yaml}{new}")).await;
    let worker = |id| json!([{"model": "sim", "id": id}]);
    let workers = &report["workers"];
    assert_eq!(workers["added"], worker("w3"));
    assert_eq!(workers["removed"], worker("w1"));
    assert_eq!(workers["changed"], worker("w2"));
    let after = ["w0", "w1", "w2"].map(number);
    assert_eq!((after[0], after[1]), (before[0], None));
    assert!(after[2] > before[2], "another engine is another worker");
    let scrape = cluster.admin.get("/metrics").await.text();
    assert!(!scrape.contains("worker=\"w1\""), "{scrape}");
    // The other way round, and all is as it was.
    taken(&cluster, &cluster.yaml).await;
    served(&cluster, "a").await;
    cluster.settle().await;
}

#[tokio::test]
async fn a_worker_under_another_name_is_there_by_that() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    taken(&cluster, &but(&cluster.yaml, "id: w0", "id: other")).await;
    assert_eq!(served(&cluster, "a").await, "other");
    let scrape = cluster.admin.get("/metrics").await.text();
    assert!(scrape.contains("worker=\"other\"") && !scrape.contains("worker=\"w0\""), "{scrape}");
}

#[tokio::test]
async fn a_drain_and_an_operators_worker_outlive_a_reload() {
    let cluster = Cluster::start(Spec::aggregated(2)).await;
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let new = json!({"worker": {"id": "extra", "role": "both", "url": engine.url()}}).to_string();
    let headers = [("content-type", "application/json")];
    assert_eq!(cluster.admin.post_with("/admin/workers", &headers, new).await.status, 201);
    for id in ["w0", "w1"] {
        let path = format!("/admin/workers/{id}/drain");
        assert_eq!(cluster.admin.post_with(&path, &[], "").await.status, 200);
    }
    // One keeps its pool, the other makes a new one.
    for model in ["    lease: 9s\n", "    speculative_index: { blocks_max: 999 }\n"] {
        let yaml = but(&cluster.yaml, "    workers:\n", &format!("{model}    workers:\n"));
        taken(&cluster, &yaml).await;
        for turn in 0..3 {
            assert_eq!(served(&cluster, &format!("{model}{turn}")).await, "extra");
        }
    }
}

#[tokio::test]
async fn models_come_and_go_while_their_requests_go_on() {
    let spec =
        Spec { engine: |_, config| config.decode_us_per_step = 2_000, ..Spec::aggregated(1) };
    let cluster = Cluster::start(spec).await;
    let mut body = completion(&prompt(8, "a"));
    body["max_tokens"] = 200.into();
    body["stream"] = true.into();
    let mut events = cluster.http.stream(COMPLETIONS, &body).await;
    events.next().await.unwrap();
    let yaml = but(&cluster.yaml, "name: sim", "name: other");
    let report = taken(&cluster, &yaml).await;
    let workers = &report["workers"];
    assert_eq!(workers["removed"], json!([{"model": "sim", "id": "w0"}]));
    assert_eq!(workers["added"], json!([{"model": "other", "id": "w0"}]));
    assert_eq!(cluster.http.post(COMPLETIONS, &completion("b")).await.status, 404);
    let names: Vec<Value> = cluster.http.get("/v1/models").await.json()["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["id"].clone())
        .collect();
    assert_eq!(names, ["default", "other"]);
    assert!(events.chunks().await.len() > 100);
    let scrape = cluster.admin.get("/metrics").await.text();
    assert!(!scrape.contains("splitrail_worker_up{model=\"sim\""), "{scrape}");
}

#[tokio::test]
async fn another_block_size_makes_another_index_and_is_ready_all_the_while() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    served(&cluster, "a").await;
    cluster.settle().await;
    let yaml = but(&cluster.yaml, "block_size: 16", "block_size: auto");
    taken(&cluster, &yaml).await;
    served(&cluster, "b").await;
    // The engine says it again, and all that it holds is read again.
    cluster.settle().await;
    taken(&cluster, &cluster.yaml).await;
    assert_eq!(cluster.http.get("/ready").await.status, 200);
    cluster.settle().await;
}

#[tokio::test]
async fn a_replaced_pool_is_freed_with_the_last_request_that_uses_it() {
    let spec =
        Spec { engine: |_, config| config.decode_us_per_step = 10_000, ..Spec::aggregated(1) };
    let cluster = Cluster::start(spec).await;
    let mut body = completion(&prompt(8, "a"));
    body["max_tokens"] = 200.into();
    body["stream"] = true.into();
    let mut events = cluster.http.stream(COMPLETIONS, &body).await;
    events.next().await.unwrap();
    let before = {
        let served = cluster.running.core.serving().models[0].clone();
        Arc::downgrade(&served.pool)
    };
    let yaml = but(&cluster.yaml, "block_size: 16", "block_size: auto");
    taken(&cluster, &yaml).await;
    assert!(before.upgrade().is_some(), "the stream under way has it");
    assert!(events.chunks().await.len() > 100);
    eventually("nothing holds the index before", async || before.upgrade().is_none()).await;
}

#[tokio::test]
async fn reloads_at_once_are_done_one_after_the_other() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let yaml = but(&cluster.yaml, "kind: kv_overlap", "kind: round_robin");
    std::fs::write(cluster.files.path().join("splitrail.yaml"), yaml).unwrap();
    let ask = || async { cluster.admin.post_with("/admin/reload", &[], "").await };
    let replies = tokio::join!(ask(), ask(), ask(), ask());
    let mut results = [replies.0, replies.1, replies.2, replies.3].map(|reply| {
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()["result"].as_str().unwrap().to_owned()
    });
    results.sort();
    assert_eq!(results, ["changed", "unchanged", "unchanged", "unchanged"]);
}

#[tokio::test]
async fn breakers_and_limits_are_those_of_the_file() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let mut body = completion(&prompt(4, "a"));
    body["n"] = 3.into();
    assert_eq!(cluster.http.post(COMPLETIONS, &body).await.status, 200);
    let yaml = but(&cluster.yaml, "limits: {", "limits: { n_max: 2, decisions_kept: 1,");
    taken(&cluster, &yaml).await;
    assert_eq!(cluster.http.post(COMPLETIONS, &body).await.status, 400);
    for turn in 0..3 {
        served(&cluster, &format!("b{turn}")).await;
    }
    let kept = cluster.admin.get("/admin/decisions").await.json();
    assert_eq!(kept["decisions"].as_array().unwrap().len(), 1);
    let yaml = but(&yaml, "    workers:\n", "    breaker: { failures: 1 }\n    workers:\n");
    let worker = cluster.running.core.serving().models[0].pool.roster().named("w0").cloned();
    taken(&cluster, &yaml).await;
    let breaker = worker.as_ref().unwrap().breaker(splitrail_policy::Leg::Decode);
    assert!(breaker.fail(std::time::Instant::now()), "one failure opens it now");
}

#[tokio::test]
async fn another_content_of_the_salt_key_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("salt.key");
    std::fs::write(&file, "first-secret").unwrap();
    let top = format!("cache_salt_key: {{ kind: file, path: {file:?} }}");
    let cluster = Cluster::start(Spec { top, ..Spec::aggregated(1) }).await;
    let renewed = async || taken(&cluster, &cluster.yaml).await["renewed"].clone();
    assert_eq!(renewed().await, json!([]));
    std::fs::write(&file, "second-secret").unwrap();
    assert_eq!(renewed().await, json!(["cache_salt_key"]));
    assert_eq!(renewed().await, json!([]), "it is in use now");
}

#[tokio::test]
async fn an_engine_key_can_be_rotated_while_requests_run() {
    let keys = tempfile::tempdir().unwrap();
    let file = keys.path().join("engine.key");
    std::fs::write(&file, "first-key").unwrap();
    let spec = Spec {
        model: format!("engine_api_key: {{ kind: file, path: {:?} }}", file.display().to_string()),
        engine: |_, config| config.decode_us_per_step = 2_000,
        ..Spec::aggregated(1)
    };
    let cluster = Cluster::start(spec).await;
    let mut body = completion(&prompt(8, "a"));
    body["max_tokens"] = 200.into();
    body["stream"] = true.into();
    let mut events = cluster.http.stream(COMPLETIONS, &body).await;
    events.next().await.unwrap();
    std::fs::write(&file, "second-key\n").unwrap();
    let report = taken(&cluster, &cluster.yaml).await;
    assert_eq!(report["changes"], json!([]));
    assert_eq!(report["renewed"], json!(["models[sim].engine_api_key"]));
    assert!(!report.to_string().contains("-key\""), "{report}");
    served(&cluster, "b").await;
    let keys: Vec<_> = cluster
        .engine("w0")
        .requests()
        .iter()
        .filter(|request| request.path == COMPLETIONS)
        .map(|request| request.header("authorization").unwrap().to_owned())
        .collect();
    assert_eq!(keys, ["Bearer first-key", "Bearer second-key"]);
    assert!(events.chunks().await.len() > 100, "the stream under way goes on");
    // Whoever asks for its load uses the new one as well.
    eventually("the load is asked for again", async || seen_up(&cluster).await).await;
}

async fn seen_up(cluster: &Cluster) -> bool {
    cluster.admin.get("/admin/workers").await.json()["workers"][0]["up"] == true
}

#[tokio::test]
async fn a_tokenizers_files_are_read_again_if_they_changed() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let tokenizer = || cluster.running.core.serving().models[0].prompt.clone().unwrap();
    let before = tokenizer();
    let file = cluster.files.path().join("tokenizer_config.json");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("{text}\n")).unwrap();
    let report = taken(&cluster, &cluster.yaml).await;
    assert_eq!(report["renewed"], json!(["models[sim].tokenizer"]));
    assert!(!Arc::ptr_eq(&before, &tokenizer()));
    served(&cluster, "a").await;
}
