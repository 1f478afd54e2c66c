//! Clients that wait to be asked for their bodies (`Expect: 100-continue`), and clients that ask
//! for another protocol.

use serde_json::{Value, json};
use splitrail_tests::cluster::eventually;
use splitrail_tests::raw::{exchange, request};
use splitrail_tests::solo::{Solo, whole_reply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const COMPLETIONS: &str = "/v1/completions";
const EXPECT: &str = "expect: 100-continue\r\n";
const CONTINUE: &str = "HTTP/1.1 100 Continue\r\n\r\n";

fn completion(prompt: &str) -> String {
    json!({"model": "sim", "max_tokens": 1, "prompt": prompt}).to_string()
}

fn head(fields: &str, length: usize) -> String {
    format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{fields}\
         content-length: {length}\r\n\r\n"
    )
}

/// The prompts that the engine was asked for.
fn prompts(solo: &Solo) -> Vec<String> {
    let heard = solo.post.heard().into_iter().filter(|heard| heard.is_inference());
    heard
        .map(|heard| {
            let body: Value = serde_json::from_slice(&heard.body).unwrap();
            body["prompt"].as_str().unwrap().to_owned()
        })
        .collect()
}

async fn nothing_is_in_flight(solo: &Solo) {
    eventually("nothing is in flight", async || {
        solo.metric("splitrail_requests_in_flight", &[]).await == 0.0
            && solo.metric("splitrail_request_memory_bytes", &[]).await == 0.0
    })
    .await;
}

/// Reads until the other side closes.
async fn rest(socket: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset is an end as well.
    let _end = socket.read_to_end(&mut bytes).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn a_client_that_is_asked_to_continue_and_sends_nothing_gets_a_408() {
    const CLIENTS: usize = 20;
    let solo = Solo::start("{ body_grace: 300ms }", |_| whole_reply()).await;
    let mut silent = Vec::new();
    for _ in 0..CLIENTS {
        let mut socket = TcpStream::connect(solo.router.http).await.unwrap();
        socket.write_all(head(EXPECT, 1 << 20).as_bytes()).await.unwrap();
        silent.push(socket);
    }
    for socket in &mut silent {
        let replies = rest(socket).await;
        let answer = replies.strip_prefix(CONTINUE).unwrap_or_else(|| panic!("{replies:?}"));
        assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "one answer: {answer}");
    }
    assert!(prompts(&solo).is_empty(), "no engine was asked");
    nothing_is_in_flight(&solo).await;
    let served = request("POST", COMPLETIONS, &[], completion("after").as_bytes());
    assert_eq!(exchange(solo.router.http, &served).await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_body_that_does_not_wait_to_be_asked_for_is_one_request() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    let body = completion("at once");
    let mut socket = TcpStream::connect(solo.router.http).await.unwrap();
    let all = head(&format!("{EXPECT}connection: close\r\n"), body.len()) + &body;
    socket.write_all(all.as_bytes()).await.unwrap();
    let replies = rest(&mut socket).await;
    let answer = replies.strip_prefix(CONTINUE).unwrap_or(&replies);
    assert!(answer.starts_with("HTTP/1.1 200 "), "{replies}");
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "one answer: {answer}");
    assert_eq!(prompts(&solo), ["at once"]);
}

/// The client goes on as if the router had agreed, in one write.
#[tokio::test]
async fn no_other_protocol_begins_within_a_connection() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    let upgrade = "upgrade: h2c\r\nconnection: upgrade, http2-settings\r\n\
                   http2-settings: AAMAAABkAAQAAP__\r\n";
    let body = completion("first");
    let first = [head(upgrade, body.len()), body].concat().into_bytes();
    let hidden = completion("hidden");
    let settings = splitrail_tests::frames::frame(4, 0, 0, &[]);
    let preface = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &settings].concat();
    let request2 = splitrail_tests::frames::request(3, COMPLETIONS, hidden.as_bytes());
    let request1 = request("POST", COMPLETIONS, &[], hidden.as_bytes());
    let nothing: &[u8] = &[];
    for (count, (preface, behind)) in
        [(&preface[..], &request2[..]), (nothing, &request1)].into_iter().enumerate()
    {
        let mut socket = TcpStream::connect(solo.router.http).await.unwrap();
        socket.write_all(&[&first, preface, behind].concat()).await.unwrap();
        let replies = rest(&mut socket).await;
        assert!(replies.starts_with("HTTP/1.1 200 "), "the offer is ignored: {replies}");
        assert_eq!(replies.matches("HTTP/1.1 ").count(), 1, "one answer: {replies}");
        assert_eq!(prompts(&solo), vec!["first"; count + 1], "nothing behind it is a request");
    }
}
