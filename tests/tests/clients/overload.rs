//! Many streams at once, more requests than there is room for, and clients that want it all.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use splitrail_tests::cluster::eventually;
use splitrail_tests::grpc::{generate, grpc_client, text_request};
use splitrail_tests::proc::{memory, open_files};
use splitrail_tests::scripted_server::{STREAM_HEAD, ScriptedReply};
use splitrail_tests::solo::{Solo, whole_reply};
use splitrail_tests::{Client, Cluster, Spec};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

const COMPLETIONS: &str = "/v1/completions";

fn completion(text: &str) -> Value {
    json!({"model": "sim", "max_tokens": 4, "temperature": 0, "prompt": text})
}

fn event(text: &str, end: Option<&str>) -> String {
    let event = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": text, "finish_reason": end}],
    });
    format!("data: {event}\n\n")
}

/// Streams that have begun and end when the post says so.
fn held() -> ScriptedReply {
    let first = [STREAM_HEAD, event("begun", None).as_bytes()].concat();
    let last = event("ended", Some("length")) + "data: [DONE]\n\n";
    ScriptedReply::Held { first, last: last.into_bytes() }
}

fn is_streamed(heard: &splitrail_tests::scripted_server::ReceivedRequest) -> bool {
    heard.text().contains("\"stream\":true")
}

/// Ten thousand streams over HTTP/2 connections of 200 each. All of them have begun before
/// any of them ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_streams_at_once() {
    const STREAMS: usize = 10_000;
    const PER_CONNECTION: usize = 200;
    let limits = "{ in_flight_max: 12000 }";
    let solo = Solo::start(limits, |heard| match is_streamed(heard) {
        true => held(),
        false => whole_reply(),
    })
    .await;
    for i in 0..50 {
        let reply = solo.http.post(COMPLETIONS, &completion(&format!("warm {i}"))).await;
        assert_eq!(reply.status, 200);
    }
    let before = (memory(solo.router.pid()), open_files(solo.router.pid()));
    let mut begun: Vec<Incoming> = Vec::new();
    let mut connections = JoinSet::new();
    let mut body = completion("a stream among many");
    body["stream"] = true.into();
    let body = Bytes::from(body.to_string());
    for _ in 0..STREAMS / PER_CONNECTION {
        let socket = TcpStream::connect(solo.router.http).await.unwrap();
        let (client, connection) =
            http2::handshake(TokioExecutor::new(), TokioIo::new(socket)).await.unwrap();
        connections.spawn(connection);
        let mut asked = JoinSet::new();
        for _ in 0..PER_CONNECTION {
            let mut client = client.clone();
            let request = http::Request::post("http://x/v1/completions")
                .header("content-type", "application/json");
            let request = request.body(Full::new(body.clone())).unwrap();
            asked.spawn(async move {
                let reply = client.send_request(request).await.unwrap();
                assert_eq!(reply.status(), 200);
                let mut body = reply.into_body();
                let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
                assert!(first.starts_with(b"data: "));
                body
            });
        }
        while let Some(body) = asked.join_next().await {
            begun.push(body.unwrap());
        }
    }
    assert_eq!(solo.metric("splitrail_requests_in_flight", &[]).await, STREAMS as f64);
    let after = (memory(solo.router.pid()), open_files(solo.router.pid()));
    let per_stream_kib = (after.0.now_kib - before.0.now_kib) as f64 / STREAMS as f64;
    let files = after.1 - before.1;
    println!("{per_stream_kib:.1} KiB and {:.3} files per stream", files as f64 / STREAMS as f64);
    // One connection to an engine for each, and the clients' own.
    assert!(files <= STREAMS + STREAMS / PER_CONNECTION + 16, "{files} files");
    assert!(per_stream_kib < 64.0, "{per_stream_kib} KiB per stream");
    // Others come through.
    assert_eq!(solo.http.post(COMPLETIONS, &completion("beside")).await.status, 200);
    solo.post.release();
    let mut ends = JoinSet::new();
    for body in begun {
        ends.spawn(async move { body.collect().await.unwrap().to_bytes() });
    }
    while let Some(rest) = ends.join_next().await {
        assert!(rest.unwrap().ends_with(b"data: [DONE]\n\n"));
    }
    eventually("nothing is in flight", async || {
        solo.metric("splitrail_requests_in_flight", &[]).await == 0.0
    })
    .await;
}

