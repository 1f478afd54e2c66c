//! Engines that never report cached tokens or usage are named once in the log, and in `/admin/workers`
//! as long as they do not. The periodic log line has the cache hits.

use std::path::Path;

use serde_json::Value;
use splitrail_sim::write_tokenizer;
use splitrail_sim::{DecodeUsage, Role, SimConfig, SimEngine, UsageReport};
use splitrail_tests::accounting::{Scrape, ledger_lines};
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::canned::{Canned, Then};
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Client, Cluster, Spec};

/// A router as a process, before engines that report so much.
struct World {
    router: RouterProcess,
    http: Client,
    admin: Client,
    files: tempfile::TempDir,
    _engines: Vec<SimEngine>,
}

impl World {
    async fn start(reports: [UsageReport; 2]) -> Self {
        let files = tempfile::tempdir().unwrap();
        write_tokenizer(files.path()).unwrap();
        let mut engines = Vec::new();
        let mut workers = String::new();
        for (name, (role, report)) in
            [("p0", (Role::Prefill, reports[0])), ("d0", (Role::Decode, reports[1]))]
        {
            let config = SimConfig {
                role,
                usage_report: report,
                decode_usage: DecodeUsage::WholePrompt,
                ..SimConfig::default()
            };
            let engine = SimEngine::start(config).await.unwrap();
            let role = if role == Role::Prefill { "prefill" } else { "decode" };
            workers +=
                &format!("    - {{ id: {name}, role: {role}, url: \"{}\" }}\n", engine.url());
            engines.push(engine);
        }
        let yaml = format!(
            "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }}
ledger: {{ log_interval: 20ms }}
models:
- name: sim
  tokenizer: {{ kind: huggingface, path: . }}
  flow: prefill_first
  connector: nixl
  workers:
{workers}"
        );
        let log = files.path().join("log");
        let env = [("RUST_LOG", "splitrail=info"), ("NO_COLOR", "1")];
        let router = RouterProcess::serve(files.path(), &yaml, &env, &log).await;
        let (http, admin) = (Client::new(router.http), Client::new(router.admin));
        eventually("it is ready", async || http.get("/ready").await.status == 200).await;
        Self { router, http, admin, files, _engines: engines }
    }

