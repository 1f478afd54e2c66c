//! Connections to the engine that wait for a request.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus::IntCounter;
use tokio::time::Instant;

use super::connection::{ArrivedData, Connection};

/// Maximum idle time of a connection. It is shorter than vLLM's (5 s), so that no request is
/// written to a connection that the engine is closing.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(3);

/// Time for which no connection is kept after the engine sent unsolicited bytes. Such bytes may
/// arrive after the next request was written, where they look like its reply.
const DISTRUST: Duration = Duration::from_secs(60);

/// Connections without a request.
#[derive(Debug)]
pub(super) struct IdleConnections {
    state: Mutex<IdleState>,
    connections_max: usize,
    /// Connections on which the engine sent bytes that answer no request.
    unsolicited: IntCounter,
}

#[derive(Debug, Default)]
struct IdleState {
    /// The last used one is at the end.
    connections: VecDeque<(Instant, Box<Connection>)>,
    /// No connection is kept until this time.
    distrusted_until: Option<Instant>,
}

impl IdleConnections {
    pub(super) fn new(connections_max: usize, unsolicited: IntCounter) -> Self {
        Self { state: Mutex::default(), connections_max, unsolicited }
    }

    /// Takes the connection that was used last, which is the least likely to be closed soon.
    /// Connections on which something has arrived since their reply are closed.
    pub(super) fn take(&self, now: Instant) -> Option<Box<Connection>> {
        loop {
            let (since, connection) = self.lock().connections.pop_back()?;
            if now.duration_since(since) >= IDLE_MAX {
                return None;
            }
            match connection.arrived() {
                ArrivedData::Nothing => return Some(connection),
                ArrivedData::Bytes => self.distrust(now),
                ArrivedData::End => {}
            }
        }
    }

    pub(super) fn put(&self, connection: Box<Connection>, now: Instant) {
        let mut state = self.lock();
        let is_trusted = state.distrusted_until.is_none_or(|until| until <= now);
        if is_trusted && state.connections.len() < self.connections_max {
            state.connections.push_back((now, connection));
        }
    }

    pub(super) fn close_old(&self, now: Instant) {
        let connections = &mut self.lock().connections;
        let young = connections.iter().position(|(since, _)| now.duration_since(*since) < IDLE_MAX);
        let old = young.unwrap_or(connections.len());
        connections.drain(..old);
    }

    /// Closes all connections, and keeps none for a while.
    fn distrust(&self, now: Instant) {
        self.unsolicited.inc();
        tracing::warn!(
            "the engine, or a proxy before it, sent bytes after its reply had ended: for a minute \
             its connections serve one request each"
        );
        let mut state = self.lock();
        state.distrusted_until = Some(now + DISTRUST);
        state.connections.clear();
    }

    fn lock(&self) -> MutexGuard<'_, IdleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::super::EngineConnections;
    use super::*;

    const IDLE_CONNECTIONS_MAX: usize = 2;

    /// An engine, connections to it, and the counter of unsolicited bytes.
    async fn engine() -> (TcpListener, EngineConnections, IntCounter) {
        let engine = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let name = engine.local_addr().unwrap().to_string().parse().unwrap();
        let unsolicited = IntCounter::new("unsolicited", "Connections.").unwrap();
        let timeout = Duration::from_secs(30);
        let connections =
            EngineConnections::new(&name, timeout, 8192, IDLE_CONNECTIONS_MAX, unsolicited.clone());
        (engine, connections, unsolicited)
    }

    /// Makes a connection idle; the engine's end of it.
    async fn idle(engine: &TcpListener, connections: &EngineConnections) -> TcpStream {
        connections.idle.put(connections.connect().await.unwrap(), Instant::now());
        engine.accept().await.unwrap().0
    }

    #[tokio::test]
    async fn a_connection_idle_for_too_long_is_closed_and_not_reused() {
        let (engine, connections, _) = engine().await;
        let mut there = Vec::new();
        for _ in 0..=IDLE_CONNECTIONS_MAX {
            there.push(idle(&engine, &connections).await);
        }
        let now = Instant::now();
        assert!(connections.idle.take(now).is_some());
        assert!(connections.idle.take(now + 2 * IDLE_MAX).is_none());
        let mut last = idle(&engine, &connections).await;
        connections.idle.close_old(Instant::now());
        let kept = connections.idle.take(Instant::now()).unwrap();
        connections.idle.put(kept, Instant::now());
        connections.idle.close_old(Instant::now() + IDLE_MAX);
        assert_eq!(last.read(&mut [0; 1]).await.unwrap(), 0, "closed");
        assert!(connections.idle.take(Instant::now()).is_none());
    }

    #[tokio::test]
    async fn a_connection_that_the_engine_has_closed_is_not_reused() {
        let (engine, connections, unsolicited) = engine().await;
        let first = idle(&engine, &connections).await;
        let second = idle(&engine, &connections).await;
        // The end is there before the runtime has looked for it.
        drop(second);
        assert!(connections.idle.take(Instant::now()).is_some(), "the other one");
        assert!(connections.idle.take(Instant::now()).is_none());
        assert_eq!(unsolicited.get(), 0);
        drop(first);
    }

    #[tokio::test]
    async fn after_bytes_that_answer_no_request_no_connection_is_kept_for_a_while() {
        let (engine, connections, unsolicited) = engine().await;
        let mut first = idle(&engine, &connections).await;
        let mut second = idle(&engine, &connections).await;
        second.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        assert!(connections.idle.take(Instant::now()).is_none());
        assert_eq!(unsolicited.get(), 1);
        assert_eq!(first.read(&mut [0; 1]).await.unwrap(), 0, "closed as well");
        let now = Instant::now();
        for (at, is_kept) in [(now, false), (now + DISTRUST, true)] {
            connections.idle.put(connections.connect().await.unwrap(), at);
            let _there = engine.accept().await.unwrap();
            assert_eq!(connections.idle.take(at).is_some(), is_kept);
        }
    }
}
