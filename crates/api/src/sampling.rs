//! The sampling options of a request, at the top level or in an object of their own, depending on the endpoint.

use std::borrow::Cow;

use super::Endpoint;
use super::json::JsonObject;
use crate::error::Error;

/// The member of `/inference/v1/generate` that holds the sampling parameters.
pub const SAMPLING_PARAMS: &str = "sampling_params";

/// Changes the members that say how a request is sampled, where its endpoint has them.
///
/// # Errors
/// A 400 if they stand in no object where they must.
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

/// The members of a request that say how it is sampled.
pub struct Sampling<'a> {
    members: Cow<'a, JsonObject>,
    endpoint: Endpoint,
}

impl<'a> Sampling<'a> {
    /// Finds them in a body.
    ///
    /// # Errors
    /// A 400 if they are missing where they must stand in an object of their own.
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

    /// Choices that the reply has per prompt. Messages and responses know one answer only,
    /// whatever a client says.
    ///
    /// # Errors
    /// A 400 if that is no count.
    pub fn n(&self) -> Result<u32, Error> {
        if self.has_one_answer() {
            return Ok(1);
        }
        Ok(self.count("n")?.unwrap_or(1))
    }

    /// Samples that the engine draws per prompt.
    ///
    /// # Errors
    /// A 400 that names the member of a wrong type.
    pub fn samples(&self) -> Result<u32, Error> {
        if self.has_one_answer() {
            return Ok(1);
        }
        let best_of = self.count("best_of")?.unwrap_or(1);
        let beams = if self.flag("use_beam_search")? { 2 } else { 1 };
        Ok(self.n()?.max(best_of).max(beams))
    }

    fn has_one_answer(&self) -> bool {
        matches!(self.endpoint, Endpoint::Responses | Endpoint::Messages)
    }

    /// Output tokens, if asked for; in chat, `max_completion_tokens` goes first.
    ///
    /// # Errors
    /// A 400 if that is no count.
    pub fn max_tokens(&self) -> Result<Option<u32>, Error> {
        match self.endpoint {
            Endpoint::Chat => {
                let newer = self.count("max_completion_tokens")?;
                Ok(newer.or(self.count("max_tokens")?))
            }
            Endpoint::Responses => self.count("max_output_tokens"),
            _ => self.count("max_tokens"),
        }
    }

    /// Whether vLLM refuses what a prefill leg does not carry: `max_tokens` from 1 (which
    /// messages must say), `min_tokens` up to it (completions end after 16 where nothing is
    /// said), no empty stop text, and stop texts only where there is text.
    ///
    /// # Errors
    /// A 400 that names the member of a wrong type.
    pub fn refusable(&self) -> Result<bool, Error> {
        const DEFAULT_TOKENS: u32 = 16;
        let said = self.max_tokens()?;
        let (default, stop) = match self.endpoint {
            Endpoint::Chat | Endpoint::Responses => (None, "stop"),
            Endpoint::Messages => (Some(0), "stop_sequences"),
            _ => (Some(DEFAULT_TOKENS), "stop"),
        };
        let min_tokens = self.count("min_tokens")?.unwrap_or(0);
        let stops = self.texts(stop)?;
        let no_text = self.raw("detokenize") == Some("false");
        let most = said.or(default);
        Ok(most == Some(0)
            || most.is_some_and(|max| min_tokens > max)
            || stops.iter().any(String::is_empty)
            || (no_text && !stops.is_empty()))
    }

    /// Why vLLM computes every token of the prompt, whatever it has cached: where it
    /// must tell log-probabilities of it, or is told to.
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
