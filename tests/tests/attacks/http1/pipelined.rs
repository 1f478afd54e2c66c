//! Clients that send bytes beyond their request before it is answered.

use std::time::Duration;

use serde_json::json;
use splitrail_tests::cluster::eventually;
use splitrail_tests::scripted_server::ScriptedReply;
use splitrail_tests::solo::{Solo, whole_reply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

fn completion() -> String {
    let body = json!({"model": "sim", "max_tokens": 1, "prompt": "a"}).to_string();
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// A router that waits little for heads, and whose engine answers when it is told to.
async fn router() -> Solo {
    Solo::start("{ header_timeout: 200ms }", |_| match whole_reply() {
        ScriptedReply::Bytes(last) => ScriptedReply::Held { first: Vec::new(), last },
        other => other,
    })
    .await
}

/// Sends bytes, and lets the engine answer when several times the time of a head is over.
async fn answered_late(solo: &Solo, bytes: &str) -> TcpStream {
    let mut socket = TcpStream::connect(solo.router.http).await.unwrap();
    socket.write_all(bytes.as_bytes()).await.unwrap();
    eventually("the engine works", async || solo.post.open() == 1).await;
    sleep(Duration::from_secs(1)).await;
    solo.post.release();
    socket
}

/// Reads a reply with the text of the engine.
async fn reply(socket: &mut TcpStream) -> String {
    let mut reply = Vec::new();
    let read = async {
        while !reply.ends_with(b"}") {
            let mut piece = [0; 4096];
            match socket.read(&mut piece).await {
                Ok(count @ 1..) => reply.extend_from_slice(&piece[..count]),
                _ => break,
            }
        }
    };
    timeout(Duration::from_secs(30), read).await.unwrap();
    String::from_utf8(reply).unwrap()
}

#[tokio::test]
async fn an_empty_line_after_a_request_does_not_end_it() {
    let solo = router().await;
    let mut socket = answered_late(&solo, &(completion() + "\r\n")).await;
    let reply = reply(&mut socket).await;
    assert!(reply.starts_with("HTTP/1.1 200 "), "{reply:?}");
}

#[tokio::test]
async fn the_beginning_of_the_next_request_does_not_end_the_one_that_is_served() {
    let solo = router().await;
    let next = completion();
    let (beginning, rest) = next.split_at(20);
    let mut socket = answered_late(&solo, &(completion() + beginning)).await;
    let first = reply(&mut socket).await;
    assert!(first.starts_with("HTTP/1.1 200 "), "{first:?}");
    socket.write_all(rest.as_bytes()).await.unwrap();
    let second = reply(&mut socket).await;
    assert!(second.starts_with("HTTP/1.1 200 "), "{second:?}");
    // A head that does not end is given up after the reply.
    let mut socket = TcpStream::connect(solo.router.http).await.unwrap();
    socket.write_all((completion() + beginning).as_bytes()).await.unwrap();
    let third = reply(&mut socket).await;
    assert!(third.starts_with("HTTP/1.1 200 "), "{third:?}");
    let ended = timeout(Duration::from_secs(30), socket.read(&mut [0; 64])).await.unwrap();
    assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
}

#[tokio::test]
async fn a_client_that_leaves_after_bytes_beyond_its_request_ends_its_work() {
    for beyond in [completion(), "\r\n".to_owned()] {
        for resets in [false, true] {
            let solo = router().await;
            let mut socket = TcpStream::connect(solo.router.http).await.unwrap();
            socket.write_all((completion() + &beyond).as_bytes()).await.unwrap();
            eventually("the engine works", async || solo.post.open() == 1).await;
            if resets {
                socket.set_zero_linger().unwrap();
            }
            drop(socket);
            eventually("the engine's work has ended", async || solo.post.open() == 0).await;
            eventually("nothing is held", async || {
                solo.metric("splitrail_requests_in_flight", &[]).await == 0.0
            })
            .await;
        }
    }
}
