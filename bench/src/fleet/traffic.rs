//! Requests at a constant rate, over the compared routes in turn, so that all routes have the same
//! conditions.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::Failure;

/// Length of a request's body in bytes.
const BODY_BYTES: usize = 1024;
/// Maximum time for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// The form of replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplyForm {
    /// A stream of chunks.
    Streamed,
    /// One body.
    Whole,
}

/// The times of the requests over one route, in nanoseconds.
#[derive(Debug, Default)]
pub(super) struct Times {
    /// Until the first chunk.
    pub(super) first: Vec<u64>,
    /// Until the end of the reply.
    pub(super) whole: Vec<u64>,
    /// Number of requests without a complete reply.
    pub(super) failed: u64,
}

/// An address to which requests are sent, with kept connections.
#[derive(Debug)]
pub(super) struct Route {
    address: SocketAddr,
    idle: Mutex<Vec<TcpStream>>,
    times: Mutex<Times>,
}

impl Route {
    /// The route to an address.
    pub(super) fn to(address: SocketAddr) -> Arc<Self> {
        Arc::new(Self { address, idle: Mutex::default(), times: Mutex::default() })
    }

    /// Takes the times since the last call.
    pub(super) fn take(&self) -> Times {
        std::mem::take(&mut lock(&self.times))
    }

    async fn request(self: Arc<Self>, form: ReplyForm) {
        let exchanged = timeout(REPLY_TIMEOUT, self.exchange(form)).await;
        let mut times = lock(&self.times);
        match exchanged {
            Ok(Ok((first, whole))) => {
                times.first.push(first.as_nanos() as u64);
                times.whole.push(whole.as_nanos() as u64);
            }
            _ => times.failed += 1,
        }
    }

    /// Sends a request and reads its reply. Returns the times until the first chunk and until the
    /// end.
    async fn exchange(&self, form: ReplyForm) -> Result<(Duration, Duration), Failure> {
        let kept = lock(&self.idle).pop();
        let mut stream = match kept {
            Some(stream) => stream,
            None => TcpStream::connect(self.address).await?,
        };
        stream.set_nodelay(true)?;
        let request = request(form);
        let start = Instant::now();
        stream.write_all(request.as_bytes()).await?;
        let (mut reply, mut first) = (Vec::with_capacity(4096), None);
        while !is_complete(&reply) {
            if stream.read_buf(&mut reply).await? == 0 {
                return Err("the connection was closed before the end of the reply".into());
            }
            if first.is_none() && body(&reply).is_some_and(|body| !body.is_empty()) {
                first = Some(start.elapsed());
            }
        }
        let whole = start.elapsed();
        lock(&self.idle).push(stream);
        Ok((first.ok_or("the reply has no body")?, whole))
    }
}

/// The part of a reply after its head; `None` if the head is not complete.
fn body(reply: &[u8]) -> Option<&[u8]> {
    let end = reply.windows(4).position(|bytes| bytes == b"\r\n\r\n")? + 4;
    Some(&reply[end..])
}

fn is_complete(reply: &[u8]) -> bool {
    let Some(body) = body(reply) else { return false };
    let head = String::from_utf8_lossy(&reply[..reply.len() - body.len()]).to_lowercase();
    let mut lines = head.lines();
    match lines.find_map(|line| line.strip_prefix("content-length: ")?.parse().ok()) {
        Some(length) => body.len() >= length,
        None => body.ends_with(b"0\r\n\r\n"),
    }
}

/// Sends `per_second` requests per second over each route for the time `span`, and waits for all
/// replies. `each_round` is called once after each round of one request per route.
///
/// # Errors
/// Those of `each_round`.
pub(super) async fn alternate(
    routes: &[Arc<Route>],
    form: ReplyForm,
    per_second: u32,
    span: Duration,
    mut each_round: impl AsyncFnMut() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut requests = JoinSet::new();
    let mut tick = interval(Duration::from_secs(1) / per_second / (routes.len() as u32 + 1));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let start = Instant::now();
    while start.elapsed() < span {
        for route in routes {
            tick.tick().await;
            requests.spawn(Arc::clone(route).request(form));
        }
        // At a time of its own, so that the call delays no request.
        tick.tick().await;
        each_round().await?;
        while requests.try_join_next().is_some() {}
    }
    requests.join_all().await;
    Ok(())
}

fn request(form: ReplyForm) -> String {
    let streamed = form == ReplyForm::Streamed;
    let begin = format!(r#"{{"model": "sim", "stream": {streamed}, "prompt": ""#);
    let end = r#""}"#;
    let prompt = "word ".repeat(BODY_BYTES / 5 + 1);
    let prompt = &prompt[..BODY_BYTES - begin.len() - end.len()];
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\n\
         content-length: {BODY_BYTES}\r\n\r\n{begin}{prompt}{end}"
    )
}

fn lock<T>(guarded: &Mutex<T>) -> MutexGuard<'_, T> {
    guarded.lock().unwrap_or_else(PoisonError::into_inner)
}
