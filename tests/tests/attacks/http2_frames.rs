//! HTTP/2 frames that carry nothing, and requests that are no requests.

use serde_json::json;
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::solo::{Solo, whole_reply};

const COMPLETIONS: &str = "/v1/completions";
const PADDED: u8 = 8;

/// Frames that a client has for the router.
const FRAMES: usize = 100_000;

/// What they may make the router grow by.
const GROWTH_KIB: u64 = 10 << 10;

async fn is_served(solo: &Solo) {
    let headers = [("content-type", "application/json")];
    let body = json!({"model": "sim", "max_tokens": 1, "prompt": "after"}).to_string();
    assert_eq!(solo.http.post_with(COMPLETIONS, &headers, body).await.status, 200);
}

fn head() -> Vec<u8> {
    frames::frame(kind::HEADERS, kind::END_HEADERS, 1, &frames::post(COMPLETIONS))
}

#[tokio::test]
async fn data_frames_that_carry_next_to_nothing_end_in_a_goaway() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    is_served(&solo).await;
    let padding = [&[255][..], &[0; 255]].concat();
    for (what, flags, payload) in [
        ("empty", 0, &[][..]),
        ("padded, of no length", PADDED, &[0]),
        ("of nothing but padding", PADDED, &padding),
        ("of one byte", 0, b" "),
    ] {
        let before = memory(solo.router.pid());
        reset_peak(solo.router.pid());
        let client = Raw2::connect(solo.router.http, &[]).await;
        let frame = frames::frame(kind::DATA, flags, 1, payload);
        let pieces = std::iter::once(head()).chain(std::iter::repeat_n(frame, FRAMES));
        let flooded = client.flood(pieces).await;
        assert!(flooded.ended && flooded.goaway.is_some(), "{what}: {flooded:?}");
        let grown_kib = memory(solo.router.pid()).peak_kib.saturating_sub(before.now_kib);
        assert!(grown_kib < GROWTH_KIB, "{what}: {grown_kib} KiB");
        is_served(&solo).await;
    }
    assert!(solo.post.heard().iter().filter(|heard| heard.is_inference()).count() == 5);
}

#[tokio::test]
async fn connect_opens_no_way_through_the_router() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    let fields = |fields: &[(&str, &str)]| -> Vec<u8> {
        fields.iter().flat_map(|(name, value)| frames::field(name, value)).collect()
    };
    let method = (":method", "CONNECT");
    let (scheme, path) = ((":scheme", "http"), (":path", COMPLETIONS));
    for (what, block) in [
        ("CONNECT", fields(&[method, (":authority", "169.254.169.254:80")])),
        ("CONNECT with a path", fields(&[method, scheme, path, (":authority", "x")])),
        (
            "a WebSocket",
            fields(&[method, (":protocol", "websocket"), scheme, path, (":authority", "x")]),
        ),
    ] {
        let mut client = Raw2::connect(solo.router.http, &[]).await;
        client.write(&frames::frame(kind::HEADERS, kind::END_HEADERS, 1, &block)).await;
        let body = json!({"model": "sim", "prompt": "through"}).to_string();
        client.write(&frames::frame(kind::DATA, kind::END_STREAM, 1, body.as_bytes())).await;
        // A reset, an answer that is no success, or the end of the connection.
        while let Some(frame) = client.next_of(1).await {
            if frame.kind == kind::RST_STREAM {
                break;
            }
            if frame.kind == kind::HEADERS {
                // The static table has 200 at place 8.
                assert_ne!(frame.payload.first(), Some(&0x88), "{what} succeeds");
                break;
            }
        }
        is_served(&solo).await;
    }
    let heard = solo.post.heard();
    assert!(heard.iter().all(|heard| !heard.text().contains("through")), "nothing went through");
}
