//! Decodes messages; those that are or become large, on the blocking pool.

use std::mem;
use std::ops::Deref;
use std::sync::Arc;

use bytes::Bytes;
use prost::Message;
use tokio::runtime::Handle;
use tonic::Status;

use crate::core::Core;
use splitrail_api::memory_budget::Charge;

/// Maximum encoded length in bytes of messages that may be decoded on the reactor.
const INLINE_MAX_BYTES: usize = 96 << 10;

/// Maximum decoded size in bytes of messages that are decoded on the reactor: five thousand
/// messages of a chat, or a hundred thousand token ids, which take less than a millisecond.
const INLINE_MAX_DECODED_BYTES: usize = 1 << 20;

/// A decoded message. To free many small parts takes as long as to decode them, so a long message
/// that is not taken out is freed off the reactor.
pub(super) struct DecodedMessage<M: Default + Send + 'static> {
    message: M,
    is_long: bool,
}

impl<M: Default + Send + 'static> DecodedMessage<M> {
    /// A message; `is_long` if it was decoded off the reactor.
    pub(super) fn new(message: M, is_long: bool) -> Self {
        Self { message, is_long }
    }

    /// Takes the message out.
    pub(super) fn into_inner(mut self) -> M {
        self.is_long = false;
        mem::take(&mut self.message)
    }

    /// The same for a part of the message.
    pub(super) fn map<N: Default + Send>(self, part: impl FnOnce(M) -> N) -> DecodedMessage<N> {
        let is_long = self.is_long;
        DecodedMessage::new(part(self.into_inner()), is_long)
    }
}

impl<M: Default + Send + 'static> Deref for DecodedMessage<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.message
    }
}

impl<M: Default + Send + 'static> Drop for DecodedMessage<M> {
    fn drop(&mut self) {
        if self.is_long
            && let Ok(runtime) = Handle::try_current()
        {
            let message = mem::take(&mut self.message);
            runtime.spawn_blocking(move || drop(message));
        }
    }
}

/// Decodes a message; before that, charges the memory that it will need, as computed by `weigh`.
///
/// # Errors
/// `INTERNAL` for bytes that are not a message, `UNAVAILABLE` if there is no memory for the decoded
/// message.
pub(super) async fn decode<M: Message + Default + 'static>(
    core: &Arc<Core>,
    encoded: Bytes,
    held: Charge,
    weigh: fn(&[u8]) -> usize,
) -> Result<(DecodedMessage<M>, Charge), Status> {
    let length = encoded.len();
    let is_short = length <= INLINE_MAX_BYTES && weigh(&encoded) <= INLINE_MAX_DECODED_BYTES;
    if is_short {
        let (message, held) = charge_and_decode(core, encoded, held, weigh)?;
        return Ok((DecodedMessage::new(message, false), held));
    }
    let charging = Arc::clone(core);
    let work = move || {
        let (message, held) = charge_and_decode(&charging, encoded, held, weigh)?;
        Ok((DecodedMessage::new(message, true), held))
    };
    core.preparer.cores.run_off_reactor(length, work).await.map_err(|error| error.to_grpc())?
}

fn charge_and_decode<M: Message + Default>(
    core: &Core,
    encoded: Bytes,
    mut held: Charge,
    weigh: fn(&[u8]) -> usize,
) -> Result<(M, Charge), Status> {
    if !held.grow(weigh(&encoded), core.serving().limits.request_memory_max_bytes) {
        return Err(core.shed_memory().to_grpc());
    }
    let message = M::decode(encoded).map_err(|error| Status::internal(error.to_string()))?;
    Ok((message, held))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::{SyncSender, sync_channel};
    use std::thread::{ThreadId, current};

    use super::*;

    /// Says on which thread it is freed.
    #[derive(Default)]
    struct Note(Option<SyncSender<ThreadId>>);

    impl Drop for Note {
        fn drop(&mut self) {
            if let Some(sender) = &self.0 {
                sender.send(current().id()).unwrap();
            }
        }
    }

    #[tokio::test]
    async fn a_long_message_that_nobody_takes_is_freed_off_the_reactor() {
        for is_long in [true, false] {
            let (sender, freed) = sync_channel(1);
            drop(DecodedMessage::new(Note(Some(sender)), is_long));
            let thread = tokio::task::spawn_blocking(move || freed.recv().unwrap()).await.unwrap();
            assert_eq!(thread != current().id(), is_long);
        }
    }
}
