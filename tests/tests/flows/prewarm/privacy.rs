//! Prompts that are remembered for prewarming appear in no output, and prompts with a salt are not
//! remembered.

use serde_json::{Value, json};
use splitrail_sim::{Role, SimConfig, SimEngine, write_tokenizer};
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::cluster::{eventually, restarted};
use splitrail_tests::leaks::leaks;
use splitrail_tests::trial::{GENERATE, generate, token_ids};
use splitrail_tests::{Client, Trial};

use super::{KEYS, drain, eager, remembered, serve, steps, turn, undrain};

#[tokio::test]
async fn prompts_with_a_salt_are_not_remembered() {
    let mut trial = Trial::start(eager()).await;
    super::greet(&mut trial).await;
    let before = remembered(&trial).await;
    drain(&trial, "p1").await;
    for end in ["first", "second", "third"] {
        let mut body = turn("a", end);
        body["cache_salt"] = "mine".into();
        serve(&mut trial, &body).await;
    }
    assert_eq!(remembered(&trial).await, before);
    undrain(&trial, "p1").await;
    trial.cluster.restart("p1").await;
    super::until_ended(&trial, "done").await;
    assert_eq!((steps(&trial, "p1").len(), steps(&trial, "d0").len()), (0, 0));
    assert_eq!(remembered(&trial).await, before);
    trial.finish().await;
}

#[tokio::test]
async fn token_ids_are_in_no_log_metric_or_page() {
    let folder = tempfile::tempdir().unwrap();
    write_tokenizer(folder.path()).unwrap();
    let mut engines = Vec::new();
    for role in [Role::Prefill, Role::Prefill, Role::Decode] {
        let config = SimConfig { role, ..SimConfig::default() };
        engines.push(SimEngine::start(config).await.unwrap());
    }
    let worker = |(id, engine): (usize, &SimEngine)| {
        let role = if id < 2 { "prefill" } else { "decode" };
        let (events, replay) = (engine.kv_events_endpoint(), engine.kv_replay_endpoint());
        format!(
            "      - {{ id: w{id}, role: {role}, url: \"{}\", kv_events: \"{}\", kv_replay: \"{}\" }}\n",
            engine.url(),
            events.unwrap(),
            replay.unwrap()
        )
    };
    let workers: String = engines.iter().enumerate().map(worker).collect();
    let keys: String = KEYS.lines().map(|line| format!("    {line}\n")).collect();
    let yaml = format!(
        "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }}\nmodels:\n  - name: sim\n    \
         block_size: 16\n    tokenizer: {{ kind: huggingface, path: . }}\n    flow: prefill_first\n    \
         connector: nixl\n    policy: {{ kind: predicted_ttft }}\n    canary: {{ enabled: false }}\n\
         {keys}    prewarm: {{ enabled: true, link_share: 1 }}\n    workers:\n{workers}"
    );
    let log = folder.path().join("log");
    let env = [("RUST_LOG", "trace"), ("NO_COLOR", "1")];
    let router = RouterProcess::serve(folder.path(), &yaml, &env, &log).await;
    let (http, admin) = (Client::new(router.http), Client::new(router.admin));
    eventually("the router is ready", async || admin.get("/ready").await.status == 200).await;
    // A worker that has served is known to be another process after a restart.
    admin.post("/admin/workers/w0/drain", &json!({})).await;
    assert_eq!(http.post(GENERATE, &generate(&token_ids(40, 9))).await.status, 200);
    admin.delete("/admin/workers/w0/drain").await;
    admin.post("/admin/workers/w1/drain", &json!({})).await;
    let ids = token_ids(200, 3);
    for end in [5, 6, 7] {
        let prompt = [ids.clone(), token_ids(30, end)].concat();
        assert_eq!(http.post(GENERATE, &generate(&prompt)).await.status, 200);
    }
    let remembered = async || {
        let text = admin.get("/metrics").await.text();
        splitrail_tests::cluster::metric_in(&text, "splitrail_hot_prefix_memory_bytes", &[])
    };
    eventually("ids are remembered", async || remembered().await > 1500.0).await;
    admin.delete("/admin/workers/w1/drain").await;
    let second = engines.remove(1);
    engines.insert(1, restarted(second, |_| {}).await);
    let prewarmed = async || {
        let workers = admin.get("/admin/workers").await.json()["workers"].clone();
        let w1 = workers.as_array().unwrap().iter().find(|one| one["id"] == "w1").unwrap().clone();
        w1["prewarm"]["prefixes"].as_u64().unwrap_or(0) > 0 && w1["prewarm"]["running"] == false
    };
    eventually("the worker is prewarmed", prewarmed).await;

    let logged = || std::fs::read_to_string(&log).unwrap();
    eventually("it is logged", async || logged().contains("prewarmed a worker")).await;
    let mut said = vec![("the log".to_owned(), logged())];
    for path in ["/metrics", "/admin/workers", "/admin/decisions?limit=100", "/"] {
        said.push((path.to_owned(), admin.get(path).await.text()));
    }
    let part = |at: usize| ids[at..at + 4].to_vec();
    let forms = |ids: Vec<u32>| {
        let comma: Vec<String> = ids.iter().map(u32::to_string).collect();
        [comma.join(","), comma.join(", "), format!("{:?}", Value::from(ids))]
    };
    let secrets: Vec<String> = [0, 16, 100].into_iter().flat_map(|at| forms(part(at))).collect();
    let mut found = Vec::new();
    for (place, text) in &said {
        leaks(place, text, &secrets, &mut found);
    }
    assert!(found.is_empty(), "{found:#?}");
}
