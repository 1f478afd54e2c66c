//! Every buffer, queue and count is limited.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::*;

const PIECE: usize = 256 << 10;
const TOTAL: usize = 320 << 20;
/// The kernel's buffers of both connections can hold up to 36 MiB each. The proxy itself holds
/// less than 1 MiB.
const AHEAD_MAX: usize = 80 << 20;

/// Reads slowly while the other side writes as fast as it can. The writer must never be far
/// ahead.
async fn slowly(mut from: Raw, mut to: Raw) {
    let written = Arc::new(AtomicUsize::new(0));
    let writing = {
        let written = Arc::clone(&written);
        async move {
            let piece = vec![b'x'; PIECE];
            while written.load(Ordering::Relaxed) < TOTAL {
                from.socket.write_all(&piece).await.unwrap();
                written.fetch_add(PIECE, Ordering::Relaxed);
            }
            from
        }
    };
    let reading = async {
        let mut piece = vec![0; PIECE];
        let mut read = 0;
        while read < TOTAL {
            // Time for the writer to get ahead, if the proxy let it.
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            let ahead = written.load(Ordering::Relaxed).saturating_sub(read);
            assert!(ahead < AHEAD_MAX, "{ahead} bytes are somewhere");
            read += to.socket.read(&mut piece).await.unwrap();
        }
    };
    within_timeout("all bytes", async { tokio::join!(writing, reading) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_client_slows_the_engine_down() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    client.write("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n").await;
    let mut connection = engine.accept().await;
    connection.head().await;
    connection.write(format!("HTTP/1.1 200 OK\r\ncontent-length: {TOTAL}\r\n\r\n")).await;
    client.head().await;
    slowly(connection, client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_engine_slows_the_client_down() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    let head =
        format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {TOTAL}\r\n\r\n");
    client.write(head).await;
    let mut connection = engine.accept().await;
    connection.head().await;
    slowly(client, connection).await;
}

#[tokio::test]
async fn the_size_of_heads_is_limited() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    client.write("GET /health HTTP/1.1\r\nhost: a\r\nx: ").await;
    client.write("x".repeat(70_000)).await;
    assert!(client.head().await.starts_with("HTTP/1.1 431 "));
    let mut client = proxy.connect().await;
    client.write("GET /health HTTP/1.1\r\nhost: a\r\n").await;
    client.write("x: y\r\n".repeat(200) + "\r\n").await;
    assert!(client.head().await.starts_with("HTTP/1.1 431 "));
    // The heads of engines are limited too.
    let asking = ask(proxy.address, Method::GET, "/health", &[], "");
    let flooding = async {
        let mut connection = engine.accept().await;
        connection.head().await;
        connection.write("HTTP/1.1 200 OK\r\nx: ").await;
        let flood = "x".repeat(1 << 20);
        while connection.socket.write_all(flood.as_bytes()).await.is_ok() {}
    };
    let (reply, ()) = tokio::join!(asking, flooding);
    assert_eq!(reply.error(), (502, "engine_failed".to_owned(), Value::Null));
}

#[tokio::test]
async fn requests_beyond_the_limit_get_503_with_retry_after() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::with(engine.address, |config| config.limits.requests_max = 1).await;
    let mut first = proxy.connect().await;
    first.write("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}").await;
    let mut connection = engine.accept().await;
    connection.head().await;
    let reply = post(proxy.address, "/v1/completions", &[], &json!({})).await;
    assert_eq!(reply.error(), (503, "busy".to_owned(), Value::Null));
    assert_eq!(reply.headers["retry-after"], "1");
    // A miss does not reach the engine and needs no permit.
    let gate = [("x-splitrail-gate", "00000000000000ab:0:1:00000000000000cd")];
    assert_eq!(post(proxy.address, "/v1/completions", &gate, &json!({})).await.status, 200);
    connection.expect("{}").await;
    connection.write("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    first.head().await;
    proxy.until_counts((0, 0)).await;
    let second = ask(proxy.address, Method::GET, "/health", &[], "");
    let answering = async {
        connection.head().await;
        connection.write("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    };
    assert_eq!(tokio::join!(second, answering).0.status, 200);
}

#[tokio::test]
async fn connections_beyond_the_limit_wait() {
    let engine = RawEngine::start().await;
    let proxy =
        ProxyUnderTest::with(engine.address, |config| config.limits.connections_max = 1).await;
    let local = "GET /splitrail/status HTTP/1.1\r\nhost: a\r\n\r\n";
    let mut first = proxy.connect().await;
    first.write(local).await;
    first.head().await;
    first.expect("here").await;
    let mut second = proxy.connect().await;
    second.write(local).await;
    first.write(local).await;
    first.head().await;
    first.expect("here").await;
    let waiting = second.socket.try_read(&mut [0; 1]).unwrap_err();
    assert_eq!(waiting.kind(), std::io::ErrorKind::WouldBlock);
    drop(first);
    second.head().await;
    second.expect("here").await;
}

#[tokio::test]
async fn a_miss_with_a_long_body_gets_412_without_reading_it() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::with(engine.address, |config| {
        config.limits.miss_body_max_bytes = 100 << 10;
        config.limits.miss_bodies_max_bytes = 150 << 10;
    });
    let proxy = proxy.await;
    let gate = "x-splitrail-gate: 00000000000000ab:0:1:00000000000000cd";
    let body = format!("{{\"prompt\":\"{}\"}}", "x".repeat(110 << 10));
    let length = format!("content-length: {}\r\n\r\n{body}", body.len());
    let chunked =
        format!("transfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    for framed in [length, chunked] {
        let mut client = proxy.connect().await;
        client
            .write(format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\n{gate}\r\n{framed}"))
            .await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 412 "), "{head}");
    }
    // Only one of two bodies at the same time fits into memory.
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\n{gate}\r\ncontent-length: {}\r\n\r\n",
        90 << 10
    );
    let mut waiting = proxy.connect().await;
    waiting.write(&head).await;
    waiting.write("{").await;
    let mut refused = proxy.connect().await;
    let mut rest = " ".repeat((90 << 10) - 2);
    rest.push('}');
    refused.write(&head).await;
    refused.write(format!("{{{rest}")).await;
    let first = refused.head().await;
    waiting.write(&rest).await;
    let second = waiting.head().await;
    let statuses = [&first, &second].map(|head| head[9..12].to_owned());
    assert_eq!(statuses.iter().filter(|status| *status == "412").count(), 1, "{statuses:?}");
    assert_eq!(statuses.iter().filter(|status| *status == "200").count(), 1, "{statuses:?}");
}

const GATE: (&str, &str) = ("x-splitrail-gate", "00000000000000ab:0:1:00000000000000cd");

#[tokio::test]
async fn a_miss_whose_reply_would_be_long_gets_412() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let long = "a".repeat(1 << 20);
    let id = ("x-request-id", &*"a".repeat(300));
    for (headers, body) in [
        (vec![GATE], json!({"model": long, "stream": true, "n": 16})),
        (vec![GATE], json!({"model": "a", "stream": true, "n": 4096})),
        (vec![GATE, id], json!({"model": "a"})),
    ] {
        let reply = post(proxy.address, "/v1/completions", &headers, &body).await;
        assert_eq!((reply.status, reply.body.len() < 1024), (412, true), "{headers:?}");
    }
}

#[tokio::test]
async fn replies_to_misses_that_are_not_read_take_bounded_memory() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::with(engine.address, |config| {
        config.limits.miss_bodies_max_bytes = 200 << 10;
    });
    let proxy = proxy.await;
    let (sender, _driving) = proxy.connect_http_2().await;
    let ask = async || {
        let uri = format!("http://{}/v1/completions", proxy.address);
        let request = Request::post(uri).header(GATE.0, GATE.1);
        // A reply of more than 100 KiB, and less than 200.
        let body = r#"{"model":"sim","prompt":"a","stream":true,"n":512}"#;
        let request = request.body(Full::new(Bytes::from_static(body.as_bytes()))).unwrap();
        within_timeout("a reply", sender.clone().send_request(request)).await.unwrap()
    };
    let unread = ask().await;
    assert_eq!(unread.status(), 200);
    assert_eq!(ask().await.status(), 412, "the first reply takes the memory");
    let read = within_timeout("a body", unread.into_body().collect()).await.unwrap().to_bytes();
    assert!(read.len() > 100 << 10 && read.ends_with(b"data: [DONE]\n\n"));
    within_timeout("memory again", async { while ask().await.status() != 200 {} }).await;
}
