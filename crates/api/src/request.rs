//! Reads from a request's body what the router needs: model, prompts and options.

use serde::Deserialize;
use serde_json::value::RawValue;
use splitrail_engine::json;

use super::endpoint::Endpoint;
use super::form::Recording;
use super::json::{JsonObject, Piece};
use super::list::{self, ListError};
use super::plain::make_plain;
use super::sampling::{OutputLimit, Sampling};
use super::sanitise::RemovedFields;
use super::{auxiliary, bounds, responses, sanitise};
use crate::error::{Error, ErrorKind};
use crate::memory_budget::{Allowance, Meter};
use splitrail_config::model::Limits;

/// One prompt of a request.
#[derive(Clone)]
pub enum Prompt {
    /// The messages of `/v1/chat/completions`, which stay in the body.
    Chat,
    /// Text that the engine tokenises.
    Text(String),
    /// The input of `/v1/responses`, from which a chat is made; it stays in the body.
    Responses,
    /// The input of `/v1/messages`, from which a chat is made; it stays in the body.
    Messages,
    /// Token ids.
    Tokens(Vec<u32>),
    /// A recording, which stands beside the body: the other fields of its form.
    Recording(Recording),
    /// A prompt that only the engine can tokenise, such as embeddings; the reason.
    Opaque(&'static str),
}

impl Prompt {
    fn is_empty_list(&self) -> bool {
        matches!(self, Self::Tokens(ids) if ids.is_empty())
    }
}

/// A prompt, with its raw JSON if it belongs to a batch.
pub type Entry = (Prompt, Option<Piece>);

/// The options of a request on which its legs depend.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether the client wants a stream.
    pub stream: bool,
    /// Whether the client wants a final usage chunk in its stream.
    pub include_usage: bool,
    /// Samples per prompt (`n`, or `best_of` if larger).
    pub samples: u32,
    /// Number of choices per prompt in the reply.
    pub n: u32,
    /// Why the engine computes the whole prompt even if it is cached; `None` if it does not.
    pub bypasses_cache: Option<&'static str>,
    /// Whether the prompt is given as embeddings (`prompt_embeds`).
    pub embeds: bool,
    /// Whether the engine may run further turns by itself, each with another prompt or another piece
    /// of it.
    pub engine_takes_turns: bool,
    /// Whether the decode leg's engine will refuse the request because of members that a prefill
    /// leg does not carry.
    pub refusable: bool,
    /// How many output tokens a sample may have.
    pub output: OutputLimit,
}

impl Options {
    /// The defaults: one choice, not streamed.
    pub const PLAIN: Self = Self {
        stream: false,
        include_usage: false,
        samples: 1,
        n: 1,
        bypasses_cache: None,
        embeds: false,
        engine_takes_turns: false,
        refusable: false,
        output: OutputLimit { max_tokens: None, upper_bound_tokens: None },
    };
}

/// A request that has been checked against the limits and stripped of forbidden fields.
pub struct Inbound {
    /// The endpoint of the request.
    pub endpoint: Endpoint,
    /// The body as engines may receive it, except for `model`.
    pub body: JsonObject,
    /// The name that the client used.
    pub model_name: String,
    /// The prompts: one, or several for a batch, each with its raw JSON.
    pub prompts: Vec<Entry>,
    /// The options that the legs depend on.
    pub options: Options,
    /// The request's `cache_hit_threshold`, which has been removed from the body.
    pub threshold: Option<f64>,
    /// The cache salt that the engine receives; part of the namespace.
    pub cache_salt: Option<String>,
    /// The fields that were removed because engines must not receive them.
    pub removed: RemovedFields,
}

