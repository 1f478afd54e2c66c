//! Requests that are refused before their body is read: the client is told to stop sending, and its
//! connection stays usable.

use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::solo::{Solo, whole_reply};

/// Number of refused requests of one connection. Their bodies together exceed every window of it.
const REQUESTS: u32 = 60;

/// Length of a frame of a body in bytes; three of them are within the first window of a stream.
const FRAME_BYTES: usize = 16 << 10;

const NO_ERROR: [u8; 4] = [0; 4];

#[tokio::test]
async fn a_client_that_sends_a_refused_body_reads_the_refusal_and_is_told_to_stop() {
    let solo = Solo::start("{ body_size_max: 20KiB }", |_| whole_reply()).await;
    let mut client = Raw2::connect(solo.router.http, &[]).await;
    let piece = vec![b' '; FRAME_BYTES];
    for request in 0..REQUESTS {
        let stream = 2 * request + 1;
        let (path, code) = match request % 2 {
            0 => ("/v1/completions", "body_too_large"),
            _ => ("/v1/none", "path_not_found"),
        };
        let head = frames::frame(kind::HEADERS, kind::END_HEADERS, stream, &frames::post(path));
        assert!(client.write(&head).await, "{request}");
        for _ in 0..3 {
            let data = frames::frame(kind::DATA, 0, stream, &piece);
            assert!(client.write(&data).await, "{request}");
        }
        let (mut body, mut is_complete) = (Vec::new(), false);
        loop {
            let frame = client.next_of(stream).await.expect("an open connection");
            match frame.kind {
                kind::DATA => body.extend_from_slice(&frame.payload),
                kind::RST_STREAM => {
                    assert_eq!(frame.payload, NO_ERROR, "{request}");
                    break;
                }
                _ => {}
            }
            is_complete |= frame.flags & kind::END_STREAM != 0 && frame.kind != kind::RST_STREAM;
        }
        let body = String::from_utf8_lossy(&body);
        assert!(is_complete && body.contains(code), "{request}: {body:?}");
        // Bytes that were on their way are no error.
        assert!(client.write(&frames::frame(kind::DATA, kind::END_STREAM, stream, &piece)).await);
    }
}
