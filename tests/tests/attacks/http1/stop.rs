//! The instant at which a router stops: who was accepted is answered.

use serde_json::json;
use splitrail_tests::cluster::eventually;
use splitrail_tests::raw::request;
use splitrail_tests::solo::{Solo, whole_reply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

fn completion() -> Vec<u8> {
    let body = json!({"model": "sim", "max_tokens": 4, "prompt": "a"}).to_string();
    request("POST", "/v1/completions", &[], body.as_bytes())
}

async fn reply(socket: &mut TcpStream) -> String {
    let mut reply = String::new();
    // A reset is an end like any other.
    let _end = socket.read_to_string(&mut reply).await;
    reply
}

#[tokio::test]
async fn a_request_of_which_a_part_was_sent_before_the_stop_is_answered() {
    let solo = Solo::start("{ drain_delay: 0s }", |_| whole_reply()).await;
    let health = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
    let mut begun = Vec::new();
    // One byte may still be the beginning of HTTP/2, or of a second request.
    for (before, cut) in [("", 1), ("", 10), ("", 40), (health, 1), (health, 40)] {
        let mut socket = TcpStream::connect(solo.router.http).await.unwrap();
        socket.write_all(before.as_bytes()).await.unwrap();
        if !before.is_empty() {
            let mut answer = [0; 64];
            let count = socket.read(&mut answer).await.unwrap();
            assert!(answer[..count].starts_with(b"HTTP/1.1 200 "));
            // What is left of the answer is read with the next one.
        }
        socket.write_all(&completion()[..cut]).await.unwrap();
        begun.push((socket, cut));
    }
    let taken = [("listener", "http")];
    eventually("all are accepted", async || {
        solo.metric("splitrail_connections", &taken).await >= begun.len() as f64
    })
    .await;
    solo.router.signal("TERM");
    let address = solo.router.http;
    eventually("it has stopped", async || TcpStream::connect(address).await.is_err()).await;
    for (mut socket, cut) in begun {
        socket.write_all(&completion()[cut..]).await.unwrap();
        let reply = reply(&mut socket).await;
        assert!(reply.contains("\"text\":\"ok\""), "{cut}: {reply:?}");
    }
}

/// The system accepts connections in a process's stead, and resets them if it does not take them.
#[tokio::test]
async fn connections_that_wait_to_be_accepted_at_the_stop_are_answered() {
    let solo = Solo::start("{ drain_delay: 0s }", |_| whole_reply()).await;
    solo.router.signal("STOP");
    let mut queued = Vec::new();
    for _ in 0..600 {
        let mut socket = TcpStream::connect(solo.router.http).await.unwrap();
        socket.write_all(&completion()).await.unwrap();
        queued.push(socket);
    }
    solo.router.signal("TERM");
    solo.router.signal("CONT");
    for (i, mut socket) in queued.into_iter().enumerate() {
        let reply = reply(&mut socket).await;
        assert!(reply.contains("\"text\":\"ok\""), "{i}: {reply:?}");
    }
}
