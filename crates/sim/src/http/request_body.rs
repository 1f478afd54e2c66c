//! Parses the bodies of requests to a simulated engine.

use http::{HeaderMap, StatusCode};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::endpoint::Endpoint;
use super::named::chat_of;
use super::remote::{is_deadly, read_of, read_remote};
use crate::adapters::Adapters;
use crate::cache::{Media, Namespace};
use crate::config::{KvConnector, PromptDialect, SimConfig};
use crate::engine::request::{RemoteKv, SampleParams};
use crate::error::ApiError;
use crate::tokenizer;

/// A parsed inference request.
#[derive(Debug)]
pub(crate) struct InferenceRequest {
    pub(crate) model: String,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) continuous_usage: bool,
    pub(crate) return_token_ids: bool,
    pub(crate) prompts: Vec<Vec<u32>>,
    /// One per choice: first all samples of the first prompt, then of the second.
    pub(crate) samples: Vec<SampleParams>,
    /// Whether the request asks for remote KV without saying whose: this kills the real engine.
    pub(crate) deadly: bool,
}

/// Maximum number of choices of one request.
const MAX_CHOICES: usize = 1024;

/// Parses a request. `external_id` identifies it in hand-offs.
pub(crate) fn read(
    endpoint: Endpoint,
    body: &Value,
    config: &SimConfig,
    adapters: &Adapters,
    external_id: &str,
) -> Result<InferenceRequest, ApiError> {
    let chat = endpoint.names_events().then(|| chat_of(endpoint, body, config)).transpose()?;
    let body = chat.as_ref().unwrap_or(body);
    let (model, mut namespace) = read_model(body, config, adapters)?;
    let prompts = match endpoint {
        Endpoint::Chat | Endpoint::Responses | Endpoint::Messages => {
            let (prompt, media) = chat_prompt(body, config.dialect)?;
            namespace.media = media;
            vec![prompt]
        }
        Endpoint::Completions => completion_prompts(&body["prompt"], config.dialect)?,
        Endpoint::Generate => vec![generate_prompt(body)?],
    };
    let sampling = match endpoint {
        Endpoint::Generate => &body["sampling_params"],
        _ => body,
    };
    let count = read_count(sampling, "n")?.unwrap_or(1);
    if count == 0 || count * prompts.len() > MAX_CHOICES {
        return Err(ApiError::bad_request("n", format!("n must be 1 to {MAX_CHOICES}.")));
    }
    let deadly = is_deadly(body, config);
    let stream = body["stream"] == true;
    let mut samples = Vec::with_capacity(count * prompts.len());
    for (index, prompt) in prompts.iter().enumerate() {
        let limits = Limits::read(endpoint, sampling, prompt.len(), config)?;
        let threshold = read_threshold(body, config)?;
        for sample in 0..count {
            let name = match endpoint {
                Endpoint::Completions => format!("{external_id}-{index}-{}", random_hex(4)),
                _ => format!("{external_id}-{}", random_hex(4)),
            };
            let remote = match deadly {
                true => RemoteKv::None,
                false => read_remote(body, config, name.clone(), samples.len())?,
            };
            let reads = read_of(body, config)?;
            let stages = matches!(remote, RemoteKv::Stage { .. });
            samples.push(SampleParams {
                prompt: prompt.clone(),
                namespace: namespace.clone(),
                variation: read_variation(sampling, sample)?,
                max_tokens: limits.max_tokens,
                min_tokens: limits.min_tokens,
                ignore_eos: sampling["ignore_eos"] == true,
                stops: limits.stops.clone(),
                threshold,
                needed_blocks: 0,
                preempted: false,
                remote,
                reads,
                name,
                first_token_only: stages && config.connector == KvConnector::Sglang,
            });
        }
    }
    Ok(InferenceRequest {
        model,
        stream,
        include_usage: stream && body["stream_options"]["include_usage"] == true,
        continuous_usage: stream && body["stream_options"]["continuous_usage_stats"] == true,
        return_token_ids: endpoint == Endpoint::Generate || body["return_token_ids"] == true,
        prompts,
        samples,
        deadly,
    })
}

/// The number of blocks that the header `x-splitrail-gate` requires:
/// `<namespace>:<rank>:<blocks>:<hash>`; 0 without it. With several ranks, it must name the rank to
/// which the request is pinned.
pub(crate) fn gate_header(headers: &HeaderMap, config: &SimConfig) -> Result<usize, ApiError> {
    let Some(value) = headers.get("x-splitrail-gate") else { return Ok(0) };
    let wrong = || ApiError::bad_request("x-splitrail-gate", "not a gate header");
    let parts: Vec<&str> = value.to_str().map_err(|_| wrong())?.split(':').collect();
    let [namespace, rank, blocks, hash] = parts[..] else { return Err(wrong()) };
    let hex = |part: &str| u64::from_str_radix(part, 16).is_ok();
    let pinned = headers.get("x-data-parallel-rank").and_then(|rank| rank.to_str().ok());
    let is_right = config.data_parallel == 1 || pinned == Some(rank);
    match (hex(namespace) && hex(hash) && is_right, rank.parse::<u32>(), blocks.parse()) {
        (true, Ok(_), Ok(blocks)) => Ok(blocks),
        _ => Err(wrong()),
    }
}

