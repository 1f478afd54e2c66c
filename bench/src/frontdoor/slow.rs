//! Thousands of concurrent streams with rare events: the memory of each, and their effect on other
//! requests.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::client::Load;
use super::engines::Engines;
use super::measure::{Figures, measure};
use super::mock::find;
use super::report::{Goal, Row};
use super::targets::{Kind, Target};
use super::text::{SIZES, Text};
use super::{Bench, Failure};
use crate::fleet::report::print_line;

/// Number of streams, if enough files may be open.
const STREAMS: usize = 10_000;
/// Number of streams per HTTP/2 connection.
const PER_CONNECTION: usize = 100;
/// Maximum number of streams that are being opened at the same time.
const OPENING: usize = 128;
/// Maximum time until all streams have begun.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Time from the beginning of the last stream until memory is read. Each stream gets some chunks in
/// that time.
const SETTLE_TIME: Duration = Duration::from_secs(6);
/// Number of clients that get whole replies at the same time.
const WHOLE_CLIENTS: usize = 4;

/// The protocol of the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    /// HTTP/1.1, with one connection per stream.
    Http1,
    /// HTTP/2, with a hundred streams per connection.
    Http2,
}

/// Measures nginx and the router. Each process gets streams of one protocol only, because memory
/// that a process has freed would hide the memory of later streams.
///
/// # Errors
/// A stream is refused or ends, or a process has ended.
pub(super) fn slow(
    bench: &Bench<'_>,
    engines: &Engines,
    text: &Text,
    folder: &Path,
) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    if !bench.options.wants("slow") {
        return Ok(rows);
    }
    let prompts = text.prompts(SIZES[0]);
    let (body, plain) = (prompts[0].slow(), Arc::new(Load::new(&prompts, false)));
    for (name, version) in
        [("nginx", Version::Http1), ("slow h1", Version::Http1), ("slow h2", Version::Http2)]
    {
        let target = bench.engine_runtime.block_on(async {
            match name {
                "nginx" => Target::nginx(engines, None, folder).await,
                _ => {
                    Target::ours(name, Kind::Aggregated(engines), bench.options.program(), folder)
                        .await
                }
            }
        })?;
        let Some(process) = &target.process else { continue };
        let count = version.max_streams()?;
        let measure_whole =
            || measure(&target, &plain, (WHOLE_CLIENTS, false), bench.effort.round_time);
        let before = bench.client_runtime.block_on(measure_whole())?;
        let empty_mb = process.resident_mb_with_children()?;
        let open = bench.client_runtime.block_on(open(target.streams, version, count, &body))?;
        let full_mb = process.resident_mb_with_children()?;
        let during = bench.client_runtime.block_on(measure_whole())?;
        drop(open);
        let kib = (full_mb - empty_mb) * 1e6 / 1024.0 / count as f64;
        let workload = format!("{name} n={count}");
        print(&workload, kib, &before, &during)?;
        let goal = (name != "nginx").then_some(Goal::AtMost(40.0));
        rows.push(Row::alone(&workload, "memory per stream", (kib, "KiB"), goal));
        for (measure, before, during) in
            [("p50", before.p50_ms, during.p50_ms), ("p99", before.p99_ms, during.p99_ms)]
        {
            rows.push(Row::alone(&workload, &format!("{measure} alone"), (before, "ms"), None));
            rows.push(Row::alone(&workload, &format!("{measure} beside"), (during, "ms"), None));
        }
        // The clients' sockets are closed while their runtime runs, and an engine's socket when it
        // sends the next chunk. Until then, they count towards the limit of open files.
        drop(target);
        bench.client_runtime.block_on(async { sleep(SETTLE_TIME).await });
    }
    Ok(rows)
}

fn print(workload: &str, kib: f64, before: &Figures, during: &Figures) -> Result<(), Failure> {
    print_line(&format!(
        "\n{workload}: {kib:.1} KiB each; {WHOLE_CLIENTS} clients beside: p50 {:.3} -> {:.3} ms, p99 {:.3} -> {:.3} ms",
        before.p50_ms, during.p50_ms, before.p99_ms, during.p99_ms
    ))?;
    Ok(())
}

