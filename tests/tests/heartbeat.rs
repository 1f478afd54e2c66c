//! What one poll of the router costs the thread that serves all connections, however large the
//! requests are that arrive.
//!
//! A router runs on one thread, whose scheduler takes turns between a task that does nothing and
//! one poll of anything else. The thread's own processor time between two turns of that task is
//! what a poll costs: other processes and threads, which take the processor away, do not count.
//! The promise is 5 ms in an optimised build:
//!
//!     cargo test --release -p splitrail-tests --test heartbeat -- --nocapture
#![allow(missing_docs, clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use splitrail_proto::v1;
use splitrail_proto::v1::generate_request::Prompt;
use splitrail_router::assemble::assemble;
use splitrail_router::run::Running;
use splitrail_sim::write_tokenizer;
use splitrail_tests::Client;
use splitrail_tests::cluster::eventually;
use splitrail_tests::grpc::{generate, text_request};
use splitrail_tests::scripted_server::{ReceivedRequest, ScriptedReply, ScriptedServer};
use splitrail_tests::solo::whole_reply;
use tokio::sync::oneshot;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";

type Headers = &'static [(&'static str, &'static str)];
const JSON: &str = "application/json";
const PLAIN: Headers = &[("content-type", JSON)];

/// Length of a large request.
const LONG_BYTES: usize = if cfg!(debug_assertions) { 4 << 20 } else { 10 << 20 };

/// The promise.
const POLL_MAX: Duration = Duration::from_millis(5);
/// How many times longer a poll may take without optimisation.
const UNOPTIMISED: u32 = if cfg!(debug_assertions) { 8 } else { 1 };

/// Processor time that this thread has used.
fn used() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.try_into().unwrap(), now.tv_nsec.try_into().unwrap())
}

