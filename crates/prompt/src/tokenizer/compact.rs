//! A tokenizer in a few megabytes, for models whose words can be scanned.

use serde_json::{Value, json};

use super::file::File;
use super::openings::Openings;
use super::scanner::Scanner;
use super::words::WordEncoder;

/// Normaliser, added tokens and post-processor of `fastokens`, with this crate's own word encoder.
pub(super) struct CompactTokenizer {
    /// Everything except the model.
    around: fastokens::Tokenizer,
    /// Recognises texts that need neither normaliser nor added tokens.
    openings: Option<Openings>,
    scanner: Scanner,
    words: WordEncoder,
}

impl CompactTokenizer {
    /// Builds the tokenizer of a file; `described` is the reference's description with the added
    /// tokens.
    ///
    /// # Errors
    /// The feature of the file that is not supported here.
    pub(super) fn read(file: &File<'_>, described: &Value) -> Result<Self, String> {
        let scanner = Scanner::of(&described["pre_tokenizer"])
            .ok_or("a pre-tokenizer that cannot be scanned")?;
        let mut around = described.clone();
        around["pre_tokenizer"] = Value::Null;
        around["decoder"] = Value::Null;
        around["truncation"] = Value::Null;
        around["padding"] = Value::Null;
        // `fastokens` requires a model, which is never used.
        around["model"] = json!({ "type": "BPE", "vocab": { "a": 0 }, "merges": [] });
        let around = fastokens::Tokenizer::from_json(around).map_err(|error| error.to_string())?;
        Ok(Self {
            around,
            openings: Openings::of(described),
            scanner,
            words: WordEncoder::read(file)?,
        })
    }

    /// Token ids; `None` if the scanner does not cover the whole text.
    pub(super) fn encode(&self, text: &str, add_special_tokens: bool) -> Option<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        self.append(text, &mut ids)?;
        Some(self.finish(ids, add_special_tokens))
    }

    /// Appends the ids of a text to which more may be appended, before post-processing; `None` if
    /// the scanner does not cover the whole text.
    pub(super) fn append(&self, text: &str, ids: &mut Vec<u32>) -> Option<()> {
        if self.openings.as_ref().is_some_and(|openings| openings.lacks_added_tokens(text)) {
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

    /// Applies the post-processor to the ids of a text.
    pub(super) fn finish(&self, ids: Vec<u32>, add_special_tokens: bool) -> Vec<u32> {
        self.around.post_process(ids, add_special_tokens)
    }
}