impl Version {
    /// Maximum number of streams for which this process and the target can open enough files.
    fn max_streams(self) -> Result<usize, Failure> {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let files = usize::try_from(files.unwrap_or(u64::MAX))?.saturating_sub(1000);
        Ok(match self {
            Self::Http1 => STREAMS.min(files / 2),
            Self::Http2 => STREAMS.min(files / (PER_CONNECTION + 1) * PER_CONNECTION),
        })
    }
}

/// Opens all streams, and waits until each has got some chunks. The streams end when the result is
/// dropped.
async fn open(
    address: SocketAddr,
    version: Version,
    count: usize,
    body: &str,
) -> Result<JoinSet<Result<(), Failure>>, Failure> {
    let begun = Arc::new(AtomicUsize::new(0));
    let room = Arc::new(Semaphore::new(OPENING));
    let body: Arc<str> = body.into();
    let mut running = JoinSet::new();
    match version {
        Version::Http1 => {
            for _ in 0..count {
                let (begun, room, body) =
                    (Arc::clone(&begun), Arc::clone(&room), Arc::clone(&body));
                running.spawn(async move { http1(address, &body, &begun, &room).await });
            }
        }
        Version::Http2 => {
            for _ in 0..count / PER_CONNECTION {
                let (begun, room, body) =
                    (Arc::clone(&begun), Arc::clone(&room), Arc::clone(&body));
                running.spawn(async move { http2(address, &body, &begun, &room).await });
            }
        }
    }
    let from = Instant::now();
    while begun.load(Relaxed) < count {
        if let Some(ended) = running.try_join_next() {
            ended??;
            return Err("a slow stream has ended".into());
        }
        if from.elapsed() > START_TIMEOUT {
            return Err(format!(
                "{} of {count} slow streams have begun in time",
                begun.load(Relaxed)
            )
            .into());
        }
        sleep(Duration::from_millis(50)).await;
    }
    sleep(SETTLE_TIME).await;
    Ok(running)
}

async fn http1(
    address: SocketAddr,
    body: &str,
    begun: &AtomicUsize,
    room: &Semaphore,
) -> Result<(), Failure> {
    let mut buffer = Vec::with_capacity(2048);
    let mut stream = {
        let _opening = room.acquire().await?;
        let mut stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await?;
        while find(&buffer, b"data:").is_none() {
            if stream.read_buf(&mut buffer).await? == 0 {
                let text = String::from_utf8_lossy(&buffer);
                return Err(format!("a slow stream is refused: {text}").into());
            }
        }
        stream
    };
    begun.fetch_add(1, Relaxed);
    loop {
        buffer.clear();
        if stream.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
    }
}

/// Opens one connection with its streams.
async fn http2(
    address: SocketAddr,
    body: &str,
    begun: &AtomicUsize,
    room: &Semaphore,
) -> Result<(), Failure> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = h2::client::handshake(stream).await?;
    let streams = async {
        // Each stream is read from its first chunk on, because all streams share the window of the
        // connection, and a router ends replies that its client does not read.
        let mut reading = JoinSet::new();
        let mut sender = sender.ready().await?;
        for _ in 0..PER_CONNECTION {
            let _opening = room.acquire().await?;
            let request = http::Request::post("http://router/v1/chat/completions")
                .header("content-type", "application/json")
                .body(())?;
            sender = sender.ready().await?;
            let (reply, mut send) = sender.send_request(request, false)?;
            send.send_data(Bytes::copy_from_slice(body.as_bytes()), true)?;
            let reply = reply.await?;
            if reply.status() != 200 {
                return Err(format!("a slow stream is refused: {}", reply.status()).into());
            }
            let mut data = reply.into_body();
            read_some(&mut data).await?;
            begun.fetch_add(1, Relaxed);
            reading.spawn(async move { while let Ok(true) = read_some(&mut data).await {} });
        }
        while reading.join_next().await.is_some() {}
        Ok::<_, Failure>(())
    };
    tokio::select! {
        ended = connection => Ok(ended?),
        ended = streams => ended,
    }
}

/// Reads the next part of a stream. Returns false at its end.
async fn read_some(data: &mut h2::RecvStream) -> Result<bool, Failure> {
    match data.data().await {
        Some(chunk) => {
            let bytes = chunk?.len();
            data.flow_control().release_capacity(bytes)?;
            Ok(true)
        }
        None => Ok(false),
    }
}
