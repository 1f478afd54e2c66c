//! The `usage` object of an engine's reply.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::dialect::Dialect;
pub use crate::json::ShapeError;

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
    /// Not an object with counts in it: a field is missing, negative, fractional
    /// or too large.
    #[error("usage: {0}")]
    Shape(#[from] ShapeError),
    /// More cached tokens than the prompt has.
    #[error("usage: {cached_tokens} cached tokens of {prompt_tokens}")]
    CachedExceedsPrompt {
        /// The reported number.
        cached_tokens: u32,
        /// The reported number.
        prompt_tokens: u32,
    },
}

#[derive(Deserialize)]
struct Usage<'a> {
    prompt_tokens: u32,
    completion_tokens: Option<u32>,
    #[serde(borrow)]
    prompt_tokens_details: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u32>,
}

/// Usage of `/v1/responses`.
#[derive(Deserialize)]
struct ResponseUsage<'a> {
    input_tokens: u32,
    output_tokens: Option<u32>,
    #[serde(borrow)]
    input_tokens_details: Option<&'a RawValue>,
}

/// Usage of `/v1/messages`, whose `input_tokens` excludes the tokens of the other figures.
#[derive(Deserialize)]
struct MessageUsage {
    input_tokens: u32,
    output_tokens: Option<u32>,
    cache_read_input_tokens: Option<u32>,
    cache_creation_input_tokens: Option<u32>,
}

impl EngineUsage {
    /// Parses the raw value of `usage` in a reply or an event of this dialect.
    ///
    /// # Errors
    /// Why the value cannot be used.
    pub fn parse_in(dialect: Dialect, usage: &str) -> Result<Self, UsageError> {
        match dialect {
            Dialect::Chunks => Self::parse(usage),
            _ if usage == "null" => Err(UsageError::Absent),
            Dialect::Responses => {
                let usage: ResponseUsage<'_> = crate::json::object(usage)?;
                Self::new(usage.input_tokens, usage.output_tokens, usage.input_tokens_details)
            }
            Dialect::Messages => {
                let usage: MessageUsage = crate::json::object(usage)?;
                let cached_tokens = usage.cache_read_input_tokens;
                let elsewhere = [cached_tokens, usage.cache_creation_input_tokens];
                let prompt_tokens = message_prompt(usage.input_tokens, elsewhere);
                let completion_tokens = usage.output_tokens;
                Ok(Self { prompt_tokens, completion_tokens, cached_tokens })
            }
        }
    }

    /// Parses the raw value of `usage` in a reply of `/v1/completions`, `/v1/chat/completions` or
    /// `/v1/embeddings`, or in a stream's chunk.
    ///
    /// # Errors
    /// The value is `null`, is no usage object, or contradicts itself.
    pub fn parse(usage: &str) -> Result<Self, UsageError> {
        if usage == "null" {
            return Err(UsageError::Absent);
        }
        let usage: Usage<'_> = crate::json::object(usage)?;
        Self::new(usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details)
    }

    /// Reads the counts of a usage object that [`parse_in`](Self::parse_in) rejects: a count that
    /// cannot be read, or a number of cached tokens above the prompt's, counts as not reported.
    /// `None` if the prompt's tokens cannot be read.
    pub fn readable(dialect: Dialect, usage: &str) -> Option<Self> {
        let own = match dialect {
            Dialect::Chunks => ["prompt_tokens", "completion_tokens", "prompt_tokens_details"],
            Dialect::Responses => ["input_tokens", "output_tokens", "input_tokens_details"],
            Dialect::Messages => ["input_tokens", "output_tokens", "cache_read_input_tokens"],
        };
        let count = |raw: Option<&str>| raw.and_then(read_count);
        let [prompt, completion, cached] = crate::json::pick(usage, own).ok()?;
        let (prompt_tokens, completion_tokens) = (count(prompt)?, count(completion));
        if dialect == Dialect::Messages {
            let cached_tokens = count(cached);
            let [written] = crate::json::pick(usage, ["cache_creation_input_tokens"]).ok()?;
            let prompt_tokens = message_prompt(prompt_tokens, [cached_tokens, count(written)]);
            return Some(Self { prompt_tokens, completion_tokens, cached_tokens });
        }
        let cached = cached.and_then(|raw| crate::json::pick(raw, ["cached_tokens"]).ok());
        let cached_tokens = cached.and_then(|[raw]| count(raw));
        let cached_tokens = cached_tokens.filter(|cached| *cached <= prompt_tokens);
        Some(Self { prompt_tokens, completion_tokens, cached_tokens })
    }

    fn new(
        prompt_tokens: u32,
        completion_tokens: Option<u32>,
        details: Option<&RawValue>,
    ) -> Result<Self, UsageError> {
        let details = details.map(|raw| crate::json::object::<Details>(raw.get()));
        let cached_tokens = details.transpose()?.and_then(|details| details.cached_tokens);
        if let Some(cached_tokens) = cached_tokens.filter(|cached| *cached > prompt_tokens) {
            return Err(UsageError::CachedExceedsPrompt { cached_tokens, prompt_tokens });
        }
        Ok(Self { prompt_tokens, completion_tokens, cached_tokens })
    }
}

/// A count of tokens in a usage object; `None` if the raw value is not one.
pub fn read_count(raw: &str) -> Option<u32> {
    serde_json::from_str(raw).ok()
}

/// Tokens of a message's prompt: those that were read from a cache or written to it come on top of
/// the others.
fn message_prompt(others: u32, elsewhere: [Option<u32>; 2]) -> u32 {
    elsewhere.into_iter().flatten().fold(others, u32::saturating_add)
}