impl Inbound {
    /// Reads a body that has been checked already, and with its prompt if that is known. Prompts that
    /// are copied are charged to the allowance. `opened` returns the further fields that a model's
    /// engines may receive, by the model name in the request. Takes time in proportion to the length
    /// of the body, so long bodies must not be read on the reactor.
    ///
    /// # Errors
    /// A 400 that names the field at fault, or the error of the meter if there is no room.
    pub fn read<'a>(
        endpoint: Endpoint,
        mut body: JsonObject,
        prompt: Option<Prompt>,
        allowance: Allowance<'_, '_>,
        opened: impl FnOnce(&str) -> &'a [String],
    ) -> Result<Self, Error> {
        let Allowance { limits, work } = allowance;
        let model_name = body.get::<String>("model", "a string")?;
        let opened = opened(model_name.as_deref().unwrap_or_default());
        make_plain(&mut body);
        bounds::check(&body, limits)?;
        let removed = sanitise::sanitise(&mut body, endpoint, opened)?;
        let model_name = match (model_name, endpoint.names_model()) {
            (Some(name), _) => name,
            // Allowed, as at an engine: the router may serve one model only.
            (None, false) => String::new(),
            (None, true) => return Err(Error::invalid("model", "`model` is missing")),
        };
        let threshold = body.get::<f64>("cache_hit_threshold", "a number from 0 to 1")?;
        let threshold = threshold.map(check_threshold).transpose()?;
        body.remove("cache_hit_threshold");
        if !endpoint.generates() {
            auxiliary::check(&body, endpoint, limits)?;
            let cache_salt = body.get("cache_salt", "a string")?;
            let (prompt, options) = auxiliary_prompt(&body, endpoint, prompt)?;
            let prompts = vec![(prompt, None)];
            return Ok(Self {
                endpoint,
                body,
                model_name,
                prompts,
                options,
                threshold,
                cache_salt,
                removed,
            });
        }
        let stream = body.get::<bool>("stream", "true or false")?.unwrap_or(false);
        let include_usage = include_usage(&body, endpoint, stream)?;
        let response = endpoint == Endpoint::Responses;
        let response = response.then(|| responses::read(&mut body, limits)).transpose()?;
        let sampling = Sampling::of(&body, endpoint)?;
        let n = sampling.n()?;
        let prompts = match endpoint {
            Endpoint::Chat => chat_prompt(&body, Prompt::Chat, limits)?,
            Endpoint::Messages => chat_prompt(&body, Prompt::Messages, limits)?,
            Endpoint::Responses => response.into_iter().map(|prompt| (prompt, None)).collect(),
            Endpoint::Completions => match prompt {
                Some(prompt) if !embeds(&body) && !prompt.is_empty_list() => vec![(prompt, None)],
                _ => completion_prompts(&body, limits, work)?,
            },
            _ => token_prompt(&body, &sampling, work)?,
        };
        let output = sampling.output_limit()?;
        let options = Options {
            stream,
            include_usage,
            samples: sampling.samples()?,
            n,
            bypasses_cache: sampling.bypasses_cache()?,
            embeds: embeds(&body),
            engine_takes_turns: endpoint == Endpoint::Responses
                && responses::engine_takes_turns(&body),
            refusable: sampling.refusable(output)?,
            output,
        };
        Ok(Self {
            endpoint,
            model_name,
            options,
            threshold,
            cache_salt: body.get("cache_salt", "a string")?,
            removed,
            prompts,
            body,
        })
    }
}

/// Checks a cache hit threshold, which is a share of the prompt's tokens.
///
/// # Errors
/// A 400 if the value is outside [0, 1] or not a number.
pub fn check_threshold(value: f64) -> Result<f64, Error> {
    if (0.0..=1.0).contains(&value) {
        Ok(value)
    } else {
        Err(Error::invalid("cache_hit_threshold", "`cache_hit_threshold` must be from 0 to 1"))
    }
}

/// The prompt of a request of an auxiliary endpoint, and its options.
fn auxiliary_prompt(
    body: &JsonObject,
    endpoint: Endpoint,
    prompt: Option<Prompt>,
) -> Result<(Prompt, Options), Error> {
    match (endpoint.transcribes(), prompt) {
        (false, _) => Ok((Prompt::Opaque(endpoint.name()), Options::PLAIN)),
        (true, Some(recording)) => Ok((recording, transcription_options(body)?)),
        (true, None) => {
            let message = "the body must be a form (`multipart/form-data`)";
            Err(Error::new(ErrorKind::InvalidRequest, message))
        }
    }
}

