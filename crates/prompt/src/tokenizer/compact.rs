//! A tokenizer in a few megabytes, for models whose words can be scanned.

use serde_json::{Value, json};

use super::file::File;
use super::openings::Openings;
use super::scanner::Scanner;
use super::words::Words;

/// Normaliser, added tokens and post-processor of `fastokens`, with words of our own.
pub(super) struct Compact {
    /// All but the model.
    around: fastokens::Tokenizer,
    /// Which texts it has nothing to do with.
    openings: Option<Openings>,
    scanner: Scanner,
    words: Words,
}

impl Compact {
    /// The tokenizer of a file; `described` is what the reference says of it, with the added
    /// tokens.
    ///
    /// # Errors
    /// What about it is not reproduced here.
    pub(super) fn read(file: &File<'_>, described: &Value) -> Result<Self, String> {
        let scanner = Scanner::of(&described["pre_tokenizer"])
            .ok_or("a pre-tokenizer that cannot be scanned")?;
        let mut around = described.clone();
        around["pre_tokenizer"] = Value::Null;
        around["decoder"] = Value::Null;
        around["truncation"] = Value::Null;
        around["padding"] = Value::Null;
        // There must be one. It is never asked.
        around["model"] = json!({ "type": "BPE", "vocab": { "a": 0 }, "merges": [] });
        let around = fastokens::Tokenizer::from_json(around).map_err(|error| error.to_string())?;
        Ok(Self { around, openings: Openings::of(described), scanner, words: Words::read(file)? })
    }

    /// Token ids; `None` if the words are not all of the text.
    pub(super) fn encode(&self, text: &str, add_special_tokens: bool) -> Option<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        self.append(text, &mut ids)?;
        Some(self.finish(ids, add_special_tokens))
    }

    /// Appends the ids of a text that goes on or will, before what the post-processor does;
    /// `None` if the words are not all of the text.
    pub(super) fn append(&self, text: &str, ids: &mut Vec<u32>) -> Option<()> {
        if self.openings.as_ref().is_some_and(|openings| openings.spare(text)) {
            return self.words.append(text, self.scanner.words(text), ids);
        }
        let split = self.around.build_pre_tokenized(text);
        for part in split.splits() {
            match part.token_id {
                Some(id) => ids.push(id),
                None => {
                    let text = split.split_text(part);
                    self.words.append(text, self.scanner.words(text), ids)?;
                }
            }
        }
        Some(())
    }

    /// What the post-processor makes of the ids of a text.
    pub(super) fn finish(&self, ids: Vec<u32>, add_special_tokens: bool) -> Vec<u32> {
        self.around.post_process(ids, add_special_tokens)
    }
}
