//! Decodes messages; those that are or become large, on the blocking pool.

use std::sync::Arc;

use bytes::Bytes;
use prost::Message;
use tonic::Status;

use crate::core::Core;
use splitrail_api::memory_budget::Charge;

/// Maximum encoded length in bytes of messages that may be decoded on the reactor.
const INLINE_MAX_BYTES: usize = 96 << 10;

/// Maximum decoded size in bytes of messages that are decoded on the reactor: five thousand
/// messages of a chat, or a hundred thousand token ids, which take less than a millisecond.
const INLINE_MAX_DECODED_BYTES: usize = 1 << 20;

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
) -> Result<(M, Charge), Status> {
    let length = encoded.len();
    let is_short = length <= INLINE_MAX_BYTES && weigh(&encoded) <= INLINE_MAX_DECODED_BYTES;
    if is_short {
        return charge_and_decode(core, encoded, held, weigh);
    }
    let charging = Arc::clone(core);
    let work = move || charge_and_decode(&charging, encoded, held, weigh);
    core.preparer.run_off_reactor(length, work).await.map_err(|error| error.to_grpc())?
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

/// Frees a message that will not be served: freeing many small parts takes as long as decoding
/// them.
pub(super) async fn discard<M: Send + 'static>(core: &Core, length: usize, message: M) {
    // If the router is stopping, the message is freed here.
    let _stopping = core.preparer.run_off_reactor(length, move || drop(message)).await;
}
