//! The tokens of a chat and of a text, as the router and the engine make them.

use serde_json::{Map, Value, json};
use splitrail_config::model::{Model, TokenizerConfig};
use splitrail_engine::tokenize::{
    DETOKENIZE_PATH, TOKENIZE_PATH, chat_body, detokenize_body, reply_ids, reply_text, text_body,
};
use splitrail_prompt::compare::{Difference, SAMPLE, difference, first_difference};
use splitrail_prompt::{ChatRequestView, PromptError, PromptModel};
use splitrail_telemetry::clock::unix_ms;

use super::Asker;
use crate::facts::{TokenDifference, TokensFact};

/// Number of tokens before and from a difference on that are shown as text.
const CONTEXT_TOKENS: usize = 6;
/// Maximum number of characters of such a text.
const CONTEXT_MAX_CHARS: usize = 60;

/// The engine's tokens of a prompt, or the status with which it refuses to say them.
type EngineTokens = Result<Vec<u32>, Option<u16>>;

/// Compares the tokens of a chat. Without a tokenizer, nothing is asked, unless the router relies
/// on the engine's tokens.
pub(crate) async fn of_chat(
    asker: &Asker<'_>,
    model: &Model,
    prompt: Option<&PromptModel>,
) -> TokensFact {
    let messages = json!([{"role": "user", "content": SAMPLE}]);
    let (tokenizer, model) = (&model.tokenizer, model.name.as_str());
    let Some(prompt) = prompt else {
        return match tokenizer {
            TokenizerConfig::Engine(_) => given(&tokens(asker, &chat_body(model, &messages)).await),
            _ => TokensFact::Untested,
        };
    };
    let body = Map::from_iter([("messages".to_owned(), messages.clone())]);
    let view = ChatRequestView::from_body(&body);
    let ours = view.and_then(|view| prompt.tokenize_chat(view, (unix_ms() / 1000) as i64));
    match ours {
        Err(error) => inexact(error),
        Ok(ours) => {
            let engines = tokens(asker, &chat_body(model, &messages)).await;
            compared(asker, model, &ours.ids, &engines).await
        }
    }
}

/// Compares the tokens of a text. Also returns the engine's tokens, which its KV events must name;
/// they are asked for without a tokenizer, too.
pub(crate) async fn of_text(
    asker: &Asker<'_>,
    model: &Model,
    prompt: Option<&PromptModel>,
    text: &str,
) -> (TokensFact, Option<Vec<u32>>) {
    let (tokenizer, model) = (&model.tokenizer, model.name.as_str());
    let engines = tokens(asker, &text_body(model, text, true)).await;
    let fact = match prompt.map(|prompt| prompt.tokenize_text(text, true)) {
        None if matches!(tokenizer, TokenizerConfig::Engine(_)) => given(&engines),
        None => TokensFact::Untested,
        Some(Err(error)) => inexact(error),
        Some(Ok(ours)) => compared(asker, model, &ours.ids, &engines).await,
    };
    (fact, engines.ok())
}

async fn tokens(asker: &Asker<'_>, body: &Value) -> EngineTokens {
    match asker.post(TOKENIZE_PATH, body.to_string()).await {
        Ok(reply) if reply.status == 200 => reply_ids(&reply.body).ok_or(Some(200)),
        Ok(reply) => Err(Some(reply.status)),
        Err(_) => Err(None),
    }
}

/// Whether the engine makes tokens for the router; there is nothing to compare them with.
fn given(engines: &EngineTokens) -> TokensFact {
    match engines {
        Ok(_) => TokensFact::Untested,
        Err(status) => TokensFact::Missing(*status),
    }
}

fn inexact(error: PromptError) -> TokensFact {
    TokensFact::Inexact(error.to_string())
}

async fn compared(
    asker: &Asker<'_>,
    model: &str,
    ours: &[u32],
    engines: &EngineTokens,
) -> TokensFact {
    let engines = match engines {
        Ok(engines) => engines,
        Err(status) => return TokensFact::Unavailable(*status),
    };
    let shape = difference(ours, engines);
    let first = first_difference(ours, engines).filter(|_| shape != Difference::None);
    let Some((at, router_token, engine_token)) = first else {
        return TokensFact::Agree(ours.len());
    };
    let (router_text, engine_text) =
        tokio::join!(text(asker, model, around(ours, at)), text(asker, model, around(engines, at)));
    TokensFact::Differ(TokenDifference {
        shape,
        router_count: ours.len(),
        engine_count: engines.len(),
        at,
        router_token,
        engine_token,
        router_text,
        engine_text,
    })
}

/// Some tokens around a place.
fn around(tokens: &[u32], at: usize) -> &[u32] {
    let end = tokens.len().min(at + CONTEXT_TOKENS);
    &tokens[at.saturating_sub(CONTEXT_TOKENS).min(end)..end]
}

/// The text of tokens in the engine's words; `None` if it does not say.
async fn text(asker: &Asker<'_>, model: &str, tokens: &[u32]) -> Option<String> {
    let body = detokenize_body(model, tokens);
    let reply = asker.post(DETOKENIZE_PATH, body.to_string()).await.ok()?;
    let text = reply_text(&reply.body).filter(|_| reply.status == 200)?;
    Some(text.chars().take(CONTEXT_MAX_CHARS).collect())
}