/// Random lower-case hex digits of this many bytes.
pub(crate) fn random_hex(bytes: usize) -> String {
    (0..bytes).map(|_| format!("{:02x}", rand::random::<u8>())).collect()
}

/// The model's name, and the namespace in the cache as far as it depends on model, adapter and salt.
pub(crate) fn read_model(
    body: &Value,
    config: &SimConfig,
    adapters: &Adapters,
) -> Result<(String, Namespace), ApiError> {
    let salt = match &body["cache_salt"] {
        Value::Null => None,
        Value::String(salt) if !salt.is_empty() => Some(salt.clone()),
        _ => {
            return Err(ApiError::bad_request(
                "cache_salt",
                "cache_salt must be a non-empty string.",
            ));
        }
    };
    let name = match &body["model"] {
        Value::Null => config.model.as_str(),
        Value::String(name) => name,
        _ => return Err(ApiError::bad_request("model", "model must be a string.")),
    };
    let mut namespace = Namespace { salt, ..Namespace::default() };
    if name != config.model {
        let Some(adapter) = adapters.loaded().get(name).cloned() else {
            let message = format!("The model `{name}` does not exist.");
            let error = ApiError::new(StatusCode::NOT_FOUND, message);
            return Err(ApiError { param: Some("model"), ..error });
        };
        namespace.adapter = Some(name.to_owned());
        namespace.adapter_id = Some(adapter.id);
        namespace.adapter_path = Some(adapter.path);
    }
    Ok((name.to_owned(), namespace))
}

/// The tokens of a chat, and the positions of its images in them.
pub(crate) fn chat_prompt(
    body: &Value,
    dialect: PromptDialect,
) -> Result<(Vec<u32>, Vec<Media>), ApiError> {
    let text = tokenizer::render_chat(&body["messages"])
        .map_err(|what| ApiError::bad_request("messages", what))?;
    let text = match dialect {
        PromptDialect::OtherTemplate => text.replace("<|im_start|>", "<|im_start|>role "),
        _ => text,
    };
    Ok(with_images(&text, &tokenizer::images(&body["messages"]), dialect))
}

/// The tokens of a text in which each image replaces its placeholder. Their number depends on the
/// image, as for images of several sizes.
fn with_images(text: &str, urls: &[&str], dialect: PromptDialect) -> (Vec<u32>, Vec<Media>) {
    let mut pieces = text.splitn(urls.len() + 1, tokenizer::IMAGE);
    let mut tokens = text_prompt(pieces.next().unwrap_or_default(), dialect);
    let mut media = Vec::new();
    for (url, piece) in urls.iter().zip(pieces) {
        let from = tokens.len();
        let identifier = format!("{:016x}", xxh3_64_with_seed(url.as_bytes(), 0));
        tokens.extend(std::iter::repeat_n(tokenizer::IMAGE_TOKEN, 24 + url.len() % 16));
        media.push(Media { identifier, from, to: tokens.len() });
        tokens.extend(plain_tokens(piece, dialect));
    }
    (tokens, media)
}

/// Tokens of a text.
pub(crate) fn text_prompt(text: &str, dialect: PromptDialect) -> Vec<u32> {
    let mut ids = plain_tokens(text, dialect);
    if dialect == PromptDialect::Bos {
        ids.insert(0, 0);
    }
    ids
}

/// The same without an initial special token.
fn plain_tokens(text: &str, dialect: PromptDialect) -> Vec<u32> {
    let ids = tokenizer::encode(text);
    match dialect {
        PromptDialect::OtherVocabulary => ids.into_iter().map(other_token).collect(),
        _ => ids,
    }
}

/// The token of the same byte in another vocabulary.
fn other_token(id: u32) -> u32 {
    let first = tokenizer::FIRST_BYTE_TOKEN;
    if id < first { id } else { first + (id - first) % 256 / 2 + 128 * (id % 2) }
}

/// The prompt of `/inference/v1/generate`, which accepts no text.
fn generate_prompt(body: &Value) -> Result<Vec<u32>, ApiError> {
    if !body["sampling_params"].is_object() {
        let message = "sampling_params is missing or no object.";
        return Err(ApiError::bad_request("body.sampling_params", message));
    }
    let ids = body["token_ids"].as_array().and_then(|ids| {
        ids.iter().map(|id| id.as_u64()?.try_into().ok()).collect::<Option<Vec<u32>>>()
    });
    let message = "token_ids must be a list of token ids.";
    ids.ok_or_else(|| ApiError::bad_request("body.token_ids", message))
}

