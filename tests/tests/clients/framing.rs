//! What can be read in two ways is refused, and what is too long is not read: an engine sees
//! one request or none.

use serde_json::{Value, json};
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::raw::exchange;
use splitrail_tests::solo::{Solo, whole_reply};
use splitrail_tests::{Cluster, Spec};

const COMPLETIONS: &str = "/v1/completions";

/// What a hostile client may make the router grow by.
const GROWTH_KIB: u64 = 10 << 10;

fn completion(text: &str) -> Value {
    json!({"model": "sim", "max_tokens": 4, "temperature": 0, "prompt": text})
}

fn post(version: &str, fields: &str, body: &str) -> Vec<u8> {
    format!("POST {COMPLETIONS} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n{fields}\r\n{body}").into_bytes()
}

fn chunked(body: &str) -> String {
    format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len())
}

fn length(body: &str) -> String {
    format!("content-length: {}\r\n", body.len())
}

#[tokio::test]
async fn ambiguous_framing_is_a_400_that_no_engine_sees() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let address = cluster.running.addresses.http;
    let body = completion("one").to_string();
    let smuggled = String::from_utf8(post("1.1", &length(&body), &body)).unwrap();
    let own = length(&body);
    let te = "transfer-encoding: chunked\r\n";
    let in_chunks = chunked(&body);
    let size = format!("{:x}", body.len());
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("CL, then TE", post("1.1", &format!("{own}{te}"), &in_chunks)),
        ("TE, then CL", post("1.1", &format!("{te}{own}"), &in_chunks)),
        ("CL of the chunks, TE", {
            post("1.1", &format!("{}{te}", length(&in_chunks)), &in_chunks)
        }),
        ("CL.TE with a request behind", {
            post("1.1", &format!("{}{te}", length(&body)), &format!("0\r\n\r\n{smuggled}"))
        }),
        ("TE.CL with a request behind", {
            post("1.1", &format!("{te}content-length: 4\r\n"), &chunked(&smuggled))
        }),
        ("TE twice", post("1.1", &format!("{te}{te}"), &in_chunks)),
        ("TE twice, another", {
            post("1.1", &format!("{te}transfer-encoding: identity\r\n"), &in_chunks)
        }),
        ("TE of two", post("1.1", "transfer-encoding: gzip, chunked\r\n", &in_chunks)),
        ("TE that is not last", post("1.1", "transfer-encoding: chunked, gzip\r\n", &in_chunks)),
        ("TE with a space before the colon", {
            post("1.1", &format!("transfer-encoding : chunked\r\n{own}"), &in_chunks)
        }),
        ("TE in HTTP/1.0", post("1.0", te, &in_chunks)),
        ("CL twice, the same", post("1.1", &format!("{own}{own}"), &body)),
        ("CL twice, another", post("1.1", &format!("{own}content-length: 1\r\n"), &body)),
        ("CL of a list", {
            post("1.1", &format!("content-length: {0}, {0}\r\n", body.len()), &body)
        }),
        ("CL with a sign", post("1.1", &format!("content-length: +{}\r\n", body.len()), &body)),
        ("CL that overflows", post("1.1", "content-length: 99999999999999999999\r\n", &body)),
        ("a bare line feed", post("1.1", &format!("a: b\n{own}"), &body)),
        ("a bare line feed at the end", {
            format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n{own}\n{body}").into_bytes()
        }),
        ("a bare carriage return", post("1.1", &format!("a: b\rc: d\r\n{own}"), &body)),
        ("a folded line", post("1.1", &format!("a: b\r\n {own}"), &body)),
        ("a chunk extension", {
            post("1.1", te, &in_chunks.replacen(&size, &format!("{size};a=b"), 1))
        }),
        ("a chunk size with a bare line feed", {
            post("1.1", te, &in_chunks.replacen("\r\n", "\n", 1))
        }),
        ("a chunk size with a sign", post("1.1", te, &format!("+{in_chunks}"))),
        ("a chunk longer than its size", post("1.1", te, &format!("1\r\n{body}\r\n0\r\n\r\n"))),
        ("a bare line feed after the last chunk", {
            post("1.1", te, &in_chunks.replacen("0\r\n\r\n", "0\r\n\n", 1))
        }),
        ("an empty line that is none", [b"\n", &post("1.1", &own, &body)[..]].concat()),
    ];
    let count = cases.len();
    for (what, bytes) in cases {
        let reply = exchange(address, &bytes).await;
        // Where the body breaks off, a reply of our own says so; it is a 400 as well.
        assert_eq!(reply.unwrap_or_else(|| panic!("{what}: no reply")).status(), 400, "{what}");
        assert!(cluster.engine("w0").requests().is_empty(), "{what}");
    }
    let framing = cluster.metric("splitrail_connections_cut_total", &[("reason", "framing")]).await;
    // The library itself refuses the old version and the bare carriage return.
    assert_eq!(framing, (count - 2) as f64);
}

