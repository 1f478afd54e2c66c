//! One small prompt that the engine serves: about two KV blocks, and one generated token.

use std::net::IpAddr;

use http::HeaderValue;
use splitrail_api::text::random_id;
use splitrail_config::model::{Connector, KvPath};
use splitrail_engine::connectors::hand_off_trial::{hand_off, prefill_body};
use splitrail_engine::connectors::nixl::{HandOff, HandOffError};
use splitrail_engine::connectors::nixl_push::{PushEngine, PushError, PushReply};
use splitrail_engine::identity::Trial;
use splitrail_engine_client::WholeReply;
use splitrail_prompt::compare::SAMPLE;

use super::{Asker, FIRST_RANK, no_reply, question_id};
use crate::facts::{StagedFact, TrialFact};

/// Where engines that generate nothing serve a small prompt.
const EMBEDDINGS_PATH: &str = "/v1/embeddings";
/// Number of KV blocks that the prompt fills at least.
const BLOCKS: usize = 2;
/// The block size that is assumed of an engine that does not say its own.
const BLOCK_SIZE_ASSUMED: u32 = 64;
/// Maximum number of bytes that one token of the sample stands for; known tokenizers need less.
const TOKEN_MAX_BYTES: usize = 5;
/// Tokens of the engine's context that are left free.
const CONTEXT_SPARE_TOKENS: usize = 64;

/// A prompt whose blocks a prefill engine keeps for a decode engine.
pub(crate) struct Staged {
    pub(crate) kv: StagedKv,
    pub(crate) text: String,
    /// Both legs of a hand-off have the same id.
    pub(crate) request_id: HeaderValue,
}

/// How a decode engine gets the KV of a staged prompt.
pub(crate) enum StagedKv {
    /// The decode engine pulls.
    Pull(HandOff),
    /// The decode engine registers with this engine, which pushes.
    Push(PushEngine),
}

impl StagedKv {
    fn host(&self) -> &str {
        match self {
            Self::Pull(hand_off) => hand_off.remote_host(),
            Self::Push(engine) => engine.host(),
        }
    }

    /// Reads a prefill reply; `None` if it has no hand-off.
    ///
    /// # Errors
    /// Why its hand-off is not one of the connector.
    fn read(reply: &[u8], connector: Connector) -> Result<Option<Self>, String> {
        match connector.kv_path() {
            KvPath::Pushed => match PushReply::from_body(reply) {
                Ok(said) => Ok(Some(Self::Push(said.engine))),
                Err(PushError::Absent) => Ok(None),
                Err(error) => Err(error.to_string()),
            },
            KvPath::None | KvPath::Pulled | KvPath::Stored | KvPath::Matched => {
                match hand_off(reply) {
                    Ok(hand_off) => Ok(Some(Self::Pull(hand_off))),
                    Err(HandOffError::Absent) => Ok(None),
                    Err(error) => Err(error.to_string()),
                }
            }
        }
    }
}

/// A text that fills two blocks and fits into the context. It begins with random characters, so that
/// no cache holds its blocks.
pub(crate) fn text(block_size: Option<u32>, context_tokens: Option<u32>) -> String {
    let block_size = block_size.unwrap_or(BLOCK_SIZE_ASSUMED) as usize;
    let wanted_bytes = BLOCKS.saturating_mul(block_size).saturating_mul(TOKEN_MAX_BYTES);
    // A byte may be a token of its own.
    let room = context_tokens.map_or(usize::MAX, |tokens| tokens as usize);
    let bytes = wanted_bytes.min(room.saturating_sub(CONTEXT_SPARE_TOKENS)).min(64 << 10);
    let mut text = random_id();
    text.push('\n');
    let sample = SAMPLE.chars().cycle();
    for letter in sample {
        if text.len() + letter.len_utf8() > bytes {
            return text;
        }
        text.push(letter);
    }
    text
}

