//! One host cannot take all connections and requests of a shim, nor keep them without using them.

use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};

use crate::support::*;

const HOSTILE: [u8; 4] = [127, 0, 0, 2];
const LOCAL: &str = "GET /splitrail/status HTTP/1.1\r\nhost: a\r\n\r\n";
const POST: &str = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n";

#[tokio::test]
async fn connections_of_one_host_leave_places_for_others() {
    let engine = RawEngine::start().await;
    let proxy =
        ProxyUnderTest::with(engine.address, |config| config.limits.connections_max = 9).await;
    let mut kept = Vec::new();
    for _ in 0..8 {
        let mut connection = proxy.connect_from(HOSTILE).await;
        connection.write(LOCAL).await;
        assert!(connection.head().await.starts_with("HTTP/1.1 200 "));
        kept.push(connection);
    }
    let mut beyond = proxy.connect_from(HOSTILE).await;
    let head = beyond.head().await;
    assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("retry-after: 1"), "{head}");
    beyond.closed().await;
    let mut other = proxy.connect().await;
    other.write(LOCAL).await;
    assert!(other.head().await.starts_with("HTTP/1.1 200 "));
    let refused = "splitrail_shim_refused_connections_total";
    let families = proxy.registry.gather();
    let family = families.iter().find(|family| family.name() == refused).unwrap();
    assert_eq!(family.get_metric()[0].get_counter().get_value(), 1.0);
}

#[tokio::test]
async fn requests_of_one_host_leave_places_for_others() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::with(engine.address, |config| config.limits.requests_max = 9).await;
    let mut kept = Vec::new();
    for _ in 0..8 {
        let mut client = proxy.connect_from(HOSTILE).await;
        client.write(POST).await;
        let mut connection = engine.accept().await;
        connection.head().await;
        kept.push((client, connection));
    }
    let mut beyond = proxy.connect_from(HOSTILE).await;
    beyond.write(POST).await;
    beyond.write("{}").await;
    assert!(beyond.head().await.starts_with("HTTP/1.1 503 "));
    let mut other = proxy.connect().await;
    other.write(POST).await;
    other.write("{}").await;
    let mut connection = engine.accept().await;
    connection.head().await;
    connection.write("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    assert!(other.head().await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn a_connection_without_requests_is_closed_and_one_with_a_request_stays() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::with(engine.address, |config| {
        config.limits.idle_timeout = Duration::from_secs(2);
    });
    let proxy = proxy.await;
    let request = |path: &str| {
        let uri = format!("http://{}{path}", proxy.address);
        Request::get(uri).body(Full::new(Bytes::new())).unwrap()
    };
    let (mut busy, _driving) = proxy.connect_http_2().await;
    let answering = async {
        let mut connection = engine.accept().await;
        connection.head().await;
        connection.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n").await;
        connection
    };
    let (reply, mut connection) = tokio::join!(busy.send_request(request("/health")), answering);
    let reply = reply.unwrap();
    // This connection comes later, and ends in spite of the pings that the client answers.
    let (mut idle, mut driving) = proxy.connect_http_2().await;
    let answered = idle.send_request(request("/splitrail/status")).await.unwrap();
    assert_eq!(answered.into_body().collect().await.unwrap().to_bytes(), "here");
    within_timeout("an end", driving.join_next()).await.unwrap().unwrap();
    connection.write("ok").await;
    assert_eq!(reply.into_body().collect().await.unwrap().to_bytes(), "ok");
    let answered = busy.send_request(request("/splitrail/status")).await.unwrap();
    assert_eq!(answered.status(), 200);
}

#[tokio::test]
async fn a_body_that_dribbles_ends_its_request_with_a_408() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::with(engine.address, |config| {
        config.limits.body_grace = Duration::from_secs(2);
    });
    let proxy = proxy.await;
    let mut client = proxy.connect().await;
    client.write(POST).await;
    client.write("{").await;
    let mut connection = engine.accept().await;
    connection.head().await;
    connection.expect("{").await;
    connection.closed().await;
    let head = client.head().await;
    assert!(head.starts_with("HTTP/1.1 408 "), "{head}");
    assert_eq!((proxy.outcomes("slow_body"), proxy.outcomes("engine_failed")), (1, 0));
    proxy.until_counts((0, 0)).await;
}