/// The options of a form with a recording. Its engine cuts a long recording into pieces, and generates
/// the text of each by itself.
fn transcription_options(body: &JsonObject) -> Result<Options, Error> {
    let flag = |key| Ok::<_, Error>(body.get::<bool>(key, "true or false")?.unwrap_or(false));
    let stream = flag("stream")?;
    let include_usage = stream && flag("stream_include_usage")?;
    Ok(Options { stream, include_usage, engine_takes_turns: true, ..Options::PLAIN })
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// Whether the client wants usage in its stream. Streams with named events always have it, and
/// `stream_options` has another meaning there.
fn include_usage(body: &JsonObject, endpoint: Endpoint, stream: bool) -> Result<bool, Error> {
    if endpoint.dialect().names_events() {
        return Ok(stream);
    }
    if body.raw("stream_options").is_some_and(|raw| raw.starts_with('[')) {
        // Serde would accept a list for the struct as well.
        let message = "`stream_options` must be an object with booleans";
        return Err(Error::invalid("stream_options", message));
    }
    let stream_options: StreamOptions =
        body.get("stream_options", "an object with booleans")?.unwrap_or_default();
    if !stream && !matches!(body.raw("stream_options"), None | Some("null")) {
        let message = "`stream_options` needs `stream: true`";
        return Err(Error::invalid("stream_options", message));
    }
    Ok(stream && stream_options.include_usage.unwrap_or(false))
}

fn embeds(body: &JsonObject) -> bool {
    !matches!(body.raw("prompt_embeds"), None | Some("null"))
}

/// The token ids, unless the engine changes them (`features`, `truncate_prompt_tokens`).
fn token_prompt(
    body: &JsonObject,
    sampling: &Sampling<'_>,
    work: &mut Meter<'_>,
) -> Result<Vec<Entry>, Error> {
    let raw = body.raw("token_ids").filter(|raw| *raw != "null");
    let raw = raw.ok_or_else(|| Error::invalid("token_ids", "`token_ids` is missing"))?;
    let wrong = || Error::invalid("token_ids", "`token_ids` must be a list of token ids");
    let ids = list::token_ids(raw, work)?.ok_or_else(wrong)?;
    if ids.is_empty() {
        return Err(Error::invalid("token_ids", "`token_ids` is an empty list"));
    }
    let given = |raw: Option<&str>| !matches!(raw, None | Some("null"));
    let prompt = if given(body.raw("features")) {
        // Images and other features are part of the engine's block hashes.
        Prompt::Opaque("features")
    } else if given(sampling.raw("truncate_prompt_tokens")) {
        Prompt::Opaque("truncate_prompt_tokens")
    } else {
        Prompt::Tokens(ids)
    };
    Ok(vec![(prompt, None)])
}

fn chat_prompt(body: &JsonObject, prompt: Prompt, limits: &Limits) -> Result<Vec<Entry>, Error> {
    check_messages(body)?;
    check_length(body, "messages", limits)?;
    Ok(vec![(prompt, None)])
}

/// Checks that a list has at most `limits.messages_max` entries.
///
/// # Errors
/// A 400 if it has more.
pub(super) fn check_length(
    body: &JsonObject,
    key: &'static str,
    limits: &Limits,
) -> Result<(), Error> {
    let max = limits.messages_max;
    // A list has no more entries than commas, and one; counting commas is several times quicker
    // than counting entries.
    let may_exceed = |raw: &&str| {
        raw.len() / 2 > max && memchr::memchr_iter(b',', raw.as_bytes()).count() >= max
    };
    let long = body.raw(key).filter(|raw| raw.starts_with('[')).filter(may_exceed);
    match long.map(|raw| json::weigh(raw.as_bytes(), usize::MAX).entries) {
        Some(entries) if entries > max => {
            let message = format!("`{key}` has more than {max} entries (limits.messages_max)");
            Err(Error::invalid(key, message))
        }
        _ => Ok(()),
    }
}

/// Checks that `messages` is a list.
///
/// # Errors
/// A 400 if it is not, or is missing.
pub(super) fn check_messages(body: &JsonObject) -> Result<(), Error> {
    match body.raw("messages") {
        Some(raw) if raw.starts_with('[') => Ok(()),
        Some(_) => Err(Error::invalid("messages", "`messages` must be a list")),
        None => Err(Error::invalid("messages", "`messages` is missing")),
    }
}

/// Reads the prompt of a body that was checked before and has one prompt; `None` if the prompt is
/// of a form whose tokens only the engine knows.
///
/// # Errors
/// The error of `work` if there is no room.
pub fn prompt_again(
    endpoint: Endpoint,
    body: &JsonObject,
    work: &mut Meter<'_>,
) -> Result<Option<Prompt>, Error> {
    Ok(match endpoint {
        Endpoint::Chat => Some(Prompt::Chat),
        Endpoint::Messages => Some(Prompt::Messages),
        Endpoint::Responses => Some(Prompt::Responses),
        Endpoint::Completions => match parse_field(body.raw("prompt").unwrap_or("null"), work)? {
            Some(PromptField::Text(text)) => Some(Prompt::Text(text)),
            Some(PromptField::Tokens(ids)) => Some(Prompt::Tokens(ids)),
            Some(PromptField::Several) | None => None,
        },
        Endpoint::Generate => {
            let ids = list::token_ids(body.raw("token_ids").unwrap_or("null"), work)?;
            ids.map(Prompt::Tokens)
        }
        _ => None,
    })
}

enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
    Several,
}

