//! The admin listener: what it shows, what an operator may change there, and who may.

use std::path::Path;

use serde_json::{Value, json};
use splitrail_router::assemble::assemble;
use splitrail_router::run::Running;
use splitrail_sim::{SimConfig, SimEngine};
use splitrail_tests::client::Reply;
use splitrail_tests::cluster::eventually;
use splitrail_tests::ports::HeldPort;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Client, Cluster, Spec};
use tokio::task::JoinSet;

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

async fn add(admin: &Client, body: &Value) -> Reply {
    admin.post_with("/admin/workers", &JSON, body.to_string()).await
}

fn worker(id: &str, engine: &SimEngine) -> Value {
    json!({
        "id": id, "role": "both", "url": engine.url(),
        "kv_events": engine.kv_events_endpoint(), "kv_replay": engine.kv_replay_endpoint(),
    })
}

/// The worker of a name in `/admin/workers`.
async fn seen(admin: &Client, id: &str) -> Option<Value> {
    let all = admin.get("/admin/workers").await.json();
    all["workers"].as_array().unwrap().iter().find(|worker| worker["id"] == id).cloned()
}

async fn served_by(http: &Client, salt: &str) -> String {
    let reply = http.post(COMPLETIONS, &completion(&prompt(8, salt))).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.route("decode").unwrap().to_owned()
}

#[tokio::test]
async fn a_worker_joins_serves_is_drained_and_leaves() {
    let spec = Spec { policy: "{ kind: round_robin }", ..Spec::aggregated(1) };
    let cluster = Cluster::start(spec).await;
    let (http, admin) = (&cluster.http, &cluster.admin);
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let added = add(admin, &json!({"worker": worker("extra", &engine)})).await;
    assert_eq!(added.status, 201, "{}", added.text());
    assert_eq!(added.json()["worker"]["sources"], json!(["admin"]));
    // What is said again changes nothing.
    let again = add(admin, &json!({"model": "sim", "worker": worker("extra", &engine)})).await;
    assert_eq!((again.status.as_u16(), seen(admin, "extra").await.is_some()), (200, true));
    let mut by = Vec::new();
    for turn in 0..2 {
        by.push(served_by(http, &format!("s{turn}")).await);
    }
    by.sort();
    assert_eq!(by, ["extra", "w0"]);

    let drained = admin.post_with("/admin/workers/w0/drain", &[], "").await.json();
    assert_eq!(drained["worker"]["draining"], true);
    for turn in 0..4 {
        assert_eq!(served_by(http, &format!("t{turn}")).await, "extra");
    }
    assert_eq!(admin.delete("/admin/workers/w0/drain").await.json()["worker"]["draining"], false);
    let by = [served_by(http, "u0").await, served_by(http, "u1").await];
    assert!(by.contains(&"w0".to_owned()), "{by:?}");

    let refused = admin.delete("/admin/workers/w0").await;
    assert_eq!(refused.status, 409);
    assert_eq!(refused.json()["sources"], json!(["config"]));
    let removed = admin.delete("/admin/workers/extra").await;
    assert_eq!((removed.status.as_u16(), &removed.json()["worker"]), (200, &Value::Null));
    assert_eq!(seen(admin, "extra").await, None);
    assert_eq!(admin.delete("/admin/workers/extra").await.status, 404);
    for turn in 0..4 {
        assert_eq!(served_by(http, &format!("v{turn}")).await, "w0");
    }
    let scrape = admin.get("/metrics").await.text();
    assert!(!scrape.contains("worker=\"extra\""), "{scrape}");
}

