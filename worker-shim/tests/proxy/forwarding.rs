//! Requests and replies are forwarded unchanged and without delay.

use bytes::Bytes;
use http::{Request, Version};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

use crate::support::*;

/// The lines of a head: the first line, then the others sorted.
fn lines(head: &str) -> Vec<String> {
    let mut lines: Vec<String> = head.trim_end().split("\r\n").map(str::to_owned).collect();
    lines[1..].sort_unstable();
    lines
}

#[tokio::test]
async fn heads_and_bodies_are_forwarded_unchanged() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    let body: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    let head = "POST /v1/completions?a=%20b&c HTTP/1.1\r\nHost: front.example:1\r\n\
         X-Unknown: a, b\r\nX-Unknown: \u{a0}\u{ff}\r\nAuthorization: Bearer x\r\n\
         X-Splitrail-Prefill-Tokens: 7\r\nConnection: keep-alive, X-Mine\r\nX-Mine: 1\r\n\
         Keep-Alive: timeout=9\r\nContent-Length: 70000\r\n\r\n";
    client.write(head.chars().map(|c| c as u8).collect::<Vec<u8>>()).await;
    client.write(&body).await;
    let mut connection = engine.accept().await;
    let expected = [
        "POST /v1/completions?a=%20b&c HTTP/1.1",
        "authorization: Bearer x",
        "content-length: 70000",
        "host: front.example:1",
        "x-unknown: \u{a0}\u{ff}",
        "x-unknown: a, b",
    ];
    let mut seen = lines(&connection.head().await);
    seen[1..].sort_unstable();
    let mut sorted = expected;
    sorted[1..].sort_unstable();
    assert_eq!(seen, sorted);
    assert!(connection.bytes(70_000).await == body);
    let reply = "HTTP/1.1 299 Most Odd\r\nX-Odd: 1\r\nx-odd: 2\r\nServer: uvicorn\r\n\
         Connection: close, x-hop\r\nx-hop: 1\r\nContent-Length: 70000\r\n\r\n";
    connection.write(reply).await;
    connection.write(&body).await;
    let seen = lines(&client.head().await);
    let expected = [
        "HTTP/1.1 299 Most Odd",
        "content-length: 70000",
        "server: uvicorn",
        "x-odd: 1",
        "x-odd: 2",
    ];
    assert_eq!(seen, expected);
    assert!(client.bytes(70_000).await == body);
    assert_eq!(proxy.outcomes("forwarded"), 1);
}

#[tokio::test]
async fn chunks_are_forwarded_as_they_arrive() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    client
        .write(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n",
        )
        .await;
    let mut connection = engine.accept().await;
    let head = connection.head().await;
    assert!(head.contains("transfer-encoding: chunked"), "{head}");
    for piece in ["{\"a\":", "1}"] {
        client.write(format!("{:x}\r\n{piece}\r\n", piece.len())).await;
        connection.expect(&format!("{:X}\r\n{piece}\r\n", piece.len())).await;
    }
    client.write("0\r\n\r\n").await;
    connection.expect("0\r\n\r\n").await;
    connection
        .write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        .await;
    let head = client.head().await;
    assert!(head.contains("transfer-encoding: chunked") && !head.contains("date"), "{head}");
    for event in ["data: 1\n\n", "data: 2\n\n", "data: [DONE]\n\n"] {
        connection.write(format!("{:x}\r\n{event}\r\n", event.len())).await;
        client.expect(&format!("{:X}\r\n{event}\r\n", event.len())).await;
    }
    connection.write("0\r\n\r\n").await;
    client.expect("0\r\n\r\n").await;
    proxy.until_counts((0, 0)).await;
}

#[tokio::test]
async fn connections_are_reused_on_both_sides() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    client.write("GET /health HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut connection = engine.accept().await;
    for _ in 0..5 {
        let head = connection.head().await;
        assert_eq!(lines(&head), ["GET /health HTTP/1.1", "host: a"]);
        connection.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
        assert_eq!(lines(&client.head().await), ["HTTP/1.1 200 OK", "content-length: 2"]);
        client.expect("ok").await;
        client.write("GET /health HTTP/1.1\r\nhost: a\r\n\r\n").await;
    }
}

#[tokio::test]
async fn a_truncated_reply_never_looks_complete() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    for framing in ["transfer-encoding: chunked\r\n\r\n2\r\nab\r\n", "content-length: 9\r\n\r\nab"]
    {
        let mut client = proxy.connect().await;
        client.write("GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n").await;
        let mut connection = engine.accept().await;
        connection.head().await;
        connection.write(format!("HTTP/1.1 200 OK\r\n{framing}")).await;
        client.head().await;
        drop(connection);
        let rest = client.rest().await;
        assert!(rest.contains("ab") && !rest.contains("0\r\n\r\n"), "{rest:?}");
    }
}

#[tokio::test]
async fn http_2_requests_are_forwarded_as_http_1() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let client = Client::builder(TokioExecutor::new()).http2_only(true).build_http();
    let uri = format!("http://{}/v1/completions", proxy.address);
    let request = Request::post(uri).header("x-unknown", "kept");
    let request = request.body(Full::new(Bytes::from_static(b"{}"))).unwrap();
    let answering = async {
        let mut connection = engine.accept().await;
        let head = connection.head().await;
        assert!(head.starts_with("POST /v1/completions HTTP/1.1\r\n"), "{head}");
        assert!(head.contains("x-unknown: kept") && head.contains("content-length: 2"), "{head}");
        connection.expect("{}").await;
        connection
            .write(
                "HTTP/1.1 200 OK\r\nconnection: keep-alive\r\ntransfer-encoding: chunked\r\n\r\n",
            )
            .await;
        connection.write("3\r\nabc\r\n0\r\n\r\n").await;
        connection
    };
    let (reply, _connection) = tokio::join!(client.request(request), answering);
    let reply = reply.unwrap();
    assert_eq!((reply.version(), reply.headers().len()), (Version::HTTP_2, 0));
    assert_eq!(
        within_timeout("a body", reply.into_body().collect()).await.unwrap().to_bytes(),
        "abc"
    );
    proxy.until_counts((0, 0)).await;
}

#[tokio::test]
async fn dropping_the_proxy_closes_all_connections() {
    let engine = RawEngine::start().await;
    let mut proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    client.write("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n").await;
    let mut connection = engine.accept().await;
    connection.head().await;
    assert_eq!(proxy.counts(), (1, 0));
    proxy.serving.abort_all();
    client.closed().await;
    connection.closed().await;
    proxy.until_counts((0, 0)).await;
}

#[tokio::test]
async fn requests_in_flight_complete_after_a_stop() {
    let engine = RawEngine::start().await;
    let mut proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    let mut idle = proxy.connect().await;
    client.write("GET /version HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut connection = engine.accept().await;
    connection.head().await;
    proxy.stop.cancel();
    idle.closed().await;
    connection.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    client.head().await;
    client.expect("ok").await;
    within_timeout("an end", proxy.serving.join_next()).await.unwrap().unwrap();
    client.closed().await;
}