fn completion_prompts(
    body: &JsonObject,
    limits: &Limits,
    work: &mut Meter<'_>,
) -> Result<Vec<Entry>, Error> {
    const EXPECTED: &str = "a string, a list of strings, a list of token ids or a list of those";
    if embeds(body) {
        if !matches!(body.raw("prompt"), None | Some("null")) {
            let message = "`prompt_embeds` cannot stand beside `prompt`";
            return Err(Error::invalid("prompt_embeds", message));
        }
        return Ok(vec![(Prompt::Opaque("prompt_embeds"), None)]);
    }
    let Some(raw) = body.raw("prompt") else {
        return Err(Error::invalid("prompt", "`prompt` is missing"));
    };
    let wrong = || Error::invalid("prompt", format!("`prompt` must be {EXPECTED}"));
    match parse_field(raw, work)?.ok_or_else(wrong)? {
        PromptField::Text(text) => return Ok(vec![(Prompt::Text(text), None)]),
        PromptField::Tokens(ids) if !ids.is_empty() => {
            return Ok(vec![(Prompt::Tokens(ids), None)]);
        }
        PromptField::Tokens(_) => {
            return Err(Error::invalid("prompt", "`prompt` is an empty list"));
        }
        PromptField::Several => {}
    }
    let max = limits.batch_prompts_max;
    let items: Vec<&RawValue> = list::entries(raw, max).map_err(|fault| match fault {
        ListError::Wrong => wrong(),
        ListError::TooLong => {
            let limit = "limits.batch_prompts_max";
            Error::invalid("prompt", format!("`prompt` has more than {max} entries ({limit})"))
        }
    })?;
    let entry = |item: &RawValue| {
        let piece = || Some(body.piece(item.get()));
        match parse_field(item.get(), work)?.ok_or_else(wrong)? {
            PromptField::Text(text) => Ok((Prompt::Text(text), piece())),
            PromptField::Tokens(ids) => Ok((Prompt::Tokens(ids), piece())),
            PromptField::Several => Err(wrong()),
        }
    };
    items.into_iter().map(entry).collect()
}

/// Parses a prompt by its first bytes. An untagged enum would buffer its input, which does not work
/// with raw values.
fn parse_field(raw: &str, work: &mut Meter<'_>) -> Result<Option<PromptField>, Error> {
    let inside = raw.strip_prefix('[').map(str::trim_start);
    Ok(match inside.and_then(|rest| rest.bytes().next()) {
        None => {
            work.take(raw.len())?;
            serde_json::from_str(raw).ok().map(PromptField::Text)
        }
        Some(b'0'..=b'9' | b']') => list::token_ids(raw, work)?.map(PromptField::Tokens),
        Some(_) => Some(PromptField::Several),
    })
}

/// A 404 for a name that no served model has.
pub fn unknown_model(name: &str, known: &[String]) -> Error {
    // The name comes from the client; it is cut to 128 characters to bound the reply.
    let shown: String = name.chars().take(128).collect();
    let message = format!("the model `{shown}` does not exist; known: {}", known.join(", "));
    Error::new(ErrorKind::UnknownModel, message).with_unknown_model(shown)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