#[tokio::test]
async fn an_operators_word_goes_before_the_files_until_it_is_taken_back() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let admin = &cluster.admin;
    assert_eq!(add(admin, &json!({"worker": worker("w0", &engine)})).await.status, 200);
    let now = seen(admin, "w0").await.unwrap();
    assert_eq!(now["url"], engine.url());
    assert_eq!(now["sources"], json!(["admin", "config"]));
    let removed = admin.delete("/admin/workers/w0").await.json();
    assert_eq!(removed["worker"]["url"], cluster.engine("w0").url());
    assert_eq!(removed["worker"]["sources"], json!(["config"]));
    assert_eq!(served_by(&cluster.http, "a").await, "w0");
}

#[tokio::test]
async fn mistakes_are_reported_with_their_places_and_change_nothing() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let admin = &cluster.admin;
    let before = admin.get("/admin/models").await.json();
    let events = cluster.engine("w0").kv_events_endpoint().unwrap().to_owned();
    let good = json!({"id": "x", "role": "both", "url": "http://127.0.0.1:1"});
    let with = |key: &str, value: Value| {
        let mut worker = good.clone();
        worker[key] = value;
        json!({ "worker": worker })
    };
    for (body, status, said) in [
        (json!({"worker": good, "modell": "sim"}), 400, "unknown key `modell`"),
        (with("url", json!("ftp://127.0.0.1:1")), 400, "`worker.url` has another scheme"),
        (with("role", json!("prefil")), 400, "`worker.role` cannot be"),
        (with("id", json!("a b")), 400, "`worker.id`"),
        (with("kv_replay", json!("tcp://127.0.0.1:1")), 400, "of no use without `kv_events`"),
        (with("bootstrap", json!("http://127.0.0.1:1")), 400, "`worker.bootstrap` is of no use"),
        (with("weight", json!(1)), 400, "unknown key `weight`"),
        (json!({"model": "none", "worker": good}), 404, "model none is not served"),
        (with("kv_events", json!(events)), 409, "is already used by worker w0"),
    ] {
        let reply = add(admin, &body).await;
        assert_eq!(reply.status, status, "{body}: {}", reply.text());
        assert!(reply.text().contains(said), "{body}: {}", reply.text());
        if status == 400 {
            let problems = reply.json()["problems"].clone();
            assert!(problems[0]["line"] == 1 && problems[0]["hint"].is_string(), "{problems}");
        }
    }
    let text = [("content-type", "text/plain")];
    let reply = admin.post_with("/admin/workers", &text, json!({"worker": good}).to_string()).await;
    assert_eq!(reply.status, 415);
    let huge = admin.post_with("/admin/workers", &JSON, vec![b' '; 1 << 20]).await;
    assert_eq!(huge.status, 413);
    assert_eq!(admin.delete("/admin/workers/none").await.status, 404);
    assert_eq!(admin.get("/admin/reload").await.status, 405);
    assert_eq!(admin.get("/admin/models").await.json(), before);
    assert!(seen(admin, "x").await.is_none());
}

/// A router from a file, without engines.
async fn router(folder: &Path, yaml: &str) -> (Running, Client) {
    let file = folder.join("c.yaml");
    std::fs::write(&file, yaml).unwrap();
    let config = splitrail_config::load(&file, splitrail_config::Parts::ALL).unwrap().config;
    let listen = config.listen.clone();
    let core = assemble(config, None).unwrap();
    let running = Running::start_from(Some(file), core, &listen).await.unwrap();
    let admin = Client::new(running.addresses.admin);
    (running, admin)
}

