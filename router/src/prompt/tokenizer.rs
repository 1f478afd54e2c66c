//! Text to token ids, exactly as the engine's tokenizer does it.
//!
//! `tokenizers` 0.22 is the library that engines run; faster look-alikes with
//! newer Unicode tables give other ids for some text.

mod files;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::template::SpecialTokens;

/// A model's tokenizer files could not be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {message} ({hint})", path.display())]
pub struct LoadError {
    /// The file in question.
    pub path: PathBuf,
    /// What went wrong.
    pub message: String,
    /// What to do about it.
    pub hint: &'static str,
}

/// Text could not be tokenized; the library's reason, never the text.
#[derive(Debug, thiserror::Error)]
#[error("the tokenizer failed: {0}")]
pub struct TokenizeError(String);

/// A loaded tokenizer with the templates that came with it.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    special: SpecialTokens,
    templates: BTreeMap<String, String>,
    native_chat: Option<&'static str>,
    notes: Vec<String>,
    fingerprint: u64,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("fingerprint", &format_args!("{:016x}", self.fingerprint))
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads a model folder (or a `tokenizer.json` and what lies beside it):
    /// `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`,
    /// `chat_template.jinja`, `config.json`. Only the first must exist.
    ///
    /// # Errors
    /// [`LoadError`] with the file that cannot be read or understood.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let files = files::read(path)?;
        let located = |message: String| LoadError {
            path: files.tokenizer_path.clone(),
            message,
            hint: "the file must be a tokenizer of the Hugging Face `tokenizers` library, 0.22 or older",
        };
        let mut inner = tokenizers::Tokenizer::from_bytes(&files.tokenizer_json)
            .map_err(|error| located(error.to_string()))?;
        // A file may keep the lengths of its training run; engines switch both off.
        inner.with_truncation(None).map_err(|error| located(error.to_string()))?;
        inner.with_padding(None);
        inner.set_encode_special_tokens(files.split_special_tokens);
        let missing = missing_tokens(&inner, &files.added);
        let mut notes = files.notes;
        if !missing.is_empty() {
            notes.push(format!(
                "{} special tokens of the configuration were missing in tokenizer.json and were added",
                missing.len()
            ));
            inner.add_special_tokens(&missing);
        }
        let mut fingerprint = Fnv::default();
        fingerprint.write(&files.tokenizer_json);
        for token in &files.added {
            fingerprint.write(format!("{token:?}").as_bytes());
        }
        fingerprint.write(&[u8::from(files.split_special_tokens)]);
        for (name, text) in files.special.iter().chain(&files.templates) {
            fingerprint.write(name.as_bytes());
            fingerprint.write(text.as_bytes());
        }
        Ok(Self {
            inner,
            special: files.special,
            templates: files.templates,
            native_chat: files.native_chat,
            notes,
            fingerprint: fingerprint.0,
        })
    }

    /// Token ids of `text`. `add_special_tokens` runs the tokenizer's
    /// post-processor (a first BOS, usually): vLLM does so for completions by
    /// default, and not for chats, whose template writes such tokens itself.
    ///
    /// # Errors
    /// [`TokenizeError`] if the library refuses; text is never in the message.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizeError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special_tokens)
            .map_err(|_| TokenizeError("encode".to_owned()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Number of tokens, added ones included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Stable across processes: the same files give the same number. Two
    /// routers with another figure would key their indexes differently.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Named special tokens, as variables for templates.
    #[must_use]
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special
    }

    /// Source of a chat template by name: `default`, `tool_use`.
    #[must_use]
    pub fn chat_template(&self, name: &str) -> Option<&str> {
        self.templates.get(name).map(String::as_str)
    }

    /// Why the engine does not use these templates, if it does not.
    #[must_use]
    pub fn native_chat(&self) -> Option<&'static str> {
        self.native_chat
    }

    /// What an operator should know about these files, for the log at start.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

/// Tokens that are not among the added tokens of `tokenizer.json`, by content:
/// transformers adds these when it loads the model.
fn missing_tokens(
    inner: &tokenizers::Tokenizer,
    wanted: &[tokenizers::AddedToken],
) -> Vec<tokenizers::AddedToken> {
    let known = inner.get_added_vocabulary().get_vocab();
    wanted.iter().filter(|token| !known.contains_key(&token.content)).cloned().collect()
}

/// FNV-1a, 64 bits: enough to tell files apart, the same on every machine.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes.iter().chain(&(bytes.len() as u64).to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
}
