//! Replies to clients that read slowly or not at all.

use std::time::Duration;

use serde_json::{Value, json};
use splitrail_tests::cluster::eventually;
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::solo::{Solo, answer_of};

use crate::support::is_full_size;

const COMPLETIONS: &str = "/v1/completions";

fn body_of(prompt: &str) -> Value {
    json!({"model": "sim", "max_tokens": 4, "prompt": prompt})
}

fn completion(prompt: &str) -> Vec<u8> {
    body_of(prompt).to_string().into_bytes()
}

/// A router whose engine answers with a text of so many bytes, but for prompts that are `short`.
async fn answering(limits: &str, bytes: usize) -> Solo {
    let text = "y".repeat(bytes);
    Solo::start(limits, move |heard| match heard.text().contains("short") {
        true => answer_of("ok"),
        false => answer_of(&text),
    })
    .await
}

/// Reads a stream to its end, and lets it send more for each byte that has come; how many bytes
/// there were, and whether the end was that of the answer.
async fn read(client: &mut Raw2, stream: u32, pause: Duration) -> (usize, bool) {
    let mut bytes = 0;
    while let Some(frame) = client.next_of(stream).await {
        if frame.kind == kind::DATA {
            let taken = u32::try_from(frame.payload.len()).unwrap();
            bytes += frame.payload.len();
            if taken > 0 {
                tokio::time::sleep(pause).await;
                let more = [frames::window(stream, taken), frames::window(0, taken)].concat();
                client.write(&more).await;
            }
        }
        match (frame.kind, frame.flags & kind::END_STREAM) {
            (kind::RST_STREAM, _) => return (bytes, false),
            (_, 0) => {}
            _ => return (bytes, true),
        }
    }
    (bytes, false)
}

/// The window and the send buffer take most of an answer's end when its request is over.
#[tokio::test]
async fn a_steady_reader_gets_all_of_a_long_answer_however_short_the_idle_timeout() {
    const BYTES: usize = 1 << 20;
    let solo = answering("{ idle_timeout: 1s }", BYTES).await;
    let mut client = Raw2::connect(solo.router.http, &[]).await;
    client.write(&frames::request(1, COMPLETIONS, &completion("long"))).await;
    let (bytes, ended) = read(&mut client, 1, Duration::from_millis(20)).await;
    assert!(ended && bytes > BYTES, "{bytes}");
}

/// Each stream's window takes one byte: enough for the HTTP library to be given an answer.
#[tokio::test]
async fn finished_answers_that_are_not_read_are_reset_and_their_memory_comes_back() {
    const STREAMS: u32 = 40;
    let limits = "{ write_stall: 1s, idle_timeout: 600s, unread_replies_size_max: 64MiB }";
    let solo = answering(limits, 1 << 20).await;
    assert_eq!(
        solo.http.post(COMPLETIONS, &json!({"model": "sim", "prompt": "short"})).await.status,
        200
    );
    let before = memory(solo.router.pid());
    let mut client = Raw2::connect(solo.router.http, &frames::initial_window(1)).await;
    client.write(&frames::window(0, 1 << 20)).await;
    let of = |path, body: Value| (path, body.to_string().into_bytes());
    let requests = [
        (COMPLETIONS, completion("long")),
        of("/tokenize", json!({"model": "sim", "prompt": "long"})),
        of("/v1/embeddings", json!({"model": "sim", "input": "long"})),
    ];
    for (i, (path, body)) in (0..STREAMS).zip(requests.iter().cycle()) {
        client.write(&frames::request(2 * i + 1, path, body)).await;
    }
    let (mut begun, mut reset) = (0, 0);
    while reset < STREAMS {
        let frame = client.next().await.expect("the connection goes on");
        // The static table has 200 at place 8.
        begun += u32::from(frame.kind == kind::HEADERS && frame.payload[0] == 0x88);
        reset += u32::from(frame.kind == kind::RST_STREAM);
    }
    assert_eq!(begun, STREAMS, "each is an answer that its client does not read");
    let stalled = [("listener", "http"), ("reason", "stream_stall")];
    let cut = solo.metric("splitrail_connections_cut_total", &stalled).await;
    assert_eq!(cut, f64::from(STREAMS));
    // The answers were more than 40 MiB. The allocator keeps some of what was freed for a while.
    eventually("the memory has come back", async || {
        solo.metric("splitrail_request_memory_bytes", &[]).await == 0.0
            && memory(solo.router.pid()).now_kib < before.now_kib + (32 << 10)
    })
    .await;
    let stream = 2 * STREAMS + 1;
    let ask = frames::request(stream, COMPLETIONS, &completion("short"));
    client.write(&[ask, frames::window(stream, 1 << 20)].concat()).await;
    let (bytes, ended) = read(&mut client, stream, Duration::ZERO).await;
    assert!(ended && bytes > 0, "the connection serves others");
}

