//! The requests that the canary sends to an engine.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Value, json};

use super::UnclearReason;
use super::diagnose::CanaryTokens;
use super::prompt::{Prompt, messages};
use crate::ServedModel;
use crate::{LegRequest, Worker};
use splitrail_api::Endpoint;
use splitrail_api::error::ErrorKind;
use splitrail_engine::tokenize::{self, ids};
use splitrail_engine_client::{LegHeaders, Shape};

/// The engine's reply to the prompt.
pub(super) struct Reply {
    /// Whether the prompt was sent as a chat.
    pub(super) is_chat: bool,
    /// The prompt's length in tokens as counted by the engine.
    pub(super) prompt_tokens: Option<u64>,
    /// The tokens that the engine reports to have found in its cache.
    pub(super) cached_tokens: Option<u64>,
}

/// Asks the engine for its tokens of the prompt, in the forms for which the router knows them and
/// the engine has an endpoint. vLLM always has `/tokenize`, and `render` with `--enable-scale-out`.
///
/// # Errors
/// If the engine cannot be asked now.
pub(super) async fn tokens(
    served: &ServedModel,
    worker: &Arc<Worker>,
    prompt: &Prompt,
) -> Result<CanaryTokens, UnclearReason> {
    let (model, text) = (served.name(), prompt.text.as_str());
    let mut tokens = CanaryTokens::default();
    if prompt.tokens.chat.is_some() {
        let body = tokenize::chat_body(model, &messages(text));
        tokens.chat = match post(served, worker, Shape::whole(Endpoint::Tokenize), &body).await? {
            Some(reply) => ids(&reply["tokens"]),
            None => {
                let body = json!({"model": model, "messages": messages(text), "max_tokens": 1});
                let shape = Shape::RENDERED_CHAT;
                post(served, worker, shape, &body).await?.and_then(|reply| ids(&reply["token_ids"]))
            }
        };
    }
    let body = tokenize::text_body(model, text, true);
    tokens.plain = match post(served, worker, Shape::whole(Endpoint::Tokenize), &body).await? {
        Some(reply) => ids(&reply["tokens"]),
        None => {
            let body = json!({"model": model, "prompt": text, "max_tokens": 1});
            let reply = post(served, worker, Shape::RENDERED_COMPLETION, &body).await?;
            reply.and_then(|reply| ids(&reply[0]["token_ids"]))
        }
    };
    Ok(tokens)
}

/// Lets the engine serve the prompt, as a chat if possible.
pub(super) async fn serve(
    served: &ServedModel,
    worker: &Arc<Worker>,
    prompt: &Prompt,
    adapter: Option<&str>,
    salt: &str,
) -> Result<Reply, UnclearReason> {
    let text = prompt.text.as_str();
    let mut body = json!({
        "model": adapter.unwrap_or(served.name()),
        "max_tokens": 1, "temperature": 0, "stream": false, "cache_salt": salt,
    });
    if worker.supports_cache_hit_threshold() == Some(true) {
        // The engine's default threshold must not reject the canary.
        body["cache_hit_threshold"] = 0.0.into();
    }
    for is_chat in [true, false] {
        let mut body = body.clone();
        let endpoint = if is_chat { Endpoint::Chat } else { Endpoint::Completions };
        match is_chat {
            true if prompt.tokens.chat.is_none() => continue,
            true => body["messages"] = messages(text),
            false => body["prompt"] = text.into(),
        }
        let shape = Shape::whole(endpoint);
        let reply = post(served, worker, shape, &body).await?;
        if let Some(reply) = reply {
            let usage = &reply["usage"];
            return Ok(Reply {
                is_chat,
                prompt_tokens: usage["prompt_tokens"].as_u64(),
                cached_tokens: usage["prompt_tokens_details"]["cached_tokens"].as_u64(),
            });
        }
    }
    Err(UnclearReason::Refused)
}

/// Sends one request; returns `None` if the engine rejects it.
async fn post(
    served: &ServedModel,
    worker: &Arc<Worker>,
    shape: Shape,
    body: &Value,
) -> Result<Option<Value>, UnclearReason> {
    // The rank whose blocks are looked up afterwards.
    let leg_headers = LegHeaders { rank: Some(0), ..LegHeaders::with_random_id() };
    let leg = LegRequest { client: &served.client, worker, shape, headers: &leg_headers };
    let exchange = leg.whole(Bytes::from(body.to_string()));
    match tokio::time::timeout(served.config.canary.timeout, exchange).await {
        Ok(Ok(reply)) => Ok(serde_json::from_slice(&reply.body).ok()),
        Ok(Err(error)) => {
            let path = shape.path;
            tracing::debug!(worker = worker.id(), path, %error, "the engine did not serve the canary");
            match error.kind() {
                ErrorKind::EngineRejected(400 | 422)
                | ErrorKind::EngineLacksPath
                | ErrorKind::EngineLacksModel => Ok(None),
                _ => Err(UnclearReason::NoReply),
            }
        }
        Err(_) => Err(UnclearReason::NoReplyInTime),
    }
}
