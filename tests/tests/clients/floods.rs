//! Floods of HTTP/2 frames end in a GOAWAY, cost no memory, and do not affect other clients.

use serde_json::{Value, json};
use splitrail_tests::frames::{self, Flooded, Raw2, kind};
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::scripted_server::ScriptedReply;
use splitrail_tests::solo::{Solo, whole_reply};

const COMPLETIONS: &str = "/v1/completions";

/// What a hostile client may make the router grow by.
const GROWTH_KIB: u64 = 10 << 10;

/// Error codes of RFC 9113, section 7.
const PROTOCOL_ERROR: u32 = 1;
const ENHANCE_YOUR_CALM: u32 = 11;

/// More than any of these floods may have.
const PIECES: u32 = 200_000;

fn completion(text: &str) -> Value {
    json!({"model": "sim", "max_tokens": 4, "temperature": 0, "prompt": text})
}

fn headers(stream: u32, flags: u8) -> Vec<u8> {
    frames::frame(kind::HEADERS, flags, stream, &frames::post(COMPLETIONS))
}

/// A router whose engine does not answer prompts that are to be `held`.
async fn solo() -> Solo {
    Solo::start("{}", |heard| match heard.text().contains("held") {
        true => ScriptedReply::Held { first: Vec::new(), last: Vec::new() },
        false => whole_reply(),
    })
    .await
}

/// Floods a router, which must end it, say so, stay small and serve others.
async fn flood(what: &str, pieces: impl Iterator<Item = Vec<u8>>) -> Flooded {
    flood_of(&solo().await, what, pieces).await
}

async fn flood_of(solo: &Solo, what: &str, pieces: impl Iterator<Item = Vec<u8>>) -> Flooded {
    for i in 0..20 {
        let reply = solo.http.post(COMPLETIONS, &completion(&format!("warm {i}"))).await;
        assert_eq!(reply.status, 200);
    }
    let before = memory(solo.router.pid());
    reset_peak(solo.router.pid());
    let client = Raw2::connect(solo.router.http, &[]).await;
    let served = async {
        for i in 0..20 {
            let reply = solo.http.post(COMPLETIONS, &completion(&format!("beside {i}"))).await;
            assert_eq!(reply.status, 200, "{what}");
        }
    };
    let (flooded, ()) = tokio::join!(client.flood(pieces), served);
    assert!(flooded.ended, "{what}: {flooded:?}");
    let grown_kib = memory(solo.router.pid()).peak_kib.saturating_sub(before.now_kib);
    assert!(grown_kib < GROWTH_KIB, "{what}: {grown_kib} KiB");
    let reply = solo.http.post(COMPLETIONS, &completion("after")).await;
    assert_eq!(reply.status, 200, "{what}");
    flooded
}

/// The streams that a client may open: 1, 3, 5 and so on.
fn streams() -> impl Iterator<Item = u32> {
    (0..PIECES).map(|i| 2 * i + 1)
}

#[tokio::test]
async fn rapid_resets_end_in_a_goaway() {
    let pieces = streams().map(|stream| {
        let head = headers(stream, kind::END_HEADERS);
        let cancel = frames::frame(kind::RST_STREAM, 0, stream, &[0, 0, 0, 8]);
        [head, cancel].concat()
    });
    let flooded = flood("rapid reset", pieces).await;
    assert!([None, Some(PROTOCOL_ERROR), Some(ENHANCE_YOUR_CALM)].contains(&flooded.goaway));
}

/// The same, of requests that are whole and already with an engine.
#[tokio::test]
async fn requests_that_are_always_cancelled_end_in_a_goaway() {
    let body = completion("held").to_string();
    let pieces = streams().map(|stream| {
        let head = headers(stream, kind::END_HEADERS);
        let body = frames::frame(kind::DATA, kind::END_STREAM, stream, body.as_bytes());
        let cancel = match stream {
            0..41 => Vec::new(),
            _ => frames::frame(kind::RST_STREAM, 0, stream - 40, &[0, 0, 0, 8]),
        };
        [head, body, cancel].concat()
    });
    let solo = solo().await;
    let flooded = flood_of(&solo, "cancelled requests", pieces).await;
    // Sockets have taken more than the router has read.
    let served = solo.post.heard().iter().filter(|heard| heard.text().contains("held")).count();
    assert!(served < 10_000, "{served} requests reached the engine: {flooded:?}");
}

#[tokio::test]
async fn endless_continuations_end_in_a_goaway() {
    let first = std::iter::once(headers(1, 0));
    let more = frames::frame(kind::CONTINUATION, 0, 1, &frames::field("x", "y"));
    let flooded = flood("CONTINUATION", first.chain(std::iter::repeat_n(more, PIECES as usize)));
    assert!(flooded.await.goaway.is_some());
    let first = std::iter::once(headers(1, 0));
    let empty = frames::frame(kind::CONTINUATION, 0, 1, &[]);
    let pieces = first.chain(std::iter::repeat_n(empty, PIECES as usize));
    assert!(flood("empty CONTINUATION", pieces).await.goaway.is_some());
}

#[tokio::test]
async fn endless_empty_data_ends_in_a_goaway() {
    let first = std::iter::once(headers(1, kind::END_HEADERS));
    let empty = frames::frame(kind::DATA, 0, 1, &[]);
    let pieces = first.chain(std::iter::repeat_n(empty, PIECES as usize));
    assert!(flood("empty DATA", pieces).await.goaway.is_some());
}

/// Streams that the client makes the server reset, by what is wrong on them.
#[tokio::test]
async fn resets_provoked_from_the_server_end_in_a_goaway() {
    let pieces = streams().map(|stream| {
        let head = headers(stream, kind::END_HEADERS);
        // A window cannot grow by nothing; RFC 9113, section 6.9.
        [head, frames::frame(kind::WINDOW_UPDATE, 0, stream, &[0; 4])].concat()
    });
    assert!(flood("provoked resets", pieces).await.goaway.is_some());
}

#[tokio::test]
async fn endless_settings_and_pings_end_in_a_goaway() {
    for (what, frame) in [
        ("SETTINGS", frames::frame(kind::SETTINGS, 0, 0, &[])),
        ("PING", frames::frame(kind::PING, 0, 0, &[7; 8])),
        ("unknown frames", frames::frame(0xbe, 0, 0, &[])),
    ] {
        let flooded = flood(what, std::iter::repeat_n(frame, PIECES as usize)).await;
        assert_eq!(flooded.goaway, Some(PROTOCOL_ERROR), "{what}");
    }
}
