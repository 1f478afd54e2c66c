//! What one client may ask for, send and hold back is bounded; the rest of the
//! world does not notice that it tried.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytes::Bytes;
use futures_util::StreamExt;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use splitrail_sim::{Fault, FaultKind};
use splitrail_tests::cluster::eventually;
use splitrail_tests::grpc::{generate, text_request};
use splitrail_tests::raw::{exchange, flood, request};
use splitrail_tests::scripted_server::{STREAM_HEAD, ScriptedReply, ScriptedServer};
use splitrail_tests::shape::{error_object, openai_error};
use splitrail_tests::{Cluster, Spec};
use tonic::Code;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

const CAP: usize = 64 << 10;

/// Socket buffers on both ways take some megabytes before a writer notices.
const FLOOD_BYTES: usize = 256 << 20;

async fn one_engine(limits: &'static str) -> Cluster {
    Cluster::start(Spec { limits, ..Spec::aggregated(1) }).await
}

fn completion(text: &str) -> Value {
    json!({"model": "sim", "max_tokens": 4, "temperature": 0, "prompt": text})
}

async fn still_serves(cluster: &Cluster) {
    let reply = cluster.http.post(COMPLETIONS, &completion("still there?")).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}

/// A valid body of exactly so many bytes.
fn body_of_bytes(bytes: usize) -> String {
    let mut body = completion("padded").to_string();
    body += &" ".repeat(bytes - body.len());
    body
}

fn chunked(body: &str) -> Vec<u8> {
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    );
    let mut bytes = head.into_bytes();
    for piece in body.as_bytes().chunks(10_000) {
        bytes.extend(format!("{:x}\r\n", piece.len()).bytes());
        bytes.extend(piece);
        bytes.extend(b"\r\n");
    }
    bytes.extend(b"0\r\n\r\n");
    bytes
}

#[tokio::test]
async fn a_body_of_the_cap_is_served_and_one_byte_more_is_a_413() {
    let cluster = one_engine("{ body_size_max: 65536 }").await;
    let address = cluster.running.addresses.http;
    for (bytes, status) in [(CAP, 200), (CAP + 1, 413)] {
        let body = body_of_bytes(bytes);
        let reply = cluster.http.post_with(COMPLETIONS, &[], body.clone()).await;
        assert_eq!(reply.status, status, "{bytes} bytes: {}", reply.text());
        if status == 413 {
            assert_eq!(openai_error(&reply, 413)["code"], "body_too_large");
        }
        let reply = exchange(address, &chunked(&body)).await.unwrap();
        assert_eq!(reply.status(), status, "{bytes} bytes in chunks");
    }
    assert_eq!(cluster.engine("w0").requests().len(), 2);
    still_serves(&cluster).await;
}

#[tokio::test]
async fn an_endless_body_is_a_413_and_reading_stops() {
    let cluster = one_engine("{ body_size_max: 65536 }").await;
    let address = cluster.running.addresses.http;
    let piece = [&b"4000\r\n"[..], &[b' '; 0x4000], b"\r\n"].concat();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n");
    for (framing, piece) in [
        ("transfer-encoding: chunked\r\n\r\n", piece),
        ("content-length: 1099511627776\r\n\r\n", vec![b' '; 0x4000]),
    ] {
        let head = format!("{head}{framing}");
        let flood = flood(address, head.as_bytes(), &piece, FLOOD_BYTES).await;
        assert!(flood.cut, "{framing}: {} bytes were read", flood.written_bytes);
        let reply = flood.reply.unwrap();
        assert_eq!(reply.status(), 413, "{framing}");
        assert_eq!(error_object(&reply.text())["code"], "body_too_large");
    }
    assert!(cluster.engine("w0").requests().is_empty());
    still_serves(&cluster).await;
}