/// The same over HTTP/1, where each has a socket of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_over_http1_have_a_budget_of_memory_and_files() {
    const STREAMS: usize = 2000;
    let solo = Solo::start("{}", |heard| match is_streamed(heard) {
        true => held(),
        false => whole_reply(),
    })
    .await;
    for i in 0..50 {
        let reply = solo.http.post(COMPLETIONS, &completion(&format!("warm {i}"))).await;
        assert_eq!(reply.status, 200);
    }
    let before = (memory(solo.router.pid()), open_files(solo.router.pid()));
    let mut body = completion("a stream among many");
    body["stream"] = true.into();
    let body = body.to_string();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n\
         content-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut begun = Vec::new();
    for _ in 0..STREAMS {
        let mut socket = TcpStream::connect(solo.router.http).await.unwrap();
        socket.write_all(head.as_bytes()).await.unwrap();
        socket.write_all(body.as_bytes()).await.unwrap();
        begun.push(socket);
    }
    for socket in &mut begun {
        let mut first = [0; 15];
        socket.read_exact(&mut first).await.unwrap();
        assert_eq!(&first, b"HTTP/1.1 200 OK");
    }
    let after = (memory(solo.router.pid()), open_files(solo.router.pid()));
    let per_stream_kib = (after.0.now_kib - before.0.now_kib) as f64 / STREAMS as f64;
    let files = after.1 - before.1;
    println!("{per_stream_kib:.1} KiB and {:.3} files per stream", files as f64 / STREAMS as f64);
    assert!(files <= 2 * STREAMS + 16, "{files} files");
    assert!(per_stream_kib < 96.0, "{per_stream_kib} KiB per stream");
    solo.post.release();
    for mut socket in begun {
        let mut rest = String::new();
        socket.read_to_string(&mut rest).await.unwrap();
        assert!(rest.contains("data: [DONE]\n\n"), "{rest}");
    }
}

#[tokio::test]
async fn overload_is_answered_at_once_without_waiting_for_the_body() {
    let solo = Solo::start("{ in_flight_max: 4 }", |heard| match is_streamed(heard) {
        true => held(),
        false => whole_reply(),
    })
    .await;
    let mut body = completion("held");
    body["stream"] = true.into();
    let mut holding = Vec::new();
    for _ in 0..4 {
        let mut events = solo.http.stream(COMPLETIONS, &body).await;
        assert!(events.next().await.is_some());
        holding.push(events);
    }
    // The head alone is enough to be refused; the engine hears nothing of it.
    let heard = solo.post.heard().len();
    for _ in 0..20 {
        let mut socket = TcpStream::connect(solo.router.http).await.unwrap();
        let head = format!(
            "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99999\r\n\r\n"
        );
        socket.write_all(head.as_bytes()).await.unwrap();
        let mut reply = String::new();
        socket.read_to_string(&mut reply).await.unwrap();
        assert!(reply.starts_with("HTTP/1.1 503 "), "{reply}");
        assert!(reply.contains("retry-after: 1\r\n"), "{reply}");
    }
    assert_eq!(solo.post.heard().iter().skip(heard).filter(|h| h.is_inference()).count(), 0);
    let status = generate(solo.router.grpc, text_request("x", "")).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    let shed = [("reason", "in_flight_max")];
    assert_eq!(solo.metric("splitrail_shed_total", &shed).await, 21.0);
    drop(holding);
    eventually("there is room again", async || {
        solo.http.post(COMPLETIONS, &completion("after")).await.status == 200
    })
    .await;
}

