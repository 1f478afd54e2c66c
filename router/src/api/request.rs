//! What the router must know of a request, taken from its body.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::json::JsonObject;
use super::{bounds, sanitise, strict};
use crate::config::model::Limits;
use crate::error::{Error, Kind};

/// An OpenAI endpoint that reaches engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

impl Endpoint {
    /// The path, at the router as at the engine. Never built from a client's bytes.
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }

    /// The metrics' `endpoint` label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
        }
    }
}

/// One prompt of a request.
#[derive(Clone)]
pub enum Prompt {
    /// A chat; its pieces stay in the body.
    Chat,
    /// Text that the engine tokenises.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// A prompt that only the engine understands (embeddings, say).
    Opaque(&'static str),
}

/// A prompt, with its raw JSON where it is one of a batch.
pub type Entry = (Prompt, Option<Box<str>>);

/// How a request is to be answered, as far as its legs depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether the client wants a stream.
    pub stream: bool,
    /// Whether the client wants a final usage chunk in its stream.
    pub include_usage: bool,
    /// Samples per prompt (`n`, or `best_of` if larger).
    pub samples: u32,
    /// Choices that the reply has per prompt.
    pub n: u32,
    /// Why the engine computes the whole prompt, whatever it has cached.
    pub bypasses_cache: Option<&'static str>,
    /// Whether the prompts are embeddings.
    pub embeds: bool,
    /// Whether the answering engine is going to refuse it for what only that leg has.
    pub refusable: bool,
    /// Output tokens, if asked for; in chat, `max_completion_tokens` goes first.
    pub max_tokens: Option<u32>,
}

/// A request that was checked, bounded and stripped of forbidden fields.
pub struct Inbound {
    /// Where it came in.
    pub endpoint: Endpoint,
    /// The body as engines may see it, but for `model`.
    pub body: JsonObject,
    /// The name that the client used.
    pub model_name: String,
    /// The prompts: one, or several of a batch, each with its raw JSON.
    pub prompts: Vec<Entry>,
    /// How it is to be answered.
    pub options: Options,
    /// Its `cache_hit_threshold`; no longer in the body.
    pub threshold: Option<f64>,
    /// The salt that the engine is sent; part of the namespace.
    pub cache_salt: Option<String>,
    /// Forbidden fields that were removed.
    pub removed_fields: usize,
}

impl Inbound {
    /// Parses a body. Costs time in proportion to its length: large ones belong
    /// off the reactor.
    ///
    /// # Errors
    /// A 400 that names what is wrong.
    pub fn parse(endpoint: Endpoint, text: bytes::Bytes, limits: &Limits) -> Result<Self, Error> {
        strict::check(&text)?;
        let mut body = JsonObject::parse(text)?;
        let removed_fields = sanitise::sanitise(&mut body)?;
        bounds::check(&body, limits)?;
        let model_name = body
            .get::<String>("model", "a string")?
            .ok_or_else(|| Error::invalid("model", "`model` is missing"))?;
        let threshold = body.get::<f64>("cache_hit_threshold", "a number from 0 to 1")?;
        let threshold = threshold.map(check_threshold).transpose()?;
        body.remove("cache_hit_threshold");
        let stream = body.get::<bool>("stream", "true or false")?.unwrap_or(false);
        if body.raw("stream_options").is_some_and(|raw| raw.starts_with('[')) {
            // A struct would be read from a list as well.
            let message = "`stream_options` must be an object with booleans";
            return Err(Error::invalid("stream_options", message));
        }
        let stream_options: StreamOptions =
            body.get("stream_options", "an object with booleans")?.unwrap_or_default();
        if !stream && !matches!(body.raw("stream_options"), None | Some("null")) {
            let message = "`stream_options` needs `stream: true`";
            return Err(Error::invalid("stream_options", message));
        }
        let n = body.get::<u32>("n", "an integer")?.unwrap_or(1);
        let best_of = body.get::<u32>("best_of", "an integer")?.unwrap_or(1);
        let beams = flag(&body, "use_beam_search")?;
        let prompts = match endpoint {
            Endpoint::Chat => chat_prompt(&body)?,
            Endpoint::Completions => completion_prompts(&body, limits)?,
        };
        let options = Options {
            stream,
            include_usage: stream && stream_options.include_usage.unwrap_or(false),
            samples: n.max(best_of).max(if beams { 2 } else { 1 }),
            n,
            bypasses_cache: bypasses_cache(&body)?,
            embeds: embeds(&body),
            refusable: refusable(&body, endpoint)?,
            max_tokens: max_tokens(&body, endpoint)?,
        };
        Ok(Self {
            endpoint,
            model_name,
            options,
            threshold,
            cache_salt: body.get("cache_salt", "a string")?,
            removed_fields,
            prompts,
            body,
        })
    }
}

