//! Peers that do not behave like an engine's sockets.

use std::time::Duration;

use splitrail_engine::kv_events::{Subscription, Update};
use splitrail_engine::zmtp::{AddressFilter, Endpoint, WireError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// The greeting of ZMTP 3.0 with a mechanism.
fn greeting(version: u8, mechanism: &[u8]) -> Vec<u8> {
    let mut greeting = vec![0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = version;
    greeting[12..12 + mechanism.len()].copy_from_slice(mechanism);
    greeting
}

/// A READY command of a kind of socket.
fn ready(socket: &[u8]) -> Vec<u8> {
    let length = (socket.len() as u32).to_be_bytes();
    let body = [b"\x05READY\x0bSocket-Type", &length[..], socket].concat();
    [&[4, body.len() as u8], &body[..]].concat()
}

/// The error with which a subscription ends after a peer sends these bytes and nothing more.
async fn outcome(bytes: Vec<u8>) -> WireError {
    outcome_within(Duration::from_secs(20), bytes).await
}

async fn outcome_within(connect_timeout: Duration, bytes: Vec<u8>) -> WireError {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("tcp://{}", listener.local_addr().unwrap()).parse().unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let (mut peer, _) = listener.accept().await.unwrap();
        peer.write_all(&bytes).await.unwrap();
        let mut sink = Vec::new();
        let _ = peer.read_to_end(&mut sink).await;
    });
    let mut subscription = Subscription::new(endpoint, None);
    subscription.timing.connect_timeout = connect_timeout;
    let (sink, mut updates) = mpsc::channel(4);
    tasks.spawn(subscription.run(sink, CancellationToken::new()));
    loop {
        let update = tokio::time::timeout(Duration::from_secs(30), updates.recv()).await;
        if let Update::Disconnected { error } = update.unwrap().unwrap() {
            return error;
        }
    }
}

#[tokio::test]
async fn addresses_that_are_not_admitted_are_not_connected_to() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let endpoint: Endpoint = format!("tcp://localhost:{port}").parse().unwrap();
    let admits = Some(AddressFilter::new(|ip| !ip.is_loopback()));
    let subscription = Subscription { admits, ..Subscription::new(endpoint, None) };
    let (sink, mut updates) = mpsc::channel(4);
    let mut tasks = JoinSet::new();
    tasks.spawn(subscription.run(sink, CancellationToken::new()));
    let update = tokio::time::timeout(Duration::from_secs(30), updates.recv()).await;
    let Update::Disconnected { error } = update.unwrap().unwrap() else { panic!("connected") };
    assert_eq!(error, WireError::Outside);
    drop(tasks);
    let accepted = tokio::time::timeout(Duration::from_millis(50), listener.accept()).await;
    assert!(accepted.is_err(), "the name leads to an address that is not admitted");
}

#[tokio::test]
async fn peers_that_are_no_publisher_are_refused_with_the_reason() {
    let http = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 0\r\n\r\n";
    assert!(matches!(outcome(http.to_vec()).await, WireError::Handshake(_)));
    assert!(matches!(outcome(greeting(1, b"NULL")).await, WireError::Handshake(_)));
    assert!(matches!(outcome(greeting(3, b"CURVE")).await, WireError::Handshake(_)));
    let error = b"\x04\x08\x05ERROR\x01x";
    let refused = [&greeting(3, b"NULL")[..], error].concat();
    assert!(matches!(outcome(refused).await, WireError::Handshake(_)));
    let router = [greeting(3, b"NULL"), ready(b"ROUTER")].concat();
    assert_eq!(outcome(router).await, WireError::WrongSocket { expected: "PUB" });
    let silent = outcome_within(Duration::from_millis(500), Vec::new()).await;
    assert_eq!(silent, WireError::TimedOut);
}

#[tokio::test]
async fn a_claimed_length_beyond_the_bound_ends_the_connection_and_reserves_nothing() {
    let publisher = [greeting(3, b"NULL"), ready(b"PUB")].concat();
    for claimed in [1_u64 << 30, 1 << 62, u64::MAX] {
        let bytes = [&publisher[..], &[2], &claimed.to_be_bytes()].concat();
        assert!(matches!(outcome(bytes).await, WireError::MessageTooLarge { .. }), "{claimed}");
    }
    // The number of small frames is bounded as well.
    let bytes = [&publisher[..], &[1, 0].repeat(100)].concat();
    assert!(matches!(outcome(bytes).await, WireError::MessageTooLarge { .. }));
}

#[tokio::test]
async fn a_claimed_length_in_the_handshake_is_bounded_too() {
    let bytes = [&greeting(3, b"NULL")[..], &[6], &u64::MAX.to_be_bytes()].concat();
    assert!(matches!(outcome(bytes).await, WireError::MessageTooLarge { .. }));
}
