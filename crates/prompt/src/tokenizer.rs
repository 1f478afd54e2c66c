//! Converts text to token ids exactly as the engine's tokenizer does.
//!
//! `tokenizers` 0.22 is the library that engines run; faster libraries with
//! newer Unicode tables give other ids for some text. One of them is used where it
//! was shown to give the same ids (`fast`).

mod compact;
mod fast;
mod file;
mod files;
mod load_error;
mod memo;
mod openings;
mod pieces;
mod proof;
mod rebuild;
mod reference;
mod scanner;
mod select;
mod special;
mod words;

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;

use serde_json::Value;
use splitrail_kv::Chain;
use tokenizers::AddedToken;

use super::template::SpecialTokens;
use crate::memory;
use fast::{Example, Fast};
use file::File;
use files::Files;
pub use load_error::LoadError;
use rebuild::{Family, Finish};
use select::Selected;
use special::{Sources, Tokens};

const REFUSAL: &str = "the engine's tokenizer class for this model is not reproduced";

/// Text could not be tokenized. No variant carries the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenizeError {
    /// The engine's ids cannot be known here; see [`Tokenizer::notes`].
    #[error("{0}")]
    Unsupported(&'static str),
    /// The library refused the text.
    #[error("the tokenizer failed")]
    Failed,
}

/// A loaded tokenizer with the templates that came with it.
pub struct Tokenizer {
    library: Library,
    vocab_size: usize,
    special: SpecialTokens,
    templates: BTreeMap<String, String>,
    native_chat: Option<&'static str>,
    unsupported: Option<&'static str>,
    notes: Vec<String>,
    fingerprint: u64,
}

/// Who does the work.
enum Library {
    /// What engines run.
    Reference(Box<tokenizers::Tokenizer>),
    /// What was seen to give the same ids.
    Fast(Box<Fast>),
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
    /// `added_tokens.json`, `chat_template.jinja`, `config.json`. Only the
    /// first must exist, but without the last the engine's choice of tokenizer
    /// class is a guess from the second.
    ///
    /// The result is the tokenizer that vLLM builds from the folder. Where
    /// that is not known, loading succeeds, [`Self::notes`] says why, and
    /// [`Self::encode`] refuses.
    ///
    /// # Errors
    /// [`LoadError`] with the file that cannot be read or understood.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        // Reading takes several times the memory that the result has, and the quick library
        // keeps some for each thread that has used it: all of that goes with this thread.
        let loaded = thread::scope(|scope| scope.spawn(|| Self::read(path)).join());
        memory::give_back();
        loaded.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    fn read(path: &Path) -> Result<Self, LoadError> {
        let mut files = files::read(path)?;
        let path = files.tokenizer_path.clone();
        let located = |message: String| LoadError {
            path: path.clone(),
            message,
            hint: "the file must be a tokenizer of the Hugging Face `tokenizers` library, 0.22 or older",
        };
        let text = std::mem::take(&mut files.tokenizer_json);
        let mut notes = std::mem::take(&mut files.notes);
        if files.model.is_none() {
            notes.push(
                "there is no config.json beside tokenizer.json: engines choose the tokenizer by the \
                 model type in it, so give the model's whole folder"
                    .to_owned(),
            );
        }
        let file = File::read(&text).map_err(|error| located(error.to_string()))?;
        let plan = Plan::new(&files, &file);
        let text = plan.serialised.as_deref().unwrap_or(&text);
        notes.extend(plan.note.clone());
        let splits_special = files.config.get("split_special_tokens") == Some(&Value::Bool(true));
        let build = || plan.build(text, splits_special).map_err(|error| located(error.to_string()));
        let Built { tokenizer, described, grown, added } = build()?;
        if grown > 0 && plan.family.is_none() {
            notes.push(format!(
                "{grown} tokens of the configuration were missing in tokenizer.json and were added"
            ));
        }
        let special = plan.tokens.variables();
        let mut fingerprint = Fnv::default();
        fingerprint.write(text);
        fingerprint.write(format!("{:?} {added:?}", plan.unsupported).as_bytes());
        fingerprint.write(&[u8::from(splits_special)]);
        for (name, text) in special.iter().chain(&files.templates) {
            fingerprint.write(name.as_bytes());
            fingerprint.write(text.as_bytes());
        }
        let vocab_size = tokenizer.get_vocab_size(true);
        let library = match plan.unsupported {
            Some(_) => Library::Reference(Box::new(tokenizer)),
            None => choose(text, tokenizer, described, || Ok(build()?.tokenizer))?,
        };
        Ok(Self {
            library,
            vocab_size,
            special,
            templates: files.templates,
            native_chat: files.native_chat,
            unsupported: plan.unsupported,
            notes,
            fingerprint: fingerprint.0,
        })
    }

