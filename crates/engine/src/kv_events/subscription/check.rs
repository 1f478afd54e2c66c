//! Single questions to an engine's event sockets, for a check that does not follow the engine.

use std::time::Duration;

use splitrail_kv::KvEvent;

use super::super::decode::Decoder;
use super::message::{self, ReplayMessage};
use super::replay::{ReplayClient, ReplayFailed};
use super::session::message_max_bytes;
use super::{GarbageError, Subscription};
use crate::zmtp::{Connection, Role, WireError};

/// The number from which a replay is requested that contains no batch: the end mark alone.
const BEHIND_ALL: u64 = u64::MAX - 1;

/// Why a replay service cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayCheckError {
    /// No connection to a replay service.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The service does not answer the request, or with something else than a replay.
    #[error("no reply to a replay request")]
    Silent,
}

/// A connection to an engine's publisher that reads what arrives from now on.
pub struct LiveStream {
    connection: Connection,
    decoder: Decoder,
}

impl LiveStream {
    /// The events of the next batch. Cancel-safe.
    ///
    /// # Errors
    /// The connection has ended (outer), or a message that cannot be decoded has arrived (inner).
    pub async fn next(&mut self) -> Result<Result<Vec<KvEvent>, GarbageError>, WireError> {
        let frames = self.connection.receive().await?;
        let batch = message::live(frames)
            .and_then(|batch| self.decoder.decode(&batch.payload).map_err(GarbageError::from));
        Ok(batch.map(|batch| batch.events))
    }
}

impl Subscription {
    /// Connects to the publisher once, without a replay, and subscribes.
    ///
    /// # Errors
    /// The publisher cannot be reached within the timeout of connections, or the peer is none.
    pub async fn listen(&self) -> Result<LiveStream, WireError> {
        let max_bytes = message_max_bytes(&self.limits);
        let (endpoint, admits) = (&self.events_endpoint, self.admits.as_ref());
        let timeout = self.timing.connect_timeout;
        let mut connection =
            Connection::open(endpoint, admits, Role::Sub, max_bytes, timeout).await?;
        connection.subscribe(&self.topic).await?;
        Ok(LiveStream { connection, decoder: Decoder::new(self.limits.clone()) })
    }

    /// Asks the replay service once for nothing: the reply is the end mark alone. Does nothing if
    /// there is no replay endpoint.
    ///
    /// # Errors
    /// The service cannot be reached, or does not answer within the timeout of replays.
    pub async fn check_replay(&self) -> Result<(), ReplayCheckError> {
        let Some(endpoint) = &self.replay_endpoint else { return Ok(()) };
        let max_bytes = message_max_bytes(&self.limits);
        let (admits, timeout) = (self.admits.as_ref(), self.timing.connect_timeout);
        // The client below repeats an attempt that is refused, and would not say why it failed.
        drop(Connection::open(endpoint, admits, Role::Dealer, max_bytes, timeout).await?);
        let patience: Duration = self.timing.replay_timeout;
        let mut client = ReplayClient::new(patience, max_bytes, self.admits.clone());
        client.start(endpoint, BEHIND_ALL);
        match client.next().await {
            Ok(ReplayMessage::End | ReplayMessage::Batch(_)) => Ok(()),
            Err(ReplayFailed) => Err(ReplayCheckError::Silent),
        }
    }
}
