//! The canary's prompt, its tokens and its blocks according to the router.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::diagnose::Tokens;
use crate::Served;
use splitrail_api::text::random_id;
use splitrail_prompt::{ChatRequestView, PromptError, PromptModel};
use splitrail_telemetry::clock::unix_ms;

/// Prose, code, numbers, white space and several scripts: where tokenizers differ, one of them
/// tells.
const TEXT: &str = "Splitrail counts blocks: 1, 2, 3 ... 1024; 3.5e-7 of them, don't ask.\n\
    \tif (a[i] != b[j]) { return \"no\"; }  // two  spaces\r\n\
    Ein schöner Gruß, 日本語の文、한국어, и немного русского. 🚄🧮\n\n";

/// Full blocks that a prompt should have: a first one, one behind another, and one more.
const BLOCKS: usize = 3;

/// Of the engine's context, so many tokens stay free for template and answer.
const CONTEXT_SPARE_TOKENS: usize = 64;

/// A known prompt.
pub(super) struct Prompt {
    /// The user's words, or the whole prompt.
    pub(super) text: String,
    /// Its tokens by the router's tokenizer.
    pub(super) tokens: Tokens,
    /// Special tokens that plain prompts begin with.
    leading: Vec<u32>,
}

/// Makes the prompt, off the reactor: it is some kilobytes long where blocks are large.
///
/// # Errors
/// Why the router knows no tokens of it, in a word.
pub(super) async fn make(
    served: &Arc<Served>,
    context_tokens: Option<u32>,
) -> Result<Prompt, &'static str> {
    let model = Arc::clone(served);
    let work = move || {
        let block_size = model.pool.block_size() as usize;
        let room = context_tokens.map_or(usize::MAX, |tokens| tokens as usize);
        let wanted = (BLOCKS * block_size + 1).min(room.saturating_sub(CONTEXT_SPARE_TOKENS));
        let model = model.prompt.as_ref().ok_or("no_tokenizer")?;
        compute(model, wanted, block_size.min(wanted / 2))
    };
    tokio::task::spawn_blocking(work).await.map_err(|_| "tokenizer_failed")?
}

/// The prompt in so many tokens at least, of which so many and more are always the same.
fn compute(
    model: &PromptModel,
    wanted_tokens: usize,
    block_tokens: usize,
) -> Result<Prompt, &'static str> {
    let plain = |text: &str, special| match model.tokenize_text(text, special) {
        Ok(tokens) => Ok(tokens.ids),
        Err(PromptError::Unsupported(_)) => Err("tokenizer_not_exact"),
        Err(_) => Err("tokenizer_failed"),
    };
    let once = plain(TEXT, false)?.len().max(1);
    // The first block is the same each time, so that an engine that knows no salts gives itself
    // away; then it is a new prompt, so that what is found of it is of this time.
    let (before, repeats) = (block_tokens.div_ceil(once), wanted_tokens.div_ceil(once));
    let after = repeats.saturating_sub(before).max(1);
    let text = format!("{}{}\n{}", TEXT.repeat(before), random_id(), TEXT.repeat(after));
    let (bare, whole) = (plain(&text, false)?, plain(&text, true)?);
    let leading = whole.strip_suffix(&bare[..]).unwrap_or_default().to_vec();
    let chat = {
        let body = Map::from_iter([("messages".to_owned(), messages(&text))]);
        let view = ChatRequestView::from_body(&body);
        view.and_then(|view| model.tokenize_chat(view, (unix_ms() / 1000) as i64))
    };
    let chat = chat.ok().map(|tokens| tokens.ids);
    Ok(Prompt { text, tokens: Tokens { chat, plain: Some(whole) }, leading })
}

/// The prompt as a chat.
pub(super) fn messages(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

impl Prompt {
    /// The tokens of the form that was sent.
    pub(super) fn sent(&self, is_chat: bool) -> &[u32] {
        let Tokens { chat, plain } = &self.tokens;
        let form = if is_chat { chat } else { plain };
        form.as_deref().unwrap_or_default()
    }

    /// The same with special tokens at its start that are doubled, missing or added.
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
