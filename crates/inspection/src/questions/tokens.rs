//! The tokens of a chat and of a text, as the router and the engine make them.

use serde_json::{Map, Value, json};
use splitrail_engine::vllm::tokenize::{TOKENIZE_PATH, chat_body, reply_ids, text_body};
use splitrail_prompt::compare::{Difference, SAMPLE, difference, first_difference};
use splitrail_prompt::{ChatRequestView, PromptError, PromptModel};
use splitrail_telemetry::clock::unix_ms;

use super::Asker;
use crate::facts::{TokenDifference, TokensFact};

/// The engine's tokens of a prompt, or the status with which it refuses to say them.
type EngineTokens = Result<Vec<u32>, Option<u16>>;

/// Compares the tokens of a chat; nothing is asked without a tokenizer.
pub(crate) async fn of_chat(
    asker: &Asker<'_>,
    model: &str,
    prompt: Option<&PromptModel>,
) -> TokensFact {
    let Some(prompt) = prompt else { return TokensFact::Untested };
    let messages = json!([{"role": "user", "content": SAMPLE}]);
    let body = Map::from_iter([("messages".to_owned(), messages.clone())]);
    let view = ChatRequestView::from_body(&body);
    let ours = view.and_then(|view| prompt.tokenize_chat(view, (unix_ms() / 1000) as i64));
    match ours {
        Err(error) => inexact(error),
        Ok(ours) => compared(&ours.ids, &tokens(asker, &chat_body(model, &messages)).await),
    }
}

/// Compares the tokens of a text. Also returns the engine's tokens, which its KV events must name;
/// they are asked for without a tokenizer, too.
pub(crate) async fn of_text(
    asker: &Asker<'_>,
    model: &str,
    prompt: Option<&PromptModel>,
    text: &str,
) -> (TokensFact, Option<Vec<u32>>) {
    let engines = tokens(asker, &text_body(model, text)).await;
    let fact = match prompt.map(|prompt| prompt.tokenize_text(text, true)) {
        None => TokensFact::Untested,
        Some(Err(error)) => inexact(error),
        Some(Ok(ours)) => compared(&ours.ids, &engines),
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

fn inexact(error: PromptError) -> TokensFact {
    TokensFact::Inexact(error.to_string())
}

fn compared(ours: &[u32], engines: &EngineTokens) -> TokensFact {
    let engines = match engines {
        Ok(engines) => engines,
        Err(status) => return TokensFact::Unavailable(*status),
    };
    let shape = difference(ours, engines);
    match first_difference(ours, engines).filter(|_| shape != Difference::None) {
        None => TokensFact::Agree(ours.len()),
        Some((at, router_token, engine_token)) => TokensFact::Differ(TokenDifference {
            shape,
            router_count: ours.len(),
            engine_count: engines.len(),
            at,
            router_token,
            engine_token,
        }),
    }
}
