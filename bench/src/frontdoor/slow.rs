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

/// As many as are asked for.
const STREAMS: usize = 10_000;
/// Streams of one HTTP/2 connection.
const PER_CONNECTION: usize = 100;
/// Streams that are being opened at once.
const OPENING: usize = 128;
/// Until all of them have begun.
const PATIENCE: Duration = Duration::from_secs(120);
/// From then until their memory is read: each has had some chunks.
const SETTLE: Duration = Duration::from_secs(6);
/// Clients of requests that are answered at once, beside them.
const BESIDE: usize = 4;

/// How clients speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    /// A connection per stream.
    Http1,
    /// A hundred streams per connection.
    Http2,
}

/// Measures nginx and the router, each process with one kind of streams only: memory that it
/// has had once would hide what the next ones take.
///
/// # Errors
/// A stream that is refused, a process that has ended.
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
        let target = bench.behind.block_on(async {
            match name {
                "nginx" => Target::nginx(engines, None, folder).await,
                _ => {
                    Target::ours(name, Kind::Aggregated(engines), bench.options.program(), folder)
                        .await
                }
            }
        })?;
        let Some(process) = &target.process else { continue };
        let count = version.most()?;
        let beside = || measure(&target, &plain, (BESIDE, false), bench.effort.lasts);
        let before = bench.before.block_on(beside())?;
        let empty_mb = process.resident_mb_with_children()?;
        let open = bench.before.block_on(open(target.streams, version, count, &body))?;
        let full_mb = process.resident_mb_with_children()?;
        let during = bench.before.block_on(beside())?;
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
        // Clients' sockets are closed as their runtime runs on, and engines notice at their
        // streams' next word: together with the next ones they were more than may be open.
        drop(target);
        bench.before.block_on(async { sleep(SETTLE).await });
    }
    Ok(rows)
}

fn print(workload: &str, kib: f64, before: &Figures, during: &Figures) -> Result<(), Failure> {
    print_line(&format!(
        "\n{workload}: {kib:.1} KiB each; {BESIDE} clients beside: p50 {:.3} -> {:.3} ms, p99 {:.3} -> {:.3} ms",
        before.p50_ms, during.p50_ms, before.p99_ms, during.p99_ms
    ))?;
    Ok(())
}

impl Version {
    /// As many as this process and the router may have files for.
    fn most(self) -> Result<usize, Failure> {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let files = usize::try_from(files.unwrap_or(u64::MAX))?.saturating_sub(1000);
        Ok(match self {
            Self::Http1 => STREAMS.min(files / 2),
            Self::Http2 => STREAMS.min(files / (PER_CONNECTION + 1) * PER_CONNECTION),
        })
    }
}

/// Opens them all, and waits until each has its first chunk and some more. They end when the
/// result is dropped.
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
        if from.elapsed() > PATIENCE {
            return Err(format!("{} of {count} slow streams begun", begun.load(Relaxed)).into());
        }
        sleep(Duration::from_millis(50)).await;
    }
    sleep(SETTLE).await;
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

/// A connection with its streams.
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
        // Each stream is read from its first chunk on: they share the connection's window, and a
        // router ends replies whose client does not read them.
        let mut reading = JoinSet::new();
        let mut sender = sender.ready().await?;
        for _ in 0..PER_CONNECTION {
            let _opening = room.acquire().await?;
            let request = http::Request::post("http://router/v1/chat/completions")
                .header("content-type", "application/json")
                .body(())?;
            sender = sender.ready().await?;
            let (answer, mut send) = sender.send_request(request, false)?;
            send.send_data(Bytes::copy_from_slice(body.as_bytes()), true)?;
            let answer = answer.await?;
            if answer.status() != 200 {
                return Err(format!("a slow stream is refused: {}", answer.status()).into());
            }
            let mut data = answer.into_body();
            release(&mut data).await?;
            begun.fetch_add(1, Relaxed);
            reading.spawn(async move { while let Ok(true) = release(&mut data).await {} });
        }
        while reading.join_next().await.is_some() {}
        Ok::<_, Failure>(())
    };
    tokio::select! {
        ended = connection => Ok(ended?),
        ended = streams => ended,
    }
}

/// Reads some of a stream; false at its end.
async fn release(data: &mut h2::RecvStream) -> Result<bool, Failure> {
    match data.data().await {
        Some(chunk) => {
            let bytes = chunk?.len();
            data.flow_control().release_capacity(bytes)?;
            Ok(true)
        }
        None => Ok(false),
    }
}
