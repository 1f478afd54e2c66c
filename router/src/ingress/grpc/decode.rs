//! Decodes messages; those that are large, or become large, on the blocking pool.

use std::sync::Arc;

use bytes::Bytes;
use prost::Message;
use tonic::Status;

use crate::core::Core;
use splitrail_api::memory_budget::Charge;

/// Messages up to this length may be decoded on the reactor.
const INLINE_MAX_BYTES: usize = 96 << 10;

/// The most that a message decoded on the reactor becomes: five thousand messages of a chat, or
/// a hundred thousand token ids, which take less than a millisecond.
const INLINE_MAX_DECODED_BYTES: usize = 1 << 20;

/// Decodes a message, and charges it for what it becomes before that, which `weigh` says.
///
/// # Errors
/// `INTERNAL` for bytes that are no message, `UNAVAILABLE` if there is no room for what they
/// become.
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

/// Frees a message that is not going to be served: many small parts take as long to free as to
/// decode.
pub(super) async fn discard<M: Send + 'static>(core: &Core, length: usize, message: M) {
    // A router that stops frees it here.
    let _stopping = core.preparer.run_off_reactor(length, move || drop(message)).await;
}