    async fn requests(&self, count: usize) {
        for _ in 0..count {
            let reply = self.http.post(COMPLETIONS, &completion(&prompt(20, "s"))).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
    }

    async fn audit_of(&self, worker: &str) -> Value {
        let workers = self.admin.get("/admin/workers").await.json();
        let workers = workers["workers"].as_array().unwrap().clone();
        workers.iter().find(|one| one["id"] == worker).unwrap()["audit"].clone()
    }
}

fn lines(log: &Path, of: &str) -> Vec<String> {
    let text = std::fs::read_to_string(log).unwrap();
    text.lines().filter(|line| line.contains(of)).map(str::to_owned).collect()
}

#[tokio::test]
async fn an_engine_that_never_reports_is_named_once_in_the_log_and_shown_to_operators() {
    let world = World::start([UsageReport::Null, UsageReport::Details]).await;
    assert_eq!(world.audit_of("p0").await["cached_tokens"]["never"], false, "nothing is known");
    world.requests(8).await;
    let prefill = world.audit_of("p0").await;
    assert_eq!(prefill["cached_tokens"]["never"], true, "{prefill}");
    assert_eq!(prefill["cached_tokens"]["replies"], 8);
    assert_eq!(prefill["usage"]["never"], false, "it reports the rest: {prefill}");
    let decode = world.audit_of("d0").await;
    // What it says of handed-over KV is not about its own cache.
    assert_eq!(decode["cached_tokens"]["replies"], 0, "{decode}");
    assert_eq!(decode["usage"]["reported"], 8, "{decode}");
    let scrape = Scrape::parse(&world.admin.get("/metrics").await.text());
    let reports = scrape.by("splitrail_engine_reports_total", &["worker", "figure", "reported"]);
    let key = ["p0", "cached_tokens", "no"].map(str::to_owned).to_vec();
    assert_eq!(reports[&key], 8);
    let log = world.files.path().join("log");
    world.router.end();
    let named = lines(&log, "never reported");
    assert_eq!(named.len(), 1, "{named:?}");
    assert!(named[0].contains("worker=\"p0\"") && named[0].contains("cached_tokens"), "{named:?}");
}

#[tokio::test]
async fn the_log_says_the_metrics_totals_from_time_to_time() {
    let world = World::start([UsageReport::Details; 2]).await;
    world.requests(4).await;
    let log = world.files.path().join("log");
    let scrape = Scrape::parse(&world.admin.get("/metrics").await.text());
    let sum = |name: &str| scrape.sum(&format!("splitrail_{name}"));
    let sources = scrape.by("splitrail_prompt_tokens_total", &["source"]);
    let by_source = |source: &str| sources.get(&[source.to_owned()][..]).copied().unwrap_or(0);
    assert!(by_source("local_compute") > 0);
    let (prompt_tokens, cached) = (sum("usage_prompt_tokens_total"), sum("cached_tokens_total"));
    assert!(cached > 0.0 && cached < prompt_tokens);
    let rate = (cached / prompt_tokens * 1e4).round() / 1e4;
    let expected = format!(
        "requests=4 hit_requests=3 miss_requests=1 hit_rate=0.75 prompt_tokens={prompt_tokens} \
         cached_tokens={cached} token_hit_rate={rate} local_hit_tokens={} read_back_tokens=0 \
         fetched_tokens=0 transferred_tokens={} computed_tokens={}",
        by_source("local_cache_hit"),
        by_source("external_kv_transfer"),
        by_source("local_compute"),
    );
    eventually("the totals are in the log", async || !lines(&log, &expected).is_empty()).await;
    let said = lines(&log, "hit_rate=").len();
    assert!(said <= 4, "only what is new is said: {said}");
}

/// A cluster of one engine that always says the same.
async fn canned(reply: String) -> (Cluster, Canned) {
    let engine = Canned::start(reply, Then::Close).await;
    let spec = Spec {
        both: 0,
        policy: "{ kind: round_robin }",
        extra_workers: vec![engine.worker("c0", "both")],
        top: "ledger: { path: l.jsonl }".into(),
        ..Spec::aggregated(0)
    };
    (Cluster::start(spec).await, engine)
}

#[tokio::test]
async fn without_usage_of_the_engine_the_router_counts_the_prompt_and_reports_no_cached_tokens() {
    let reply = r#"{"id":"c","object":"text_completion","choices":[{"index":0,"text":"hm","finish_reason":"stop"}]}"#;
    let (cluster, _engine) = canned(Canned::reply("application/json", reply)).await;
    for _ in 0..3 {
        let reply = cluster.http.post(COMPLETIONS, &completion("17 tokens of text")).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert!(reply.json().get("usage").is_none(), "nothing is invented: {}", reply.text());
    }
    let path = cluster.files.path().join("l.jsonl");
    eventually("three lines", async || ledger_lines(&path).len() == 3).await;
    for line in ledger_lines(&path) {
        assert_eq!(line["outcome"], "ok");
        assert_eq!(
            (&line["told"], &line["completion_tokens"]),
            (&Value::Null, &Value::Null),
            "{line}"
        );
        assert_eq!(
            (&line["prompt_tokens"], &line["cached_tokens"]),
            (&17.into(), &0.into()),
            "{line}"
        );
        let sources = line["prompts"][0]["legs"][0]["sources"].as_object().unwrap();
        assert!(sources.values().all(|source| source == "estimate"), "{line}");
    }
    let workers = cluster.admin.get("/admin/workers").await.json();
    assert_eq!(workers["workers"][0]["audit"]["usage"]["never"], true, "{workers}");
    assert_eq!(cluster.metric("splitrail_usage_prompt_tokens_total", &[]).await, 51.0);
    assert_eq!(cluster.metric("splitrail_generation_tokens_total", &[]).await, 0.0);
}

#[tokio::test]
async fn unknown_usage_details_are_passed_on_beside_the_routers() {
    let usage = r#"{"prompt_tokens":17,"total_tokens":18,"completion_tokens":1,"prompt_tokens_details":{"audio_tokens":7,"cached_tokens":16,"of_tomorrow":{"a":[1]}},"cost":0.25}"#;
    let reply = format!(
        r#"{{"id":"c","choices":[{{"index":0,"text":"x","finish_reason":"stop"}}],"usage":{usage}}}"#
    );
    let (cluster, _engine) = canned(Canned::reply("application/json", &reply)).await;
    let detail = [("x-splitrail-usage", "detail")];
    let body = completion("17 tokens of text").to_string();
    let mut told = cluster.http.post_with(COMPLETIONS, &detail, body).await.json()["usage"].clone();
    let ours = told.as_object_mut().unwrap().remove("splitrail").unwrap();
    assert_eq!(told, serde_json::from_str::<Value>(usage).unwrap());
    assert_eq!(ours["prompts"][0]["cached_tokens"], 16);
    // The index knows of no tier here: the engine's own memory it was.
    assert_eq!(ours["prompts"][0]["legs"][0]["local_cache_hit_by_tier"]["device"], 16, "{ours}");
}
