//! The log says by how much a prompt missed its threshold.

use serde_json::{Value, json};
use splitrail_sim::write_tokenizer;
use splitrail_sim::{Role, SimConfig, SimEngine};
use splitrail_tests::Client;
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};

async fn ask(http: &Client, id: &str, text: &str, threshold: f64) {
    let mut body = completion(text);
    body["cache_hit_threshold"] = json!(threshold);
    let headers = [("content-type", "application/json"), ("x-request-id", id)];
    let reply = http.post_with(COMPLETIONS, &headers, body.to_string()).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}

/// The decision of a request, from the admin listener.
async fn decision(admin: &Client, id: &str) -> Value {
    let told = admin.get(&format!("/admin/decisions?request_id={id}")).await.json();
    told["decisions"][0].clone()
}

#[tokio::test]
async fn a_rejection_is_logged_with_the_hit_rate_and_the_threshold() {
    let files = tempfile::tempdir().unwrap();
    write_tokenizer(files.path()).unwrap();
    let mut engines = Vec::new();
    let mut workers = String::new();
    for (name, role, word) in [("p0", Role::Prefill, "prefill"), ("d0", Role::Decode, "decode")] {
        let engine = SimEngine::start(SimConfig { role, ..SimConfig::default() }).await.unwrap();
        workers += &format!("  - {{ id: {name}, role: {word}, url: \"{}\" }}\n", engine.url());
        engines.push(engine);
    }
    let yaml = format!(
        "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }}
models:
- name: sim
  tokenizer: {{ kind: huggingface, path: . }}
  flow: decode_first
  connector: nixl
  gate: {{ kind: engine, index_first: false }}
  workers:
{workers}"
    );
    let log = files.path().join("log");
    let env = [("RUST_LOG", "splitrail=debug"), ("NO_COLOR", "1")];
    let router = RouterProcess::serve(files.path(), &yaml, &env, &log).await;
    let (http, admin) = (Client::new(router.http), Client::new(router.admin));
    eventually("it is ready", async || http.get("/ready").await.status == 200).await;
    let marker = "Zq1PromptMarkerXk ";
    let known = prompt(30, marker);
    ask(&http, "warm", &known, 0.0).await;
    ask(&http, "half", &format!("{known}{}", prompt(30, "more")), 0.8).await;
    ask(&http, "cold", &prompt(30, "cold"), 0.25).await;
    let half = decision(&admin, "half").await;
    assert_eq!((&half["decode_try"], &half["gate"]), (&json!("rejected"), &json!("engine")));
    let ratio = half["cache_hit_ratio"].as_f64().unwrap();
    assert!(ratio > 0.0 && ratio < 0.8, "{half}");
    assert_eq!(decision(&admin, "cold").await["cache_hit_ratio"], 0.0);
    // Lines are written after the replies.
    let read = || std::fs::read_to_string(&log).unwrap();
    eventually("both are logged", async || read().matches(", rejected").count() == 2).await;
    router.end();
    let text = read();
    let rejected: Vec<&str> = text.lines().filter(|line| line.contains(", rejected")).collect();
    let [first, second] = rejected[..] else { panic!("{rejected:?}") };
    let said = format!("cache hit rate {ratio:.3} < threshold 0.800, rejected");
    assert!(first.contains(&said) && first.contains("INFO"), "{first}");
    for part in ["request_id=\"half\"", "model=\"sim\"", "worker=\"d0\"", "gate=\"engine\""] {
        assert!(first.contains(part), "{first}");
    }
    assert!(second.contains("cache hit rate 0.000 < threshold 0.250, rejected"), "{second}");
    assert!(second.contains("DEBUG"), "further ones are for those who want them: {second}");
    assert!(!text.contains("Zq1PromptMarkerXk"));
}