/// One that wants everything gets much, and cannot keep another one out.
#[tokio::test]
async fn a_greedy_client_does_not_starve_another() {
    let limits = "{ in_flight_max: 90, fair_by: { kind: header, name: x-api-key } }";
    let solo = Solo::start(limits, |heard| match is_streamed(heard) {
        true => held(),
        false => whole_reply(),
    })
    .await;
    let mut body = completion("held");
    body["stream"] = true.into();
    let ask = async |client: &Client, key: &str| {
        let mut events = client.stream_with(COMPLETIONS, &[("x-api-key", key)], &body).await;
        if events.status == 200 {
            assert!(events.next().await.is_some());
        } else {
            assert_eq!(events.status, 429);
            assert_eq!(events.headers["retry-after"], "1");
            let error: Value = serde_json::from_str(&events.rest_text().await).unwrap();
            assert_eq!(error["error"]["type"], "rate_limit_error");
            assert_eq!(error["error"]["code"], "over_share");
            return None;
        }
        Some(events)
    };
    let mut greedy = Vec::new();
    for _ in 0..200 {
        greedy.extend(ask(&solo.http, "greedy").await);
    }
    assert_eq!(greedy.len(), 80, "eight ninths for one alone");
    let mut modest = Vec::new();
    for _ in 0..8 {
        modest.push(ask(&solo.http, "modest").await.expect("room for a modest client"));
    }
    // Whenever the greedy one's requests end, the room goes to who has less of it.
    let mut waits = std::collections::VecDeque::from(greedy);
    for _ in 0..60 {
        drop(waits.pop_front());
        eventually("a place is free", async || {
            let in_flight = (waits.len() + modest.len()) as f64;
            solo.metric("splitrail_requests_in_flight", &[]).await <= in_flight
        })
        .await;
        waits.extend(ask(&solo.http, "greedy").await);
        modest.extend(ask(&solo.http, "modest").await);
    }
    let (greedy, modest) = (waits.len(), modest.len());
    assert!(greedy.abs_diff(modest) <= 10, "greedy {greedy}, modest {modest}");
    let shed = [("reason", "fair_share")];
    assert!(solo.metric("splitrail_shed_total", &shed).await >= 120.0);
    // A third, without a key.
    assert_eq!(solo.http.post(COMPLETIONS, &completion("third")).await.status, 200);
}

#[tokio::test]
async fn all_bodies_share_a_budget() {
    // In the share of one client, eight ninths, there is no room to tokenise a third body beside two
    // and their hashes.
    let limits = "{ body_size_max: 1000000, request_memory_max: 2306250 }";
    let solo = Solo::start(limits, |heard| match is_streamed(heard) {
        true => held(),
        false => whole_reply(),
    })
    .await;
    let mut body = completion(&"x".repeat(400 << 10));
    body["stream"] = true.into();
    let mut holding = Vec::new();
    for _ in 0..2 {
        let mut events = solo.http.stream(COMPLETIONS, &body).await;
        assert_eq!(events.status, 200);
        assert!(events.next().await.is_some());
        holding.push(events);
    }
    let refused = solo.http.post(COMPLETIONS, &body).await;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (503, "1"));
    assert!(refused.text().contains("limits.request_memory_max"), "{}", refused.text());
    assert_eq!(solo.http.post(COMPLETIONS, &completion("small")).await.status, 200);
    drop(holding);
    eventually("there is room again", async || {
        let mut events = solo.http.stream(COMPLETIONS, &body).await;
        events.status == 200 && events.next().await.is_some()
    })
    .await;
}

/// A call's message counts as long as its answer lasts: further attempts need it.
#[tokio::test]
async fn messages_of_grpc_calls_share_the_budget_of_bodies() {
    // A message is there twice: as it was sent, and decoded.
    let limits = "{ body_size_max: 1000000, request_memory_max: 2925000 }";
    let solo = Solo::start(limits, |heard| match is_streamed(heard) {
        true => held(),
        false => whole_reply(),
    })
    .await;
    let request = || text_request(&"x".repeat(400 << 10), "");
    let mut client = grpc_client(solo.router.grpc);
    let mut holding = Vec::new();
    for _ in 0..2 {
        let mut events = client.generate(request()).await.unwrap().into_inner();
        assert!(events.message().await.unwrap().is_some());
        holding.push(events);
    }
    let refused = generate(solo.router.grpc, request()).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    assert!(refused.message().contains("limits.request_memory_max"), "{refused:?}");
    let shed = [("reason", "request_memory")];
    assert_eq!(solo.metric("splitrail_shed_total", &shed).await, 1.0);
    drop(holding);
    eventually("there is room again", async || client.generate(request()).await.is_ok()).await;
}

