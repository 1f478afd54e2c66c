//! `tokenizer: engine`: the router has no tokenizer files and asks the engines for the tokens of
//! prompts.

use std::time::Duration;

use serde_json::{Value, json};
use splitrail_sim::{RecordedRequest, write_tokenizer};
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::proc::processor_time;
use splitrail_tests::raw::request;
use splitrail_tests::scripted_server::{ReceivedRequest, ScriptedReply, ScriptedServer};
use splitrail_tests::solo::{Solo, whole_reply};
use splitrail_tests::trial::{CHAT, COMPLETIONS, chat, completion, prompt};
use splitrail_tests::{Client, Cluster, Spec};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

const TOKENIZE: &str = "/tokenize";
const MESSAGES: &str = "/v1/messages";
const FROM_ENGINES: &str = "splitrail_engine_tokenized_prompts_total";
const UNKNOWN: &str = "splitrail_untokenized_prompts_total";

/// The label of prompts whose tokens came too late.
const LATE: [(&str, &str); 1] = [("reason", "the_tokens_of_the_engine_came_too_late")];

/// A chat template that takes hours for a long chat.
const ENDLESS: &str = "{% for n in messages %}{% set ns = namespace(s='') %}{% for m in messages %}\
    {% set ns.s = ns.s + m['content'] %}{% endfor %}{% endfor %}x";

/// A cluster whose router has no tokenizer and is patient with those of the engines, with further
/// keys of `tokenizer`.
async fn start(spec: Spec, keys: &str) -> Cluster {
    let cluster = Cluster::start(spec).await;
    let lines =
        cluster.yaml.lines().map(|line| match line.trim_start().starts_with("tokenizer:") {
            true => format!("    tokenizer: {{ kind: engine, timeout: 30s{keys} }}"),
            false => line.to_owned(),
        });
    let yaml: Vec<String> = lines.collect();
    let report = cluster.reload(&yaml.join("\n")).await;
    assert_eq!(report.status, 200, "{}", report.text());
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::remove_file(cluster.files.path().join(file)).unwrap();
    }
    cluster
}

/// The requests for tokens that engines have got.
fn questions(cluster: &Cluster) -> Vec<RecordedRequest> {
    let all = cluster.engines.iter().flat_map(|(_, engine)| engine.requests());
    all.filter(|request| request.path == TOKENIZE).collect()
}

fn prompts_of(cluster: &Cluster) -> Vec<Value> {
    questions(cluster).iter().map(|question| question.body.clone()).collect()
}

#[tokio::test]
async fn prompts_are_found_in_caches_without_tokenizer_files() {
    let cluster = start(Spec::default(), "").await;
    let words = prompt(60, "cached");
    let message = json!({"model": "sim", "max_tokens": 4, "messages": [
        {"role": "user", "content": prompt(60, "message")},
    ]});
    for (path, body) in
        [(CHAT, chat(&words)), (COMPLETIONS, completion(&words)), (MESSAGES, message)]
    {
        let cold = cluster.http.post(path, &body).await;
        assert_eq!(cold.status, 200, "{}", cold.text());
        cluster.settle().await;
        let warm = cluster.http.post(path, &body).await;
        assert_eq!(warm.route("prefill"), cold.route("prefill"), "{path}: where its blocks are");
        let id = warm.header("x-request-id");
        let decision = &cluster.decisions(id).await[0];
        let counted = &warm.json()["usage"];
        let length = counted["prompt_tokens"].as_u64().or(counted["input_tokens"].as_u64());
        if path != MESSAGES {
            assert_eq!(decision["prompt_tokens"].as_u64(), length, "{path}: {decision}");
        }
        assert!(decision["prompt_blocks"].as_u64().unwrap() > 4, "{decision}");
    }
    // Each prompt was asked about once, and known the second time.
    assert_eq!(questions(&cluster).len(), 3, "{:#?}", prompts_of(&cluster));
    for source in ["engine", "kept"] {
        assert_eq!(cluster.metric(FROM_ENGINES, &[("source", source)]).await, 3.0, "{source}");
    }
    assert_eq!(cluster.metric(UNKNOWN, &[]).await, 0.0);
    assert_eq!(cluster.metric("splitrail_prompt_length_mismatches_total", &[]).await, 0.0);
    cluster.quiet().await;
}