/// A threshold is a share of the prompt's tokens.
///
/// # Errors
/// A 400 outside [0, 1], and for what is not a number.
pub fn check_threshold(value: f64) -> Result<f64, Error> {
    if (0.0..=1.0).contains(&value) {
        Ok(value)
    } else {
        Err(Error::invalid("cache_hit_threshold", "`cache_hit_threshold` must be from 0 to 1"))
    }
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

fn max_tokens(body: &JsonObject, endpoint: Endpoint) -> Result<Option<u32>, Error> {
    let newer = match endpoint {
        Endpoint::Chat => body.get("max_completion_tokens", "an integer")?,
        Endpoint::Completions => None,
    };
    Ok(newer.or(body.get("max_tokens", "an integer")?))
}

fn flag(body: &JsonObject, key: &'static str) -> Result<bool, Error> {
    Ok(body.get::<bool>(key, "true or false")?.unwrap_or(false))
}

fn embeds(body: &JsonObject) -> bool {
    !matches!(body.raw("prompt_embeds"), None | Some("null"))
}

/// What vLLM checks in members that a prefill leg does not carry: `max_tokens` from
/// 1, `min_tokens` up to it (completions end after 16 where nothing is said), no
/// empty stop text, and stop texts only where there is text.
fn refusable(body: &JsonObject, endpoint: Endpoint) -> Result<bool, Error> {
    const COMPLETION_TOKENS: u32 = 16;
    let said = max_tokens(body, endpoint)?;
    let default = (endpoint == Endpoint::Completions).then_some(COMPLETION_TOKENS);
    let min_tokens = body.get::<u32>("min_tokens", "an integer")?.unwrap_or(0);
    let stops = match body.raw("stop") {
        None | Some("null") => Vec::new(),
        Some(raw) if raw.starts_with('[') => {
            body.get::<Vec<String>>("stop", "a string or a list of strings")?.unwrap_or_default()
        }
        Some(_) => body.get::<String>("stop", "a string or a list")?.into_iter().collect(),
    };
    let no_text = body.raw("detokenize") == Some("false");
    Ok(said == Some(0)
        || said.or(default).is_some_and(|max| min_tokens > max)
        || stops.iter().any(String::is_empty)
        || (no_text && !stops.is_empty()))
}

/// vLLM reads no prefix cache for a request that wants log-probabilities of its
/// prompt: every token of it is computed.
fn bypasses_cache(body: &JsonObject) -> Result<Option<&'static str>, Error> {
    let asks = |key| !matches!(body.raw(key), None | Some("null" | "false"));
    Ok(if asks("prompt_logprobs") {
        Some("prompt_logprobs")
    } else if flag(body, "echo")? && asks("logprobs") {
        Some("echo_logprobs")
    } else {
        None
    })
}

fn chat_prompt(body: &JsonObject) -> Result<Vec<Entry>, Error> {
    match body.raw("messages") {
        Some(raw) if raw.starts_with('[') => Ok(vec![(Prompt::Chat, None)]),
        Some(_) => Err(Error::invalid("messages", "`messages` must be a list")),
        None => Err(Error::invalid("messages", "`messages` is missing")),
    }
}

enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
    Several(Vec<Box<RawValue>>),
}

fn completion_prompts(body: &JsonObject, limits: &Limits) -> Result<Vec<Entry>, Error> {
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
    let field = parse_field(raw)
        .ok_or_else(|| Error::invalid("prompt", format!("`prompt` must be {EXPECTED}")))?;
    let items = match field {
        PromptField::Text(text) => return Ok(vec![(Prompt::Text(text), None)]),
        PromptField::Tokens(ids) if !ids.is_empty() => {
            return Ok(vec![(Prompt::Tokens(ids), None)]);
        }
        PromptField::Tokens(_) => Vec::new(),
        PromptField::Several(items) => items,
    };
    if items.is_empty() {
        return Err(Error::invalid("prompt", "`prompt` is an empty list"));
    }
    if items.len() > limits.batch_prompts_max {
        let max = limits.batch_prompts_max;
        return Err(Error::invalid(
            "prompt",
            format!(
                "`prompt` has {} entries; at most {max} are allowed (limits.batch_prompts_max)",
                items.len()
            ),
        ));
    }
    items
        .into_iter()
        .map(|item| match parse_field(item.get()) {
            Some(PromptField::Text(text)) => Ok((Prompt::Text(text), Some(item.get().into()))),
            Some(PromptField::Tokens(ids)) => Ok((Prompt::Tokens(ids), Some(item.get().into()))),
            _ => Err(Error::invalid("prompt", format!("`prompt` must be {EXPECTED}"))),
        })
        .collect()
}

/// Untagged enums buffer their input, which raw values do not survive: the first
/// bytes decide what to parse instead.
fn parse_field(raw: &str) -> Option<PromptField> {
    let inside = raw.strip_prefix('[').map(str::trim_start);
    match inside.and_then(|rest| rest.bytes().next()) {
        None => serde_json::from_str(raw).ok().map(PromptField::Text),
        Some(b'0'..=b'9' | b']') => serde_json::from_str(raw).ok().map(PromptField::Tokens),
        Some(_) => serde_json::from_str(raw).ok().map(PromptField::Several),
    }
}

