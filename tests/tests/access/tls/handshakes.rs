//! Handshakes that are slow, or none.

use std::sync::Arc;
use std::time::Duration;

use rustls::{AlertDescription, ClientConnection};
use splitrail_tests::tls::{TlsClient, ask, server_name};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::support::{ROUTER, SecureCluster, whole_or_events};

/// Pause between two bytes of a slow handshake.
const DRIP: Duration = Duration::from_millis(100);

/// Nothing takes longer, unless something hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// The first message of a handshake.
fn client_hello() -> Vec<u8> {
    let config = Arc::new(TlsClient::default().config());
    let mut client = ClientConnection::new(config, server_name()).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

/// Whether the router has closed the connection, with whatever it said before.
async fn ends(socket: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset is an end like any other.
    let _end = socket.read_to_end(&mut bytes).await;
    bytes
}

#[tokio::test]
async fn slow_handshakes_are_closed_after_the_header_timeout_and_others_are_served() {
    const CLIENTS: usize = 60;
    let limits = "{ header_timeout: 5s }";
    let router = SecureCluster::start_with(ROUTER, limits, "", whole_or_events).await;
    let address = router.running.addresses.http;
    let mut kept = TlsClient::default().connect(address).await.unwrap();
    assert_eq!(ask(&mut kept, "/health").await, 200);
    let mut slow = JoinSet::new();
    for i in 0..CLIENTS {
        slow.spawn(async move {
            let hello = client_hello();
            let mut socket = TcpStream::connect(address).await.unwrap();
            // A third sends nothing, a third stops in the middle, and a third goes on slowly.
            match i % 3 {
                0 => {}
                1 => socket.write_all(&hello[..hello.len() / 2]).await.unwrap(),
                _ => {
                    for byte in hello {
                        if socket.write_all(&[byte]).await.is_err() {
                            break;
                        }
                        tokio::time::sleep(DRIP).await;
                    }
                }
            }
            ends(&mut socket).await
        });
    }
    let served = async {
        while !slow.is_empty() {
            while slow.try_join_next().is_some() {}
            assert_eq!(ask(&mut kept, "/health").await, 200);
            let mut other = TlsClient::default().connect(address).await.unwrap();
            assert_eq!(ask(&mut other, "/health").await, 200);
            // More handshakes would take the processor from those that are served.
            tokio::time::sleep(DRIP).await;
        }
    };
    tokio::time::timeout(PATIENCE, served).await.expect("all slow ones are closed in time");
    router.until_cut("tls_timeout", CLIENTS).await;
}

#[tokio::test]
async fn a_client_without_a_request_is_closed_after_its_handshake() {
    let limits = "{ header_timeout: 3s }";
    let router = SecureCluster::start_with(ROUTER, limits, "", whole_or_events).await;
    let mut stream = TlsClient::default().connect(router.running.addresses.http).await.unwrap();
    let mut bytes = Vec::new();
    let _end = stream.read_to_end(&mut bytes).await;
    assert!(bytes.is_empty());
    router.until_cut("header_timeout", 1).await;
}

#[tokio::test]
async fn garbage_is_answered_with_an_alert_and_counted() {
    let router = SecureCluster::start(ROUTER).await;
    let address = router.running.addresses.http;
    let mut damaged = client_hello();
    damaged.iter_mut().skip(9).step_by(3).for_each(|byte| *byte ^= 0x55);
    let too_long = [&[22, 3, 1, 0xff, 0xff][..], &[1; 70_000]].concat();
    let without_hello = [23, 3, 3, 0, 2, 1, 2].to_vec();
    let garbage = [damaged, too_long, without_hello, vec![0; 100], vec![0xff; 100]];
    for (place, bytes) in garbage.iter().enumerate() {
        let mut socket = TcpStream::connect(address).await.unwrap();
        let _refused = socket.write_all(bytes).await;
        let answer = ends(&mut socket).await;
        assert!(answer.is_empty() || answer[0] == 21, "{place}: an alert, not {answer:?}");
        router.until_cut("tls_handshake", place + 1).await;
    }
    // A test whether the port is open is no failure.
    for _ in 0..10 {
        drop(TcpStream::connect(address).await.unwrap());
    }
    let reply = router.complete(TlsClient::default()).await;
    assert!(reply.error.is_none(), "{reply:?}");
    assert_eq!(router.cut().await, garbage.len() as f64);
}

#[tokio::test]
async fn damaged_bytes_after_the_handshake_end_the_connection() {
    let router = SecureCluster::start(ROUTER).await;
    let mut stream = TlsClient::default().connect(router.running.addresses.http).await.unwrap();
    assert_eq!(ask(&mut stream, "/health").await, 200);
    let record = [&[23, 3, 3, 0, 40][..], &[7; 40]].concat();
    stream.get_mut().0.write_all(&record).await.unwrap();
    let end = splitrail_tests::tls::exchange(stream, b"").await;
    assert_eq!(end.alert(), Some(AlertDescription::BadRecordMac), "{end:?}");
    let reply = router.complete(TlsClient::default()).await;
    assert!(reply.error.is_none(), "{reply:?}");
}

#[tokio::test]
async fn a_client_that_distrusts_the_certificate_is_counted() {
    let router = SecureCluster::start(ROUTER).await;
    let client = TlsClient { authority: "clients/ca", ..TlsClient::default() };
    let reply = router.complete(client).await;
    assert!(reply.error.unwrap().to_string().contains("UnknownIssuer"));
    router.until_cut("tls_handshake", 1).await;
}
