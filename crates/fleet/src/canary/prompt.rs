//! The canary's prompt and its tokens according to the router.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::UnclearReason;
use super::diagnose::CanaryTokens;
use crate::ServedModel;
use splitrail_api::text::random_id;
use splitrail_prompt::compare::SAMPLE;
use splitrail_prompt::{ChatRequestView, PromptError, PromptModel};
use splitrail_telemetry::clock::unix_ms;

/// Number of full blocks of the prompt: a first one, one with a parent, and one more.
const BLOCKS: usize = 3;

/// Tokens of the engine's context that are reserved for the template and the reply.
const CONTEXT_SPARE_TOKENS: usize = 64;

/// A known prompt.
pub(super) struct Prompt {
    /// The user's message in a chat; the whole prompt otherwise.
    pub(super) text: String,
    /// The tokens according to the router's tokenizer.
    pub(super) tokens: CanaryTokens,
    /// The special tokens with which plain prompts begin.
    leading: Vec<u32>,
}

/// Makes the prompt on a blocking thread: it has some kilobytes if blocks are large.
///
/// # Errors
/// If the router cannot tokenise the prompt.
pub(super) async fn make(
    served: &Arc<ServedModel>,
    context_tokens: Option<u32>,
) -> Result<Prompt, UnclearReason> {
    let model = Arc::clone(served);
    let work = move || {
        let block_size = model.pool.block_size() as usize;
        let room = context_tokens.map_or(usize::MAX, |tokens| tokens as usize);
        let wanted = (BLOCKS * block_size + 1).min(room.saturating_sub(CONTEXT_SPARE_TOKENS));
        let tokenizer = model.prompt.as_ref().ok_or(UnclearReason::TokenizerFailed)?;
        compute(tokenizer, wanted, block_size.min(wanted / 2)).map_err(|error| match error {
            PromptError::Unsupported(_) => UnclearReason::TokenizerNotExact,
            error => {
                let model = model.name();
                tracing::error!(model, %error, "the canary's prompt cannot be tokenised");
                UnclearReason::TokenizerFailed
            }
        })
    };
    tokio::task::spawn_blocking(work).await.map_err(|_| UnclearReason::TokenizerFailed)?
}

/// Makes a prompt of at least `wanted_tokens`, of which at least the first `block_tokens` are
/// always the same.
fn compute(
    model: &PromptModel,
    wanted_tokens: usize,
    block_tokens: usize,
) -> Result<Prompt, PromptError> {
    let plain = |text: &str, special| model.tokenize_text(text, special).map(|tokens| tokens.ids);
    let once = plain(SAMPLE, false)?.len().max(1);
    // The first block is always the same, so that an engine that ignores salts is detected. The
    // rest is new each time, so that blocks that are found come from this canary.
    let (before, repeats) = (block_tokens.div_ceil(once), wanted_tokens.div_ceil(once));
    let after = repeats.saturating_sub(before).max(1);
    let text = format!("{}{}\n{}", SAMPLE.repeat(before), random_id(), SAMPLE.repeat(after));
    let (bare, whole) = (plain(&text, false)?, plain(&text, true)?);
    let leading = whole.strip_suffix(&bare[..]).unwrap_or_default().to_vec();
    let chat = {
        let body = Map::from_iter([("messages".to_owned(), messages(&text))]);
        let view = ChatRequestView::from_body(&body);
        view.and_then(|view| model.tokenize_chat(view, (unix_ms() / 1000) as i64))
    };
    let chat = chat.ok().map(|tokens| tokens.ids);
    Ok(Prompt { text, tokens: CanaryTokens { chat, plain: Some(whole) }, leading })
}

/// The prompt as a chat.
pub(super) fn messages(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

impl Prompt {
    /// The tokens of the form that was sent.
    pub(super) fn sent(&self, is_chat: bool) -> &[u32] {
        let CanaryTokens { chat, plain } = &self.tokens;
        let form = if is_chat { chat } else { plain };
        form.as_deref().unwrap_or_default()
    }

    /// Variants of `tokens` with special tokens at the start that are doubled, missing or added.
    pub(super) fn otherwise(&self, tokens: &[u32]) -> Vec<Vec<u32>> {
        let (Some(first), rest) = (tokens.first(), tokens.get(1..).unwrap_or_default()) else {
            return Vec::new();
        };
        let mut others = vec![[&[*first], tokens].concat(), rest.to_vec()];
        if !self.leading.is_empty() {
            others.push([&self.leading, tokens].concat());
        }
        others
    }
}
