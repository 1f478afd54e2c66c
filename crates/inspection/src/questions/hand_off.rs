//! The decode leg of a hand-off: fetches what a prefill engine has staged.

use std::time::Duration;

use splitrail_engine::connectors::hand_off_trial::{decode_body, prefill_body, push_decode_body};

use super::trial::{Staged, StagedKv};
use super::{Asker, FIRST_RANK, no_reply};
use crate::facts::FetchOutcome;

/// Maximum size of `/metrics`, in bytes.
const METRICS_MAX_BYTES: usize = 4 << 20;
/// Number of times that the metrics are read until they show the transfer: engines update them in
/// their next step.
const READS: u32 = 5;
/// Time between two reads.
const READ_PAUSE: Duration = Duration::from_millis(200);

/// Sends the decode leg, and compares the engine's count of transferred tokens before and after it.
/// `prefill` asks the engine that has staged the prompt.
pub(crate) async fn fetch(
    asker: &Asker<'_>,
    prefill: &Asker<'_>,
    model: &str,
    staged: Staged,
) -> FetchOutcome {
    let Staged { kv, text, request_id } = staged;
    let before = transferred(asker).await;
    let is_pushed = matches!(kv, StagedKv::Push(_));
    let body = match kv {
        StagedKv::Pull(hand_off) => decode_body(model, &text, hand_off),
        StagedKv::Push(engine) => {
            push_decode_body(model, &text, &engine, request_id.to_str().unwrap_or_default())
        }
    };
    match asker.complete(body, &request_id, FIRST_RANK).await {
        Err(why) => {
            if is_pushed {
                // Without a further prefill, the decode engine would keep the blocks for ever.
                let again = prefill_body(model, &text);
                let _ = prefill.complete(again, &request_id, FIRST_RANK).await;
            }
            return FetchOutcome::NoReply(no_reply(&why));
        }
        Ok(reply) if reply.status != 200 => {
            let message = asker.error_message(&reply.body);
            return FetchOutcome::Refused { status: reply.status, message };
        }
        Ok(_) => {}
    }
    let Some(before) = before else { return FetchOutcome::Served };
    for _ in 0..READS {
        match transferred(asker).await {
            Some(after) if after > before => return FetchOutcome::Transferred,
            Some(_) => tokio::time::sleep(READ_PAUSE).await,
            None => return FetchOutcome::Served,
        }
    }
    FetchOutcome::Computed
}

/// The number of prompt tokens whose KV the engine has received since its start.
async fn transferred(asker: &Asker<'_>) -> Option<u64> {
    let reply = asker.get(asker.kind.paths().metrics, METRICS_MAX_BYTES).await.ok()?;
    asker.kind.load(&reply.body).prompt_tokens_by_source.external_kv_transfer
}