#[tokio::test]
async fn a_name_of_several_models_workers_needs_the_models() {
    let gone = [HeldPort::take(), HeldPort::take()];
    let model = |name: &str, nobody: &HeldPort| {
        format!(
            "  - {{ name: {name}, flow: aggregated, tokenizer: {{ kind: none }}, \
             workers: [ {} ] }}\n",
            nobody.worker("w0", "both")
        )
    };
    let yaml = format!(
        "listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}\nmodels:\n{}{}",
        model("a", &gone[0]),
        model("b", &gone[1])
    );
    let folder = tempfile::tempdir().unwrap();
    let (_running, admin) = router(folder.path(), &yaml).await;
    let reply = admin.post_with("/admin/workers/w0/drain", &[], "").await;
    assert_eq!((reply.status.as_u16(), &reply.json()["models"]), (409, &json!(["a", "b"])));
    let reply = admin.post_with("/admin/workers/w0/drain?model=b", &[], "").await;
    assert_eq!(reply.json()["worker"]["model"], "b");
    let draining: Vec<_> = admin.get("/admin/workers").await.json()["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|worker| (worker["model"].clone(), worker["draining"].clone()))
        .collect();
    assert_eq!(draining, [(json!("a"), json!(false)), (json!("b"), json!(true))]);
    let new = json!({"worker": {"id": "x", "role": "both", "url": "http://127.0.0.1:1"}});
    let reply = add(&admin, &new).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["models"]), (409, &json!(["a", "b"])));
}

#[tokio::test]
async fn the_running_configuration_is_shown_as_one_and_without_secrets() {
    const KEY: &str = "sk-engine-not-to-be-shown";
    let keys = tempfile::tempdir().unwrap();
    let file = keys.path().join("engine.key");
    std::fs::write(&file, KEY).unwrap();
    let key = format!("engine_api_key: {{ kind: file, path: {:?} }}", file.display().to_string());
    let cluster = Cluster::start(Spec { model: key, ..Spec::aggregated(1) }).await;
    let shown = cluster.admin.get("/admin/config").await;
    let text = shown.text();
    assert!(!text.contains(KEY) && text.contains("engine.key"), "{text}");
    let again = splitrail_config::parse("shown.json", &text, Path::new("/nowhere")).unwrap().config;
    let running = cluster.running.core.serving();
    assert_eq!(
        serde_json::to_value(&again).unwrap(),
        serde_json::to_value(&*running.config).unwrap()
    );
    assert_eq!(shown.header("etag"), format!("\"{:012x}\"", again.digest()));
    let hash = cluster.metric("splitrail_config_hash", &[]).await;
    assert_eq!(hash, again.digest() as f64);
    assert!(
        cluster.metric("splitrail_config_last_reload_success_timestamp_seconds", &[]).await > 1e9
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn series_of_a_worker_that_left_never_come_back() {
    let cluster =
        Cluster::start(Spec { policy: "{ kind: round_robin }", ..Spec::aggregated(2) }).await;
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let mut busy = JoinSet::new();
    for place in 0..3 {
        let (admin, http) = (cluster.admin.clone(), cluster.http.clone());
        busy.spawn(async move {
            for turn in 0.. {
                admin.get("/metrics").await;
                // Some end, and are counted, when their worker has left.
                let body = completion(&prompt(8, &format!("{place}x{turn}y")));
                assert_eq!(http.post(COMPLETIONS, &body).await.status, 200);
            }
        });
    }
    for turn in 0..40 {
        let id = format!("x{turn}");
        let added = add(&cluster.admin, &json!({"worker": worker(&id, &engine)})).await;
        assert_eq!(added.status, 201, "{}", added.text());
        let label = format!("worker=\"{id}\"");
        assert!(cluster.admin.get("/metrics").await.text().contains(&label));
        assert_eq!(cluster.admin.delete(&format!("/admin/workers/{id}")).await.status, 200);
        let scrape = cluster.admin.get("/metrics").await.text();
        assert!(!scrape.contains(&label), "{scrape}");
    }
    busy.abort_all();
    while let Some(ended) = busy.join_next().await {
        assert!(ended.is_err_and(|error| error.is_cancelled()), "a request failed");
    }
    let mut scrape = String::new();
    eventually("all that had left is forgotten", async || {
        scrape = cluster.admin.get("/metrics").await.text();
        !cluster.running.core.metrics.encode().contains("worker=\"x")
    })
    .await;
    assert!(!scrape.contains("worker=\"x"), "{scrape}");
}
