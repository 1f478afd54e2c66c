//! What a client has used that leaves before the end of its reply: the prompt that an engine has begun,
//! and the tokens that have arrived. Quota, ledger and metrics say the same.

mod random;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use splitrail_tests::accounting::ledger_lines;
use splitrail_tests::cluster::eventually;
use splitrail_tests::dialect::{self, MESSAGES, RESPONSES};
use splitrail_tests::grpc::{grpc_client, text_request};
use splitrail_tests::scripted_server::{
    ReceivedRequest, STREAM_HEAD, ScriptedReply, ScriptedServer,
};
use splitrail_tests::tenants::{Keys, bearer, start};
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, GENERATE, chat, completion, generate, prompt, streamed, token_ids,
};
use splitrail_tests::{Cluster, Spec};

/// The limit of the tenant, in tokens of a minute.
const LIMIT: u64 = 100_000;

/// The events with output that an engine sends before it falls silent.
const EVENTS: usize = 7;

/// What each event with output has. The tokenizer has a token for each byte.
const MARK: &str = "zz";

fn event(data: &Value) -> String {
    match data["type"].as_str() {
        Some(name) => format!("event: {name}\ndata: {data}\n\n"),
        None => format!("data: {data}\n\n"),
    }
}

fn chunk(choices: &Value) -> Value {
    json!({"id": "x", "object": "x", "created": 1, "model": "sim", "choices": choices})
}

/// The events of a reply on this path, and the number of tokens in each with output.
fn events(path: &str) -> (String, u64) {
    let output = |index: usize| match path {
        CHAT => chunk(&json!([{"index": 0, "delta": {"content": MARK}, "finish_reason": null}])),
        COMPLETIONS => chunk(&json!([{"index": 0, "text": MARK, "finish_reason": null}])),
        GENERATE => chunk(&json!([{"index": 0, "token_ids": [5, 6, 7 + index], "x": MARK}])),
        RESPONSES => json!({"type": "response.output_text.delta", "delta": MARK}),
        _ => json!({
            "type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": MARK},
        }),
    };
    let opening = match path {
        CHAT => vec![chunk(&json!([{"index": 0, "delta": {"role": "assistant", "content": ""}}]))],
        RESPONSES => vec![json!({"type": "response.created", "response": {"id": "x"}})],
        MESSAGES => vec![
            json!({"type": "message_start", "message": {
                "id": "x", "content": [], "usage": {"input_tokens": 0, "output_tokens": 0},
            }}),
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}),
        ],
        _ => Vec::new(),
    };
    let all = opening.into_iter().chain((0..EVENTS).map(output));
    (all.map(|data| event(&data)).collect(), if path == GENERATE { 3 } else { MARK.len() as u64 })
}

/// Bytes, and then nothing.
fn silent_after(bytes: &[u8]) -> ScriptedReply {
    ScriptedReply::Held { first: bytes.to_vec(), last: Vec::new() }
}

/// The head of a stream and some events, and then nothing.
fn begun(path: &str) -> ScriptedReply {
    silent_after(&[STREAM_HEAD, events(path).0.as_bytes()].concat())
}

type Script = Arc<dyn Fn(&str) -> ScriptedReply + Send + Sync>;

/// The same by the whole request.
type RequestScript = Arc<dyn Fn(&ReceivedRequest) -> ScriptedReply + Send + Sync>;

/// A router with a tenant and a ledger file in front of engines that all answer by a script, which
/// takes the path of a request.
struct Stand {
    cluster: Cluster,
    engines: Vec<ScriptedServer>,
    key: String,
    _keys: Keys,
}

impl Stand {
    /// `prefill` says whether an engine computes the prompts for the others.
    async fn start(prefill: bool, engines: usize, script: Script) -> Self {
        Self::serving(prefill, engines, Arc::new(move |heard| script(&heard.target)), "").await
    }

