//! Long prompts do not block the threads that serve connections while they are parsed and
//! tokenised. The criterion is order, not time: short requests must end while a long one is still
//! being prepared.

use serde_json::{Value, json};
use splitrail_sim::write_tokenizer;
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::client::whole_text;
use splitrail_tests::cluster::eventually;
use splitrail_tests::grpc::{generate, text_request};
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::shape::openai_error;
use splitrail_tests::{Client, Cluster, Spec};
use tokio::task::JoinSet;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const LONG_BYTES: usize = 10 << 20;

fn long_text(seed: usize, bytes: usize) -> String {
    let words = (0..).flat_map(|i| format!("word{} ", i * 7 + seed).into_bytes());
    String::from_utf8(words.take(bytes).collect()).unwrap()
}

fn completion(text: &str) -> Value {
    json!({"model": "sim", "max_tokens": 2, "temperature": 0, "prompt": text})
}

/// One thread serves router, engines and clients: whatever blocks it blocks all.
#[tokio::test]
async fn short_requests_are_answered_while_long_prompts_are_tokenised() {
    let limits = "{ tokenize_size_max: 33554432, drain_delay: 10ms }";
    let cluster = Cluster::start(Spec { limits, ..Spec::aggregated(1) }).await;
    // Where long prompts are in work.
    let preparer = &cluster.running.core.preparer;
    let paths = [COMPLETIONS, CHAT, COMPLETIONS];
    let places = preparer.cores.free_long_permits();
    let left = places.saturating_sub(paths.len());
    let mut long = JoinSet::new();
    for (i, path) in paths.into_iter().enumerate() {
        let http = cluster.http.clone();
        let mut body = completion("");
        match path {
            CHAT => {
                body["messages"] = json!([{"role": "user", "content": long_text(i, LONG_BYTES)}])
            }
            _ => body["prompt"] = long_text(i, LONG_BYTES).into(),
        }
        let text = body.to_string();
        long.spawn(async move { http.post_with(path, &[], text).await });
    }
    eventually("the long prompts are in work", async || preparer.cores.free_long_permits() == left)
        .await;
    for _ in 0..50 {
        assert_eq!(cluster.http.get("/health").await.status, 200);
    }
    for i in 0..20 {
        let reply = cluster.http.post(COMPLETIONS, &completion(&format!("short {i}"))).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert!(!whole_text(&reply.json(), 0).is_empty());
    }
    let address = cluster.running.addresses.grpc.unwrap();
    assert!(generate(address, text_request("short", "")).await.is_ok());
    assert_eq!(preparer.cores.free_long_permits(), left, "still in work");
    assert!(long.try_join_next().is_none(), "no long request is answered yet");
    while let Some(reply) = long.join_next().await {
        let reply = reply.unwrap();
        assert_eq!(
            openai_error(&reply, 400)["param"],
            "input_tokens",
            "longer than the model takes"
        );
    }
    assert_eq!(preparer.cores.free_long_permits(), places);
    cluster.quiet().await;
}

fn peak_kib(router: &RouterProcess) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", router.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Tokenising takes many times a prompt's bytes. Prompts that wait for their turn
/// do not take that: twelve times as many at once must stay far below twelve times.
#[tokio::test]
async fn memory_does_not_grow_with_waiting_work() {
    const BYTES: usize = 1 << 19;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let answer = json!({"choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": BYTES, "completion_tokens": 1, "total_tokens": BYTES + 1}});
    let answer = answer.to_string();
    let post = ScriptedServer::start(move |_| ScriptedReply::json(200, &answer)).await;
    let files = tempfile::tempdir().unwrap();
    write_tokenizer(files.path()).unwrap();
    let yaml = format!(
        "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: huggingface, path: . }}
    flow: aggregated
    workers:
      - {{ id: w0, role: both, url: \"{}\" }}
",
        post.url()
    );
    let log = files.path().join("router.log");
    let router = RouterProcess::serve(files.path(), &yaml, &[], &log).await;
    let http = Client::new(router.http);
    let at_once = async |count: usize| {
        let mut long = JoinSet::new();
        for i in 0..count {
            let http = http.clone();
            let text = completion(&long_text(i, BYTES)).to_string();
            long.spawn(async move { http.post_with(COMPLETIONS, &[], text).await });
        }
        while let Some(reply) = long.join_next().await {
            assert_eq!(reply.unwrap().status, 200);
        }
        peak_kib(&router)
    };
    // Allocators keep some of what they had: the second round is the measure.
    at_once(cores).await;
    let few = at_once(cores).await;
    let many = at_once(12 * cores).await;
    assert!(many < 3 * few, "peak KiB: {few} for one per core, {many} for twelve");
}
