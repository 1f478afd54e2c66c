//! Clients that read slowly, or not at all, over TLS.

use std::time::Duration;

use serde_json::Value;
use splitrail_tests::cluster::eventually;
use splitrail_tests::raw::connect_narrow;
use splitrail_tests::scripted_server::{STREAM_HEAD, ScriptedReply};
use splitrail_tests::solo::answer_of;
use splitrail_tests::tls::{TlsClient, exchange, over};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::support::{ROUTER, SecureCluster, completion, completion_of};

const ANSWER_BYTES: usize = 4 << 20;

/// Nothing takes longer, unless something hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// Sends a request on a connection whose client has little room for what it does not read.
async fn narrow(router: &SecureCluster, request: &[u8]) -> TlsStream<TcpStream> {
    let socket = connect_narrow(router.running.addresses.http).await;
    let mut stream = over(socket, TlsClient::default().config().into()).await.unwrap();
    stream.write_all(request).await.unwrap();
    stream.flush().await.unwrap();
    stream
}

async fn with_answers_of(bytes: usize, limits: &str) -> SecureCluster {
    let text = "y".repeat(bytes);
    SecureCluster::start_with(ROUTER, limits, "", move |_| answer_of(&text)).await
}

/// Of some replies, the rest is in the TLS library's own buffer of 64 KiB: the lengths differ by
/// less.
#[tokio::test]
async fn clients_that_do_not_read_are_disconnected_however_long_their_replies_are() {
    const STEP_BYTES: usize = 40 << 10;
    let limits = "{ write_stall: 500ms, idle_timeout: 600s }";
    let router = SecureCluster::start_with(ROUTER, limits, "", |heard| {
        let body: Value = serde_json::from_str(&heard.text()).unwrap();
        let steps: usize = body["prompt"].as_str().unwrap().parse().unwrap();
        answer_of(&"y".repeat(steps * STEP_BYTES))
    })
    .await;
    let mut silent = Vec::new();
    for steps in 1..=25 {
        silent.push(narrow(&router, &completion_of(&steps.to_string(), false)).await);
    }
    eventually("nothing is left of them", async || {
        let open = [("listener", "http")];
        router.metric("splitrail_connections", &open).await == 0.0 && router.post.open() == 0
    })
    .await;
    // Short replies are in the system's buffers.
    assert!(router.cut().await >= 10.0);
    drop(silent);
}

#[tokio::test]
async fn a_stream_whose_client_does_not_read_is_ended() {
    let endless = |_: &_| {
        let text = "x".repeat(4 << 10);
        let piece = format!(
            "data: {{\"id\":\"x\",\"object\":\"text_completion\",\"created\":1,\"model\":\"sim\",\
             \"choices\":[{{\"index\":0,\"text\":\"{text}\",\"finish_reason\":null}}]}}\n\n"
        );
        ScriptedReply::Endless {
            head: STREAM_HEAD.to_vec(),
            piece: piece.into(),
            max_bytes: 64 << 20,
        }
    };
    let limits = "{ write_stall: 500ms, idle_timeout: 600s }";
    let router = SecureCluster::start_with(ROUTER, limits, "", endless).await;
    let silent = narrow(&router, &completion(true)).await;
    router.until_cut("write_stall", 1).await;
    eventually("the engine is not read any more", async || router.post.open() == 0).await;
    drop(silent);
}

#[tokio::test]
async fn a_steady_reader_gets_all_and_a_slow_one_is_disconnected() {
    let steady = with_answers_of(ANSWER_BYTES, "{ write_stall: 2s, idle_timeout: 300ms }").await;
    let bytes =
        read_slowly(narrow(&steady, &completion(false)).await, 32 << 10, Duration::from_millis(10))
            .await;
    assert!(bytes > ANSWER_BYTES, "{bytes}");

    let limits = "{ write_stall: 600s, idle_timeout: 600s, reply_grace: 500ms, \
                  reply_rate_min: 1MiB/s }";
    let slow = with_answers_of(ANSWER_BYTES, limits).await;
    let bytes =
        read_slowly(narrow(&slow, &completion(false)).await, 4 << 10, Duration::from_millis(40))
            .await;
    assert!(bytes < ANSWER_BYTES, "{bytes}");
    slow.until_cut("write_pace", 1).await;
    let quick = TlsClient::default().connect(slow.running.addresses.http).await.unwrap();
    let quick = exchange(quick, &completion(false)).await;
    assert!(quick.error.is_none() && quick.bytes.len() > ANSWER_BYTES, "a quick reader gets all");
}

/// On a kept connection, nothing follows a reply that would bring its last bytes along.
#[tokio::test]
async fn all_bytes_of_a_reply_arrive_on_a_connection_that_stays_open() {
    let router = with_answers_of(1 << 20, "{ idle_timeout: 600s }").await;
    let request = String::from_utf8(completion(false)).unwrap();
    let request = request.replace("connection: close\r\n", "");
    let mut stream = narrow(&router, request.as_bytes()).await;
    eventually("the router has the whole reply", async || {
        router.metric("splitrail_requests_in_flight", &[]).await == 0.0
    })
    .await;
    let mut reply = Vec::new();
    let mut piece = vec![0; 16 << 10];
    while !reply.ends_with(b"}}") {
        let read = tokio::time::timeout(PATIENCE, stream.read(&mut piece)).await;
        match read.expect("more of the reply in time").unwrap() {
            0 => panic!("the connection ended after {} bytes", reply.len()),
            bytes => reply.extend_from_slice(&piece[..bytes]),
        }
    }
    assert!(reply.len() > 1 << 20);
}

/// Reads pieces with a pause after each until the connection ends; the number of bytes.
async fn read_slowly(
    mut stream: TlsStream<TcpStream>,
    piece_bytes: usize,
    pause: Duration,
) -> usize {
    let mut piece = vec![0; piece_bytes];
    let mut bytes = 0;
    while let Ok(count @ 1..) = stream.read(&mut piece).await {
        bytes += count;
        tokio::time::sleep(pause).await;
    }
    bytes
}
