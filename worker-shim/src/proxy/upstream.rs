//! Connections to the engine. Each is driven by the task of the request that it serves: one
//! with a task of its own would be woken for a chunk, wake the request's task, and be woken
//! by it again.

mod line;

use std::collections::VecDeque;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Request;
use http::header::{HOST, HeaderValue};
use http::response;
use http::uri::Authority;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::time::{Instant, sleep, timeout};

pub(super) use self::line::Line;

use self::line::Connection;
use super::bodies::Upload;
use crate::tasks::ConnectionTasks;

/// vLLM closes idle connections after 5 s; ours are used no more before, so that no request
/// is written to one that is just being closed.
const IDLE: Duration = Duration::from_secs(3);
/// An engine's host that vanished is noticed by this.
const KEEPALIVE: Duration = Duration::from_secs(30);
const HTTP_PORT: u16 = 80;

/// Why an engine has not answered.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failed {
    /// No connection came about.
    #[error("{0}")]
    Connect(#[source] io::Error),
    /// It ended before the head of an answer, or what came was none.
    #[error("{0}")]
    Broken(#[source] hyper::Error),
}

/// The way to one engine.
#[derive(Debug)]
pub(super) struct Upstream {
    /// Of requests that name no host.
    name: HeaderValue,
    host: String,
    port: u16,
    connect_timeout: Duration,
    builder: http1::Builder,
    idle: Arc<Idle>,
    /// What outlives its answer's head.
    uploads: ConnectionTasks,
}

/// Connections without a request, those that were used last at the end.
#[derive(Debug)]
pub(super) struct Idle {
    kept: Mutex<VecDeque<(Instant, Box<Connection>)>>,
    most: usize,
}

impl Upstream {
    /// To an engine, with at most so many idle connections.
    pub(super) fn new(
        engine: &Authority,
        connect_timeout: Duration,
        head_max_bytes: usize,
        idle_max: usize,
    ) -> Self {
        let mut builder = http1::Builder::new();
        builder.max_buf_size(head_max_bytes.max(8192));
        let host = engine.host();
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        Self {
            name: HeaderValue::from_str(engine.as_str())
                .unwrap_or(HeaderValue::from_static("engine")),
            host: bare.unwrap_or(host).to_owned(),
            port: engine.port_u16().unwrap_or(HTTP_PORT),
            connect_timeout,
            builder,
            idle: Arc::new(Idle { kept: Mutex::default(), most: idle_max }),
            uploads: ConnectionTasks::default(),
        }
    }

    /// Sends a request, whose URI is a path, and waits for the answer's head. Dropping the
    /// future, or the answer's body before its end, closes the connection: the engine then
    /// drops the request. `unread` is the other end of the request's body.
    ///
    /// # Errors
    /// No connection, or one that ended too early. A request that was not written yet when an
    /// idle connection turned out to be closed is sent by another one.
    pub(super) async fn send(
        &self,
        mut request: Request<Upload>,
        unread: &mut oneshot::Receiver<Incoming>,
    ) -> Result<(response::Parts, Line), Failed> {
        request.headers_mut().entry(HOST).or_insert_with(|| self.name.clone());
        loop {
            let (mut connection, is_new) = match self.idle.take(Instant::now()) {
                Some(connection) => (connection, false),
                None => (self.connect().await.map_err(Failed::Connect)?, true),
            };
            let sending = pin!(connection.sender.try_send_request(request));
            match connection.answered(sending).await {
                Ok(response) => {
                    let (parts, body) = response.into_parts();
                    // Nothing is said as long as the upload is with the connection.
                    return Ok(match unread.try_recv() {
                        Err(TryRecvError::Empty) => {
                            connection.run_alone(&self.uploads);
                            (parts, Line::alone(body))
                        }
                        _ => (parts, Line::new(body, connection, Arc::clone(&self.idle))),
                    });
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if !is_new => request = unsent,
                    _ => return Err(Failed::Broken(error.into_error())),
                },
            }
        }
    }

    /// Closes connections that are idle for too long, until dropped.
    pub(super) async fn close_idle(&self) {
        loop {
            sleep(IDLE).await;
            self.idle.close_old(Instant::now());
        }
    }

    async fn connect(&self) -> io::Result<Box<Connection>> {
        let connecting = TcpStream::connect((self.host.as_str(), self.port));
        let socket = match timeout(self.connect_timeout, connecting).await {
            Ok(socket) => socket?,
            Err(_) => return Err(io::ErrorKind::TimedOut.into()),
        };
        set_up(&socket)?;
        let shaken = self.builder.handshake(TokioIo::new(socket)).await;
        let (sender, wire) = shaken.map_err(io::Error::other)?;
        Ok(Box::new(Connection::new(sender, wire)))
    }
}

fn set_up(socket: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE)?;
    Ok(())
}

impl Idle {
    /// The one that was used last, since it is the least likely to be closed soon.
    fn take(&self, now: Instant) -> Option<Box<Connection>> {
        let (since, connection) = self.lock().pop_back()?;
        (now.duration_since(since) < IDLE).then_some(connection)
    }

    fn put(&self, connection: Box<Connection>) {
        let mut kept = self.lock();
        if kept.len() < self.most {
            kept.push_back((Instant::now(), connection));
        }
    }

    fn close_old(&self, now: Instant) {
        let mut kept = self.lock();
        let young = kept.iter().position(|(since, _)| now.duration_since(*since) < IDLE);
        let old = young.unwrap_or(kept.len());
        kept.drain(..old);
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Instant, Box<Connection>)>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn what_is_idle_for_too_long_is_not_used_and_is_closed() {
        let engine = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let name = engine.local_addr().unwrap().to_string().parse().unwrap();
        let upstream = Upstream::new(&name, Duration::from_secs(30), 8192, 2);
        let mut there = Vec::new();
        let mut kept_at = Instant::now();
        for _ in 0..3 {
            // The third is one too many.
            kept_at = Instant::now();
            upstream.idle.put(upstream.connect().await.unwrap());
            there.push(engine.accept().await.unwrap().0);
        }
        assert!(upstream.idle.take(kept_at).is_some());
        assert!(upstream.idle.take(kept_at + 2 * IDLE).is_none());
        upstream.idle.put(upstream.connect().await.unwrap());
        let mut last = engine.accept().await.unwrap().0;
        upstream.idle.close_old(Instant::now());
        assert!(upstream.idle.take(Instant::now()).is_some_and(|connection| {
            upstream.idle.put(connection);
            true
        }));
        upstream.idle.close_old(Instant::now() + IDLE);
        assert_eq!(last.read(&mut [0; 1]).await.unwrap(), 0, "closed");
        assert!(upstream.idle.take(Instant::now()).is_none());
    }

    #[tokio::test]
    async fn hosts_are_names_addresses_and_addresses_in_brackets() {
        for (engine, host, port) in [
            ("engine.example:8000", "engine.example", 8000),
            ("10.0.0.1", "10.0.0.1", 80),
            ("[::1]:9", "::1", 9),
        ] {
            let name = engine.parse().unwrap();
            let upstream = Upstream::new(&name, Duration::from_secs(1), 8192, 1);
            assert_eq!((upstream.host.as_str(), upstream.port), (host, port));
            assert_eq!(upstream.name, engine);
        }
    }
}
