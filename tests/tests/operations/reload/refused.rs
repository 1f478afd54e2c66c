//! A change that cannot be applied is refused with its place and changes nothing.

use std::sync::Arc;

use serde_json::{Value, json};
use splitrail_router::reload::ReloadError;
use splitrail_tests::{Cluster, Spec};

use super::support::{but, served};

/// A reload that must be refused and change nothing; gives its problems.
async fn refused(cluster: &Cluster, yaml: &str) -> Vec<Value> {
    let core = &cluster.running.core;
    let (serving, roster) = (core.serving(), core.serving().models[0].pool.roster());
    let shown = cluster.admin.get("/admin/config").await.text();
    let reply = cluster.reload(yaml).await;
    assert_eq!(reply.status, 422, "{}", reply.text());
    assert!(Arc::ptr_eq(&serving, &core.serving()));
    assert!(Arc::ptr_eq(&roster, &core.serving().models[0].pool.roster()));
    assert_eq!(cluster.admin.get("/admin/config").await.text(), shown);
    served(cluster, "still served").await;
    reply.json()["problems"].as_array().unwrap().clone()
}

/// The line in which a text is, from 1.
fn line(yaml: &str, text: &str) -> usize {
    1 + yaml.lines().position(|line| line.contains(text)).unwrap()
}

#[tokio::test]
async fn changes_that_need_a_restart_are_refused_with_their_place() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let yaml = but(&cluster.yaml, "hash_seed: 7", "hash_seed: 8\nrng_seed: 1");
    let yaml = but(&yaml, "grpc: 127.0.0.1:0, ", "");
    let yaml = but(&yaml, "limits: {", "limits: { in_flight_max: 9, n_max: 1,");
    let problems = refused(&cluster, &yaml).await;
    let told: Vec<_> = problems
        .iter()
        .map(|problem| {
            (problem["line"].as_u64().unwrap() as usize, problem["message"].as_str().unwrap())
        })
        .collect();
    let said = |key: &str| format!("`{key}` cannot change while the router runs");
    let wanted = [
        (line(&yaml, "listen:"), said("listen.grpc")),
        (line(&yaml, "hash_seed"), said("hash_seed")),
        (line(&yaml, "rng_seed"), said("rng_seed")),
        (line(&yaml, "limits:"), said("limits.in_flight_max")),
    ];
    let wanted: Vec<_> = wanted.iter().map(|(line, message)| (*line, message.as_str())).collect();
    assert_eq!(told, wanted);
    assert!(problems.iter().all(|problem| problem["hint"].as_str().unwrap().contains("restart")));
}

#[tokio::test]
async fn mistakes_and_missing_files_are_refused_with_their_places() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let key = "    engine_api_key: { kind: file, path: no.key }\n    workers:\n";
    for (yaml, at, said) in [
        (but(&cluster.yaml, "flow: aggregated", "flow: agregated"), "flow:", "cannot be"),
        (but(&cluster.yaml, "    workers:\n", key), "engine_api_key", "cannot be read"),
        (
            but(&cluster.yaml, "kind: huggingface, path: \"", "kind: huggingface, path: \"/no"),
            "tokenizer:",
            "does not exist",
        ),
        (format!("{}x: [", cluster.yaml), "x: [", ""),
    ] {
        let problems = refused(&cluster, &yaml).await;
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0]["line"].as_u64().unwrap() as usize >= line(&yaml, at), "{problems:?}");
        assert!(problems[0]["message"].as_str().unwrap().contains(said), "{problems:?}");
    }
    // One that only its loader finds.
    std::fs::write(cluster.files.path().join("tokenizer.json"), "{}").unwrap();
    let problems = refused(&cluster, &cluster.yaml).await;
    assert_eq!(problems[0]["line"], line(&cluster.yaml, "tokenizer:"));
    std::fs::remove_file(cluster.files.path().join("splitrail.yaml")).unwrap();
    let gone = cluster.admin.post_with("/admin/reload", &[], "").await;
    assert_eq!((gone.status.as_u16(), &gone.json()["problems"][0]["line"]), (422, &json!(1)));
    assert!(cluster.metric("splitrail_reloads_total", &[("result", "refused")]).await >= 6.0);
}

#[tokio::test]
async fn nothing_is_reloaded_while_draining_or_without_a_file() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let yaml = but(&cluster.yaml, "    workers:\n", "    lease: 9s\n    workers:\n");
    cluster.running.core.drain();
    let reply = cluster.reload(&yaml).await;
    assert_eq!(reply.status, 503, "{}", reply.text());
    assert!(matches!(cluster.running.reload.now().await, Err(ReloadError::Draining)));
    // No configuration is at fault, so nothing tells operators that one is.
    let refused = [("result", "refused")];
    assert_eq!(cluster.metric("splitrail_reloads_total", &refused).await, 0.0);

    let yaml = "listen: { http: 127.0.0.1:0, admin: 127.0.0.1:0 }
models: [ { name: m, flow: aggregated, tokenizer: { kind: none },
            workers: [ { id: w, role: both, url: \"http://127.0.0.1:1\" } ] } ]";
    let folder = tempfile::tempdir().unwrap();
    let config = splitrail_config::parse("x.yaml", yaml, folder.path()).unwrap().config;
    let listen = config.listen.clone();
    let core = splitrail_router::assemble::assemble(config, None).unwrap();
    let running = splitrail_router::run::Running::start(core, &listen).await.unwrap();
    assert!(matches!(running.reload.now().await, Err(ReloadError::NoFile)));
}