#[tokio::test]
async fn bytes_after_an_upgrade_are_not_a_request() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let address = cluster.running.addresses.http;
    let body = completion("one").to_string();
    let behind = post("1.1", &length(&body), &body);
    for protocol in ["websocket", "h2c", "x/1"] {
        let seen = cluster.engine("w0").requests().len();
        let upgrade = format!("connection: upgrade\r\nupgrade: {protocol}\r\n{}", length(&body));
        let bytes = [post("1.1", &upgrade, &body), behind.clone()].concat();
        let reply = exchange(address, &bytes).await.unwrap();
        assert_eq!(reply.status(), 200, "{protocol}: it is ignored");
        assert!(reply.head.contains("connection: close"), "{}", reply.head);
        assert!(!reply.text().contains("HTTP/1.1 200"), "one reply: {}", reply.text());
        assert_eq!(cluster.engine("w0").requests().len(), seen + 1, "{protocol}");
    }
    let connect = [&b"CONNECT x:1 HTTP/1.1\r\nhost: x:1\r\n\r\n"[..], &behind].concat();
    let seen = cluster.engine("w0").requests().len();
    let reply = exchange(address, &connect).await.unwrap();
    assert!(reply.status() >= 400, "{}", reply.head);
    assert!(cluster.engine("w0").requests().len() <= seen + 1);
}

#[tokio::test]
async fn pipelined_requests_are_served_in_order() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let body = completion("one").to_string();
    let first = post("1.1", "transfer-encoding: chunked\r\n", &chunked(&body));
    let last = post("1.1", &format!("{}connection: close\r\n", length(&body)), &body);
    let bytes = [&first[..], &b"\r\n"[..], &last].concat();
    let reply = exchange(cluster.running.addresses.http, &bytes).await.unwrap();
    assert_eq!(reply.status(), 200);
    assert_eq!(reply.text().matches("HTTP/1.1 200 OK").count(), 1, "behind the first");
    assert_eq!(cluster.engine("w0").requests().len(), 2);
}

/// A bad request behind a good one does not take the good one with it.
#[tokio::test]
async fn a_request_before_an_ambiguous_one_is_served() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let body = completion("one").to_string();
    let good = post("1.1", &length(&body), &body);
    let bad = post("1.1", &format!("{}transfer-encoding: chunked\r\n", length(&body)), &body);
    let bytes = [good, bad].concat();
    let reply = exchange(cluster.running.addresses.http, &bytes).await.unwrap();
    assert_eq!(reply.status(), 200);
    assert_eq!(reply.text().matches("HTTP/1.1 400 Bad Request").count(), 1);
    assert_eq!(cluster.engine("w0").requests().len(), 1);
}

fn fields(count: usize) -> String {
    (0..count).map(|i| format!("x-{i}: v\r\n")).collect()
}

#[tokio::test]
async fn heads_are_bounded_in_bytes_and_fields() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    let body = completion("one").to_string();
    let mut own = length(&body);
    own += "connection: close\r\n";
    let long = |bytes: usize| format!("x-long: {}\r\n", "v".repeat(bytes));
    // Host, type, length and connection make it 100 and 101; 16 KiB is the bound.
    for (extra, status) in
        [(fields(96), 200), (fields(97), 431), (long(15 << 10), 200), (long(17 << 10), 431)]
    {
        let bytes = post("1.1", &format!("{own}{extra}"), &body);
        let reply = exchange(solo.router.http, &bytes).await.unwrap();
        assert_eq!(reply.status(), status, "{} bytes", bytes.len());
    }
    let ask = async |extra: Vec<u8>| {
        let mut client = Raw2::connect(solo.router.http, &[]).await;
        let block = [frames::post(COMPLETIONS), extra].concat();
        client.write(&frames::frame(kind::HEADERS, kind::END_HEADERS, 1, &block)).await;
        client.write(&frames::frame(kind::DATA, kind::END_STREAM, 1, body.as_bytes())).await;
        loop {
            match client.next_of(1).await {
                // The static table has 200 at place 8; others are written out.
                Some(frame) if frame.kind == kind::HEADERS => {
                    break if frame.payload[0] == 0x88 { 200 } else { 431 };
                }
                Some(frame) if frame.kind == kind::RST_STREAM => break 431,
                Some(_) => {}
                None => break 0,
            }
        }
    };
    // The type of the body makes it 100 and 101.
    let few = |count: usize| (0..count).flat_map(|i| frames::field(&format!("x-{i}"), "v"));
    assert_eq!(ask(few(99).collect()).await, 200);
    assert_eq!(ask(few(100).collect()).await, 431);
    assert_eq!(ask(frames::field("x-long", &"v".repeat(15 << 10))).await, 200);
    // More than a frame holds.
    let long = frames::field("x-long", &"v".repeat(16 << 10));
    assert_ne!(ask(long).await, 200);
}