/// With the default room of a connection for unread replies, which is what bounds the memory.
#[tokio::test]
#[allow(clippy::print_stderr)]
async fn a_hundred_and_ninety_nine_unread_long_answers_are_reset() {
    const STREAMS: u32 = 199;
    let solo = match is_full_size() {
        true => answering("{ write_stall: 10s }", 8 << 20).await,
        false => answering("{ write_stall: 1s }", 1 << 20).await,
    };
    let short = json!({"model": "sim", "prompt": "short"});
    assert_eq!(solo.http.post(COMPLETIONS, &short).await.status, 200);
    let before = memory(solo.router.pid());
    reset_peak(solo.router.pid());
    let mut client = Raw2::connect(solo.router.http, &frames::initial_window(1)).await;
    for i in 0..STREAMS {
        client.write(&frames::request(2 * i + 1, COMPLETIONS, &completion("long"))).await;
    }
    let (refused, stalled) = ([("reason", "unread_replies")], [("reason", "stream_stall")]);
    eventually("all are reset or refused", async || {
        let refused = solo.metric("splitrail_shed_total", &refused).await;
        let stalled = solo.metric("splitrail_connections_cut_total", &stalled).await;
        refused + stalled >= f64::from(STREAMS)
            && solo.metric("splitrail_requests_in_flight", &[]).await == 0.0
    })
    .await;
    let peak_mib = memory(solo.router.pid()).peak_kib >> 10;
    eventually("the memory has come back", async || {
        solo.metric("splitrail_request_memory_bytes", &[]).await == 0.0
    })
    .await;
    let now_mib = memory(solo.router.pid()).now_kib >> 10;
    let before_mib = before.now_kib >> 10;
    eprintln!("before {before_mib} MiB, at most {peak_mib}, afterwards {now_mib}");
    assert!(peak_mib - before_mib < 150, "{peak_mib} MiB");
}

/// The engine's replies wait at the engine, but for a beginning of each.
#[tokio::test]
async fn unread_replies_are_not_buffered_beyond_the_window_of_their_connection() {
    const STREAMS: u32 = 100;
    let limits = "{ write_stall: 1s, idle_timeout: 600s, unread_replies_size_max: 2097152 }";
    let solo = answering(limits, 1 << 20).await;
    let short = json!({"model": "sim", "prompt": "short"});
    assert_eq!(solo.http.post(COMPLETIONS, &short).await.status, 200);
    let before = memory(solo.router.pid());
    reset_peak(solo.router.pid());
    let mut client = Raw2::connect(solo.router.http, &frames::initial_window(1)).await;
    for i in 0..STREAMS {
        client.write(&frames::request(2 * i + 1, COMPLETIONS, &completion("long"))).await;
    }
    let refused = [("reason", "unread_replies")];
    let stalled = [("reason", "stream_stall")];
    eventually("all are reset or refused", async || {
        let refused = solo.metric("splitrail_shed_total", &refused).await;
        let stalled = solo.metric("splitrail_connections_cut_total", &stalled).await;
        // What is refused and not read is reset as well.
        refused > 0.0
            && stalled > 0.0
            && solo.metric("splitrail_requests_in_flight", &[]).await == 0.0
    })
    .await;
    eventually("nothing is held", async || {
        solo.metric("splitrail_request_memory_bytes", &[]).await == 0.0
    })
    .await;
    let grown_kib = memory(solo.router.pid()).peak_kib.saturating_sub(before.now_kib);
    // A quarter of a megabyte of each, and some answers with their copies.
    assert!(grown_kib < 60 << 10, "{grown_kib} KiB");
}

#[tokio::test]
async fn many_long_answers_at_a_time_reach_a_client_that_reads_them() {
    const STREAMS: u32 = 30;
    let solo = answering("{ unread_replies_size_max: 1048576, write_stall: 5s }", 1 << 20).await;
    let mut client = Raw2::connect(solo.router.http, &frames::initial_window(1 << 24)).await;
    client.write(&frames::window(0, 1 << 30)).await;
    for i in 0..STREAMS {
        client.write(&frames::request(2 * i + 1, COMPLETIONS, &completion("long"))).await;
    }
    let (mut bytes, mut ended) = (0, 0);
    while ended < STREAMS {
        let frame = client.next().await.expect("a frame");
        assert_ne!(frame.kind, kind::RST_STREAM);
        if frame.kind == kind::DATA {
            bytes += frame.payload.len();
            ended += u32::from(frame.flags & kind::END_STREAM != 0);
        }
    }
    assert!(bytes > (STREAMS as usize) << 20, "{bytes}: whole answers, and no refusals");
}

/// The rest of an answer whose end the library holds is watched as well as its beginning.
#[tokio::test]
async fn the_last_bytes_of_an_answer_are_waited_for_no_longer_than_the_first() {
    const BYTES: usize = 10_000;
    let solo = answering("{ write_stall: 1s, idle_timeout: 600s }", BYTES).await;
    let mut client = Raw2::connect(solo.router.http, &frames::initial_window(9_000)).await;
    client.write(&frames::request(1, COMPLETIONS, &completion("long"))).await;
    assert_eq!(bytes_before_reset(&mut client).await, 9_000, "as much as the window takes");
}

