//! Connections to the engine. Each connection is driven by the task of the request that it
//! serves. A connection with its own task would be woken for each chunk, wake the request's
//! task, and be woken by it again.

mod connection;
mod idle;

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use http::header::{HOST, HeaderValue};
use http::response;
use http::uri::Authority;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use prometheus::IntCounter;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::time::{Instant, sleep, timeout};

pub(super) use self::connection::EngineBody;

use self::connection::{Connection, Probe};
use self::idle::{IDLE_MAX, IdleConnections};
use super::bodies::RequestBody;
use crate::tasks::ConnectionTasks;

/// TCP keep-alive time, which detects that the engine's host has vanished.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const HTTP_PORT: u16 = 80;

/// Why a request could not be sent, or got no reply.
#[derive(Debug, thiserror::Error)]
pub(super) enum SendError {
    /// The connection could not be opened.
    #[error("{0}")]
    Connect(#[source] io::Error),
    /// The connection ended before the head of a reply, the head was invalid, or the request's body
    /// failed.
    #[error("{0}")]
    Broken(#[source] hyper::Error),
}

/// The connections to one engine.
#[derive(Debug)]
pub(super) struct EngineConnections {
    /// The `host` of requests that have none.
    name: HeaderValue,
    host: String,
    port: u16,
    connect_timeout: Duration,
    builder: http1::Builder,
    idle: Arc<IdleConnections>,
    /// Connections whose request is still being sent after the head of its reply.
    uploads: ConnectionTasks,
}

impl EngineConnections {
    /// `idle_max` is the maximum number of idle connections. `unsolicited` counts those on which the
    /// engine sent bytes that answer no request.
    pub(super) fn new(
        engine: &Authority,
        connect_timeout: Duration,
        head_max_bytes: usize,
        idle_max: usize,
        unsolicited: IntCounter,
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
            idle: Arc::new(IdleConnections::new(idle_max, unsolicited)),
            uploads: ConnectionTasks::default(),
        }
    }

    /// Sends a request, whose URI is a path, and waits for the head of the reply. Dropping the
    /// future, or the reply's body before its end, closes the connection, and the engine then
    /// aborts the request. `unread` receives the part of the body that the engine did not read.
    ///
    /// # Errors
    /// If the connection cannot be opened, or ends too early. If an idle connection turns out to
    /// be closed before the request was written, another connection is used.
    pub(super) async fn send(
        &self,
        mut request: Request<RequestBody>,
        unread: &mut oneshot::Receiver<Incoming>,
    ) -> Result<(response::Parts, EngineBody), SendError> {
        request.headers_mut().entry(HOST).or_insert_with(|| self.name.clone());
        loop {
            let (mut connection, is_new) = match self.idle.take(Instant::now()) {
                Some(connection) => (connection, false),
                None => (self.connect().await.map_err(SendError::Connect)?, true),
            };
            let sending = pin!(connection.sender.try_send_request(request));
            match connection.wait_for_reply(sending).await {
                Ok(response) => {
                    let (parts, body) = response.into_parts();
                    // The channel is empty while the connection still sends the body.
                    return Ok(match unread.try_recv() {
                        Err(TryRecvError::Empty) => {
                            connection.run_detached(&self.uploads);
                            (parts, EngineBody::detached(body))
                        }
                        _ => (parts, EngineBody::new(body, connection, Arc::clone(&self.idle))),
                    });
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if !is_new => request = unsent,
                    _ => return Err(SendError::Broken(error.into_error())),
                },
            }
        }
    }

    /// Closes connections that have been idle for too long. Runs until dropped.
    pub(super) async fn close_idle(&self) {
        loop {
            sleep(IDLE_MAX).await;
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
        let probe = Probe::new(&socket)?;
        let shaken = self.builder.handshake(TokioIo::new(socket)).await;
        let (sender, wire) = shaken.map_err(io::Error::other)?;
        Ok(Box::new(Connection::new(sender, wire, probe)))
    }
}

fn set_up(socket: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn engine_hosts_are_names_or_addresses() {
        for (engine, host, port) in [
            ("engine.example:8000", "engine.example", 8000),
            ("10.0.0.1", "10.0.0.1", 80),
            ("[::1]:9", "::1", 9),
        ] {
            let name = engine.parse().unwrap();
            let connections = EngineConnections::new(
                &name,
                Duration::from_secs(1),
                8192,
                1,
                IntCounter::new("unsolicited", "Connections.").unwrap(),
            );
            assert_eq!((connections.host.as_str(), connections.port), (host, port));
            assert_eq!(connections.name, engine);
        }
    }
}