/// A 404 for a name that no model has.
pub fn unknown_model(name: &str, known: &[String]) -> Error {
    // A client's name is text of its own; it is cut so that it cannot flood a reply.
    let shown: String = name.chars().take(128).collect();
    Error::new(
        Kind::UnknownModel,
        format!("the model `{shown}` does not exist; known: {}", known.join(", ")),
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(endpoint: Endpoint, text: &str) -> Result<Inbound, Error> {
        Inbound::parse(endpoint, bytes::Bytes::copy_from_slice(text.as_bytes()), &Limits::default())
    }

    #[test]
    fn prompts_of_every_shape_are_told_apart() {
        let shapes = [
            (r#""text""#, 1, false),
            ("[1,2,3]", 1, false),
            (r#"["a","b"]"#, 2, true),
            ("[[1,2],[3]]", 2, true),
            (r#"["a"]"#, 1, true),
        ];
        for (prompt, count, split) in shapes {
            let text = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
            let inbound = parse(Endpoint::Completions, &text).unwrap();
            assert_eq!(inbound.prompts.len(), count, "{prompt}");
            assert_eq!(inbound.prompts[0].1.is_some(), split, "{prompt}");
        }
        for prompt in
            ["[]", "[1,\"a\"]", "[[1],2]", "{}", "1", "null", "[-1]", "[1.5]", "[[\"a\"]]"]
        {
            let text = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
            let error = parse(Endpoint::Completions, &text).err().unwrap();
            assert_eq!(error.status(), 400, "{prompt}");
        }
    }

    #[test]
    fn a_threshold_is_checked_and_taken_out_of_the_body() {
        let body = |t: &str| format!(r#"{{"model":"m","prompt":"x","cache_hit_threshold":{t}}}"#);
        let inbound = parse(Endpoint::Completions, &body("0.33")).unwrap();
        assert_eq!(inbound.body.raw("cache_hit_threshold"), None);
        assert_eq!(inbound.threshold, Some(0.33));
        assert_eq!(parse(Endpoint::Completions, &body("null")).unwrap().threshold, None);
        for bad in ["1.01", "-0.1", "\"0.5\"", "true", "[0.5]"] {
            assert_eq!(
                parse(Endpoint::Completions, &body(bad)).err().unwrap().status(),
                400,
                "{bad}"
            );
        }
        assert!(check_threshold(f64::NAN).is_err());
    }

    #[test]
    fn what_only_the_answering_leg_carries_is_checked_before_a_prefill() {
        let refusable = |endpoint, members: &str| {
            let text = format!(r#"{{"model":"m","prompt":"x","messages":[],{members}}}"#);
            parse(endpoint, &text).unwrap().options.refusable
        };
        for members in [
            r#""max_tokens":0"#,
            r#""min_tokens":17"#,
            r#""min_tokens":5,"max_tokens":4"#,
            r#""stop":["a",""]"#,
            r#""stop":"""#,
            r#""stop":"a","detokenize":false"#,
        ] {
            assert!(refusable(Endpoint::Completions, members), "{members}");
        }
        for members in [
            r#""min_tokens":4,"max_tokens":4"#,
            r#""stop":["a"]"#,
            r#""stop":null,"detokenize":false"#,
            r#""min_tokens":16"#,
        ] {
            assert!(!refusable(Endpoint::Completions, members), "{members}");
        }
        assert!(!refusable(Endpoint::Chat, r#""min_tokens":17"#));
        assert!(refusable(Endpoint::Chat, r#""min_tokens":5,"max_completion_tokens":4"#));
    }

    #[test]
    fn wrong_types_are_named() {
        for (text, param) in [
            (r#"{"prompt":"x"}"#, "model"),
            (r#"{"model":3,"prompt":"x"}"#, "model"),
            (r#"{"model":"m","prompt":"x","stream":"yes"}"#, "stream"),
            (
                r#"{"model":"m","prompt":"x","stream":true,"stream_options":[true]}"#,
                "stream_options",
            ),
            (r#"{"model":"m","prompt":"x","stream_options":{}}"#, "stream_options"),
            (r#"{"model":"m","prompt":"x","cache_salt":5}"#, "cache_salt"),
            (r#"{"model":"m","prompt":"x","use_beam_search":1}"#, "use_beam_search"),
            (r#"{"model":"m","prompt":"x","prompt_embeds":[]}"#, "prompt_embeds"),
        ] {
            let error = parse(Endpoint::Completions, text).err().unwrap();
            assert!(error.to_openai().contains(&format!("\"param\":\"{param}\"")), "{text}");
        }
        assert!(parse(Endpoint::Chat, r#"{"model":"m","messages":"hi"}"#).is_err());
    }
}
