//! Health watches by the thousand, on connections that stay open.

use std::net::Ipv4Addr;
use std::time::Duration;

use splitrail_tests::cluster::eventually;
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::proc::{memory, processor_time, reset_peak};
use splitrail_tests::raw::connect_from;
use splitrail_tests::solo::Solo;

use super::{CHECK, EMPTY, GENERATE, MESSAGE, WATCH, engine, framed};
use crate::support::{HTTP1_STREAM_KIB, HTTP2_STREAM_KIB, REST_KIB};

const PARKING: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

const CONNECTIONS: u32 = 50;
/// On each connection: as many as `limits.http2_streams_max` allows.
const WATCHES: u32 = 200;
/// `limits.grpc_watches_max`.
const WATCHES_MAX: u32 = 1024;

/// A call with one message, as frames.
fn call(stream: u32, path: &str, message: &[u8]) -> Vec<u8> {
    // Of the static table: POST is 3, the scheme http 6.
    let mut head = vec![0x83, 0x86];
    for (name, value) in [(":path", path), (":authority", "x")].iter().chain(super::USUAL) {
        head.extend(frames::field(name, value));
    }
    let head = frames::frame(kind::HEADERS, kind::END_HEADERS, stream, &head);
    [head, frames::frame(kind::DATA, kind::END_STREAM, stream, message)].concat()
}

/// Opens as many watches as a connection can have; how many of them stay open.
async fn park(client: &mut Raw2) -> u32 {
    let calls = (0..WATCHES).flat_map(|i| call(2 * i + 1, WATCH, EMPTY));
    client.write(&calls.collect::<Vec<_>>()).await;
    let (mut open, mut refused) = (0, 0);
    while open + refused < WATCHES {
        let frame = client.next().await.expect("the connection stays");
        match (frame.kind, frame.flags & kind::END_STREAM) {
            // The status of the service, which a watch begins with.
            (kind::DATA, 0) => open += 1,
            // A status of the call, and nothing else.
            (kind::HEADERS, kind::END_STREAM) => refused += 1,
            _ => {}
        }
    }
    open
}

/// Whether a call of another client gets a message.
async fn is_served(client: &mut Raw2, stream: u32, path: &str, message: &[u8]) -> bool {
    client.write(&call(stream, path, message)).await;
    while let Some(frame) = client.next_of(stream).await {
        match (frame.kind, frame.flags & kind::END_STREAM) {
            (kind::DATA, _) => return true,
            (_, 0) => {}
            _ => return false,
        }
    }
    false
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_watches_leave_memory_processor_time_and_places_to_others() {
    let solo = Solo::start("{}", engine).await;
    let pid = solo.router.pid();
    let mut other = Raw2::over(connect_from(OTHER, solo.router.grpc).await, &[]).await;
    assert!(is_served(&mut other, 1, GENERATE, &framed(MESSAGE)).await);
    let before = memory(pid);
    reset_peak(pid);
    let (mut parked, mut open) = (Vec::new(), 0);
    for _ in 0..CONNECTIONS {
        let socket = connect_from(PARKING, solo.router.grpc).await;
        let mut client = Raw2::over(socket, &[]).await;
        open += park(&mut client).await;
        parked.push(client);
    }
    assert!((1..WATCHES_MAX).contains(&open), "{open} watches are open");
    let shed = solo.metric("splitrail_shed_total", &[("reason", "grpc_watches")]).await;
    assert_eq!(shed, f64::from(CONNECTIONS * WATCHES - open), "all others were refused");

    // A watch takes no more than a stream, of which there are `grpc_watches_max` at most, and a
    // connection no more than one of HTTP/1.1 that streams. Nothing is charged to
    // `request_memory_max`.
    let allowed_kib = u64::from(WATCHES_MAX) * HTTP2_STREAM_KIB
        + u64::from(CONNECTIONS) * HTTP1_STREAM_KIB
        + REST_KIB;
    let grown_kib = memory(pid).peak_kib.saturating_sub(before.now_kib);
    assert!(grown_kib < allowed_kib, "{grown_kib} KiB, where {allowed_kib} are allowed");
    assert_eq!(solo.metric("splitrail_request_memory_bytes", &[]).await, 0.0);

    let mut new = Raw2::over(connect_from(OTHER, solo.router.grpc).await, &[]).await;
    for (stream, path, message) in
        [(1, GENERATE, &*framed(MESSAGE)), (3, CHECK, EMPTY), (5, WATCH, EMPTY)]
    {
        assert!(is_served(&mut new, stream, path, message).await, "{path} of a new client");
    }
    eventually("the open watches cost less than a twentieth of a processor", async || {
        let used = processor_time(pid);
        tokio::time::sleep(Duration::from_secs(1)).await;
        processor_time(pid).saturating_sub(used) < Duration::from_millis(50)
    })
    .await;
    drop(parked);
}
