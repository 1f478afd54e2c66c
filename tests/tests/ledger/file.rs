//! The ledger file: nothing of it is lost on the way out, nothing of it is anybody's
//! words, and no request waits for it.

use std::process::{Command, Stdio};

use serde_json::json;
use splitrail_sim::{SimConfig, SimEngine};
use splitrail_tests::accounting::ledger_lines;
use splitrail_tests::binary::{self, RouterProcess};
use splitrail_tests::cluster::eventually;
use splitrail_tests::proc::signal;
use splitrail_tests::trial::{CHAT, COMPLETIONS, completion, prompt, streamed};
use splitrail_tests::{Client, Cluster, Spec};

fn spec(ledger: &str) -> Spec {
    Spec { top: format!("ledger: {ledger}"), ..Spec::default() }
}

#[tokio::test]
async fn a_drain_writes_every_request_that_has_ended() {
    let cluster = Cluster::start(spec("{ path: billing.jsonl }")).await;
    let path = cluster.files.path().join("billing.jsonl");
    let (http, files, engines) = (cluster.http.clone(), cluster.files, cluster.engines);
    for number in 0..30 {
        let id = [("x-request-id", &*format!("id-{number}"))];
        let body = completion(&prompt(10, "drain"));
        assert_eq!(http.post_with(COMPLETIONS, &id, body.to_string()).await.status, 200);
    }
    // One that is still being answered when the drain begins.
    let mut long = streamed(&completion(&prompt(10, "long")));
    long["max_tokens"] = 400.into();
    let mut events = http.stream_with(COMPLETIONS, &[("x-request-id", "last")], &long).await;
    events.next().await.unwrap();
    let (cut, chunks) = tokio::join!(cluster.running.drain(), events.chunks());
    assert_eq!((cut, chunks.is_empty()), (0, false));
    let lines = ledger_lines(&path);
    let ids: Vec<&str> = lines.iter().map(|line| line["request_id"].as_str().unwrap()).collect();
    let expected: Vec<String> = (0..30).map(|number| format!("id-{number}")).collect();
    assert_eq!(ids[..30], expected);
    assert_eq!(ids[30..], ["last"]);
    drop((engines, files));
}

#[tokio::test]
async fn a_line_says_who_did_what_and_nothing_of_what_was_said() {
    let cluster = Cluster::start(spec("{ path: l.jsonl }")).await;
    let secret = "CANARY-IN-THE-PROMPT";
    let body = json!({
        "model": "default", "max_tokens": 9, "user": "CANARY-USER", "cache_salt": "CANARY-SALT",
        "messages": [{"role": "user", "content": secret.repeat(5)}],
    });
    let id = [
        ("x-request-id", "a-name"),
        ("authorization", "Bearer CANARY-KEY"),
        ("x-claude-code-session-id", "a-session"),
    ];
    let reply = cluster.http.post_with(CHAT, &id, body.to_string()).await;
    let answer = reply.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert_eq!(cluster.http.post_with(CHAT, &id, r#"{"model": "sim"}"#).await.status, 400);
    let path = cluster.files.path().join("l.jsonl");
    eventually("the line is there", async || !ledger_lines(&path).is_empty()).await;
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(!text.contains("CANARY") && !text.contains(&answer), "{text}");
    let lines = ledger_lines(&path);
    // What was no request to a model is nobody's.
    assert_eq!(lines.len(), 1, "{text}");
    let line = &lines[0];
    for (key, value) in [
        ("request_id", json!("a-name")),
        ("tenant", json!(null)),
        ("session", json!("a-session")),
        ("model", json!("sim")),
        ("endpoint", json!("chat")),
        ("flow", json!("prefill_first")),
        ("outcome", json!("ok")),
        ("completion_tokens", json!(9)),
        ("cached_tokens", json!(0)),
        ("wasted_prompt_tokens", json!(0)),
    ] {
        assert_eq!(line[key], value, "{key} in {line}");
    }
    let legs = line["prompts"][0]["legs"].as_array().unwrap();
    let workers: Vec<_> = legs.iter().map(|leg| leg["worker"].as_str().unwrap()).collect();
    assert_eq!(reply.route("prefill"), Some(workers[0]));
    assert_eq!(reply.route("decode"), Some(workers[1]));
    assert!(line["arrived_unix_ms"].as_u64().unwrap() <= line["ended_unix_ms"].as_u64().unwrap());
    // A decision shows the same entry.
    let decision = &cluster.decisions("a-name").await[0];
    assert_eq!(decision["ledger"], line["prompts"][0]);
}

#[tokio::test]
async fn a_disk_that_takes_nothing_costs_records_and_no_request() {
    let cluster = Cluster::start(spec("{ path: /dev/full }")).await;
    for _ in 0..5 {
        let reply = cluster.http.post(COMPLETIONS, &completion(&prompt(10, "full"))).await;
        assert_eq!(reply.status, 200);
    }
    eventually("what is lost is counted", async || {
        let lost = [("result", "write_failed")];
        cluster.metric("splitrail_ledger_records_total", &lost).await == 5.0
    })
    .await;
    cluster.quiet().await;
}

#[tokio::test]
async fn a_terminated_router_leaves_whole_lines_and_a_second_one_takes_no_file_in_use() {
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let files = tempfile::tempdir().unwrap();
    let yaml = format!(
        "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }}
limits: {{ drain_delay: 1ms }}
ledger: {{ path: l.jsonl }}
models:
- {{ name: sim, tokenizer: {{ kind: none }}, flow: aggregated,
     workers: [ {{ id: w0, role: both, url: \"{}\" }} ] }}
",
        engine.url()
    );
    let log = files.path().join("log");
    let router = RouterProcess::serve(files.path(), &yaml, &[], &log).await;
    let http = Client::new(router.http);
    eventually("it is ready", async || http.get("/ready").await.status == 200).await;
    for _ in 0..20 {
        assert_eq!(http.post(COMPLETIONS, &completion("hello there")).await.status, 200);
    }
    let second = Command::new(binary::built("splitrail"))
        .args(["serve", "--config"])
        .arg(files.path().join("splitrail.yaml"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(69), "{said}");
    assert!(said.contains("l.jsonl") && said.contains("another process writes it"), "{said}");
    signal(router.pid(), "TERM");
    let path = files.path().join("l.jsonl");
    eventually("every line is there", async || ledger_lines(&path).len() == 20).await;
    let lines = ledger_lines(&path);
    // Nobody knows tokens here but the engine.
    assert!(lines.iter().all(|line| line["prompt_tokens"] == 11), "{lines:?}");
}