#[tokio::test]
async fn engines_are_asked_in_turn_and_are_sent_nothing_but_the_prompt() {
    let cluster = start(Spec::aggregated(3), ", cache_size: 0").await;
    for turn in 0..6 {
        let mut body = chat(&prompt(4, &format!("turn{}", turn % 2)));
        body["cache_salt"] = "secret".into();
        body["temperature"] = 0.5.into();
        assert_eq!(cluster.http.post(CHAT, &body).await.status, 200);
    }
    for (name, engine) in &cluster.engines {
        let requests = engine.requests();
        let asked = requests.iter().filter(|request| request.path == TOKENIZE).count();
        assert_eq!(asked, 2, "{name}");
    }
    for question in prompts_of(&cluster) {
        let mut members: Vec<&str> =
            question.as_object().unwrap().keys().map(String::as_str).collect();
        members.sort_unstable();
        let expected = ["add_generation_prompt", "add_special_tokens", "messages", "model"];
        assert_eq!(members, expected);
    }
    assert_eq!(cluster.metric(FROM_ENGINES, &[("source", "kept")]).await, 0.0, "no room");
}

#[tokio::test]
async fn a_batch_gets_the_tokens_of_each_of_its_prompts() {
    let cluster = start(Spec::aggregated(2), "").await;
    let prompts = [prompt(20, "one"), prompt(30, "two"), prompt(20, "one")];
    let body = json!({"model": "sim", "max_tokens": 2, "n": 2, "prompt": prompts});
    let reply = cluster.http.post(COMPLETIONS, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let decisions = cluster.decisions(reply.header("x-request-id")).await;
    assert_eq!(decisions.len(), 3);
    let lengths: u64 = decisions.iter().map(|one| one["prompt_tokens"].as_u64().unwrap()).sum();
    assert_eq!(reply.json()["usage"]["prompt_tokens"], lengths);
}

#[tokio::test]
async fn without_tokens_a_request_is_placed_by_load_and_the_record_says_why() {
    let spec = Spec { engine: |_, config| config.offers_tokenize = false, ..Spec::aggregated(2) };
    let cluster = start(spec, "").await;
    for turn in 0..4 {
        let reply = cluster.http.post(CHAT, &chat(&prompt(9, &format!("load{turn}")))).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let decision = &cluster.decisions(reply.header("x-request-id")).await[0];
        assert_eq!(decision["prompt_unknown"], "no engine to ask for tokens", "{decision}");
    }
    let reason = [("reason", "no_engine_to_ask_for_tokens")];
    assert_eq!(cluster.metric(UNKNOWN, &reason).await, 4.0);
    assert_eq!(questions(&cluster).len(), 2, "an engine without the endpoint is not asked again");
}

#[tokio::test]
async fn a_prompt_that_the_endpoint_cannot_express_is_not_asked_about() {
    let cluster = start(Spec::aggregated(1), "").await;
    let image = json!({"type": "image_url", "image_url": {"url": "http://a/b.png"}});
    let body = json!({"model": "sim", "max_tokens": 2, "messages": [
        {"role": "user", "content": [image]},
    ]});
    let reply = cluster.http.post(CHAT, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let decision = &cluster.decisions(reply.header("x-request-id")).await[0];
    assert_eq!(decision["prompt_unknown"], "images, audio, video or files", "{decision}");
    assert!(questions(&cluster).is_empty());
}

#[tokio::test]
async fn an_engine_that_gives_no_tokens_in_time_is_waited_for_no_longer() {
    let model = "    tokenizer: { kind: engine, timeout: 50ms, in_flight_max: 1 }\n";
    let solo = Solo::start_with("{}", model, |heard| match heard.target.as_str() {
        // The head of the reply comes at once, and the rest never.
        TOKENIZE if heard.text().contains("halfway") => {
            let first = b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n{".to_vec();
            ScriptedReply::Held { first, last: Vec::new() }
        }
        TOKENIZE => ScriptedReply::Held { first: Vec::new(), last: Vec::new() },
        _ => whole_reply(),
    })
    .await;
    for (prompt, count) in [("late", 1.0), ("halfway", 2.0)] {
        let reply = solo.http.post(COMPLETIONS, &completion(prompt)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(solo.metric(UNKNOWN, &LATE).await, count, "{prompt}");
    }
    // Prompts beyond the bound do not wait at all.
    let body = json!({"model": "sim", "max_tokens": 2, "prompt": ["a", "b", "c"]});
    let reply = solo.http.post(COMPLETIONS, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    eventually("two prompts found too many that wait", async || {
        let busy = [("reason", "too_many_prompts_wait_for_tokens_of_engines")];
        solo.metric(UNKNOWN, &busy).await == 2.0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_that_no_core_is_free_to_read_are_waited_for_no_longer_than_others() {
    // A reply that is long enough to be read like a long prompt.
    let tokens = json!({"tokens": vec![100_000; 50_000]}).to_string();
    let engine = move |heard: &ReceivedRequest| match heard.target.as_str() {
        TOKENIZE => ScriptedReply::json(200, &tokens),
        _ if heard.is_inference() => whole_reply(),
        _ => ScriptedReply::json(200, "{}"),
    };
    let asked = ScriptedServer::start(engine.clone()).await;
    let other = ScriptedServer::start(engine).await;
    let files = tempfile::tempdir().unwrap();
    write_tokenizer(files.path()).unwrap();
    std::fs::write(files.path().join("endless.jinja"), ENDLESS).unwrap();
    let model = |name: &str, tokenizer: &str, engine: &ScriptedServer| {
        let url = engine.url();
        format!(
            "- name: {name}
  block_size: 16
  tokenizer: {{ {tokenizer} }}
  flow: aggregated
  policy: {{ kind: round_robin }}
  canary: {{ enabled: false }}
  workers: [{{ id: {name}, role: both, url: \"{url}\" }}]
"
        )
    };
    let yaml = format!(
        "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }}
limits: {{ template_timeout: 24h }}
models:
{}{}",
        model("sim", "kind: engine, timeout: 2s", &asked),
        model("endless", "kind: huggingface, path: ., chat_template: endless.jinja", &other),
    );
    let log = files.path().join("router.log");
    let router = RouterProcess::serve(files.path(), &yaml, &[], &log).await;
    let (http, admin) = (Client::new(router.http), Client::new(router.admin));
    eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
    let message = json!({"role": "user", "content": "words ".repeat(160)});
    let long = json!({"model": "endless", "messages": vec![message; 4000]}).to_string();
    // At most half of the cores prepare long requests.
    let mut clients = Vec::new();
    for _ in 0..std::thread::available_parallelism().unwrap().get() {
        let mut client = TcpStream::connect(router.http).await.unwrap();
        client.write_all(&request("POST", CHAT, &[], long.as_bytes())).await.unwrap();
        clients.push(client);
    }
    let before = processor_time(router.pid());
    eventually("templates are rendered", async || {
        processor_time(router.pid()) >= before + Duration::from_secs(1)
    })
    .await;
    let body = completion("late");
    let placed = eventually("the prompt is placed without its tokens", async || {
        metric_in(&admin.get("/metrics").await.text(), UNKNOWN, &LATE) == 1.0
    });
    let (reply, ()) = tokio::join!(http.post(COMPLETIONS, &body), placed);
    assert_eq!(reply.status, 200, "{}", reply.text());
}
