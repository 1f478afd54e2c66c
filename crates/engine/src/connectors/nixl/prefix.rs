//! A hand-off of a prefix, cut so that a prefill leg takes the prefix itself (vLLM's NIXL connector
//! with `bidirectional_kv_xfer`).
//!
//! vLLM 0.32 copies the first blocks of the list under the hashes of the leg's own prompt, and checks
//! nothing. One id too many makes the reply wrong with status 200 (ids are trimmed from the front),
//! and the engine's prefix cache as well; one id too few ends the engine.

use serde_json::{Map, Value};

use super::IDS;

/// The `kv_transfer_params` of a prefill leg that takes the first `blocks` blocks of a hand-off, given
/// as the owner's reply had it. `None` if they cannot be taken exactly: the ids are in several cache
/// groups, their number is not that of the blocks that the hand-off's tokens fill, or the hand-off
/// has fewer whole blocks.
pub(super) fn prefix_params(hand_off: &str, blocks: u32, block_size: u32) -> Option<String> {
    let mut params: Map<String, Value> = serde_json::from_str(hand_off).ok()?;
    let staged_tokens = u32::try_from(params.get("remote_num_tokens")?.as_u64()?).ok()?;
    let tokens = blocks.checked_mul(block_size)?;
    if tokens == 0 || tokens > staged_tokens {
        return None;
    }
    let mut ids = params.get_mut(IDS)?.as_array_mut()?;
    if ids.iter().any(Value::is_array) {
        let [group] = &mut ids[..] else { return None };
        ids = group.as_array_mut()?;
    }
    let is_exact = ids.len() == staged_tokens.div_ceil(block_size) as usize;
    if !is_exact || !ids.iter().all(Value::is_u64) {
        return None;
    }
    ids.truncate(blocks as usize);
    params.insert("do_remote_decode".into(), true.into());
    params.insert("do_remote_prefill".into(), false.into());
    params.insert("remote_num_tokens".into(), tokens.into());
    // What the owner had cached is no figure of this leg.
    params.remove("remote_prefill_cached_tokens");
    serde_json::to_string(&params).ok()
}