#[tokio::test]
async fn a_grpc_message_over_the_cap_is_refused() {
    let cluster = one_engine("{ body_size_max: 65536 }").await;
    let address = cluster.running.addresses.grpc.unwrap();
    let small = generate(address, text_request(&"x".repeat(10_000), "")).await;
    assert!(small.is_ok(), "{small:?}");
    let status = generate(address, text_request(&"x".repeat(CAP), "")).await;
    let code = status.unwrap_err().code();
    assert!([Code::ResourceExhausted, Code::OutOfRange].contains(&code), "{code:?}");
    assert_eq!(cluster.engine("w0").requests().len(), 1);
}

/// Sends pieces for as long as the other side reads; says how many bytes it took
/// and what it answered.
async fn grpc_flood(cluster: &Cluster, first: Vec<u8>, piece: Vec<u8>) -> (usize, String) {
    let sent = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&sent);
    let piece = Bytes::from(piece);
    let pieces =
        futures_util::stream::iter(std::iter::repeat_n(piece.clone(), FLOOD_BYTES / piece.len()));
    let pieces = futures_util::stream::iter([Bytes::from(first)]).chain(pieces);
    let frames = pieces.map(move |piece| {
        counted.fetch_add(piece.len(), Relaxed);
        Ok::<_, std::convert::Infallible>(Frame::data(piece))
    });
    let http: Hyper<HttpConnector, _> =
        Hyper::builder(TokioExecutor::new()).http2_only(true).build(HttpConnector::new());
    let address = cluster.running.addresses.grpc.unwrap();
    let request =
        http::Request::post(format!("http://{address}/splitrail.v1.FrontDoorService/Generate"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(StreamBody::new(frames))
            .unwrap();
    let reply = http.request(request).await.unwrap();
    let from_head = reply.headers().get("grpc-status").cloned();
    let trailers = reply.into_body().collect().await;
    let from_end = trailers.ok().and_then(|body| body.trailers()?.get("grpc-status").cloned());
    let status =
        from_head.or(from_end).map_or("none".into(), |value| value.to_str().unwrap().to_owned());
    (sent.load(Relaxed), status)
}

#[tokio::test]
async fn an_endless_grpc_body_is_refused_and_reading_stops() {
    let cluster = one_engine("{ body_size_max: 65536 }").await;
    let spaces = vec![b' '; 0x4000];
    // A message that says it has 2 GiB.
    let huge = [0, 0x7f, 0xff, 0xff, 0xff].to_vec();
    let (sent, status) = grpc_flood(&cluster, huge, spaces).await;
    assert!(sent < FLOOD_BYTES, "all {sent} bytes were read");
    assert_ne!(status, "0");
    assert!(cluster.engine("w0").requests().is_empty());
    still_serves(&cluster).await;
}

#[tokio::test]
async fn an_endless_grpc_call_is_refused_and_reading_stops() {
    let cluster = one_engine("{ body_size_max: 65536 }").await;
    // Field 15 is nobody's: each message is valid and means nothing.
    let unknown = [&[0, 0, 0, 0x40, 0x05, 0x7a, 0x81, 0x80, 0x01][..], &[b' '; 0x4001]].concat();
    let (sent, status) = grpc_flood(&cluster, unknown.clone(), unknown).await;
    assert!(sent < FLOOD_BYTES, "all {sent} bytes were read");
    assert_ne!(status, "0");
    assert!(cluster.engine("w0").requests().is_empty());
}

#[tokio::test]
async fn malformed_json_is_a_located_400_that_no_engine_sees() {
    let cluster = one_engine("{}").await;
    let deep = |n: usize| format!("{}1{}", "[".repeat(n), "]".repeat(n));
    let with = |member: &str| {
        format!(r#"{{"model":"sim","prompt":"x","messages":[],{member}}}"#).into_bytes()
    };
    let valid = completion("x").to_string().into_bytes();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("depth 200", with(&format!(r#""a":{}"#, deep(200)))),
        ("depth 10^6", with(&format!(r#""a":{}"#, deep(1_000_000)))),
        ("depth 10^6, unclosed", "[".repeat(1_000_000).into_bytes()),
        ("depth 10^6 of objects", r#"{"a":"#.repeat(1_000_000).into_bytes()),
        ("duplicate key", with(r#""prompt":"y""#)),
        ("duplicate key, escaped", with(r#""\u0070rompt":"y""#)),
        ("duplicate key, nested", with(r#""tools":[{"a":{"b":1,"c":2,"b":1}}]"#)),
        ("duplicate key, nested and escaped", with(r#""vllm_xargs":{"a":1,"\u0061":2}"#)),
        ("1e999", with(r#""temperature":1e999"#)),
        ("-1e999, nested", with(r#""tools":[[-1e999]]"#)),
        ("NaN", with(r#""temperature":NaN"#)),
        ("BOM", [b"\xef\xbb\xbf", valid.as_slice()].concat()),
        ("trailing garbage", [valid.as_slice(), b" x"].concat()),
        ("two documents", [valid.as_slice(), valid.as_slice()].concat()),
        ("NUL at the end", [valid.as_slice(), b"\0"].concat()),
        ("empty", Vec::new()),
        ("white space", b" \n ".to_vec()),
        ("cut off", valid[..valid.len() - 1].to_vec()),
        ("lone surrogate in a key", with(r#""\ud800":1"#)),
        ("control character", with("\"user\":\"a\nb\"")),
    ];
    for path in [CHAT, COMPLETIONS] {
        for (what, body) in &cases {
            let reply = cluster.http.post_with(path, &[], body.clone()).await;
            let error = openai_error(&reply, 400);
            let message = error["message"].as_str().unwrap();
            assert!(message.contains("line ") && message.contains("column "), "{what}: {message}");
            assert!(message.len() < 300, "{what}: {message}");
        }
        for (what, body) in [
            ("bad UTF-8", b"{\"model\":\"sim\",\"prompt\":\"\xff\"}".to_vec()),
            ("UTF-16", b"{\0\"\0m\0\"\0:\x001\0}\0".to_vec()),
            ("array", [b"[", valid.as_slice(), b"]"].concat()),
            ("number", b"1".to_vec()),
            ("string", b"\"x\"".to_vec()),
            ("null", b"null".to_vec()),
        ] {
            let reply = cluster.http.post_with(path, &[], body).await;
            let error = openai_error(&reply, 400);
            assert_eq!(error["type"], "invalid_request_error", "{what}");
        }
    }
    assert!(cluster.engine("w0").requests().is_empty());
    still_serves(&cluster).await;
}

#[tokio::test]
async fn malformed_extra_fields_over_grpc_are_refused() {
    let cluster = one_engine("{}").await;
    let address = cluster.running.addresses.grpc.unwrap();
    for extra in [
        format!("{{\"a\":{}", "[".repeat(1_000_000)),
        format!("{{\"a\":{}1{}}}", "[".repeat(200), "]".repeat(200)),
        r#"{"a":1,"\u0061":2}"#.into(),
        r#"{"tools":{"a":1,"a":2}}"#.into(),
        r#"{"a":1e999}"#.into(),
        "[]".into(),
        "{} x".into(),
        r#"{"max_tokens":5}"#.into(),
        r#"{"\u0070rompt":"y"}"#.into(),
    ] {
        let status = generate(address, text_request("x", &extra)).await.unwrap_err();
        let shown: String = extra.chars().take(40).collect();
        assert_eq!(status.code(), Code::InvalidArgument, "{shown}");
    }
    assert!(cluster.engine("w0").requests().is_empty());
    assert!(generate(address, text_request("x", "{}")).await.is_ok());
}

#[tokio::test]
async fn counts_and_sizes_out_of_bounds_are_a_400_that_no_engine_sees() {
    let cluster = one_engine("{ stop_max: 16, schema_size_max: 4096 }").await;
    let big = json!("g".repeat(5000));
    let mut cases: Vec<(&str, Value)> = vec![
        ("n", json!(1_u64 << 31)),
        ("n", json!(0)),
        ("n", json!(-1)),
        ("n", json!(1.5)),
        ("n", json!("300000")),
        ("n", json!([3])),
        ("best_of", json!(1_u64 << 31)),
        ("max_tokens", json!(1_u64 << 40)),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!(u64::MAX)),
        ("max_tokens", json!("99999999999")),
        ("max_tokens", json!(1e12)),
        ("max_completion_tokens", json!(1_u64 << 31)),
        ("min_tokens", json!(1_u64 << 31)),
        ("min_tokens", json!(-7)),
        ("stop", json!(vec!["x"; 17])),
        ("stop", json!("x".repeat(10_000))),
        ("stop", json!(["x".repeat(10_000)])),
        ("stop_token_ids", json!(vec![7; 17])),
        ("bad_words", json!(vec!["x"; 17])),
        ("logprobs", json!(1_u64 << 31)),
        ("top_logprobs", json!(1_u64 << 31)),
        ("prompt_logprobs", json!(1_u64 << 31)),
        ("tools", json!([{"type": "function", "function": {"name": "f", "description": big}}])),
        ("response_format", json!({"type": "json_schema", "json_schema": {"schema": big}})),
        ("structured_outputs", json!({"grammar": big})),
        ("guided_json", big.clone()),
        ("guided_regex", big.clone()),
        ("guided_grammar", big.clone()),
        ("guided_whitespace_pattern", big.clone()),
        ("json_schema", big.clone()),
        ("regex", big.clone()),
        ("ebnf", big.clone()),
        ("structural_tag", big.clone()),
        ("stop_regex", big.clone()),
        ("allowed_token_ids", json!(vec![7; 5000])),
        ("logprob_token_ids", json!(vec![7; 5000])),
        ("prompt_logprob_token_ids", json!(vec![7; 5000])),
        ("guided_choice", json!(vec!["c"; 5000])),
        ("logit_bias", (0..1000).map(|i| (i.to_string(), json!(1))).collect()),
    ];
    for path in [CHAT, COMPLETIONS] {
        for (field, value) in &mut cases {
            let mut body = completion("x");
            body["messages"] = json!([{"role": "user", "content": "x"}]);
            body[&*field] = value.clone();
            let reply = cluster.http.post(path, &body).await;
            assert_eq!(reply.status, 400, "{path} {field}: {}", reply.text());
            assert_eq!(openai_error(&reply, 400)["param"], *field);
        }
    }
    let batch = json!({"model": "sim", "prompt": vec!["x"; 65]});
    let reply = cluster.http.post(COMPLETIONS, &batch).await;
    assert_eq!(openai_error(&reply, 400)["param"], "prompt");
    assert!(cluster.engine("w0").requests().is_empty());
    still_serves(&cluster).await;
}

#[tokio::test]
#[allow(clippy::too_many_lines)] // One table of cases.
async fn counts_and_sizes_are_bounded_on_every_endpoint_and_in_every_object() {
    let limits = "{ stop_max: 16, schema_size_max: 4096, messages_max: 8 }";
    let cluster = one_engine(limits).await;
    let user = json!({"role": "user", "content": "x"});
    let many = json!(vec![user.clone(); 9]);
    let tool = json!([{"type": "function", "name": "f", "description": "g".repeat(5000)}]);
    let over = json!(1_u64 << 31);
    let requests = [
        (
            "/v1/responses",
            json!({"input": "x"}),
            vec![
                ("max_output_tokens", over.clone()),
                ("max_output_tokens", json!(-1)),
                ("top_logprobs", over.clone()),
                ("tools", tool.clone()),
                ("text", json!({"format": "g".repeat(5000)})),
                ("input", many.clone()),
            ],
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 1, "messages": [user]}),
            vec![
                ("max_tokens", over.clone()),
                ("stop_sequences", json!(vec!["x"; 17])),
                ("stop_sequences", json!(["x".repeat(10_000)])),
                ("tools", tool),
                ("output_config", json!({"format": "g".repeat(5000)})),
                ("messages", many.clone()),
            ],
        ),
        (CHAT, json!({}), vec![("messages", many)]),
        (
            COMPLETIONS,
            json!({"prompt": "x", "stream": true}),
            vec![
                ("stream_options", json!([true])),
                ("stream_options", json!("x")),
                ("stream_options", json!({"include_usage": 1})),
            ],
        ),
    ];
    let refused = async |path: &str, body: &Value, field: &str| {
        let reply = cluster.http.post(path, body).await;
        assert_eq!(reply.status, 400, "{path} {field}: {}", reply.text());
        assert!(reply.text().contains(&format!("`{field}`")), "{path} {field}: {}", reply.text());
    };
    for (path, mut body, cases) in requests {
        body["model"] = "sim".into();
        for (field, value) in cases {
            let mut body = body.clone();
            body[field] = value;
            refused(path, &body, field).await;
        }
    }
    for (field, value) in [
        ("n", over.clone()),
        ("n", json!(0)),
        ("max_tokens", over.clone()),
        ("min_tokens", json!(-7)),
        ("logprobs", over.clone()),
        ("prompt_logprobs", over),
        ("stop", json!(vec!["x"; 17])),
        ("stop_token_ids", json!(vec![7; 17])),
        ("structured_outputs", json!({"grammar": "g".repeat(5000)})),
    ] {
        let body = json!({"model": "sim", "token_ids": [1], "sampling_params": {field: value}});
        refused("/inference/v1/generate", &body, field).await;
    }
    assert!(cluster.engine("w0").requests().is_empty());
    still_serves(&cluster).await;
}

#[tokio::test]
async fn the_bounds_hold_over_grpc() {
    let cluster = one_engine("{ stop_max: 16, schema_size_max: 4096 }").await;
    let address = cluster.running.addresses.grpc.unwrap();
    let set = |change: fn(&mut splitrail_proto::v1::SamplingParams)| {
        let mut request = text_request("x", "");
        change(request.sampling.as_mut().unwrap());
        request
    };
    let extra = json!({"tools": "t".repeat(5000)}).to_string();
    for request in [
        set(|params| params.n = Some(1 << 31)),
        set(|params| params.n = Some(0)),
        set(|params| params.max_tokens = Some(u32::MAX)),
        set(|params| params.min_tokens = Some(u32::MAX)),
        set(|params| params.stop = vec!["x".into(); 17]),
        set(|params| params.temperature = Some(f64::INFINITY)),
        text_request("x", &extra),
        text_request("x", r#"{"best_of":2147483648}"#),
        text_request("x", r#"{"max_completion_tokens":2147483648}"#),
    ] {
        let status = generate(address, request.clone()).await;
        let code = status.map_err(|status| status.code());
        assert_eq!(code, Err(Code::InvalidArgument), "{request:?}");
    }
    assert!(cluster.engine("w0").requests().is_empty());
}

#[tokio::test]
async fn requests_over_the_limit_are_shed_and_room_comes_back() {
    let cluster = one_engine("{ in_flight_max: 2 }").await;
    let engine = cluster.engine("w0");
    engine.set_fault(Fault { kind: FaultKind::Hang, times: Some(2) });
    let mut held = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let http = cluster.http.clone();
        held.spawn(async move { http.post(COMPLETIONS, &completion("held")).await });
    }
    eventually("two requests hang", async || engine.requests().len() == 2).await;
    for _ in 0..3 {
        let reply = cluster.http.post(COMPLETIONS, &completion("more")).await;
        let error = openai_error(&reply, 503);
        assert_eq!(error["code"], "overloaded");
        let seconds: u32 = reply.header("retry-after").parse().unwrap();
        assert!(seconds >= 1);
    }
    let shed = [("reason", "in_flight_max")];
    assert_eq!(cluster.metric("splitrail_shed_total", &shed).await, 3.0);
    assert_eq!(engine.requests().len(), 2);
    let health = cluster.http.get("/health").await;
    assert_eq!(health.status, 200, "health is not shed");
    held.shutdown().await;
    cluster.quiet().await;
    for _ in 0..3 {
        still_serves(&cluster).await;
    }
    assert_eq!(cluster.metric("splitrail_shed_total", &shed).await, 3.0);
}

#[tokio::test]
async fn a_shed_grpc_call_says_that_resources_are_exhausted() {
    let cluster = one_engine("{ in_flight_max: 1 }").await;
    let engine = cluster.engine("w0");
    engine.set_fault(Fault { kind: FaultKind::Hang, times: Some(1) });
    let http = cluster.http.clone();
    let mut held = tokio::task::JoinSet::new();
    held.spawn(async move { http.post(COMPLETIONS, &completion("held")).await });
    eventually("a request hangs", async || engine.requests().len() == 1).await;
    let address = cluster.running.addresses.grpc.unwrap();
    let status = generate(address, text_request("x", "")).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    held.shutdown().await;
    cluster.quiet().await;
    assert!(generate(address, text_request("x", "")).await.is_ok());
}

#[tokio::test]
async fn compressed_bodies_are_a_415_that_no_engine_sees() {
    let cluster = one_engine("{}").await;
    let body = completion("x").to_string();
    for encoding in ["gzip", "GZIP", "deflate", "br", "zstd", "identity, gzip", "gzip, gzip"] {
        let headers = [("content-encoding", encoding)];
        let reply = cluster.http.post_with(COMPLETIONS, &headers, body.clone()).await;
        let error = openai_error(&reply, 415);
        assert_eq!(error["code"], "unsupported_media", "{encoding}");
    }
    let twice = [("content-encoding", "identity"), ("content-encoding", "gzip")];
    let raw = request("POST", COMPLETIONS, &twice, body.as_bytes());
    let reply = exchange(cluster.running.addresses.http, &raw).await.unwrap();
    assert_eq!(reply.status(), 415, "the second of two headers counts too");
    assert!(cluster.engine("w0").requests().is_empty());
    let headers = [("content-encoding", "identity")];
    let reply = cluster.http.post_with(COMPLETIONS, &headers, body).await;
    assert_eq!(reply.status, 200);
}

/// A client that asks for a stream and does not read it holds its engine back:
/// what the router keeps for it is a part of what the engine would send.
#[tokio::test]
async fn a_client_that_does_not_read_holds_back_its_own_engine_request_only() {
    let event = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": "t".repeat(16 << 10), "finish_reason": null}],
    });
    let piece = format!("data: {event}\n\n").into_bytes();
    let post = ScriptedServer::start(move |heard| {
        if heard.text().contains("\"stream\":true") {
            ScriptedReply::Endless {
                head: STREAM_HEAD.to_vec(),
                piece: piece.clone(),
                max_bytes: FLOOD_BYTES,
            }
        } else {
            ScriptedReply::json(if heard.is_inference() { 500 } else { 200 }, "")
        }
    })
    .await;
    let slow = format!("{{ id: slow, role: both, url: \"{}\" }}", post.url());
    let cluster = Cluster::start(Spec {
        policy: "{ kind: round_robin }",
        extra_workers: vec![slow],
        ..Spec::aggregated(1)
    })
    .await;
    eventually("both workers are up", async || {
        cluster.metric("splitrail_worker_up", &[]).await == 2.0
    })
    .await;
    let mut body = completion("x");
    body["stream"] = true.into();
    let events = loop {
        let events = cluster.http.stream(COMPLETIONS, &body).await;
        if post.open() > 0 {
            break events;
        }
    };
    let mut last = 0;
    let mut unchanged = 0;
    eventually("the engine cannot write on", async || {
        // Meanwhile others are served.
        assert_eq!(cluster.http.get("/v1/models").await.status, 200);
        let written = post.written_bytes();
        unchanged = if written == last { unchanged + 1 } else { 0 };
        last = written;
        unchanged == 50
    })
    .await;
    assert!(last > 0 && last < FLOOD_BYTES / 2, "the router took {last} bytes");
    assert_eq!(post.open(), 1, "the stream is held back, not ended");
    for _ in 0..4 {
        let reply = cluster.http.post(COMPLETIONS, &completion("y")).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    drop(events);
    eventually("the engine's connection is closed", async || post.open() == 0).await;
    cluster.quiet().await;
}
