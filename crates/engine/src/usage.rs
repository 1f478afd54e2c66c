//! The `usage` object of an engine's reply.

use crate::dialect::Dialect;
pub use crate::json::ShapeError;
use crate::json::{Members, pick};

/// What an engine reports about one request's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineUsage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Number of generated tokens. `None` if the engine leaves it out, as for embeddings, or if it
    /// cannot be read.
    pub completion_tokens: Option<u32>,
    /// Number of prompt tokens that came from a cache. `None` if the engine does not report it:
    /// vLLM does so only with `--enable-prompt-tokens-details`; otherwise the details are null, or
    /// absent in streams. `Some(0)` is a figure.
    pub cached_tokens: Option<u32>,
}

/// A `usage` that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UsageError {
    /// The reply says `"usage": null`.
    #[error("the engine reports no usage")]
    Absent,
    /// Not an object, or one with a key twice.
    #[error("usage: {0}")]
    Shape(#[from] ShapeError),
    /// The count of this name is missing, negative, fractional or too large.
    #[error("usage: `{0}` is not a count of tokens")]
    Count(&'static str),
    /// More cached tokens than the prompt has.
    #[error("usage: {cached_tokens} cached tokens of {prompt_tokens}")]
    CachedExceedsPrompt {
        /// The reported number.
        cached_tokens: u32,
        /// The reported number.
        prompt_tokens: u32,
    },
}

const CACHED: &str = "cached_tokens";
const WRITTEN: &str = "cache_creation_input_tokens";

impl EngineUsage {
    /// Reads the raw value of `usage` in a reply or an event of this dialect. Also returns the first
    /// fault that was found. A count that cannot be read is left out, and so is a number of cached
    /// tokens above the prompt's. No usage is returned if the prompt's tokens cannot be read, or if
    /// the value is not an object whose keys are unique: the usage that the client gets is made from
    /// the same object.
    pub fn read(dialect: Dialect, usage: &str) -> (Option<Self>, Option<UsageError>) {
        let mut reader = Reader { fault: None };
        (reader.usage(dialect, usage), reader.fault)
    }

    /// Parses the raw value of `usage` in a reply or an event of this dialect.
    ///
    /// # Errors
    /// The first fault: the value is `null`, is no object of unique keys, has a count that cannot be
    /// read, or contradicts itself.
    pub fn parse(dialect: Dialect, usage: &str) -> Result<Self, UsageError> {
        match Self::read(dialect, usage) {
            (_, Some(fault)) => Err(fault),
            (usage, None) => usage.ok_or(UsageError::Absent),
        }
    }
}

/// Reads a usage object, and keeps its first fault.
struct Reader {
    fault: Option<UsageError>,
}

impl Reader {
    fn usage(&mut self, dialect: Dialect, usage: &str) -> Option<EngineUsage> {
        if usage == "null" {
            self.fail(UsageError::Absent);
            return None;
        }
        // What the prompt's tokens, the generated tokens and the cached tokens are called.
        let names = match dialect {
            Dialect::Chunks => ["prompt_tokens", "completion_tokens", "prompt_tokens_details"],
            Dialect::Responses => ["input_tokens", "output_tokens", "input_tokens_details"],
            Dialect::Messages => ["input_tokens", "output_tokens", "cache_read_input_tokens"],
        };
        let members = self.shaped(Members::of(usage))?;
        let [prompt, completion, cached] = members.pick(usage, names);
        if prompt.is_none() {
            self.fail(UsageError::Count(names[0]));
        }
        let prompt_tokens = self.count(names[0], prompt)?;
        let completion_tokens = self.count(names[1], completion);
        if dialect == Dialect::Messages {
            // Tokens that were read from a cache or written to it come on top of `input_tokens`.
            let [written] = members.pick(usage, [WRITTEN]);
            let cached_tokens = self.count(names[2], cached);
            let elsewhere = [cached_tokens, self.count(WRITTEN, written)].into_iter().flatten();
            let prompt_tokens = elsewhere.fold(prompt_tokens, u32::saturating_add);
            return Some(EngineUsage { prompt_tokens, completion_tokens, cached_tokens });
        }
        let details = cached.map(|raw| pick(raw, [CACHED])).transpose();
        let cached = self.shaped(details).flatten().and_then(|[cached]| cached);
        let cached_tokens = self.count(CACHED, cached);
        let too_many = cached_tokens.filter(|cached| *cached > prompt_tokens);
        if let Some(cached_tokens) = too_many {
            self.fail(UsageError::CachedExceedsPrompt { cached_tokens, prompt_tokens });
        }
        let cached_tokens = cached_tokens.filter(|_| too_many.is_none());
        Some(EngineUsage { prompt_tokens, completion_tokens, cached_tokens })
    }

    fn shaped<T>(&mut self, read: Result<T, ShapeError>) -> Option<T> {
        read.map_err(|error| self.fail(error.into())).ok()
    }

    fn count(&mut self, name: &'static str, raw: Option<&str>) -> Option<u32> {
        let tokens = read_count(raw?);
        if tokens.is_none() {
            self.fail(UsageError::Count(name));
        }
        tokens
    }

    fn fail(&mut self, fault: UsageError) {
        self.fault.get_or_insert(fault);
    }
}

/// A count of tokens in a usage object; `None` if the raw value is not one.
pub fn read_count(raw: &str) -> Option<u32> {
    serde_json::from_str(raw).ok()
}
