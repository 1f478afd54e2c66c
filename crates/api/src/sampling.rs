//! The sampling options of a request: at the top level, or in a nested object at
//! `/inference/v1/generate`.

use std::borrow::Cow;

use super::Endpoint;
use super::json::JsonObject;
use crate::error::Error;

/// The member of `/inference/v1/generate` that holds the sampling parameters.
pub const SAMPLING_PARAMS: &str = "sampling_params";

/// Edits the sampling options at the place where the endpoint has them.
///
/// # Errors
/// A 400 if they must be in a nested object and are not.
pub fn edit_sampling(
    body: &mut JsonObject,
    endpoint: Endpoint,
    edit: impl FnOnce(&mut JsonObject),
) -> Result<(), Error> {
    match endpoint {
        Endpoint::Generate => {
            let mut sampling = JsonObject::parse_str(body.raw(SAMPLING_PARAMS).unwrap_or("{}"))?;
            edit(&mut sampling);
            body.set(SAMPLING_PARAMS, sampling.to_string());
        }
        _ => edit(body),
    }
    Ok(())
}

/// How many output tokens a sample may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputLimit {
    /// The maximum, if given. In chat, `max_completion_tokens` takes precedence.
    pub max_tokens: Option<u32>,
    /// The most that an engine may read from the options; `None` if there may be no limit. Engines
    /// differ: SGLang lets `max_tokens` of a chat take precedence, and takes 0 for no limit.
    pub upper_bound_tokens: Option<u32>,
}

impl OutputLimit {
    /// For how many tokens of output an engine must have room: as many as it may generate, if that is
    /// given, and at least one.
    pub fn least_tokens(self) -> u32 {
        self.max_tokens.unwrap_or(1).max(1)
    }
}

/// The sampling options of a request.
pub struct Sampling<'a> {
    members: Cow<'a, JsonObject>,
    endpoint: Endpoint,
}

impl<'a> Sampling<'a> {
    /// Finds the sampling options in a body.
    ///
    /// # Errors
    /// A 400 if the endpoint requires a nested object and it is missing.
    pub fn of(body: &'a JsonObject, endpoint: Endpoint) -> Result<Self, Error> {
        let members = match endpoint {
            Endpoint::Generate => match body.raw(SAMPLING_PARAMS) {
                Some(raw) if raw.starts_with('{') => Cow::Owned(JsonObject::parse_str(raw)?),
                Some(_) => {
                    let message = "`sampling_params` must be an object";
                    return Err(Error::invalid(SAMPLING_PARAMS, message));
                }
                None => {
                    let message = "`sampling_params` is missing";
                    return Err(Error::invalid(SAMPLING_PARAMS, message));
                }
            },
            _ => Cow::Borrowed(body),
        };
        Ok(Self { members, endpoint })
    }

    /// The raw JSON of a member.
    pub fn raw(&self, key: &str) -> Option<&str> {
        self.members.raw(key)
    }

    /// Number of choices per prompt in the reply. Messages and responses always have one.
    ///
    /// # Errors
    /// A 400 if the member is not a count.
    pub fn n(&self) -> Result<u32, Error> {
        if self.has_one_reply() {
            return Ok(1);
        }
        Ok(self.count("n")?.unwrap_or(1))
    }

    /// Number of samples that the engine draws per prompt.
    ///
    /// # Errors
    /// A 400 that names the member of a wrong type.
    pub fn samples(&self) -> Result<u32, Error> {
        if self.has_one_reply() {
            return Ok(1);
        }
        let best_of = self.count("best_of")?.unwrap_or(1);
        let beams = if self.flag("use_beam_search")? { 2 } else { 1 };
        Ok(self.n()?.max(best_of).max(beams))
    }

    fn has_one_reply(&self) -> bool {
        matches!(self.endpoint, Endpoint::Responses | Endpoint::Messages)
    }

    /// How many output tokens a sample may have.
    ///
    /// # Errors
    /// A 400 if a member is not a count.
    pub fn output_limit(&self) -> Result<OutputLimit, Error> {
        let [first, second] = match self.endpoint {
            Endpoint::Chat => [self.count("max_completion_tokens")?, self.count("max_tokens")?],
            Endpoint::Responses => [self.count("max_output_tokens")?, None],
            _ => [self.count("max_tokens")?, None],
        };
        let may_be_unlimited = [first, second].contains(&Some(0));
        let upper_bound_tokens = first.max(second).filter(|_| !may_be_unlimited);
        Ok(OutputLimit { max_tokens: first.or(second), upper_bound_tokens })
    }

    /// Whether vLLM will refuse options that a prefill leg does not carry. vLLM requires
    /// `max_tokens` of at least 1 (mandatory in messages), `min_tokens` of at most `max_tokens` (16
    /// in completions by default), no empty stop text, and no stop texts if there is no text. `limit`
    /// is the request's own [output limit](Self::output_limit).
    ///
    /// # Errors
    /// A 400 that names the member of a wrong type.
    pub fn refusable(&self, limit: OutputLimit) -> Result<bool, Error> {
        const DEFAULT_TOKENS: u32 = 16;
        let (default, stop) = match self.endpoint {
            Endpoint::Chat | Endpoint::Responses => (None, "stop"),
            Endpoint::Messages => (Some(0), "stop_sequences"),
            _ => (Some(DEFAULT_TOKENS), "stop"),
        };
        let min_tokens = self.count("min_tokens")?.unwrap_or(0);
        let stops = self.texts(stop)?;
        let no_text = self.raw("detokenize") == Some("false");
        let most = limit.max_tokens.or(default);
        Ok(most == Some(0)
            || most.is_some_and(|max| min_tokens > max)
            || stops.iter().any(String::is_empty)
            || (no_text && !stops.is_empty()))
    }

    /// Why vLLM computes every token of the prompt even if it is cached: log-probabilities of the
    /// prompt are requested, or the cache is to be skipped.
    ///
    /// # Errors
    /// A 400 that names the member of a wrong type.
    pub fn bypasses_cache(&self) -> Result<Option<&'static str>, Error> {
        let asks = |key| !matches!(self.raw(key), None | Some("null" | "false"));
        Ok(if asks("prompt_logprobs") {
            Some("prompt_logprobs")
        } else if self.flag("echo")? && asks("logprobs") {
            Some("echo_logprobs")
        } else if self.flag("skip_reading_prefix_cache")? {
            Some("skip_reading_prefix_cache")
        } else {
            None
        })
    }

    fn texts(&self, key: &'static str) -> Result<Vec<String>, Error> {
        const EXPECTED: &str = "a string or a list of strings";
        match self.raw(key) {
            None | Some("null") => Ok(Vec::new()),
            Some(raw) if raw.starts_with('[') => {
                Ok(self.members.get::<Vec<String>>(key, EXPECTED)?.unwrap_or_default())
            }
            Some(_) => Ok(self.members.get::<String>(key, EXPECTED)?.into_iter().collect()),
        }
    }

    fn count(&self, key: &'static str) -> Result<Option<u32>, Error> {
        self.members.get(key, "an integer")
    }

    fn flag(&self, key: &'static str) -> Result<bool, Error> {
        Ok(self.members.get::<bool>(key, "true or false")?.unwrap_or(false))
    }
}