/// What distinguishes a sample: as in vLLM, sample `i` of a request with a seed equals that of a
/// request with `seed + i`. At temperature 0 all samples are equal.
fn read_variation(sampling: &Value, sample: usize) -> Result<u64, ApiError> {
    if sampling["temperature"].as_f64() == Some(0.0) {
        return Ok(0);
    }
    let seed = match &sampling["seed"] {
        Value::Null => 0,
        seed => {
            let wrong = || ApiError::bad_request("seed", "seed must be a whole number.");
            seed.as_i64().ok_or_else(wrong)?
        }
    };
    Ok((seed as u64).wrapping_add(sample as u64))
}

/// The tokens of a completion's prompts: text, ids, or a list of either.
pub(crate) fn completion_prompts(
    prompt: &Value,
    dialect: PromptDialect,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let wrong = || {
        let message = "prompt must be a string, a list of strings, token ids or a list of those.";
        ApiError::bad_request("prompt", message)
    };
    let one = |prompt: &Value| match prompt {
        Value::String(text) => Some(text_prompt(text, dialect)),
        Value::Array(ids) => ids.iter().map(|id| id.as_u64()?.try_into().ok()).collect(),
        _ => None,
    };
    let prompts = match prompt {
        Value::Array(list) if list.iter().any(|item| !item.is_u64()) => {
            list.iter().map(one).collect::<Option<Vec<_>>>()
        }
        single => one(single).map(|prompt| vec![prompt]),
    };
    prompts.filter(|prompts| !prompts.is_empty()).ok_or_else(wrong)
}

/// Bounds of one reply.
struct Limits {
    max_tokens: usize,
    min_tokens: usize,
    stops: Vec<String>,
}

impl Limits {
    fn read(
        endpoint: Endpoint,
        body: &Value,
        prompt_tokens: usize,
        config: &SimConfig,
    ) -> Result<Self, ApiError> {
        let limit = config.sequence_limit_tokens();
        if prompt_tokens == 0 {
            return Err(ApiError::bad_request("prompt", "The prompt has no tokens."));
        }
        if prompt_tokens >= limit {
            let message = format!(
                "This model's maximum context length is {limit} tokens, but the prompt alone has \
                 {prompt_tokens}."
            );
            return Err(ApiError::bad_request("input_tokens", message));
        }
        let asked = match read_count(body, "max_completion_tokens")? {
            Some(count) => Some(count),
            None => read_count(body, "max_tokens")?,
        };
        let room = limit - prompt_tokens;
        let default = match endpoint {
            Endpoint::Completions | Endpoint::Generate => 16,
            _ => config.default_max_tokens,
        };
        let max_tokens = asked.unwrap_or(default.min(room));
        if max_tokens == 0 {
            return Err(ApiError::bad_request("max_tokens", "max_tokens must be at least 1."));
        }
        if max_tokens > room {
            let message = format!(
                "This model's maximum context length is {limit} tokens; {prompt_tokens} of the prompt \
                 and {max_tokens} of the reply are more."
            );
            return Err(ApiError::bad_request("max_tokens", message));
        }
        let min_tokens = read_count(body, "min_tokens")?.unwrap_or(0);
        if min_tokens > max_tokens {
            return Err(ApiError::bad_request("min_tokens", "min_tokens is above max_tokens."));
        }
        Ok(Self { max_tokens, min_tokens, stops: read_stops(body)? })
    }
}

fn read_threshold(body: &Value, config: &SimConfig) -> Result<Option<f64>, ApiError> {
    let given = &body["cache_hit_threshold"];
    if !config.honour_threshold || given.is_null() {
        return Ok(None);
    }
    match given.as_f64() {
        Some(threshold) if (0.0..=1.0).contains(&threshold) => Ok(Some(threshold)),
        _ => Err(ApiError::bad_request(
            "cache_hit_threshold",
            "cache_hit_threshold must be a number in [0, 1].",
        )),
    }
}

fn read_stops(body: &Value) -> Result<Vec<String>, ApiError> {
    let wrong = || ApiError::bad_request("stop", "stop must be a string or a list of strings.");
    match &body["stop"] {
        Value::Null => Ok(Vec::new()),
        Value::String(stop) if !stop.is_empty() => Ok(vec![stop.clone()]),
        Value::Array(stops) => stops
            .iter()
            .map(|stop| stop.as_str().filter(|stop| !stop.is_empty()).map(str::to_owned))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(wrong),
        _ => Err(wrong()),
    }
}

fn read_count(body: &Value, field: &'static str) -> Result<Option<usize>, ApiError> {
    match &body[field] {
        Value::Null => Ok(None),
        value => match value.as_u64() {
            Some(count) => Ok(Some(count as usize)),
            None => Err(ApiError::bad_request(field, format!("{field} must be a whole number."))),
        },
    }
}
