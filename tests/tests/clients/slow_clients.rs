//! Clients that send or read slowly, or not at all, lose their connections and hold nothing
//! that others need. No clock decides: the slow ones would go on for ever, and are cut;
//! whatever is asked beside them is answered.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use splitrail_tests::cluster::eventually;
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::scripted_server::{STREAM_HEAD, ScriptedReply};
use splitrail_tests::solo::{Solo, whole_reply};
use splitrail_tests::{Client, Cluster, Spec};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

const COMPLETIONS: &str = "/v1/completions";

/// A thousand clients are a load of their own; unless something hangs, it takes seconds.
const PATIENCE: Duration = Duration::from_secs(300);

/// Between two bytes of a client that drips.
const DRIP: Duration = Duration::from_millis(50);

fn completion(text: &str) -> Value {
    json!({"model": "sim", "max_tokens": 4, "temperature": 0, "prompt": text})
}

/// Asks and is answered for as long as `until` does not hold.
async fn served_until(http: &Client, what: &str, mut until: impl AsyncFnMut() -> bool) {
    let served = async {
        for i in 0_u64.. {
            let reply = http.post(COMPLETIONS, &completion(&format!("healthy {i}"))).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
            if until().await {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, served).await.unwrap_or_else(|_| panic!("not in time: {what}"));
}

/// Writes these bytes, then a byte again and again, until the other side closes. What it says
/// before that.
async fn drip(address: SocketAddr, first: &[u8], byte: u8) -> Vec<u8> {
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(first).await.unwrap();
    let mut told = Vec::new();
    loop {
        let mut buffer = [0; 4096];
        tokio::select! {
            read = socket.read(&mut buffer) => match read {
                Ok(count @ 1..) => told.extend_from_slice(&buffer[..count]),
                _ => return told,
            },
            () = tokio::time::sleep(DRIP) => {
                // If it is closed, reading tells.
                let _closed = socket.write_all(&[byte]).await;
            }
        }
    }
}

#[tokio::test]
async fn a_thousand_slow_heads_are_closed_and_others_are_served() {
    let solo = Solo::start("{ header_timeout: 2s }", |_| whole_reply()).await;
    let address = solo.router.http;
    let mut slow = JoinSet::new();
    for i in 0..1000 {
        slow.spawn(async move {
            match i % 4 {
                // Nothing, a first line, header lines.
                0 => drip(address, b"", b'A').await,
                1 => drip(address, b"POST /v1/comp", b'x').await,
                2 => drip(address, b"GET /health HTTP/1.1\r\nhost: x\r\na: ", b'b').await,
                // A second head: no byte of it came with the first.
                _ => drip(address, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b'G').await,
            }
        });
    }
    served_until(&solo.http, "all slow connections are closed", async || {
        while slow.try_join_next().is_some() {}
        slow.is_empty()
    })
    .await;
    let closed = [("listener", "http"), ("reason", "header_timeout")];
    assert_eq!(solo.metric("splitrail_connections_cut_total", &closed).await, 1000.0);
}

#[tokio::test]
async fn slow_http2_heads_are_closed() {
    let limits = "{ header_timeout: 2s, drain_delay: 10ms }";
    let cluster = Cluster::start(Spec { limits, ..Spec::aggregated(1) }).await;
    let address = cluster.running.addresses.http;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    // A header block without an end, and a frame of headers without an end.
    let block = frames::frame(kind::HEADERS, 0, 1, &frames::post(COMPLETIONS));
    let settings = frames::frame(kind::SETTINGS, 0, 0, &[]);
    let open = [&preface[..], &settings, &block].concat();
    let drops = frames::frame(kind::CONTINUATION, 0, 1, &[0; 200]);
    drip(address, &[&open[..], &drops[..9]].concat(), 0).await;
    drip(address, &[&preface[..], &settings, &block[..12]].concat(), 0).await;
    let closed = [("listener", "http"), ("reason", "header_timeout")];
    eventually("all are counted", async || {
        cluster.metric("splitrail_connections_cut_total", &closed).await == 2.0
    })
    .await;
}

#[tokio::test]
async fn idle_connections_are_closed_and_busy_ones_are_not() {
    let limits = "{ header_timeout: 10s, idle_timeout: 2s }";
    let solo = Solo::start(limits, |heard| match heard.text().contains("held") {
        true => ScriptedReply::Held { first: Vec::new(), last: answered() },
        false => whole_reply(),
    })
    .await;
    let http = solo.http.clone();
    let mut busy = JoinSet::new();
    busy.spawn(async move { http.post(COMPLETIONS, &completion("held")).await });
    eventually("one request waits", async || solo.post.open() == 1).await;
    let mut idle = TcpStream::connect(solo.router.http).await.unwrap();
    idle.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut told = Vec::new();
    idle.read_to_end(&mut told).await.unwrap();
    assert!(told.starts_with(b"HTTP/1.1 200"), "answered, and closed later");
    // The same over HTTP/2, in its own words.
    let mut idle = Raw2::connect(solo.router.http, &[]).await;
    let block = [frames::post("/health")].concat();
    let ends = kind::END_HEADERS | kind::END_STREAM;
    idle.write(&frames::frame(kind::HEADERS, ends, 1, &block)).await;
    let mut seen = Vec::new();
    while let Some(frame) = idle.next().await {
        seen.push(frame.kind);
    }
    assert!(seen.contains(&kind::HEADERS) && seen.contains(&kind::GOAWAY), "{seen:?}");
    assert!(busy.try_join_next().is_none(), "who waits for an answer is not idle");
    solo.post.release();
    assert_eq!(busy.join_next().await.unwrap().unwrap().status, 200);
}

fn answered() -> Vec<u8> {
    match whole_reply() {
        ScriptedReply::Bytes(bytes) => bytes,
        _ => unreachable!("a whole answer is bytes"),
    }
}

#[tokio::test]
async fn slow_bodies_are_a_408_and_take_no_place() {
    let limits = "{ body_grace: 1s, body_rate_min: 1000, in_flight_max: 1 }";
    let cluster = Cluster::start(Spec { limits, ..Spec::aggregated(1) }).await;
    let core = &cluster.running.core;
    let address = cluster.running.addresses.http;
    let mut slow = JoinSet::new();
    for i in 0..200 {
        slow.spawn(async move {
            let framing = match i % 2 {
                0 => "content-length: 1000000\r\n\r\n{",
                _ => "transfer-encoding: chunked\r\n\r\nf0000\r\n{",
            };
            let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{framing}");
            String::from_utf8(drip(address, head.as_bytes(), b' ').await).unwrap()
        });
    }
    let mut told = Vec::new();
    // There is one place, and it is free.
    served_until(&cluster.http, "all slow bodies are refused", async || {
        assert_eq!(core.in_flight.free(), 1);
        while let Some(reply) = slow.try_join_next() {
            told.push(reply.unwrap());
        }
        slow.is_empty()
    })
    .await;
    for reply in told {
        assert!(reply.starts_with("HTTP/1.1 408 "), "{reply}");
        assert!(reply.contains("connection: close\r\n"), "{reply}");
        assert!(reply.contains("limits.body_rate_min"), "{reply}");
    }
    for request in cluster.engine("w0").requests() {
        assert!(request.body["prompt"].as_str().unwrap().starts_with("healthy"));
    }
    let timed_out = [("outcome", "body_timeout")];
    assert_eq!(cluster.metric("splitrail_requests_total", &timed_out).await, 200.0);
}

/// A body that comes in pieces, the first at once and each other one after a pause; its length is
/// unknown.
fn in_pieces(
    pieces: Vec<Bytes>,
    then_never_ends: bool,
) -> StreamBody<impl futures_util::Stream<Item = Result<Frame<Bytes>, Infallible>>> {
    let paced = stream::iter(pieces.into_iter().enumerate()).then(|(i, piece)| async move {
        if i > 0 {
            tokio::time::sleep(DRIP).await;
        }
        Ok(Frame::data(piece))
    });
    let end = stream::iter(then_never_ends.then_some(())).then(|()| std::future::pending());
    StreamBody::new(Box::pin(paced.chain(end)))
}

#[tokio::test]
async fn a_body_at_the_least_pace_is_served() {
    let limits = "{ body_grace: 100ms, body_rate_min: 10 }";
    let cluster = Cluster::start(Spec { limits, ..Spec::aggregated(1) }).await;
    let body = completion(&"long enough ".repeat(40)).to_string();
    let pieces = body.as_bytes().chunks(30).map(Bytes::copy_from_slice).collect();
    let http: Hyper<HttpConnector, _> =
        Hyper::builder(TokioExecutor::new()).build(HttpConnector::new());
    let url = format!("http://{}{COMPLETIONS}", cluster.running.addresses.http);
    let request = http::Request::post(url).header("content-type", "application/json");
    let request = request.body(in_pieces(pieces, false)).unwrap();
    assert_eq!(http.request(request).await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_grpc_message_that_never_arrives_exceeds_its_deadline() {
    let limits = "{ body_grace: 100ms, in_flight_max: 1 }";
    let cluster = Cluster::start(Spec { limits, ..Spec::aggregated(1) }).await;
    let http: Hyper<HttpConnector, _> =
        Hyper::builder(TokioExecutor::new()).http2_only(true).build(HttpConnector::new());
    let address = cluster.running.addresses.grpc.unwrap();
    let url = format!("http://{address}/splitrail.v1.FrontDoorService/Generate");
    let begun = Bytes::from_static(&[0, 0, 0, 1, 0, 7]);
    let request = http::Request::post(url)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(in_pieces(vec![begun], true))
        .unwrap();
    let reply = http.request(request).await.unwrap();
    let from_head = reply.headers().get("grpc-status").cloned();
    let trailers = reply.into_body().collect().await.ok();
    let from_end = trailers.and_then(|body| body.trailers()?.get("grpc-status").cloned());
    assert_eq!(from_head.or(from_end).unwrap(), "4");
    assert!(cluster.engine("w0").requests().is_empty());
}

/// An engine that has more to say than anybody holds for a client.
fn endless(text_bytes: usize) -> ScriptedReply {
    let event = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": "t".repeat(text_bytes), "finish_reason": null}],
    });
    let piece = format!("data: {event}\n\n").into_bytes();
    ScriptedReply::Endless { head: STREAM_HEAD.to_vec(), piece, max_bytes: 64 << 20 }
}

fn streamed() -> Value {
    let mut body = completion("endless");
    body["stream"] = true.into();
    body
}

#[tokio::test]
async fn a_thousand_clients_that_do_not_read_are_closed_and_others_are_served() {
    const CLIENTS: usize = 1000;
    let limits = "{ write_stall: 2s, idle_timeout: 600s }";
    let solo = Solo::start(limits, |heard| match heard.text().contains("\"stream\":true") {
        true => endless(4 << 10),
        false => whole_reply(),
    })
    .await;
    for i in 0..20 {
        assert_eq!(solo.http.post(COMPLETIONS, &completion(&format!("{i}"))).await.status, 200);
    }
    let before = memory(solo.router.pid());
    reset_peak(solo.router.pid());
    let body = streamed().to_string();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut silent = Vec::new();
    for _ in 0..CLIENTS {
        let socket = TcpSocket::new_v4().unwrap();
        // What the client's system would take in its stead is not the router's affair.
        socket.set_recv_buffer_size(4096).unwrap();
        let mut socket = socket.connect(solo.router.http).await.unwrap();
        socket.write_all(head.as_bytes()).await.unwrap();
        silent.push(socket);
    }
    let stalled = [("listener", "http"), ("reason", "write_stall")];
    served_until(&solo.http, "all that do not read are cut", async || {
        solo.metric("splitrail_connections_cut_total", &stalled).await == CLIENTS as f64
    })
    .await;
    eventually("nothing is left of them", async || {
        solo.post.open() == 0
            && solo.metric("splitrail_requests_in_flight", &[]).await == 0.0
            && solo.metric("splitrail_worker_requests", &[]).await == 0.0
    })
    .await;
    let grown_kib = memory(solo.router.pid()).peak_kib.saturating_sub(before.now_kib);
    println!("{} KiB for each", grown_kib / CLIENTS as u64);
    // Some pieces of 4 KiB each way, and what any stream takes.
    assert!(grown_kib < 256 * CLIENTS as u64, "{grown_kib} KiB for {CLIENTS} clients");
    drop(silent);
}

#[tokio::test]
async fn a_stream_that_is_not_read_is_reset_and_its_connection_goes_on() {
    let solo = Solo::start("{ write_stall: 500ms }", |heard| {
        match heard.text().contains("\"stream\":true") {
            true => endless(4 << 10),
            false => whole_reply(),
        }
    })
    .await;
    let mut client = Raw2::connect(solo.router.http, &[]).await;
    let ask = |stream: u32, body: &Value| {
        let head =
            frames::frame(kind::HEADERS, kind::END_HEADERS, stream, &frames::post(COMPLETIONS));
        let body = body.to_string().into_bytes();
        [head, frames::frame(kind::DATA, kind::END_STREAM, stream, &body)].concat()
    };
    // Both windows are 65,535 bytes, and the connection's is opened for others.
    client.write(&ask(1, &streamed())).await;
    let more = (1_u32 << 20).to_be_bytes();
    client.write(&frames::frame(kind::WINDOW_UPDATE, 0, 0, &more)).await;
    let mut taken = 0;
    loop {
        let frame = client.next_of(1).await.expect("the connection goes on");
        match frame.kind {
            kind::DATA => taken += frame.payload.len(),
            kind::RST_STREAM => break,
            _ => {}
        }
    }
    assert_eq!(taken, 65_535, "as much as the client had room for");
    client.write(&ask(3, &completion("after"))).await;
    let mut answer = Vec::new();
    while let Some(frame) = client.next_of(3).await {
        if frame.kind == kind::DATA {
            answer.extend(frame.payload);
        }
        if frame.flags & kind::END_STREAM != 0 {
            break;
        }
    }
    assert!(String::from_utf8_lossy(&answer).contains("\"ok\""));
    let stalled = [("reason", "stream_stall")];
    assert_eq!(solo.metric("splitrail_connections_cut_total", &stalled).await, 1.0);
    eventually("nothing is left of it", async || {
        solo.post.open() == 0 && solo.metric("splitrail_requests_in_flight", &[]).await == 0.0
    })
    .await;
}
