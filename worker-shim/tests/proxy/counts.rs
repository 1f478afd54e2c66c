//! Requests are counted exactly while they are in flight.

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::json;
use splitrail_proto::v1::Capabilities;
use splitrail_sim::{Role, SimConfig, SimEngine};

use crate::support::*;

const EVENTS: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
const EVENT: &str = "3\r\nabc\r\n";

fn request(path: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!("POST {path} HTTP/1.1\r\nhost: a\r\n{headers}content-length: {length}\r\n\r\n{body}")
}

fn request_with_token_count(path: &str, prefill_tokens: u32) -> String {
    request(path, &format!("x-splitrail-prefill-tokens: {prefill_tokens}\r\n"), "{}")
}

#[tokio::test]
async fn a_streamed_request_is_queued_until_the_first_byte_of_its_body() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    client.write(request_with_token_count("/v1/chat/completions", 1200)).await;
    let mut connection = engine.accept().await;
    connection.head().await;
    assert_eq!(proxy.counts(), (1, 1200));
    connection.write(EVENTS).await;
    client.head().await;
    assert_eq!(proxy.counts(), (1, 1200), "the head comes before the prompt is computed");
    connection.write(EVENT).await;
    client.expect(EVENT).await;
    assert_eq!(proxy.counts(), (1, 0));
    connection.write("0\r\n\r\n").await;
    client.expect("0\r\n\r\n").await;
    proxy.until_counts((0, 0)).await;
}

#[tokio::test]
async fn an_unstreamed_request_is_queued_until_the_head_of_its_reply() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    client.write(request_with_token_count("/v1/completions", 50)).await;
    let mut connection = engine.accept().await;
    connection.head().await;
    assert_eq!(proxy.counts(), (1, 50));
    connection.write("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab").await;
    client.head().await;
    client.expect("ab").await;
    assert_eq!(proxy.counts(), (1, 0));
    connection.write("cd").await;
    client.expect("cd").await;
    proxy.until_counts((0, 0)).await;
}

#[tokio::test]
async fn prompt_tokens_without_a_count_are_estimated_from_the_bytes() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    client.write(request("/v1/completions", "", &"x".repeat(400))).await;
    let mut first = engine.accept().await;
    first.head().await;
    assert_eq!(proxy.counts(), (1, 100));
    let mut chunked = proxy.connect().await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n";
    chunked.write(head).await;
    let mut second = engine.accept().await;
    second.head().await;
    for tokens in [110, 120] {
        chunked.write(format!("28\r\n{}\r\n", "x".repeat(40))).await;
        proxy.until_counts((2, tokens)).await;
    }
    drop((client, chunked));
    first.bytes(400).await;
    first.closed().await;
    proxy.until_counts((0, 0)).await;
}

#[tokio::test]
async fn requests_that_need_no_accelerator_are_not_counted() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    for path in ["/tokenize", "/v1/chat/completions/render"] {
        let mut client = proxy.connect().await;
        client.write(request_with_token_count(path, 50)).await;
        let mut connection = engine.accept().await;
        let head = connection.head().await;
        assert!(!head.contains("x-splitrail"), "{head}");
        assert_eq!(proxy.counts(), (0, 0));
    }
}

#[tokio::test]
async fn a_client_that_disconnects_ends_its_request_on_the_engine() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    // Before the reply, after its head, and in the middle of it.
    for written in ["", EVENTS, &format!("{EVENTS}{EVENT}")] {
        let mut client = proxy.connect().await;
        client.write(request_with_token_count("/v1/completions", 70)).await;
        let mut connection = engine.accept().await;
        connection.head().await;
        connection.expect("{}").await;
        connection.write(written).await;
        if !written.is_empty() {
            client.head().await;
        }
        assert_eq!(proxy.counts().0, 1);
        drop(client);
        connection.closed().await;
        proxy.until_counts((0, 0)).await;
    }
    assert_eq!((proxy.outcomes("client_gone"), proxy.outcomes("forwarded")), (1, 2));
}

#[tokio::test]
async fn an_http_2_stream_ends_without_the_others_of_its_connection() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let client = Client::builder(TokioExecutor::new()).http2_only(true).build_http();
    let uri = format!("http://{}/v1/completions", proxy.address);
    let send = || {
        let request = Request::post(&uri).body(Full::new(Bytes::from_static(b"{}"))).unwrap();
        client.request(request)
    };
    let open = async || {
        let answering = async {
            let mut connection = engine.accept().await;
            connection.head().await;
            connection.expect("{}").await;
            connection.write(EVENTS).await;
            connection.write(EVENT).await;
            connection
        };
        let (reply, connection) = tokio::join!(send(), answering);
        (reply.unwrap().into_body(), connection)
    };
    let (mut stays, mut stays_there) = open().await;
    let (mut leaves, mut left) = open().await;
    for body in [&mut stays, &mut leaves] {
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "abc");
    }
    assert_eq!(proxy.counts(), (2, 0));
    drop(leaves);
    left.closed().await;
    proxy.until_counts((1, 0)).await;
    stays_there.write("0\r\n\r\n").await;
    assert_eq!(within_timeout("an end", stays.collect()).await.unwrap().to_bytes(), "");
    proxy.until_counts((0, 0)).await;
}

#[tokio::test]
async fn a_hand_off_in_a_reply_is_counted_until_its_lease_ends() {
    let config = SimConfig { role: Role::Prefill, ..SimConfig::default() };
    let engine = SimEngine::start(config).await.unwrap();
    let proxy = ProxyUnderTest::in_front_of(engine.http_addr()).await;
    let prefill = json!({
        "prompt": "one two three four", "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false},
    });
    let plain = json!({"prompt": "\"kv_transfer_params\":{", "max_tokens": 1});
    for (body, staged) in [(&plain, 0), (&prefill, 1), (&plain, 1), (&prefill, 2)] {
        let mut changed = proxy.traffic.changed();
        changed.mark_unchanged();
        assert_eq!(post(proxy.address, "/v1/completions", &[], body).await.status, 200);
        assert_eq!(proxy.traffic.staged(), staged);
        assert!(changed.has_changed().unwrap());
    }
    let known = Capabilities { lease_ms: Some(0), ..Capabilities::default() };
    proxy.capabilities.send_replace(known);
    let other = ProxyUnderTest::in_front_of(engine.http_addr()).await;
    other.capabilities.send_replace(Capabilities { lease_ms: Some(0), ..Capabilities::default() });
    assert_eq!(post(other.address, "/v1/completions", &[], &prefill).await.status, 200);
    assert_eq!(other.traffic.staged(), 0, "its lease is over");
}
