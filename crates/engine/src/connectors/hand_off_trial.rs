//! A hand-off of one small prompt, which shows whether two engines can hand over at all: the bodies
//! of its two legs, and what the reply of the first one contains.

use serde_json::json;

use crate::connectors::nixl::{HandOff, HandOffError, PREFILL_PARAMS_JSON};
use crate::connectors::nixl_push::PushEngine;
use crate::json;

/// The member of bodies and replies that holds a hand-off.
const KV_TRANSFER_PARAMS: &str = "kv_transfer_params";

/// The body of a completion of one token, with further members as raw JSON.
fn body(model: &str, prompt: &str, transfer_params: &str) -> String {
    let body =
        json!({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}).to_string();
    let open = body.strip_suffix('}').unwrap_or(&body);
    format!("{open},\"{KV_TRANSFER_PARAMS}\":{transfer_params}}}")
}

/// The body of the prefill leg. The prompt must fill at least one KV block.
#[must_use]
pub fn prefill_body(model: &str, prompt: &str) -> String {
    body(model, prompt, PREFILL_PARAMS_JSON)
}

/// The body of the decode leg.
#[must_use]
pub fn decode_body(model: &str, prompt: &str, hand_off: HandOff) -> String {
    body(model, prompt, &hand_off.into_json())
}

/// The body of the decode leg of a prompt that an engine pushes; both legs have `request_id`.
#[must_use]
pub fn push_decode_body(
    model: &str,
    prompt: &str,
    prefill: &PushEngine,
    request_id: &str,
) -> String {
    body(model, prompt, &prefill.decode_params_json(request_id))
}

/// The hand-off in the reply to the prefill leg.
///
/// # Errors
/// There is none, or it is not one of NIXL.
pub fn hand_off(reply: &[u8]) -> Result<HandOff, HandOffError> {
    let [raw] = json::pick_from_slice(reply, [KV_TRANSFER_PARAMS])?;
    raw.map_or(Err(HandOffError::Absent), HandOff::from_reply)
}
