//! Counts the tokens of a streamed reply whose engine does not name them: for a client that leaves
//! before the engine has reported its usage.

use std::sync::Arc;

use splitrail_prompt::PromptModel;

/// Length in bytes from which the text so far is counted, and forgotten.
const COUNTED_BYTES: usize = 1 << 10;

/// The text that has arrived and is not counted yet, and the counts so far.
pub(super) struct TextTokens {
    /// The tokenizer of the model; without one, an event has one token for each choice with output.
    prompt: Option<Arc<PromptModel>>,
    text: String,
    /// Tokens of the text that was counted.
    counted: u64,
    /// Tokens that the events are known to have at least.
    events: u64,
    /// Tokens beyond those of the events that were returned before.
    reported: u64,
    /// The most tokens that the reply can have.
    most: u64,
}

impl TextTokens {
    /// Counts with the tokenizer of a model, if it has one, up to the most tokens that the reply can
    /// have.
    pub(super) fn new(prompt: Option<Arc<PromptModel>>, most: u64) -> Self {
        Self { prompt, text: String::new(), counted: 0, events: 0, reported: 0, most }
    }

    /// Drops the text and the counts so far, because the engine has named the tokens.
    pub(super) fn restart(&mut self) {
        *self = Self::new(self.prompt.take(), self.most);
    }

    /// Notes the tokens that an event without ids has at least.
    pub(super) fn event(&mut self, tokens: u32) {
        self.events += u64::from(tokens);
    }

    /// Adds text.
    pub(super) fn push(&mut self, text: &str) {
        if self.prompt.is_none() {
            return;
        }
        let mut rest = text;
        while !rest.is_empty() {
            let room = COUNTED_BYTES.saturating_sub(self.text.len()).max(1);
            let (piece, behind) = rest.split_at(rest.ceil_char_boundary(room.min(rest.len())));
            self.text.push_str(piece);
            rest = behind;
            if self.text.len() >= COUNTED_BYTES {
                // A word is not counted in two parts.
                let at = self.text.rfind(' ').filter(|at| *at > 0).unwrap_or(self.text.len());
                let word = self.text.split_off(at);
                self.count();
                self.text = word;
            }
        }
    }

    /// The number of tokens beyond those of the events, as far as it was not returned before.
    pub(super) fn more(&mut self) -> u32 {
        self.count();
        let all = self.counted.min(self.most).saturating_sub(self.events);
        let more = all.saturating_sub(self.reported);
        self.reported += more;
        u32::try_from(more).unwrap_or(u32::MAX)
    }

    fn count(&mut self) {
        let Some(prompt) = self.prompt.as_ref().filter(|_| !self.text.is_empty()) else { return };
        // A tokenizer that cannot be used counts nothing.
        let ids = prompt.tokenizer.encode(&self.text, false).unwrap_or_default();
        self.counted += ids.len() as u64;
        self.text.clear();
    }
}