#[tokio::test]
async fn a_bomb_of_header_table_references_takes_no_memory() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    for i in 0..20 {
        let reply = solo.http.post(COMPLETIONS, &completion(&format!("warm {i}"))).await;
        assert_eq!(reply.status, 200);
    }
    let before = memory(solo.router.pid());
    reset_peak(solo.router.pid());
    // 3,900 bytes into the table, then 16,000 times the same by one byte each: 60 MB.
    let mut block = frames::post(COMPLETIONS);
    block.extend(frames::indexed_field("x", &"v".repeat(3900)));
    block.resize(16 << 10, 0xbe);
    let bomb = frames::frame(kind::HEADERS, 0, 1, &block);
    let more = frames::frame(kind::CONTINUATION, 0, 1, &[0xbe; 16 << 10]);
    for _ in 0..8 {
        let client = Raw2::connect(solo.router.http, &[]).await;
        let pieces = std::iter::once(bomb.clone()).chain(std::iter::repeat_n(more.clone(), 64));
        let flooded = client.flood(pieces).await;
        assert!(flooded.ended, "{flooded:?}");
    }
    let grown_kib = memory(solo.router.pid()).peak_kib.saturating_sub(before.now_kib);
    assert!(grown_kib < GROWTH_KIB, "{grown_kib} KiB");
    assert_eq!(solo.http.post(COMPLETIONS, &completion("after")).await.status, 200);
}

#[tokio::test]
async fn compression_bombs_are_refused_unread() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let address = cluster.running.addresses.http;
    // Beginnings of streams of each kind; what would follow is never looked at.
    for (encoding, magic) in [
        ("gzip", &b"\x1f\x8b\x08\0\0\0\0\0\0\x03"[..]),
        ("x-gzip", b"\x1f\x8b\x08\0\0\0\0\0\0\x03"),
        ("zstd", b"\x28\xb5\x2f\xfd"),
        ("br", b"\x5b\xff\xff\x3f"),
        ("deflate", b"\x78\x9c"),
        ("gzip, gzip, gzip", b"\x1f\x8b\x08"),
        ("identity, zstd", b"\x28\xb5\x2f\xfd"),
    ] {
        let head = format!(
            "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-encoding: {encoding}\r\n\
             content-length: 1000000000\r\n\r\n"
        );
        let piece = magic.repeat(1 << 10);
        let flood = splitrail_tests::raw::flood(address, head.as_bytes(), &piece, 256 << 20).await;
        assert!(flood.cut, "{encoding}: {} bytes were read", flood.written_bytes);
        // A reset may take the reply with it; where it comes, it says why.
        if let Some(reply) = flood.reply {
            assert_eq!(reply.status(), 415, "{encoding}");
            assert!(reply.head.contains("accept-encoding: identity"), "{}", reply.head);
        }
    }
    assert!(cluster.engine("w0").requests().is_empty());
}

#[tokio::test]
async fn compressed_grpc_messages_are_refused() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let address = cluster.running.addresses.grpc.unwrap();
    for (encoding, flag) in [(Some("gzip"), 1), (Some("zstd"), 1), (None, 1)] {
        let mut client = Raw2::connect(address, &[]).await;
        let mut block = frames::post("/splitrail.v1.FrontDoorService/Generate");
        block.extend(frames::field("content-type", "application/grpc"));
        block.extend(frames::field("te", "trailers"));
        if let Some(encoding) = encoding {
            block.extend(frames::field("grpc-encoding", encoding));
        }
        client.write(&frames::frame(kind::HEADERS, kind::END_HEADERS, 1, &block)).await;
        let message = [flag, 0, 0, 0, 4, 0x1f, 0x8b, 8, 0];
        client.write(&frames::frame(kind::DATA, kind::END_STREAM, 1, &message)).await;
        while let Some(frame) = client.next_of(1).await {
            if frame.flags & kind::END_STREAM != 0 {
                break;
            }
        }
    }
    assert!(cluster.engine("w0").requests().is_empty());
    let request = splitrail_tests::grpc::text_request("after", "");
    assert!(splitrail_tests::grpc::generate(address, request).await.is_ok());
}
