//! What runs is counted for as long as it runs, and no longer.

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

fn told(path: &str, prefill_tokens: u32) -> String {
    request(path, &format!("x-splitrail-prefill-tokens: {prefill_tokens}\r\n"), "{}")
}

#[tokio::test]
async fn a_stream_begins_with_its_first_byte_and_ends_with_its_last() {
    let engine = RawEngine::start().await;
    let stand = Stand::before(engine.address).await;
    let mut client = stand.connect().await;
    client.write(told("/v1/chat/completions", 1200)).await;
    let mut connection = engine.accept().await;
    connection.head().await;
    assert_eq!(stand.counts(), (1, 1200));
    connection.write(EVENTS).await;
    client.head().await;
    assert_eq!(stand.counts(), (1, 1200), "the head comes before the prompt is computed");
    connection.write(EVENT).await;
    client.expect(EVENT).await;
    assert_eq!(stand.counts(), (1, 0));
    connection.write("0\r\n\r\n").await;
    client.expect("0\r\n\r\n").await;
    stand.until_counts((0, 0)).await;
}

#[tokio::test]
async fn a_whole_reply_begins_with_its_head() {
    let engine = RawEngine::start().await;
    let stand = Stand::before(engine.address).await;
    let mut client = stand.connect().await;
    client.write(told("/v1/completions", 50)).await;
    let mut connection = engine.accept().await;
    connection.head().await;
    assert_eq!(stand.counts(), (1, 50));
    connection.write("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab").await;
    client.head().await;
    client.expect("ab").await;
    assert_eq!(stand.counts(), (1, 0));
    connection.write("cd").await;
    client.expect("cd").await;
    stand.until_counts((0, 0)).await;
}

#[tokio::test]
async fn a_prompt_of_unknown_length_is_estimated_by_its_bytes() {
    let engine = RawEngine::start().await;
    let stand = Stand::before(engine.address).await;
    let mut client = stand.connect().await;
    client.write(request("/v1/completions", "", &"x".repeat(400))).await;
    let mut first = engine.accept().await;
    first.head().await;
    assert_eq!(stand.counts(), (1, 100));
    let mut chunked = stand.connect().await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n";
    chunked.write(head).await;
    let mut second = engine.accept().await;
    second.head().await;
    for tokens in [110, 120] {
        chunked.write(format!("28\r\n{}\r\n", "x".repeat(40))).await;
        stand.until_counts((2, tokens)).await;
    }
    drop((client, chunked));
    first.bytes(400).await;
    first.closed().await;
    stand.until_counts((0, 0)).await;
}

#[tokio::test]
async fn what_the_accelerator_does_not_do_is_not_counted() {
    let engine = RawEngine::start().await;
    let stand = Stand::before(engine.address).await;
    for path in ["/tokenize", "/v1/chat/completions/render"] {
        let mut client = stand.connect().await;
        client.write(told(path, 50)).await;
        let mut connection = engine.accept().await;
        let head = connection.head().await;
        assert!(!head.contains("x-splitrail"), "{head}");
        assert_eq!(stand.counts(), (0, 0));
    }
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_request_on_the_engine() {
    let engine = RawEngine::start().await;
    let stand = Stand::before(engine.address).await;
    // Before the answer, after its head, and in the middle of it.
    for written in ["", EVENTS, &format!("{EVENTS}{EVENT}")] {
        let mut client = stand.connect().await;
        client.write(told("/v1/completions", 70)).await;
        let mut connection = engine.accept().await;
        connection.head().await;
        connection.expect("{}").await;
        connection.write(written).await;
        if !written.is_empty() {
            client.head().await;
        }
        assert_eq!(stand.counts().0, 1);
        drop(client);
        connection.closed().await;
        stand.until_counts((0, 0)).await;
    }
    assert_eq!((stand.outcomes("client_gone"), stand.outcomes("forwarded")), (1, 2));
}

#[tokio::test]
async fn one_of_many_streams_on_a_connection_ends_alone() {
    let engine = RawEngine::start().await;
    let stand = Stand::before(engine.address).await;
    let client = Client::builder(TokioExecutor::new()).http2_only(true).build_http();
    let uri = format!("http://{}/v1/completions", stand.address);
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
    assert_eq!(stand.counts(), (2, 0));
    drop(leaves);
    left.closed().await;
    stand.until_counts((1, 0)).await;
    stays_there.write("0\r\n\r\n").await;
    assert_eq!(soon("an end", stays.collect()).await.unwrap().to_bytes(), "");
    stand.until_counts((0, 0)).await;
}

#[tokio::test]
async fn hand_offs_are_counted_until_their_lease_ends() {
    let config = SimConfig { role: Role::Prefill, ..SimConfig::default() };
    let engine = SimEngine::start(config).await.unwrap();
    let stand = Stand::before(engine.http_addr()).await;
    let prefill = json!({
        "prompt": "one two three four", "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false},
    });
    let plain = json!({"prompt": "\"kv_transfer_params\":{", "max_tokens": 1});
    for (body, staged) in [(&plain, 0), (&prefill, 1), (&plain, 1), (&prefill, 2)] {
        let mut changed = stand.traffic.changed();
        changed.mark_unchanged();
        assert_eq!(post(stand.address, "/v1/completions", &[], body).await.status, 200);
        assert_eq!(stand.traffic.staged(), staged);
        assert!(changed.has_changed().unwrap());
    }
    let known = Capabilities { lease_ms: Some(0), ..Capabilities::default() };
    stand.capabilities.send_replace(known);
    let other = Stand::before(engine.http_addr()).await;
    other.capabilities.send_replace(Capabilities { lease_ms: Some(0), ..Capabilities::default() });
    assert_eq!(post(other.address, "/v1/completions", &[], &prefill).await.status, 200);
    assert_eq!(other.traffic.staged(), 0, "its lease is over");
}
