//! Requests at a constant rate, over the compared paths in turn, so that all paths see the same
//! conditions.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::Failure;

/// Length of a request's body, in bytes.
const BODY_BYTES: usize = 1024;
/// How long one answer may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// How answers come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// As a stream of chunks.
    Streamed,
    /// Whole.
    Whole,
}

/// What was measured of one way, in nanoseconds.
#[derive(Debug, Default)]
pub(super) struct Times {
    /// Until the first chunk.
    pub(super) first: Vec<u64>,
    /// Until the end of the answer.
    pub(super) whole: Vec<u64>,
    /// Requests without a whole answer.
    pub(super) failed: u64,
}

/// One way: an address, with connections that are kept.
#[derive(Debug)]
pub(super) struct Way {
    address: SocketAddr,
    idle: Mutex<Vec<TcpStream>>,
    times: Mutex<Times>,
}

impl Way {
    /// To an address.
    pub(super) fn to(address: SocketAddr) -> Arc<Self> {
        Arc::new(Self { address, idle: Mutex::default(), times: Mutex::default() })
    }

    /// What was measured since the last time.
    pub(super) fn take(&self) -> Times {
        std::mem::take(&mut lock(&self.times))
    }

    async fn request(self: Arc<Self>, form: Form) {
        let asked = timeout(PATIENCE, self.ask(form)).await;
        let mut times = lock(&self.times);
        match asked {
            Ok(Ok((first, whole))) => {
                times.first.push(first.as_nanos() as u64);
                times.whole.push(whole.as_nanos() as u64);
            }
            _ => times.failed += 1,
        }
    }

    async fn ask(&self, form: Form) -> Result<(Duration, Duration), Failure> {
        let kept = lock(&self.idle).pop();
        let mut stream = match kept {
            Some(stream) => stream,
            None => TcpStream::connect(self.address).await?,
        };
        stream.set_nodelay(true)?;
        let request = request(form);
        let start = Instant::now();
        stream.write_all(request.as_bytes()).await?;
        let (mut answer, mut first) = (Vec::with_capacity(4096), None);
        while !is_whole(&answer) {
            if stream.read_buf(&mut answer).await? == 0 {
                return Err("the answer breaks off".into());
            }
            if first.is_none() && body(&answer).is_some_and(|body| !body.is_empty()) {
                first = Some(start.elapsed());
            }
        }
        let whole = start.elapsed();
        lock(&self.idle).push(stream);
        Ok((first.ok_or("no chunk")?, whole))
    }
}

/// What stands behind the head, if that is there.
fn body(answer: &[u8]) -> Option<&[u8]> {
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n")? + 4;
    Some(&answer[end..])
}

fn is_whole(answer: &[u8]) -> bool {
    let Some(body) = body(answer) else { return false };
    let head = String::from_utf8_lossy(&answer[..answer.len() - body.len()]).to_lowercase();
    let mut lines = head.lines();
    match lines.find_map(|line| line.strip_prefix("content-length: ")?.parse().ok()) {
        Some(length) => body.len() >= length,
        None => body.ends_with(b"0\r\n\r\n"),
    }
}

/// Sends so many requests a second each way for a while, and waits for all answers. `beside`
/// is called with each round's number.
///
/// # Errors
/// Those of `beside`.
pub(super) async fn alternate(
    ways: &[Arc<Way>],
    form: Form,
    per_second: u32,
    span: Duration,
    mut beside: impl AsyncFnMut(u64) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut requests = JoinSet::new();
    let mut tick = interval(Duration::from_secs(1) / per_second / (ways.len() as u32 + 1));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let start = Instant::now();
    let mut number = 0;
    while start.elapsed() < span {
        for way in ways {
            tick.tick().await;
            requests.spawn(Arc::clone(way).request(form));
        }
        // In a moment of its own, so that it stands in no request's way.
        tick.tick().await;
        beside(number).await?;
        number += 1;
        while requests.try_join_next().is_some() {}
    }
    requests.join_all().await;
    Ok(())
}

fn request(form: Form) -> String {
    let streamed = form == Form::Streamed;
    let before = format!(r#"{{"model": "sim", "stream": {streamed}, "prompt": ""#);
    let behind = r#""}"#;
    let prompt = "word ".repeat(BODY_BYTES / 5 + 1);
    let prompt = &prompt[..BODY_BYTES - before.len() - behind.len()];
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\n\
         content-length: {BODY_BYTES}\r\n\r\n{before}{prompt}{behind}"
    )
}

fn lock<T>(guarded: &Mutex<T>) -> MutexGuard<'_, T> {
    guarded.lock().unwrap_or_else(PoisonError::into_inner)
}