    /// Token ids of `text`. `add_special_tokens` runs the tokenizer's
    /// post-processor (a first BOS, usually): vLLM does so for completions by
    /// default, and not for chats, whose template writes such tokens itself.
    ///
    /// # Errors
    /// [`TokenizeError::Unsupported`] for every text if the engine's tokenizer
    /// could not be rebuilt, [`TokenizeError::Failed`] if the library refuses.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizeError> {
        self.check()?;
        match &self.library {
            Library::Fast(fast) => fast.whole(text, add_special_tokens),
            Library::Reference(reference) => {
                let encoding = reference.encode_fast(text, add_special_tokens).ok();
                encoding.map(|encoding| encoding.get_ids().to_vec())
            }
        }
        .ok_or(TokenizeError::Failed)
    }

    /// Appends the same ids to a chain that has none yet. What is remembered of the text, for the
    /// next one that begins like it, is of use to chains of the same root only.
    ///
    /// # Errors
    /// As [`Self::encode`]; what the chain has then is of no use.
    pub fn chain(
        &self,
        text: &str,
        add_special_tokens: bool,
        chain: &mut Chain,
    ) -> Result<(), TokenizeError> {
        self.check()?;
        if let Library::Fast(fast) = &self.library {
            return fast.chain(text, add_special_tokens, chain).ok_or(TokenizeError::Failed);
        }
        chain.append(&self.encode(text, add_special_tokens)?);
        Ok(())
    }

    fn check(&self) -> Result<(), TokenizeError> {
        self.unsupported.map_or(Ok(()), |reason| Err(TokenizeError::Unsupported(reason)))
    }

    /// Whether text of tens of kilobytes takes it less than a millisecond.
    #[must_use]
    pub fn is_fast(&self) -> bool {
        matches!(self.library, Library::Fast(_)) || self.unsupported.is_some()
    }

    /// Number of tokens, added ones included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
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

    /// Why this model's text cannot be tokenized as its engine does it, if it
    /// cannot.
    #[must_use]
    pub fn unsupported(&self) -> Option<&'static str> {
        self.unsupported
    }

    /// What an operator should know about these files, for the log at start.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

/// The quick library where it does the reference's work. The reference takes as much memory
/// again, and has nothing to add: it is gone before the other is built, and built once more
/// where that was in vain.
fn choose(
    text: &[u8],
    reference: tokenizers::Tokenizer,
    described: Option<Value>,
    again: impl Fn() -> Result<tokenizers::Tokenizer, LoadError>,
) -> Result<Library, LoadError> {
    let slowly = |why: &str| {
        tracing::info!(why, "prompts are tokenised by the reference library, slowly");
    };
    let example = described.ok_or_else(|| "a model that is not BPE".to_owned());
    let example = match example.and_then(|described| Example::of(&reference, described)) {
        Ok(example) => example,
        Err(why) => {
            slowly(&why);
            return Ok(Library::Reference(Box::new(reference)));
        }
    };
    drop(reference);
    let file = File::read(text).map_err(|error| error.to_string());
    match file.and_then(|file| Fast::prove(&file, &example)) {
        Ok(fast) => Ok(Library::Fast(Box::new(fast))),
        Err(why) => {
            slowly(&why);
            Ok(Library::Reference(Box::new(again()?)))
        }
    }
}

