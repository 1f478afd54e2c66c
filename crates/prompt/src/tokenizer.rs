//! Converts text to token ids exactly as the engine's tokenizer does.
//!
//! `tokenizers` 0.22 is the library that engines run; faster libraries with newer Unicode tables
//! give other ids for some texts. A faster library is used only where a test at loading showed that
//! its ids are the same (`fast`).

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
use splitrail_engine::EngineKind;
use splitrail_kv::Chain;
use tokenizers::AddedToken;

use super::template::SpecialTokens;
use crate::memory;
use fast::{Example, FastTokenizer};
use file::File;
use files::Files;
pub use load_error::LoadError;
use rebuild::{Family, Finish};
use select::TokenizerUse;
use special::{Sources, Tokens};

const REFUSAL: &str = "the engine's tokenizer class for this model is not reproduced";

/// Text could not be tokenized. No variant carries the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenizeError {
    /// The engine's ids cannot be computed here; see [`Tokenizer::notes`].
    #[error("{0}")]
    Unsupported(&'static str),
    /// The library failed on the text.
    #[error("the tokenizer failed")]
    Failed,
}

/// A loaded tokenizer, with the chat templates of its folder.
pub struct Tokenizer {
    library: Library,
    /// Number of tokens, added ones included.
    pub vocab_size: usize,
    /// Named special tokens, as variables for templates.
    pub special: SpecialTokens,
    templates: BTreeMap<String, String>,
    /// Why the engine does not use these templates; `None` if it uses them.
    pub native_chat: Option<&'static str>,
    /// Why text cannot be tokenised as by the engine; `None` if it can.
    pub unsupported: Option<&'static str>,
    /// Notes about these files for an operator, for the log at start.
    pub notes: Vec<String>,
    /// A number that is the same for the same files in every process. Routers with different
    /// fingerprints would hash the same prompt to different blocks.
    pub fingerprint: u64,
    /// The chunk of the model's chunked local attention in tokens (`attention_chunk_size` of
    /// `config.json`); `None` if it has none.
    pub attention_chunk_tokens: Option<u32>,
}

/// The library that tokenises.
enum Library {
    /// The library that engines run.
    Reference(Box<tokenizers::Tokenizer>),
    /// A faster library whose ids were compared with the reference.
    Fast(Box<FastTokenizer>),
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size)
            .field("fingerprint", &format_args!("{:016x}", self.fingerprint))
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads a model folder (or a `tokenizer.json` and the files beside it): `tokenizer.json`,
    /// `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`,
    /// `chat_template.jinja`, `config.json`. Only the first must exist, but without the last the
    /// engine's tokenizer class can only be guessed from the second.
    ///
    /// The result is the tokenizer that the engine builds from the folder. If that is not known, loading
    /// succeeds, [`Self::notes`] says why, and [`Self::encode`] refuses every text.
    ///
    /// # Errors
    /// [`LoadError`] with the file that cannot be read or parsed.
    pub fn load(path: &Path, engine: EngineKind) -> Result<Self, LoadError> {
        // Reading takes several times the memory of the result, and the fast library keeps memory
        // for each thread that used it: all of that is freed when this thread ends.
        let loaded = thread::scope(|scope| scope.spawn(|| Self::read(path, engine)).join());
        memory::give_back();
        loaded.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    fn read(path: &Path, engine: EngineKind) -> Result<Self, LoadError> {
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
        let attention_chunk_tokens = files.attention_chunk_tokens();
        let file = File::read(&text).map_err(|error| located(error.to_string()))?;
        let plan = Plan::new(&files, &file, engine);
        let text = plan.serialised.as_deref().unwrap_or(&text);
        notes.extend(plan.note.clone());
        let splits_special = files.config.get("split_special_tokens") == Some(&Value::Bool(true));
        let build = || plan.build(text, splits_special).map_err(|error| located(error.to_string()));
        let BuiltTokenizer { tokenizer, described, grown, added } = build()?;
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
            attention_chunk_tokens,
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

    /// Appends the ids to a chain that is still empty. The part of the text that is cached for
    /// later texts with the same prefix is used only for chains with the same root.
    ///
    /// # Errors
    /// As [`Self::encode`]; the content of the chain is then undefined.
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

    /// Whether tokenising tens of kilobytes takes less than a millisecond.
    #[must_use]
    pub fn is_fast(&self) -> bool {
        matches!(self.library, Library::Fast(_)) || self.unsupported.is_some()
    }

    /// Source of the chat template with this name: `default` or `tool_use`.
    #[must_use]
    pub fn chat_template(&self, name: &str) -> Option<&str> {
        self.templates.get(name).map(String::as_str)
    }
}

/// Chooses the fast library if its ids are those of the reference. The reference takes as much
/// memory again, so it is dropped before the fast one is built, and built again if the fast one
/// cannot be used.
fn choose(
    text: &[u8],
    reference: tokenizers::Tokenizer,
    described: Option<Value>,
    again: impl Fn() -> Result<tokenizers::Tokenizer, LoadError>,
) -> Result<Library, LoadError> {
    let slowly = |why: &str| {
        tracing::info!(why, "prompts are tokenised by the reference library, which is slower");
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
    match file.and_then(|file| FastTokenizer::prove(&file, &example)) {
        Ok(fast) => Ok(Library::Fast(Box::new(fast))),
        Err(why) => {
            slowly(&why);
            Ok(Library::Reference(Box::new(again()?)))
        }
    }
}

/// How the engine makes a tokenizer of the files.
struct Plan {
    /// The tokenizer class that rebuilds the tokenizer; `None` if the file is used as it is.
    family: Option<Family>,
    tokens: Tokens,
    /// The `tokenizer.json` that the class would write.
    serialised: Option<Vec<u8>>,
    unsupported: Option<&'static str>,
    note: Option<String>,
}

/// A reference tokenizer, and how it was built.
struct BuiltTokenizer {
    tokenizer: tokenizers::Tokenizer,
    /// The description of a BPE tokenizer; see [`reference::build`].
    described: Option<Value>,
    /// Number of tokens by which the configuration enlarged the vocabulary.
    grown: usize,
    /// The tokens that the configuration added.
    added: Vec<AddedToken>,
}

impl Plan {
    fn new(files: &Files, file: &File<'_>, engine: EngineKind) -> Self {
        let model = files.model.as_ref();
        let selected = select::select(&files.folder, &files.config, model, engine);
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
            TokenizerUse::AsIs => return as_is(None),
            TokenizerUse::Unknown(what) => return as_is(Some(what)),
            TokenizerUse::Rebuilt(family) => family,
        };
        let tokens = read(Some(family));
        let special = tokens.variables();
        let rebuilt = family.rebuild(file, &files.config, &special, engine).and_then(|rebuilt| {
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

    /// Builds the reference tokenizer from a `tokenizer.json`.
    fn build(&self, text: &[u8], splits_special: bool) -> tokenizers::Result<BuiltTokenizer> {
        let (mut tokenizer, described) = reference::build(text)?;
        // A file may contain truncation and padding of its training run; engines switch both off.
        tokenizer.with_truncation(None)?;
        tokenizer.with_padding(None);
        tokenizer.set_encode_special_tokens(splits_special);
        let size = tokenizer.get_vocab_size(true);
        let added = self.add_tokens(&mut tokenizer);
        let grown = tokenizer.get_vocab_size(true) - size;
        Ok(BuiltTokenizer { tokenizer, described, grown, added })
    }

    /// Adds the configured tokens and returns them.
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

/// FNV-1a, 64 bits: distinguishes files, with the same result on every machine.
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