    /// The same with further lines of the model.
    async fn serving(prefill: bool, engines: usize, script: RequestScript, model: &str) -> Self {
        let mut keys = Keys::empty();
        let key = keys.tenant("acme");
        let (mut servers, mut extra_workers) = (Vec::new(), Vec::new());
        for number in 0..engines {
            let script = Arc::clone(&script);
            let server = ScriptedServer::start(move |heard| match heard.is_inference() {
                true => script(heard),
                false => ScriptedReply::json(200, r#"{"data":[{"id":"sim"}]}"#),
            })
            .await;
            let role = if prefill { "decode" } else { "both" };
            extra_workers
                .push(format!("{{ id: s{number}, role: {role}, url: \"{}\" }}", server.url()));
            servers.push(server);
        }
        let spec = match prefill {
            true => Spec { prefill: 1, decode: 0, ..Spec::default() },
            false => Spec::aggregated(0),
        };
        let spec = Spec {
            policy: "{ kind: round_robin }",
            top: "ledger: { path: ledger.jsonl }".into(),
            model: model.into(),
            extra_workers,
            ..spec
        };
        let limits = format!("{{ tokens_per_minute: {LIMIT}, tokens_per_day: {LIMIT} }}");
        let tenants = format!("tenants: [ {{ name: acme, limits: {limits} }} ]");
        let cluster = start(&keys, &tenants, spec).await;
        let workers = (engines + usize::from(prefill)) as f64;
        eventually("the engines are up", async || {
            cluster.metric("splitrail_worker_up", &[]).await == workers
        })
        .await;
        Self { cluster, engines: servers, key, _keys: keys }
    }

    /// An engine that sends [`EVENTS`] events with output and falls silent.
    async fn of_silent_streams(prefill: bool) -> Self {
        Self::start(prefill, 1, Arc::new(begun)).await
    }

    fn asked(&self) -> usize {
        let inference = |server: &ScriptedServer| {
            server.heard().iter().filter(|heard| heard.is_inference()).count()
        };
        self.engines.iter().map(inference).sum()
    }

    /// The tokens that the tenant has left.
    async fn remaining(&self) -> u64 {
        let authorization = bearer(&self.key);
        let headers = [("authorization", authorization.as_str())];
        let reply = self.cluster.http.get_with("/v1/models", &headers).await;
        reply.header("x-ratelimit-remaining-tokens").parse().unwrap()
    }

    /// Waits for the only line of the ledger file. Quota, ledger and metrics must agree on it.
    /// Returns it, with the length of its prompts by the router's tokenizer.
    async fn line(&self, outcome: &str) -> (Value, u64) {
        let path = self.cluster.files.path().join("ledger.jsonl");
        eventually("the line is written", async || !ledger_lines(&path).is_empty()).await;
        let lines = ledger_lines(&path);
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert_eq!(line["outcome"], outcome, "{line}");
        let tokens = |name: &str| line[name].as_u64().unwrap_or(0);
        let [prompt, cached, completion] =
            ["prompt_tokens", "cached_tokens", "completion_tokens"].map(tokens);
        assert_eq!(self.remaining().await, LIMIT - (prompt - cached + completion), "{line}");
        for (metric, label, expected) in [
            ("splitrail_tenant_tokens_total", "prompt", prompt),
            ("splitrail_tenant_tokens_total", "cached", cached),
            ("splitrail_tenant_tokens_total", "completion", completion),
            ("splitrail_usage_prompt_tokens_total", "", prompt),
            ("splitrail_generation_tokens_total", "", completion),
            ("splitrail_tenant_settled_tokens_total", "", prompt - cached + completion),
        ] {
            let labels = [("kind", label)];
            let labels = if label.is_empty() { &[][..] } else { &labels[..] };
            let counted = self.cluster.metric(metric, labels).await;
            assert_eq!(counted, expected as f64, "{metric} {label} of {line}");
        }
        let decisions = self.cluster.decisions(line["request_id"].as_str().unwrap()).await;
        let lengths = decisions.iter().map(|decision| decision["prompt_tokens"].as_u64().unwrap());
        (line.clone(), lengths.sum())
    }

    /// The same for a client that has left after so many tokens of its reply.
    async fn is_charged(&self, completion_tokens: u64) {
        let (line, prompt_tokens) = self.line("cancelled").await;
        assert!(prompt_tokens > 0);
        assert_eq!(line["prompt_tokens"], prompt_tokens, "{line}");
        assert_eq!(line["completion_tokens"], completion_tokens, "{line}");
        assert_eq!(line["wasted_prompt_tokens"], 0, "{line}");
        for prompt in line["prompts"].as_array().unwrap() {
            assert_eq!(prompt["completion_source"], "estimate", "the router has counted: {line}");
        }
    }

    /// The same for a request that costs nothing.
    async fn is_free(&self, outcome: &str) {
        let (line, _) = self.line(outcome).await;
        assert_eq!(
            (&line["prompt_tokens"], &line["completion_tokens"]),
            (&Value::Null, &Value::Null)
        );
    }

    /// Asks over HTTP, reads so many events with output, and leaves.
    async fn leave_after(&self, is_http2: bool, path: &str, body: &Value, events: usize) {
        let address = self.cluster.running.addresses.http;
        let client =
            Hyper::builder(TokioExecutor::new()).http2_only(is_http2).build_http::<Full<Bytes>>();
        let request = Request::post(format!("http://{address}{path}"))
            .header("authorization", bearer(&self.key))
            .header("content-type", "application/json")
            .body(Full::from(streamed(body).to_string()))
            .unwrap();
        let response = client.request(request).await.unwrap();
        assert_eq!(response.status(), 200);
        let (mut body, mut seen) = (response.into_body(), Vec::new());
        while String::from_utf8_lossy(&seen).matches(MARK).count() < events {
            let frame = body.frame().await.expect("the stream goes on").unwrap();
            seen.extend_from_slice(frame.data_ref().unwrap());
        }
    }

    /// Asks, and leaves as soon as an engine of the script is asked.
    async fn leave_when_asked(&self, body: &Value) {
        tokio::select! {
            () = self.leave_after(false, COMPLETIONS, body, 1) => panic!("a reply"),
            () = eventually("the engine is asked", async || self.asked() > 0) => {}
        }
    }
}

/// A request to each endpoint that streams, for more tokens than the engines of the scripts send.
fn requests() -> [(&'static str, Value); 5] {
    let text = prompt(30, "leave");
    let mut generate = generate(&token_ids(50, 1));
    generate["sampling_params"]["max_tokens"] = 100.into();
    [
        (CHAT, for_more(chat(&text))),
        (COMPLETIONS, for_more(completion(&text))),
        (GENERATE, generate),
        (RESPONSES, dialect::request(RESPONSES, &text, 100)),
        (MESSAGES, dialect::request(MESSAGES, &text, 100)),
    ]
}

fn for_more(mut body: Value) -> Value {
    body["max_tokens"] = 100.into();
    body
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_pays_for_its_prompt_and_what_has_arrived() {
    for (path, body) in requests() {
        for (prefill, is_http2) in [(false, false), (false, true), (true, false), (true, true)] {
            let stand = Stand::of_silent_streams(prefill).await;
            stand.leave_after(is_http2, path, &body, EVENTS).await;
            stand.is_charged(EVENTS as u64 * events(path).1).await;
        }
    }
}

#[tokio::test]
async fn a_call_that_is_cancelled_pays_for_its_prompt_and_what_has_arrived() {
    for prefill in [false, true] {
        let stand = Stand::of_silent_streams(prefill).await;
        let mut call = tonic::Request::new(text_request(&prompt(30, "call"), ""));
        call.get_mut().sampling.as_mut().unwrap().max_tokens = Some(100);
        call.metadata_mut().insert("authorization", bearer(&stand.key).parse().unwrap());
        let address = stand.cluster.running.addresses.grpc.unwrap();
        let mut stream = grpc_client(address).generate(call).await.unwrap().into_inner();
        // The first message says that the call was started.
        for _ in 0..=EVENTS {
            stream.message().await.unwrap().expect("the stream goes on");
        }
        drop(stream);
        stand.is_charged((EVENTS * MARK.len()) as u64).await;
    }
}

#[tokio::test]
async fn a_batch_and_several_samples_that_are_left_are_charged_with_all_of_their_streams() {
    // With a hand-off, a leg of its own would take it before several samples.
    for (prefill, samples) in [(false, 2), (true, 1)] {
        let script = move |path: &str| {
            let of_first = events(path).0;
            let of_second = of_first.replace(r#""index":0"#, r#""index":1"#);
            let of_second = if samples == 2 { &of_second } else { "" };
            silent_after(&[STREAM_HEAD, of_first.as_bytes(), of_second.as_bytes()].concat())
        };
        let mut batch = for_more(completion(""));
        batch["prompt"] = json!([prompt(30, "one"), prompt(40, "two"), prompt(50, "three")]);
        batch["n"] = samples.into();
        let stand = Stand::start(prefill, 1, Arc::new(script)).await;
        stand.leave_after(false, COMPLETIONS, &batch, 3 * samples * EVENTS).await;
        stand.is_charged((3 * samples * EVENTS * MARK.len()) as u64).await;
    }
}

/// A client gains nothing by reading less than has arrived, or by leaving before the last event.
#[tokio::test]
async fn what_has_arrived_is_charged_whether_or_not_the_client_has_read_it() {
    for (path, body) in requests() {
        let stand = Stand::of_silent_streams(false).await;
        stand.leave_after(false, path, &body, 1).await;
        stand.is_charged(EVENTS as u64 * events(path).1).await;
    }
}

#[tokio::test]
async fn what_has_arrived_of_a_reply_is_charged_if_the_router_stops() {
    let stand = Stand::of_silent_streams(false).await;
    let body = streamed(&for_more(completion(&prompt(30, "stop"))));
    let authorization = bearer(&stand.key);
    let headers = [("authorization", authorization.as_str())];
    let mut stream = stand.cluster.http.stream_with(COMPLETIONS, &headers, &body).await;
    for _ in 0..EVENTS {
        stream.next().await.expect("the stream goes on");
    }
    stand.cluster.running.core.abort.cancel();
    assert!(stream.rest().await.last().unwrap().contains("router_stopping"));
    let path = stand.cluster.files.path().join("ledger.jsonl");
    eventually("the line is written", async || !ledger_lines(&path).is_empty()).await;
    let line = &ledger_lines(&path)[0];
    let generated = EVENTS * MARK.len();
    assert_eq!(
        (&line["outcome"], &line["completion_tokens"]),
        (&json!("router_stopping"), &json!(generated))
    );
    let spent = line["prompt_tokens"].as_u64().unwrap() + generated as u64;
    assert_eq!(stand.remaining().await, LIMIT - spent);
}

/// A reply that is not streamed has no head before its end: the engine's KV events tell.
#[tokio::test]
async fn a_prompt_of_which_an_engine_stores_blocks_is_charged_before_its_reply_begins() {
    let mut keys = Keys::empty();
    let key = keys.tenant("acme");
    let spec = Spec {
        engine: |_, config| config.decode_us_per_step = 1_000_000,
        top: "ledger: { path: ledger.jsonl }".into(),
        ..Spec::aggregated(1)
    };
    let tenants =
        format!("tenants: [ {{ name: acme, limits: {{ tokens_per_minute: {LIMIT} }} }} ]");
    let cluster = start(&keys, &tenants, spec).await;
    let authorization = bearer(&key);
    let headers = [("authorization", authorization.as_str())];
    let mut body = completion(&prompt(100, "whole"));
    body["max_tokens"] = 1000.into();
    let asks = cluster.http.post_with(COMPLETIONS, &headers, body.to_string());
    tokio::select! {
        _ = asks => panic!("a reply"),
        () = eventually("its blocks are known", async || {
            cluster.metric("splitrail_index_blocks", &[]).await > 0.0
        }) => {}
    }
    let path = cluster.files.path().join("ledger.jsonl");
    eventually("the line is written", async || !ledger_lines(&path).is_empty()).await;
    let line = &ledger_lines(&path)[0];
    assert_eq!((&line["outcome"], &line["completion_tokens"]), (&json!("cancelled"), &json!(0)));
    assert!(line["prompt_tokens"].as_u64().unwrap() >= 100, "{line}");
}

#[tokio::test]
async fn a_prompt_that_no_engine_has_begun_is_free() {
    let stand = Stand::start(false, 1, Arc::new(|_| silent_after(b""))).await;
    stand.leave_when_asked(&completion(&prompt(30, "early"))).await;
    stand.is_free("cancelled").await;
}

#[tokio::test]
async fn a_prompt_that_was_prefilled_is_charged_before_its_reply_begins() {
    let stand = Stand::start(true, 1, Arc::new(|_| silent_after(b""))).await;
    stand.leave_when_asked(&completion(&prompt(30, "early"))).await;
    stand.is_charged(0).await;
}

#[tokio::test]
async fn an_attempt_that_failed_is_not_charged_beside_the_one_that_was_left() {
    let asked = AtomicUsize::new(0);
    let script = move |path: &str| match asked.fetch_add(1, Relaxed) {
        0 => ScriptedReply::events("data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n"),
        _ => begun(path),
    };
    let stand = Stand::start(false, 2, Arc::new(script)).await;
    stand
        .leave_after(false, COMPLETIONS, &for_more(completion(&prompt(30, "again"))), EVENTS)
        .await;
    assert_eq!(stand.asked(), 2);
    stand.is_charged((EVENTS * MARK.len()) as u64).await;
}

#[tokio::test]
async fn a_stream_that_its_engine_breaks_off_is_free() {
    let script = |path: &str| ScriptedReply::events(&events(path).0);
    let stand = Stand::start(false, 1, Arc::new(script)).await;
    let mut body = streamed(&completion(&prompt(30, "lost")));
    body["max_tokens"] = 100.into();
    let authorization = bearer(&stand.key);
    let headers = [("authorization", authorization.as_str())];
    let mut stream = stand.cluster.http.stream_with(COMPLETIONS, &headers, &body).await;
    assert!(stream.rest().await.len() > EVENTS);
    stand.is_free("decode_lost").await;
}

#[tokio::test]
async fn the_running_total_of_an_engine_counts_before_what_the_router_has_counted() {
    let script = |_: &str| {
        let mut last = chunk(&json!([{"index": 0, "text": MARK, "finish_reason": null}]));
        last["usage"] = json!({"prompt_tokens": 40, "completion_tokens": 9, "total_tokens": 49});
        let body = event(&last);
        silent_after(&[STREAM_HEAD, body.as_bytes()].concat())
    };
    let stand = Stand::start(false, 1, Arc::new(script)).await;
    stand.leave_after(false, COMPLETIONS, &completion(&prompt(30, "total")), 1).await;
    let (line, router) = stand.line("cancelled").await;
    assert!(router >= 40, "the engine's figure is what the request can have");
    assert_eq!((&line["prompt_tokens"], &line["completion_tokens"]), (&json!(40), &json!(9)));
}

#[tokio::test]
async fn a_prompt_of_unknown_length_is_charged_with_what_was_reserved_for_it() {
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    let mut body = for_more(chat(""));
    body["messages"] = json!([{"role": "user", "content": [image]}]);
    let stand = Stand::of_silent_streams(false).await;
    stand.leave_after(false, CHAT, &body, EVENTS).await;
    let path = stand.cluster.files.path().join("ledger.jsonl");
    eventually("the line is written", async || !ledger_lines(&path).is_empty()).await;
    let line = &ledger_lines(&path)[0];
    let (prompt, completion) = (&line["prompt_tokens"], &line["completion_tokens"]);
    let generated = EVENTS * MARK.len();
    assert_eq!((prompt, completion), (&Value::Null, &json!(generated)), "{line}");
    let reserved = stand.cluster.metric("splitrail_tenant_reserved_tokens_total", &[]).await as u64;
    let max_tokens = body["max_tokens"].as_u64().unwrap();
    assert!(reserved > max_tokens, "the prompt was estimated");
    assert_eq!(stand.remaining().await, LIMIT - (reserved - max_tokens + generated as u64));
}
