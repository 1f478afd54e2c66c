//! Requests that are refused before their body is read: the client is told that the connection ends,
//! and may go on sending until it reads the refusal.

use std::net::SocketAddr;

use serde_json::json;
use splitrail_tests::Spec;
use splitrail_tests::solo::{Solo, whole_reply};
use splitrail_tests::tenants::{self, Keys};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The head of the reply to a head that announces a body.
async fn refusal(solo: &Solo, target: &str, fields: &str) -> String {
    let head = format!("{target} HTTP/1.1\r\n{fields}content-length: 100\r\n\r\n");
    let mut socket = TcpStream::connect(solo.router.http).await.unwrap();
    socket.write_all(head.as_bytes()).await.unwrap();
    let mut reply = Vec::new();
    while !reply.windows(4).any(|four| four == b"\r\n\r\n") {
        let mut piece = [0; 4096];
        match socket.read(&mut piece).await {
            Ok(count @ 1..) => reply.extend_from_slice(&piece[..count]),
            _ => break,
        }
    }
    String::from_utf8(reply).unwrap().to_ascii_lowercase()
}

#[tokio::test]
async fn a_client_that_waits_to_be_asked_for_its_body_is_told_that_the_connection_ends() {
    let listen = "http_hosts: [x]";
    let solo = Solo::start_listening(listen, "{}", |_| whole_reply()).await;
    let expect = "expect: 100-continue\r\n";
    for (target, fields, status) in [
        ("POST /v1/completions", "host: x\r\ncontent-type: text/plain\r\n", 415),
        ("POST /v1/none", "host: x\r\n", 404),
        ("PUT /v1/completions", "host: x\r\n", 405),
        ("POST /v1/completions", "host: y\r\n", 403),
    ] {
        let refused = refusal(&solo, target, &(fields.to_owned() + expect)).await;
        assert!(refused.starts_with(&format!("http/1.1 {status} ")), "{target} {refused}");
        assert!(refused.contains("\r\nconnection: close\r\n"), "{target} {refused}");
    }
    let body = json!({"model": "sim", "max_tokens": 1, "prompt": "a"});
    let get = solo.http.post("/v1/completions", &body).await;
    assert_eq!(get.status, 403, "only the name `x` is allowed");
}

/// Sends 30 MB as the body of a request, and reads only then; the head and the body of the reply.
async fn reply_after_sending(address: SocketAddr, head: &str, is_chunked: bool) -> String {
    const PIECES: usize = 30;
    let mut piece = vec![b' '; 1 << 20];
    let mut length = format!("content-length: {}", PIECES * piece.len());
    if is_chunked {
        length = "transfer-encoding: chunked".to_owned();
        piece = [format!("{:x}\r\n", piece.len()).as_bytes(), &piece, b"\r\n"].concat();
    }
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(format!("{head}{length}\r\n\r\n").as_bytes()).await.unwrap();
    for sent in 0..PIECES {
        let written = socket.write_all(&piece).await;
        assert!(written.is_ok(), "{head:?}: after {sent} MiB: {written:?}");
    }
    let mut reply = String::new();
    socket.read_to_string(&mut reply).await.unwrap_or_else(|error| panic!("{head:?}: {error}"));
    reply
}

#[tokio::test]
async fn a_client_that_sends_all_of_its_body_first_reads_the_refusal() {
    let limits = "{ body_size_max: 1MiB }";
    let solo = Solo::start_listening("http_hosts: [x]", limits, |_| whole_reply()).await;
    let json = "content-type: application/json\r\n";
    for (target, fields, status) in [
        ("POST /v1/completions", format!("host: x\r\n{json}"), 413),
        ("POST /v1/completions", "host: x\r\ncontent-type: text/plain\r\n".to_owned(), 415),
        ("POST /v1/none", "host: x\r\n".to_owned(), 404),
        ("PUT /v1/completions", "host: x\r\n".to_owned(), 405),
        ("POST /v1/completions", format!("host: y\r\n{json}"), 403),
        ("POST /v1/completions", format!("host: x\r\nhost: x\r\n{json}"), 400),
    ] {
        for is_chunked in [false, true] {
            let head = format!("{target} HTTP/1.1\r\n{fields}");
            let reply = reply_after_sending(solo.router.http, &head, is_chunked).await;
            assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{head:?}: {reply:?}");
            assert!(reply.contains("connection: close\r\n"), "{head:?}: {reply:?}");
            assert_eq!(reply.matches("HTTP/1.1 ").count(), 1, "one reply: {reply:?}");
        }
    }
    assert_eq!(solo.metric("splitrail_request_memory_bytes", &[]).await, 0.0);
}

#[tokio::test]
async fn a_client_without_a_key_reads_the_401_after_sending_its_body() {
    let cluster =
        tenants::start(&Keys::empty(), "tenants: [ { name: a } ]", Spec::aggregated(1)).await;
    let address = cluster.running.addresses.http;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    let reply = reply_after_sending(address, head, false).await;
    assert!(reply.starts_with("HTTP/1.1 401 "), "{reply:?}");
}

#[tokio::test]
async fn a_client_that_was_too_slow_reads_the_408_when_it_has_sent_the_rest() {
    let solo = Solo::start("{ body_grace: 200ms }", |_| whole_reply()).await;
    let mut socket = TcpStream::connect(solo.router.http).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
                content-length: 10000000\r\n\r\n{";
    socket.write_all(head.as_bytes()).await.unwrap();
    // The first byte of the reply says that the router has given up.
    assert_eq!(socket.peek(&mut [0]).await.unwrap(), 1);
    socket.write_all(&vec![b' '; 9_999_999]).await.unwrap();
    let mut reply = String::new();
    socket.read_to_string(&mut reply).await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 408 "), "{reply:?}");
}