#[tokio::test]
async fn connections_are_bounded_and_open_ones_are_served() {
    let limits = "{ connections_max: 8, drain_delay: 10ms }";
    let cluster = Cluster::start(Spec { limits, ..Spec::aggregated(1) }).await;
    let address = cluster.running.addresses.http;
    let open = [("listener", "http")];
    let there = cluster.metric("splitrail_connections", &open).await as usize;
    let mut held = Vec::new();
    for _ in there..8 {
        held.push(TcpStream::connect(address).await.unwrap());
    }
    eventually("all are accepted", async || {
        cluster.metric("splitrail_connections", &open).await == 8.0
    })
    .await;
    let mut more = TcpStream::connect(address).await.unwrap();
    let mut reply = String::new();
    more.read_to_string(&mut reply).await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 503 ") && reply.contains("retry-after: 1"), "{reply}");
    let refused = [("listener", "http"), ("reason", "connections_max")];
    assert_eq!(cluster.metric("splitrail_connections_cut_total", &refused).await, 1.0);
    let first = &mut held[0];
    first.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut reply = [0; 15];
    first.read_exact(&mut reply).await.unwrap();
    assert_eq!(&reply, b"HTTP/1.1 200 OK");
    held.truncate(2);
    eventually("there is room again", async || {
        let fresh = Client::new(address);
        fresh.try_get("/health").await.is_ok_and(|reply| reply.status == 200)
    })
    .await;
}

#[tokio::test]
async fn accepting_goes_on_after_a_lack_of_file_descriptors() {
    use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
    let solo = Solo::start("{}", |_| whole_reply()).await;
    let pid = solo.router.pid();
    let few = open_files(pid) + 16;
    let limit = Rlimit { current: Some(few as u64), ..getrlimit(Resource::Nofile) };
    let process = Pid::from_raw(i32::try_from(pid).unwrap());
    let before = prlimit(process, Resource::Nofile, limit).unwrap();
    let mut held = Vec::new();
    for _ in 0..64 {
        held.push(TcpStream::connect(solo.router.http).await.unwrap());
    }
    eventually("no file is left", async || open_files(pid) >= few).await;
    // Some of those that wait are accepted now, and others later.
    held.truncate(32);
    drop(held);
    eventually("there are files again", async || {
        let fresh = Client::new(solo.router.http);
        fresh.try_get("/health").await.is_ok_and(|reply| reply.status == 200)
    })
    .await;
    prlimit(process, Resource::Nofile, before).unwrap();
    assert_eq!(solo.http.post(COMPLETIONS, &completion("after")).await.status, 200);
}

/// Both protocols, on one listener, on connections that go on.
#[tokio::test]
async fn clients_of_both_protocols_are_served_on_connections_that_last() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    let mut h1 = TcpStream::connect(solo.router.http).await.unwrap();
    for _ in 0..3 {
        h1.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut reply = Vec::new();
        while !reply.ends_with(b"}") {
            reply.push(h1.read_u8().await.unwrap());
        }
        assert!(reply.starts_with(b"HTTP/1.1 200 OK"));
    }
    let h2 = TcpStream::connect(solo.router.http).await.unwrap();
    let (client, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(h2)).await.unwrap();
    let mut connections = JoinSet::new();
    connections.spawn(connection);
    for i in 0..3 {
        let request = http::Request::post("http://x/v1/completions")
            .header("content-type", "application/json");
        let body = completion(&format!("{i}")).to_string();
        let request = request.body(Full::new(Bytes::from(body))).unwrap();
        let reply = client.clone().send_request(request).await.unwrap();
        assert_eq!((reply.status().as_u16(), reply.version()), (200, http::Version::HTTP_2));
        assert!(!reply.into_body().collect().await.unwrap().to_bytes().is_empty());
    }
}
