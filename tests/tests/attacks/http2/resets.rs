//! Requests that are cancelled as soon as they are at work.

use std::time::Duration;

use serde_json::json;
use splitrail_tests::cluster::eventually;
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::scripted_server::ScriptedReply;
use splitrail_tests::solo::{Solo, whole_reply};

const COMPLETIONS: &str = "/v1/completions";

/// Requests at a time.
const AT_ONCE: u32 = 10;
/// What a client may cancel without having as many answered.
const CANCELLED_MAX: u32 = 100;
/// From the stream of a request to that of the one that is to pay for its cancelling.
const PAID: u32 = 2 * AT_ONCE;
/// Ten times as many, all together.
const ROUNDS: u32 = 10 * CANCELLED_MAX / AT_ONCE;

/// Reads until the engine has so many requests; whether the router has ended the connection.
async fn ended_before(client: &mut Raw2, solo: &Solo, requests: usize) -> bool {
    while solo.post.open() != requests {
        tokio::select! {
            frame = client.next() => match frame {
                Some(frame) if frame.kind != kind::GOAWAY => {}
                _ => return true,
            },
            () = tokio::time::sleep(Duration::from_millis(1)) => {}
        }
    }
    false
}

/// Trailers are header blocks as well; they do not make a cancelled request two.
#[tokio::test]
async fn requests_with_trailers_that_are_always_cancelled_end_in_a_goaway() {
    let solo = Solo::start("{}", |heard| match heard.text().contains("held") {
        true => ScriptedReply::Held { first: Vec::new(), last: Vec::new() },
        false => whole_reply(),
    })
    .await;
    let body = json!({"model": "sim", "max_tokens": 4, "prompt": "held"}).to_string();
    let ask = |stream: u32| {
        let head =
            frames::frame(kind::HEADERS, kind::END_HEADERS, stream, &frames::post(COMPLETIONS));
        let body = frames::frame(kind::DATA, 0, stream, body.as_bytes());
        let ends = kind::END_HEADERS | kind::END_STREAM;
        [head, body, frames::frame(kind::HEADERS, ends, stream, &frames::field("x", "y"))].concat()
    };
    let cancel = |stream: u32| frames::frame(kind::RST_STREAM, 0, stream, &[0, 0, 0, 8]);
    let mut client = Raw2::connect(solo.router.http, &[]).await;
    let (mut ended, mut cancelled) = (false, 0);
    // As many requests that cost nothing buy nothing.
    let paid = |stream: u32| {
        let flags = kind::END_HEADERS | kind::END_STREAM;
        frames::frame(kind::HEADERS, flags, stream + PAID, &frames::get("/health"))
    };
    for round in 0..ROUNDS {
        let streams = || (0..AT_ONCE).map(|i| 2 * (2 * round * AT_ONCE + i) + 1);
        client.write(&streams().flat_map(ask).collect::<Vec<_>>()).await;
        client.write(&streams().flat_map(paid).collect::<Vec<_>>()).await;
        ended = ended_before(&mut client, &solo, AT_ONCE as usize).await;
        client.write(&streams().flat_map(cancel).collect::<Vec<_>>()).await;
        cancelled += AT_ONCE;
        ended = ended || ended_before(&mut client, &solo, 0).await;
        if ended {
            break;
        }
    }
    assert!(ended, "{cancelled} cancelled requests");
    // The end comes with the round that is too much, or with the next one.
    assert!(cancelled <= CANCELLED_MAX + 2 * AT_ONCE, "{cancelled} cancelled requests");
    let flood = [("listener", "http"), ("reason", "flood")];
    // The connection is counted when it has ended, which may be after the GOAWAY was read.
    let cut = async || solo.metric("splitrail_connections_cut_total", &flood).await;
    eventually("the connection is counted", async || cut().await == 1.0).await;
    let after = json!({"model": "sim", "max_tokens": 4, "prompt": "a"});
    assert_eq!(solo.http.post(COMPLETIONS, &after).await.status, 200);
}