/// A client that reads one reply slowly, and requests further ones that wait for room.
#[tokio::test]
async fn a_reply_that_waits_for_its_client_past_the_timeout_is_no_fault_of_the_worker() {
    const WAITING: u32 = 5;
    const PIECE_BYTES: u32 = 16 << 10;
    let limits = "{ write_stall: 1s, unread_replies_size_max: 1MiB, reply_rate_min: 10B/s }";
    let model = "    timeouts: { reply: 3s }\n";
    let text = "y".repeat(1 << 20);
    let solo = Solo::start_with(limits, model, move |_| answer_of(&text)).await;
    let mut client = Raw2::connect(solo.router.http, &frames::initial_window(PIECE_BYTES)).await;
    client.write(&frames::request(1, COMPLETIONS, &completion("long"))).await;
    let head = client.next_of(1).await.expect("a reply");
    assert_eq!(head.kind, kind::HEADERS);
    for i in 1..=WAITING {
        client.write(&frames::request(2 * i + 1, COMPLETIONS, &completion("long"))).await;
    }
    let (bytes, ended) = read(&mut client, 1, Duration::from_millis(200)).await;
    assert!(ended && bytes > 1 << 20, "{bytes}");
    let refused = [("reason", "unread_replies")];
    assert_eq!(solo.metric("splitrail_shed_total", &refused).await, f64::from(WAITING));
    assert_eq!(solo.metric("splitrail_worker_leg_failures_total", &[]).await, 0.0);
    assert_eq!(solo.metric("splitrail_retries_total", &[]).await, 0.0);
}

/// The last piece is short, and keeps all of the reply in memory.
#[tokio::test]
async fn an_end_of_a_kilobyte_is_waited_for_no_longer_than_the_rest_of_a_long_answer() {
    const PIECE_BYTES: usize = 16 << 10;
    let solo = answering("{ write_stall: 1s, idle_timeout: 600s }", 1 << 20).await;
    let all_bytes = solo.http.post(COMPLETIONS, &body_of("long")).await.body.len();
    let end_bytes = all_bytes % PIECE_BYTES;
    assert!((2..1 << 10).contains(&end_bytes), "{end_bytes}");
    let window = u32::try_from(all_bytes - end_bytes + 1).unwrap();
    let mut client = Raw2::connect(solo.router.http, &frames::initial_window(window)).await;
    client.write(&frames::window(0, 1 << 24)).await;
    client.write(&frames::request(1, COMPLETIONS, &completion("long"))).await;
    assert_eq!(bytes_before_reset(&mut client).await, window as usize);
    let stalled = [("listener", "http"), ("reason", "stream_stall")];
    assert_eq!(solo.metric("splitrail_connections_cut_total", &stalled).await, 1.0);
    eventually("the memory has come back", async || {
        solo.metric("splitrail_request_memory_bytes", &[]).await == 0.0
    })
    .await;
}

#[tokio::test]
async fn a_refusal_that_is_not_read_is_reset() {
    let solo = answering("{ write_stall: 1s, idle_timeout: 600s }", 1).await;
    let mut client = Raw2::connect(solo.router.http, &frames::initial_window(1)).await;
    let unknown = json!({"model": "nobody", "prompt": "long"}).to_string();
    client.write(&frames::request(1, COMPLETIONS, unknown.as_bytes())).await;
    assert_eq!(bytes_before_reset(&mut client).await, 1);
}

/// Reads the first stream until it is reset.
async fn bytes_before_reset(client: &mut Raw2) -> usize {
    let mut bytes = 0;
    loop {
        let frame = client.next_of(1).await.expect("the connection goes on");
        match frame.kind {
            kind::DATA => bytes += frame.payload.len(),
            kind::RST_STREAM => return bytes,
            _ => {}
        }
    }
}

#[tokio::test]
async fn a_stream_that_is_read_without_end_and_slowly_is_reset_and_others_go_on() {
    let limits = "{ write_stall: 600s, idle_timeout: 600s, reply_grace: 1s, \
                  reply_rate_min: 1MiB/s }";
    let solo = answering(limits, 4 << 20).await;
    let mut client = Raw2::connect(solo.router.http, &frames::initial_window(4096)).await;
    client.write(&frames::request(1, COMPLETIONS, &completion("long"))).await;
    let (bytes, ended) = read(&mut client, 1, Duration::from_millis(50)).await;
    assert!(!ended && bytes < 4 << 20, "{bytes}");
    let slow = [("listener", "http"), ("reason", "stream_pace")];
    assert_eq!(solo.metric("splitrail_connections_cut_total", &slow).await, 1.0);
    client.write(&frames::request(3, COMPLETIONS, &completion("short"))).await;
    let (bytes, ended) = read(&mut client, 3, Duration::ZERO).await;
    assert!(ended && bytes > 0, "the connection serves others");
}