/// A router whose connections all share one thread.
struct OneThread {
    http: Client,
    grpc: SocketAddr,
    longest_ns: Arc<AtomicU64>,
    ended: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl OneThread {
    async fn start(folder: &Path, engine: &str) -> Self {
        write_tokenizer(folder).unwrap();
        let file = folder.join("splitrail.yaml");
        let yaml = format!(
            "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }}
limits: {{ tokenize_size_max: 33554432 }}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: huggingface, path: . }}
    flow: aggregated
    canary: {{ enabled: false }}
    workers:
      - {{ id: w0, role: both, url: \"{engine}\" }}
"
        );
        std::fs::write(&file, yaml).unwrap();
        let (longest_ns, ended) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (tell, told) = oneshot::channel();
        let (longest, end) = (Arc::clone(&longest_ns), Arc::clone(&ended));
        let thread = std::thread::spawn(move || {
            // One poll, and one look at sockets, between two turns of the first task.
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_all().event_interval(1).build().unwrap();
            runtime.block_on(async {
                let loaded = splitrail_config::load(&file, splitrail_config::Parts::ALL)
                    .unwrap_or_else(|problems| panic!("{problems}"));
                let listen = loaded.config.listen.clone();
                let core = assemble(loaded.config, None).unwrap();
                let running = Running::start_from(Some(file), core, &listen).await.unwrap();
                let (http, grpc) = (running.addresses.http, running.addresses.grpc);
                tell.send((http, grpc.unwrap())).unwrap();
                let mut last = used();
                while !end.load(Relaxed) {
                    tokio::task::yield_now().await;
                    let now = used();
                    longest.fetch_max((now - last).as_nanos() as u64, Relaxed);
                    last = now;
                }
            });
        });
        let (http, grpc) = told.await.unwrap();
        let http = Client::new(http);
        eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
        Self { http, grpc, longest_ns, ended, thread: Some(thread) }
    }

    /// The longest poll since the last question.
    fn longest(&self) -> Duration {
        Duration::from_nanos(self.longest_ns.swap(0, Relaxed))
    }
}

impl Drop for OneThread {
    fn drop(&mut self) {
        self.ended.store(true, Relaxed);
        let _panicked = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

fn words(bytes: usize) -> String {
    let words = (0..).flat_map(|i| format!("word{} ", i * 7).into_bytes());
    String::from_utf8(words.take(bytes).collect()).unwrap()
}

fn completion(prompt: Value) -> String {
    json!({"model": "sim", "max_tokens": 2, "prompt": prompt}).to_string()
}

/// A streamed completion that gets long events.
fn streamed(word: &str) -> String {
    let prompt = format!("{ASKS_LONG_EVENT} {word}");
    json!({"model": "sim", "max_tokens": 2, "stream": true, "prompt": prompt}).to_string()
}

/// A completion with a further member of this value.
fn with(value: &str) -> String {
    format!("{{\"model\":\"sim\",\"max_tokens\":2,\"prompt\":\"p\",\"x\":{value}}}")
}

fn large() -> Vec<(&'static str, &'static str, String)> {
    let text = words(LONG_BYTES);
    let chat = json!({"model": "sim", "messages": [{"role": "user", "content": text}]}).to_string();
    let batch: Vec<String> = (0..64).map(|i| format!("{i} {}", words(LONG_BYTES / 64))).collect();
    let members: String = (0..LONG_BYTES / 10).map(|i| format!(",\"{i:06}\":0")).collect();
    let flat = format!("{{\"model\":\"sim\",\"prompt\":\"p\"{members}}}");
    let nested: String = (0..LONG_BYTES / 10).map(|i| format!("\"{i:06}\":0,")).collect();
    // As long as what is tokenised at once, and dense between the places that are looked at.
    let dense: String = (0..24).map(|_| "word ".repeat(40) + &"!?".repeat(1900)).collect();
    let tokens: Vec<u32> = (0..LONG_BYTES as u32 / 8).map(|i| i % 256).collect();
    vec![
        ("a long text", COMPLETIONS, completion(text.into())),
        ("a long chat", CHAT, chat),
        ("64 prompts", COMPLETIONS, completion(batch.into())),
        ("token ids", COMPLETIONS, completion(tokens.into())),
        ("numbers", COMPLETIONS, with(&format!("[{}0]", "0,".repeat(LONG_BYTES / 2)))),
        ("members", COMPLETIONS, flat),
        ("an object of many members", COMPLETIONS, with(&format!("{{{nested}\"y\":0}}"))),
        ("96 KB that are dense in places", COMPLETIONS, completion(dense.into())),
    ]
}

/// What a prompt says that gets a long reply.
const ASKS_MUCH: &str = "asks much";
/// The reason for which an engine ends a choice below its threshold.
const WORD: &str = "cache_threshold";
/// What a prompt says that gets a stream with a long event.
const ASKS_LONG_EVENT: &str = "asks for a long event";

/// A reply or an event with many log probabilities, and a member whose value is this text.
fn long_reply(text: &str) -> String {
    let token = r#"{" word":-0.125,"cache":-10.5}"#;
    let tokens = vec![token; LONG_BYTES / token.len()].join(",");
    format!(
        r#"{{"id":"x","object":"text_completion","created":1,"model":"sim","choices":[{{"index":0,"text":"{text}","finish_reason":null,"logprobs":{{"top_logprobs":[{tokens}]}}}}]}}"#
    )
}

/// A stream of two long events, which as a client asks have a word that the router looks for.
fn long_events(heard: &ReceivedRequest) -> ScriptedReply {
    let word = if heard.text().contains(WORD) { WORD } else { "word" };
    let event = format!("data: {}\n\n", long_reply(word));
    ScriptedReply::events(&format!("{event}{event}data: [DONE]\n\n"))
}

/// The stream of a response whose last event repeats all of the reply, of half the length.
fn long_response() -> ScriptedReply {
    let output = vec![r#"{"text":" word"}"#; LONG_BYTES / 40].join(",");
    let usage = r#"{"input_tokens":3,"output_tokens":2,"total_tokens":5}"#;
    ScriptedReply::events(&format!(
        "event: response.created\ndata: {{\"type\":\"response.created\",\"response\":{{}}}}\n\n\
         event: response.completed\ndata: {{\"type\":\"response.completed\",\"response\":\
         {{\"output\":[{output}],\"usage\":{usage}}}}}\n\n"
    ))
}

/// Requests to endpoints whose bodies are passed on, and those with long replies.
fn large_replies() -> Vec<(&'static str, &'static str, String)> {
    let text = json!({"model": "sim", "prompt": words(LONG_BYTES)}).to_string();
    let input = json!({"model": "sim", "input": words(LONG_BYTES)}).to_string();
    vec![
        ("a long reply", COMPLETIONS, completion(ASKS_MUCH.into())),
        ("two long replies", COMPLETIONS, completion(json!([ASKS_MUCH, ASKS_MUCH]))),
        ("long events", COMPLETIONS, streamed("")),
        ("long events with the word", COMPLETIONS, streamed(WORD)),
        ("a long text to tokenize", "/tokenize", text),
        ("a long text to embed", "/v1/embeddings", input),
    ]
}

/// Requests whose streams have a long event, with headers beside that of the type.
fn large_events() -> Vec<(&'static str, &'static str, Headers, String)> {
    const DETAIL: Headers = &[("content-type", JSON), ("x-splitrail-usage", "detail")];
    let batch = json!({
        "model": "sim", "max_tokens": 2, "stream": true,
        "prompt": [ASKS_LONG_EVENT, ASKS_LONG_EVENT],
    });
    let response =
        json!({"model": "sim", "max_output_tokens": 2, "stream": true, "input": ASKS_LONG_EVENT});
    vec![
        ("long events of a batch", COMPLETIONS, PLAIN, batch.to_string()),
        ("long events and usage details", COMPLETIONS, DETAIL, streamed("")),
        ("a long end of a response", RESPONSES, PLAIN, response.to_string()),
        ("a long end of a response and usage details", RESPONSES, DETAIL, response.to_string()),
    ]
}

/// Calls of the gRPC listener whose messages are long.
fn large_calls() -> Vec<(&'static str, v1::GenerateRequest)> {
    let of = |prompt| v1::GenerateRequest { prompt: Some(prompt), ..text_request("", "") };
    let message = |text: &str| v1::ChatMessage { role: text.into(), ..Default::default() };
    let messages = vec![message("u"); LONG_BYTES / 10];
    // Each takes one byte on the wire.
    let ids = vec![1; LONG_BYTES / 2];
    vec![
        ("a long text over gRPC", text_request(&words(LONG_BYTES), "")),
        ("token ids over gRPC", of(Prompt::TokenIds(v1::TokenIds { ids }))),
        ("many messages over gRPC", of(Prompt::Chat(v1::Chat { messages }))),
    ]
}

/// What it prints are the figures, which a run with `--nocapture` shows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::print_stderr)]
async fn no_poll_of_a_large_request_holds_the_thread_that_serves_all_connections() {
    let long = long_reply("word");
    let answer = move |heard: &ReceivedRequest| match heard.is_inference() {
        true if heard.text().contains(ASKS_MUCH) => ScriptedReply::json(200, &long),
        true if heard.target == RESPONSES => long_response(),
        true if heard.text().contains(ASKS_LONG_EVENT) => long_events(heard),
        true => whole_reply(),
        false => ScriptedReply::json(200, "{}"),
    };
    let engine = ScriptedServer::start(answer).await;
    let files = tempfile::tempdir().unwrap();
    let router = OneThread::start(files.path(), &engine.url()).await;
    for i in 0..20 {
        let body = completion(format!("warm {i}").into());
        let reply = router.http.post_with(COMPLETIONS, PLAIN, body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    let usual = router.longest();
    let mut longest = Vec::new();
    let plain = large().into_iter().chain(large_replies());
    let plain = plain.map(|(what, path, body)| (what, path, PLAIN, body));
    for (what, path, headers, body) in plain.chain(large_events()) {
        router.longest();
        let reply = router.http.post_with(path, headers, body).await;
        let poll = router.longest();
        eprintln!("{what}: {poll:?} (status {})", reply.status);
        longest.push((what, poll));
    }
    for (what, call) in large_calls() {
        router.longest();
        let answered = generate(router.grpc, call).await.map(|events| events.len());
        let poll = router.longest();
        eprintln!("{what}: {poll:?} ({:?})", answered.map_err(|status| status.code()));
        longest.push((what, poll));
    }
    let allowed = POLL_MAX * UNOPTIMISED;
    longest.retain(|(_, poll)| *poll > allowed);
    assert!(longest.is_empty(), "{longest:?}, where {allowed:?} are allowed and {usual:?} usual");
}
