//! Publishers of KV events whose messages are made to hurt: lengths that are only claimed, blocks
//! without end, times that are none.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use serde_json::{Value, json};
use splitrail_tests::cluster::eventually;
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::scripted_server::ScriptedServer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::support::{Site, engine};

/// What each of them may make the router grow by.
const GROWTH_KIB: u64 = 6 << 10;

/// Time between two batches of a replay that never ends.
const PACE: Duration = Duration::from_millis(1);

/// How a ZeroMQ socket of this type begins (ZMTP 3.0, no security).
fn handshake(socket: &[u8]) -> Vec<u8> {
    let mut greeting = vec![0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    let length = u32::try_from(socket.len()).unwrap().to_be_bytes();
    let ready = [b"\x05READY\x0bSocket-Type", &length[..], socket].concat();
    greeting.extend([4, u8::try_from(ready.len()).unwrap()]);
    [greeting, ready].concat()
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

/// A batch of one event that stores so many blocks, none of which was stored before; after a block
/// that is not known, if there is one.
fn stored(number: u64, parent: Option<u64>, blocks: u32) -> Vec<u8> {
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
    match parent {
        Some(parent) => batch.extend([&[0xcf][..], &parent.to_be_bytes()].concat()),
        None => batch.push(0xc0),
    }
    batch.push(0xdd);
    batch.extend((16 * blocks).to_be_bytes());
    batch.extend(vec![1; 16 * blocks as usize]);
    batch.extend([16, 0xc0]);
    batch
}

/// A batch of so many events.
fn cleared(events: u32) -> Vec<u8> {
    let event = [&[0x91, 0xb0][..], b"AllBlocksCleared"].concat();
    let head = [&[0x92, 0xcb][..], &1.0_f64.to_be_bytes(), &[0xdd], &events.to_be_bytes()];
    [head.concat(), event.repeat(events as usize)].concat()
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
    let many: Vec<u8> = (0..50).flat_map(|i| message(i, &stored(i, None, 2000))).collect();
    vec![
        ("a frame of 2^62 bytes", frame(1 << 62)),
        ("a frame of 2^64 bytes", frame(u64::MAX)),
        ("a list of 2^32 entries", message(0, &[0xdd, 0xff, 0xff, 0xff, 0xff])),
        ("a text of 2^32 bytes", message(0, &[0x92, 0xdb, 0xff, 0xff, 0xff, 0xff])),
        ("lists within lists", message(0, &deep)),
        ("no time", [message(0, &of_time(f64::NAN)), message(1, &of_time(1e308))].concat()),
        ("gaps", gaps),
        ("unknown parents", message(0, &stored(0, Some(u64::MAX), 500))),
        ("65,536 events at once", message(0, &cleared(1 << 16))),
        ("blocks without end", many),
    ]
}

/// A replay service whose answer never ends; the port, and how many batches it has sent.
async fn endless_replay(tasks: &mut JoinSet<()>) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&sent);
    tasks.spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            // The router may have had enough.
            let mut goes_on = socket.write_all(&handshake(b"ROUTER")).await.is_ok();
            while goes_on {
                let number = counter.fetch_add(1, Relaxed) as u64;
                goes_on = socket.write_all(&message(number, &of_time(1.0))).await.is_ok();
                tokio::time::sleep(PACE).await;
            }
        }
    });
    (port, sent)
}

/// Adds a worker with these sources of events.
async fn add(site: &Site, id: &str, url: &str, sources: Value) {
    let mut worker = json!({"id": id, "role": "both", "url": url});
    worker.as_object_mut().unwrap().extend(sources.as_object().unwrap().clone());
    let json = [("content-type", "application/json")];
    let body = json!({"worker": worker}).to_string();
    let added = site.admin.post_with("/admin/workers", &json, body).await;
    assert_eq!(added.status, 201, "{}", added.text());
}

/// Adds a worker `replaying`, whose publisher says nothing and whose replay does not end.
async fn replays_without_end(
    site: &Site,
    tasks: &mut JoinSet<()>,
) -> (ScriptedServer, Arc<AtomicUsize>) {
    let silent = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let events = format!("tcp://{}", silent.local_addr().unwrap());
    tasks.spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut socket, _)) = silent.accept().await {
            let _closed = socket.write_all(&handshake(b"PUB")).await;
            open.push(socket);
        }
    });
    let (replay, sent) = endless_replay(tasks).await;
    let engine = engine().await;
    let replay = format!("tcp://127.0.0.1:{replay}");
    let sources = json!({"kv_events": events, "kv_replay": replay});
    add(site, "replaying", &engine.url(), sources).await;
    (engine, sent)
}

/// Listens, and sends the same to each who connects; the port, and how many did.
async fn publisher(bytes: Vec<u8>, tasks: &mut JoinSet<()>) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let connected = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&connected);
    let bytes = [handshake(b"PUB"), bytes].concat();
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
        let events = format!("tcp://127.0.0.1:{port}");
        add(&site, &format!("x{number}"), &engine.url(), json!({"kv_events": events})).await;
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
    let (_engine, replayed) = replays_without_end(&site, &mut tasks).await;
    eventually("the replay goes on and on", async || replayed.load(Relaxed) > 1000).await;
    assert_eq!(site.worker("replaying").await["events_current"], false, "it is not believed");
    let garbage = site.metric("splitrail_index_resyncs_total", &[("reason", "garbage")]).await;
    assert!(garbage > 0.0, "what cannot be read is counted");
    let grown_kib = memory(site.pid()).peak_kib.saturating_sub(before.now_kib);
    let allowed_kib = (publishers.len() as u64 + 1) * GROWTH_KIB;
    assert!(grown_kib < allowed_kib, "{grown_kib} KiB, where {allowed_kib} are allowed");
    site.prompts(20).await;
}