/// Lets the engine serve the text.
pub(crate) async fn serve(asker: &Asker<'_>, model: &str, text: &str) -> TrialFact {
    let body = Trial::Usage.body_of(model, text);
    match asker.complete(body, &question_id(), FIRST_RANK).await {
        Ok(reply) if reply.status == 404 && embeds(asker, model).await => TrialFact::Embedded,
        Ok(reply) => served(asker, &reply),
        Err(why) => TrialFact::NoReply(no_reply(&why)),
    }
}

/// Whether the engine computes embeddings.
async fn embeds(asker: &Asker<'_>, model: &str) -> bool {
    let body = serde_json::json!({"model": model, "input": "a"}).to_string();
    asker.post(EMBEDDINGS_PATH, body).await.is_ok_and(|reply| reply.status == 200)
}

/// Lets a prefill engine serve the text as the prefill leg of a hand-off.
pub(crate) async fn stage(
    asker: &Asker<'_>,
    model: &str,
    text: String,
    connector: Connector,
    is_allowed: impl Fn(&str, Option<IpAddr>) -> bool,
) -> (TrialFact, StagedFact, Option<Staged>) {
    let request_id = question_id();
    let reply = match asker.complete(prefill_body(model, &text), &request_id, FIRST_RANK).await {
        Ok(reply) => reply,
        Err(why) => return (TrialFact::NoReply(no_reply(&why)), StagedFact::Untested, None),
    };
    let trial = served(asker, &reply);
    if reply.status != 200 {
        return (trial, StagedFact::Untested, None);
    }
    let (fact, staged) = match StagedKv::read(&reply.body, connector) {
        Ok(None) => (StagedFact::Absent, None),
        Err(cause) => (StagedFact::Foreign(cause), None),
        Ok(Some(kv)) if !is_allowed(kv.host(), reply.peer) => {
            (StagedFact::ForbiddenHost(super::shortened(kv.host())), None)
        }
        Ok(Some(kv)) => (StagedFact::Usable, Some(Staged { kv, text, request_id })),
    };
    (trial, fact, staged)
}

/// Whether the engine supports `cache_hit_threshold`; `None` if it does not show.
pub(crate) async fn threshold(asker: &Asker<'_>, model: &str) -> Option<bool> {
    let body = Trial::Threshold.body(model);
    let reply = asker.complete(body, &question_id(), FIRST_RANK).await.ok()?;
    Trial::Threshold.read(reply.status, &reply.body)?.supports_cache_hit_threshold
}

/// Whether a request can be pinned to a rank of an engine that has so many; `None` if it does not
/// show.
pub(crate) async fn takes_rank(asker: &Asker<'_>, model: &str, ranks: u32) -> Option<bool> {
    let body = Trial::Rank.body(model);
    let reply = asker.complete(body, &question_id(), ranks).await.ok()?;
    Trial::Rank.read(reply.status, &reply.body)?.takes_rank_header
}

fn served(asker: &Asker<'_>, reply: &WholeReply) -> TrialFact {
    let outcome = Trial::Usage.read(reply.status, &reply.body).filter(|_| reply.status == 200);
    match outcome {
        Some(outcome) => TrialFact::Served {
            reports_cached_tokens: outcome.reports_cached_tokens.unwrap_or(false),
        },
        None => {
            TrialFact::Refused { status: reply.status, message: asker.error_message(&reply.body) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_fills_two_blocks_and_fits_into_the_context() {
        for (block_size, context, bytes) in
            [(16, None, 160), (128, None, 1280), (128, Some(256), 192), (16, Some(8192), 160)]
        {
            let text = text(Some(block_size), context);
            assert!((bytes - 4..=bytes).contains(&text.len()), "{}", text.len());
        }
        assert_ne!(text(None, None), text(None, None), "no cache holds it");
        assert!(text(Some(u32::MAX), None).len() <= 64 << 10);
        assert!(!text(Some(16), Some(1)).is_empty());
    }
}
