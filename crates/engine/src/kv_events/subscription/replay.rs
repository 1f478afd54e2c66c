//! Runs one replay at a time, over a connection of its own.

use std::future::{Future, pending};
use std::pin::Pin;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::message::{self, ReplayMessage};
use crate::zmtp::{AddressFilter, Connection, Endpoint, Role, WireError};

/// Pause before connecting to a replay endpoint again, within the timeout.
const RETRY: Duration = Duration::from_millis(100);

type Opening = Pin<Box<dyn Future<Output = Result<Connection, WireError>> + Send>>;

enum ReplayState {
    Idle,
    Opening(Opening),
    Streaming(Connection),
}

/// The client of a replay endpoint.
pub(super) struct ReplayClient {
    state: ReplayState,
    /// When the replay is given up.
    deadline: Instant,
    timeout: Duration,
    max_message_bytes: usize,
    admits: Option<AddressFilter>,
}

/// A replay that has failed.
#[derive(Debug)]
pub(super) struct ReplayFailed;

impl ReplayClient {
    /// An idle client, which gives up a replay after a silence of `timeout`, and accepts messages
    /// of up to `max_message_bytes`.
    pub(super) fn new(
        timeout: Duration,
        max_message_bytes: usize,
        admits: Option<AddressFilter>,
    ) -> Self {
        Self {
            state: ReplayState::Idle,
            deadline: Instant::now(),
            timeout,
            max_message_bytes,
            admits,
        }
    }

    /// Requests the batches from a number on, and gives up a running replay.
    pub(super) fn start(&mut self, endpoint: &Endpoint, from: u64) {
        let (endpoint, admits) = (endpoint.clone(), self.admits.clone());
        let (timeout, max_message_bytes) = (self.timeout, self.max_message_bytes);
        self.deadline = Instant::now() + timeout;
        self.state = ReplayState::Opening(Box::pin(async move {
            loop {
                let (admits, role) = (admits.as_ref(), Role::Dealer);
                let opened =
                    Connection::open(&endpoint, admits, role, max_message_bytes, timeout).await;
                match opened {
                    Ok(mut connection) => {
                        // A REQ socket, for which the service was made, would send the empty frame.
                        connection.send(&[b"", &from.to_be_bytes()]).await?;
                        return Ok(connection);
                    }
                    // An engine binds its two sockets one after the other, so the second may not be
                    // ready.
                    Err(WireError::Network(_)) => tokio::time::sleep(RETRY).await,
                    Err(error) => return Err(error),
                }
            }
        }));
    }

    /// Gives up a running replay.
    pub(super) fn stop(&mut self) {
        self.state = ReplayState::Idle;
    }

    /// The next message of the running replay; pending if there is none. Cancel-safe. After the end
    /// or a failure the client is idle.
    pub(super) async fn next(&mut self) -> Result<ReplayMessage, ReplayFailed> {
        if matches!(self.state, ReplayState::Idle) {
            return pending().await;
        }
        let next = tokio::select! {
            next = receive(&mut self.state) => next,
            () = sleep_until(self.deadline) => Err(WireError::TimedOut),
        };
        let next = match next {
            Ok(frames) => message::replayed(frames).map_err(|_| ReplayFailed),
            Err(error) => {
                tracing::debug!(%error, "a replay of KV events failed");
                Err(ReplayFailed)
            }
        };
        match next {
            Ok(ReplayMessage::Batch(_)) => self.deadline = Instant::now() + self.timeout,
            Ok(ReplayMessage::End) | Err(ReplayFailed) => self.stop(),
        }
        next
    }
}

async fn receive(state: &mut ReplayState) -> Result<Vec<bytes::Bytes>, WireError> {
    loop {
        match state {
            ReplayState::Idle => return pending().await,
            ReplayState::Opening(opening) => {
                let connection = opening.await?;
                *state = ReplayState::Streaming(connection);
            }
            ReplayState::Streaming(connection) => return connection.receive().await,
        }
    }
}
