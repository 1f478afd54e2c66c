//! Requests that are refused before their body is read: the client is told that the connection ends.

use serde_json::json;
use splitrail_tests::solo::{Solo, whole_reply};
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