/// How the engine makes a tokenizer of the files.
struct Plan {
    /// The class that rebuilds it; `None` uses the file as it is.
    family: Option<Family>,
    tokens: Tokens,
    /// The `tokenizer.json` of that class.
    serialised: Option<Vec<u8>>,
    unsupported: Option<&'static str>,
    note: Option<String>,
}

/// A reference, and how it came about.
struct Built {
    tokenizer: tokenizers::Tokenizer,
    /// What it says of itself, if it is of BPE; see [`reference::build`].
    described: Option<Value>,
    /// By how many tokens the configuration's made it grow.
    grown: usize,
    /// These tokens.
    added: Vec<AddedToken>,
}

impl Plan {
    fn new(files: &Files, file: &File<'_>) -> Self {
        let selected = select::select(&files.folder, &files.config, files.model.as_ref());
        let read = |family| {
            let sources = Sources {
                config: &files.config,
                special_map: &files.special_map,
                added: &files.added,
                file: &file.rest,
            };
            Tokens::read(&sources, family)
        };
        let as_is = |what: Option<String>| Self {
            family: None,
            tokens: read(None),
            serialised: None,
            unsupported: what.is_some().then_some(REFUSAL),
            note: what.map(|what| {
                format!(
                    "prompts of this model are not tokenized: its engine uses {what}, which is not \
                     reproduced here; they are routed on estimates (`tokenizer: {{ kind: none }}` \
                     with a policy that needs no tokens says so openly)"
                )
            }),
        };
        let family = match selected {
            Selected::AsIs => return as_is(None),
            Selected::Unknown(what) => return as_is(Some(what)),
            Selected::Rebuilt(family) => family,
        };
        let tokens = read(Some(family));
        let rebuilt = family.rebuild(file, &files.config, tokens.unknown()).and_then(|rebuilt| {
            let text = serde_json::to_vec(&rebuilt).map_err(|_| "a file that cannot be written")?;
            Ok((rebuilt.rest, text))
        });
        match rebuilt {
            Err(what) => as_is(Some(format!("its {family:?} tokenizer class on {what}"))),
            Ok((rest, text)) => {
                let differs = ["normalizer", "pre_tokenizer"]
                    .iter()
                    .any(|part| file.rest[*part] != rest[*part]);
                Self {
                    family: Some(family),
                    tokens,
                    serialised: Some(text),
                    unsupported: None,
                    note: differs.then(|| {
                        format!(
                            "normalizer and pre-tokenizer are those of the engine's {family:?} \
                             tokenizer class; tokenizer.json has others, which the engine ignores"
                        )
                    }),
                }
            }
        }
    }

    /// The reference of that text.
    fn build(&self, text: &[u8], splits_special: bool) -> tokenizers::Result<Built> {
        let (mut tokenizer, described) = reference::build(text)?;
        // A file may keep the lengths of its training run; engines switch both off.
        tokenizer.with_truncation(None)?;
        tokenizer.with_padding(None);
        tokenizer.set_encode_special_tokens(splits_special);
        let size = tokenizer.get_vocab_size(true);
        let added = self.add_tokens(&mut tokenizer);
        let grown = tokenizer.get_vocab_size(true) - size;
        Ok(Built { tokenizer, described, grown, added })
    }

    /// Adds the configured tokens and says which.
    fn add_tokens(&self, inner: &mut tokenizers::Tokenizer) -> Vec<AddedToken> {
        let present: Vec<AddedToken> = inner.get_added_tokens_decoder().into_values().collect();
        let mut added = self.tokens.missing(&present);
        inner.add_tokens(&added);
        let last = self.tokens.finishing(self.family.map_or(Finish::Nothing, Family::finish));
        inner.add_tokens(&last);
        added.extend(last);
        added
    }
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
