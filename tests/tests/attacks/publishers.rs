//! Publishers of KV events whose messages are made to hurt: lengths that are only claimed, blocks
//! without end, times that are none.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use serde_json::json;
use splitrail_tests::cluster::eventually;
use splitrail_tests::proc::{memory, reset_peak};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::support::{Site, engine};

/// What all of them together may make the router grow by.
const GROWTH_KIB: u64 = 48 << 10;

/// How a ZeroMQ publisher begins (ZMTP 3.0, no security).
fn handshake() -> Vec<u8> {
    let mut greeting = vec![0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    let ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB";
    greeting.extend([4, u8::try_from(ready.len()).unwrap()]);
    [&greeting[..], ready].concat()
}

/// A message as vLLM sends it: a topic, a number, a batch.
fn message(number: u64, batch: &[u8]) -> Vec<u8> {
    let mut bytes = vec![1, 0, 1, 8];
    bytes.extend(number.to_be_bytes());
    bytes.push(2);
    bytes.extend((batch.len() as u64).to_be_bytes());
    bytes.extend(batch);
    bytes
}

/// A batch of one event that stores so many blocks, none of which was stored before.
fn stored(number: u64, blocks: u32) -> Vec<u8> {
    // [time, [["BlockStored", hashes, parent, token ids, block size, adapter]]]
    let mut batch = vec![0x92, 0xcb];
    batch.extend(1.0_f64.to_be_bytes());
    batch.extend([0x91, 0x96, 0xab]);
    batch.extend(b"BlockStored");
    batch.push(0xdd);
    batch.extend(blocks.to_be_bytes());
    for block in 0..blocks {
        batch.push(0xcf);
        batch.extend((number << 32 | u64::from(block)).to_be_bytes());
    }
    batch.extend([0xc0, 0xdd]);
    batch.extend((16 * blocks).to_be_bytes());
    batch.extend(vec![1; 16 * blocks as usize]);
    batch.extend([16, 0xc0]);
    batch
}

fn of_time(time: f64) -> Vec<u8> {
    [&[0x92, 0xcb][..], &time.to_be_bytes(), &[0x90]].concat()
}

/// What is sent on each connection, by name.
fn hostile() -> Vec<(&'static str, Vec<u8>)> {
    // A router that waited for all of a frame would hold as much as is sent of it.
    let frame = |length: u64| [&[2][..], &length.to_be_bytes(), &vec![0; 96 << 20]].concat();
    let deep = vec![0x91; 100_000];
    let gaps: Vec<u8> = (0..500).flat_map(|i| message(i * 1_000_000, &of_time(1.0))).collect();
    let many: Vec<u8> = (0..50).flat_map(|i| message(i, &stored(i, 2000))).collect();
    vec![
        ("a frame of 2^62 bytes", frame(1 << 62)),
        ("a frame of 2^64 bytes", frame(u64::MAX)),
        ("a list of 2^32 entries", message(0, &[0xdd, 0xff, 0xff, 0xff, 0xff])),
        ("a text of 2^32 bytes", message(0, &[0x92, 0xdb, 0xff, 0xff, 0xff, 0xff])),
        ("lists within lists", message(0, &deep)),
        ("no time", [message(0, &of_time(f64::NAN)), message(1, &of_time(1e308))].concat()),
        ("gaps", gaps),
        ("blocks without end", many),
    ]
}

/// Listens, and sends the same to each who connects; the port, and how many did.
async fn publisher(bytes: Vec<u8>, tasks: &mut JoinSet<()>) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let connected = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&connected);
    let bytes = [handshake(), bytes].concat();
    tasks.spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            // The router may have had enough.
            let _closed = socket.write_all(&bytes).await;
            let _closed = socket.shutdown().await;
            // What has not been read would be lost with a reset.
            let _closed = socket.read_to_end(&mut Vec::new()).await;
            counter.fetch_add(1, Relaxed);
        }
    });
    (port, connected)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishers_of_hostile_events_cost_little_memory_and_no_request() {
    let limits = "limits: { index_blocks_per_worker_max: 5000 }";
    let site = Site::start(limits, "", tempfile::tempdir().unwrap()).await;
    site.prompts(20).await;
    let before = memory(site.pid());
    reset_peak(site.pid());
    let mut tasks = JoinSet::new();
    let mut publishers = Vec::new();
    for (number, (what, bytes)) in hostile().into_iter().enumerate() {
        let (port, connected) = publisher(bytes, &mut tasks).await;
        // It answers as any other, and is asked in turn.
        let engine = engine().await;
        let worker = json!({
            "id": format!("x{number}"), "role": "both", "url": engine.url(),
            "kv_events": format!("tcp://127.0.0.1:{port}"),
        });
        let json = [("content-type", "application/json")];
        let body = json!({"worker": worker}).to_string();
        let added = site.admin.post_with("/admin/workers", &json, body).await;
        assert_eq!(added.status, 201, "{}", added.text());
        publishers.push((what, connected, engine));
    }
    for (what, connected, _) in &publishers {
        let what = format!("{what}: the router comes back");
        eventually(&what, async || connected.load(Relaxed) >= 2).await;
        site.prompts(2).await;
    }
    let beyond = [("reason", "over_limit")];
    eventually("blocks are bounded", async || {
        site.metric("splitrail_index_rejected_total", &beyond).await > 0.0
    })
    .await;
    let grown_kib = memory(site.pid()).peak_kib.saturating_sub(before.now_kib);
    assert!(grown_kib < GROWTH_KIB, "{grown_kib} KiB");
    site.prompts(20).await;
}
