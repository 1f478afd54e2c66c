//! From a body to prompts that can be placed: parsed, tokenised, hashed.
//!
//! Pure computation, in proportion to the body. Small bodies are done where they
//! stand; larger ones go to the blocking pool, at most one per core, so that the
//! reactor never waits for a prompt. Promise 10.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value};
use splitrail_engine::json::scan;
use splitrail_kv::{BlockHash, Chain, Namespace};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::api::request::{Options, Prompt, unknown_model};
use crate::api::sampling::edit_sampling;
use crate::api::sanitise::Removed;
use crate::api::{Endpoint, Inbound, JsonObject, json, strict};
use crate::config::model::{Connector, Flow, Limits};
use crate::core::{Core, Named, Served, Serving, Tokenizing, unix_ms};
use crate::error::{Error, Kind};
use crate::prompt::{ChatRequestView, Extent, PromptError, PromptModel, messages, responses};
use crate::telemetry::metrics::Metrics;

/// Bodies up to this length are prepared on the reactor: under a millisecond with
/// the slowest exact tokenizer.
const INLINE_MAX_BYTES: usize = 4096;

/// The same where every tokenizer is fast, or there is none, if the body is of words.
const FAST_INLINE_MAX_BYTES: usize = 96 << 10;

/// Bodies from this length on are long: some tens of milliseconds, and more.
const LONG_BYTES: usize = 256 << 10;

/// Why only a prompt's first blocks are known.
pub const MEDIA_FOLLOWS: &str = "media after the known blocks";

/// A prompt of unknown tokens weighs this many bytes per token in the load view.
const BYTES_PER_TOKEN: usize = 4;

/// A request that is ready to be placed.
pub struct Prepared {
    /// The model.
    pub served: Arc<Served>,
    /// Where the request came in.
    pub endpoint: Endpoint,
    /// How it is to be answered.
    pub options: Options,
    /// The share of its prompts that its body wants cached.
    pub threshold: Option<f64>,
    /// One unit per prompt, or per sample where `samples_apart` is more than 1.
    pub units: Vec<Unit>,
    /// Units per prompt.
    pub samples_apart: u32,
    /// The fields of the body that engines are not sent.
    pub removed: Removed,
}

impl Prepared {
    /// Counts what was found in a request that is going to be served.
    pub fn count(&self, metrics: &Metrics) {
        let name = self.served.name();
        for (reason, count) in self.removed.counts().filter(|(_, count)| *count > 0) {
            let labels = [name, reason.name()];
            metrics.removed_fields.with_label_values(&labels).inc_by(count.into());
        }
        if !self.endpoint.generates() {
            return;
        }
        let prompts = self.units.iter().filter(|unit| !unit.further_sample);
        for reason in prompts.filter_map(|unit| unit.unknown) {
            self.served.series.unknown(metrics, name, reason, || label(reason));
        }
    }
}

/// One prompt of a request, with the body that an engine gets for it.
#[derive(Clone)]
pub struct Unit {
    /// The prompt's place in its batch.
    pub prompt_index: usize,
    /// Whether it is a further sample of the prompt before it.
    pub further_sample: bool,
    /// The body, without the fields of a leg.
    pub body: JsonObject,
    /// The prompt's length, if its tokens are known.
    pub prompt_tokens: Option<u32>,
    /// Why they are not, or not all of them: [`MEDIA_FOLLOWS`].
    pub unknown: Option<&'static str>,
    /// What its first block's hash follows upon.
    pub namespace: BlockHash,
    /// Hashes of its full blocks, as far as its tokens are known.
    pub hashes: Vec<BlockHash>,
    /// The prompt's weight in the load view, in tokens.
    pub weight_tokens: u64,
}

/// A request's body, as its door has it.
pub enum Payload {
    /// An OpenAI body.
    Json(Bytes),
    /// What makes an OpenAI body of about so many bytes, which needs no check.
    Made {
        /// Its length, about.
        bytes: usize,
        /// As [`is_harmless`] has it.
        is_harmless: bool,
        /// Makes it.
        make: Box<dyn FnOnce() -> Result<Made, Error> + Send>,
    },
}

/// A body that the router wrote.
pub struct Made {
    /// The body.
    pub body: JsonObject,
    /// Its one prompt, where that is not read from the body.
    pub prompt: Option<Prompt>,
}

/// Whether text of so many parts is of the length and kind that a fast tokenizer has done in
/// less than a millisecond: of words, with nothing that goes on for long, and not of many small
/// parts (a chat's messages), each of which costs the template its time.
pub fn is_harmless(text: &[u8], parts: usize) -> bool {
    parts.saturating_mul(SAMPLE) <= text.len() && is_of_words(text, APART)
}

/// Whether text is short enough, and of words as far as samples tell that are so far apart.
fn is_of_words(text: &[u8], apart: usize) -> bool {
    let words = |part: &[u8]| part.contains(&b' ') && part.iter().any(u8::is_ascii_alphabetic);
    text.len() <= FAST_INLINE_MAX_BYTES && samples(text, apart).all(words)
}

const SAMPLE: usize = 160;
const APART: usize = 1024;
/// The same of a body that is read and not tokenised. Text costs next to nothing there, a list of
/// small values did a millisecond or more for 90 KB.
const FAR_APART: usize = 4096;

fn samples(text: &[u8], apart: usize) -> impl Iterator<Item = &[u8]> {
    text.chunks_exact(apart).map(|part| &part[..SAMPLE])
}

impl Payload {
    fn bytes(&self) -> usize {
        match self {
            Self::Json(text) => text.len(),
            Self::Made { bytes, .. } => *bytes,
        }
    }

    /// Whether it may be prepared where it stands: it holds nobody up.
    fn is_short(&self, tokenizing: Tokenizing) -> bool {
        if self.bytes() <= INLINE_MAX_BYTES {
            return true;
        }
        match (self, tokenizing) {
            (_, Tokenizing::Slow) => false,
            (Self::Made { is_harmless, .. }, _) => *is_harmless,
            (Self::Json(text), Tokenizing::None) => is_of_words(text, FAR_APART),
            (Self::Json(text), Tokenizing::Fast) => {
                // Nearly every object in a body is a part.
                let count = |part: &[u8]| memchr::memchr_iter(b'{', part).count();
                let objects = || samples(text, APART).map(count).sum::<usize>();
                is_harmless(text, 0) && objects() <= samples(text, APART).count()
            }
        }
    }

    fn read(self, endpoint: Endpoint, serving: &Serving) -> Result<Inbound, Error> {
        let (body, prompt) = match self {
            Self::Json(text) => (JsonObject::parse_strictly(text)?, None),
            Self::Made { make, .. } => {
                let Made { body, prompt } = make()?;
                (body, prompt)
            }
        };
        let opened = |name: &str| -> &[String] {
            let named = named(serving, endpoint, name);
            named.map_or(&[], |named| &serving.models[named.model].config.pass_unknown)
        };
        Inbound::read(endpoint, body, prompt, &serving.limits, opened)
    }
}

/// Prepares a body.
///
/// # Errors
/// The client's mistakes, as 400 or 404.
pub async fn prepare(
    core: &Arc<Core>,
    endpoint: Endpoint,
    payload: Payload,
) -> Result<Prepared, Error> {
    if payload.is_short(core.serving().tokenizing) {
        return compute(core, endpoint, payload);
    }
    // The permits go with the work: a client that leaves does not free a core that
    // is still at work for it.
    let long = match payload.bytes() > LONG_BYTES {
        true => Some(room(&core.preparing_long).await?),
        false => None,
    };
    let permits = (room(&core.preparing).await?, long);
    let core = Arc::clone(core);
    let work = move || {
        let _permits = permits;
        compute(&core, endpoint, payload)
    };
    let defect = |_| Error::new(Kind::Internal, "a request could not be prepared");
    tokio::task::spawn_blocking(work).await.map_err(defect)?
}

async fn room(semaphore: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Error> {
    let permit = Arc::clone(semaphore).acquire_owned().await;
    permit.map_err(|_| Error::new(Kind::Internal, "the router is stopping"))
}

fn compute(core: &Core, endpoint: Endpoint, payload: Payload) -> Result<Prepared, Error> {
    let serving = core.serving();
    let mut inbound = payload.read(endpoint, &serving)?;
    let Named { model, adapter } = named(&serving, endpoint, &inbound.model_name)?;
    let served = Arc::clone(&serving.models[model]);
    // Engines know the model under its own name, and an adapter under its.
    let engine_name = adapter.as_deref().unwrap_or(served.name());
    inbound.body.set("model", json::quote(engine_name));
    check_connector(&served, endpoint)?;
    check_salt(&served, &inbound)?;
    let samples_apart = samples_apart(&served, &mut inbound, &serving.limits)?;
    let namespace = Namespace {
        salt: inbound.cache_salt.as_deref(),
        model: served.name(),
        adapter: adapter.as_deref(),
        block_size: served.pool.block_size(),
    };
    let mut units = Vec::with_capacity(inbound.prompts.len());
    for (prompt_index, (prompt, raw)) in
        std::mem::take(&mut inbound.prompts).into_iter().enumerate()
    {
        let mut body = inbound.body.clone();
        if let Some(raw) = raw {
            body.set("prompt", raw);
        }
        let weight = match endpoint.computes() {
            true => {
                let members = endpoint.prompt_members().iter();
                members.map(|member| body.raw(member).map_or(0, str::len)).sum()
            }
            false => 0,
        };
        let mut chain = Chain::new(&namespace, core.hash_seed);
        let mut unit = Unit {
            prompt_index,
            further_sample: false,
            prompt_tokens: None,
            unknown: None,
            namespace: chain.root(),
            hashes: Vec::new(),
            weight_tokens: (weight / BYTES_PER_TOKEN) as u64,
            body,
        };
        match tokenize(&served, &unit.body, prompt, weight, &serving.limits, &mut chain)? {
            Ok(Extent::Whole) => {
                unit.prompt_tokens = Some(chain.tokens() as u32);
                unit.weight_tokens = chain.tokens() as u64;
                unit.hashes = chain.into_hashes();
            }
            Ok(Extent::BeforeMedia) => {
                unit.unknown = Some(MEDIA_FOLLOWS);
                // Something follows, if only the medium.
                unit.weight_tokens = unit.weight_tokens.max(chain.tokens() as u64 + 1);
                unit.hashes = chain.into_hashes();
            }
            Err(reason) => {
                unit.unknown = Some(reason);
            }
        }
        let further = |unit: &Unit| Unit { further_sample: true, ..unit.clone() };
        let samples: Vec<Unit> = (1..samples_apart).map(|_| further(&unit)).collect();
        units.push(unit);
        units.extend(samples);
    }
    let Inbound { options, threshold, removed, .. } = inbound;
    Ok(Prepared { served, endpoint, options, threshold, units, samples_apart, removed })
}

/// What a request asks for by its model's name. Where the model does nothing, none need be
/// given, as long as there is one only.
fn named(serving: &Serving, endpoint: Endpoint, name: &str) -> Result<Named, Error> {
    if name.is_empty() && !endpoint.names_model() {
        return match serving.models.len() {
            1 => Ok(Named { model: 0, adapter: None }),
            _ => Err(Error::invalid("model", "`model` is missing")),
        };
    }
    serving.names.get(name).cloned().ok_or_else(|| {
        let known: Vec<String> = serving.names.keys().cloned().collect();
        unknown_model(name, &known)
    })
}

/// Of engines that do nothing alone, none is known that meets another for these endpoints.
fn check_connector(served: &Served, endpoint: Endpoint) -> Result<(), Error> {
    let config = &served.config;
    let alone = config.connector.serves_alone() || config.flow == Flow::Aggregated;
    if alone || !(endpoint.generates() && endpoint.dialect().names_events()) {
        return Ok(());
    }
    let (path, connector) = (endpoint.path(), config.connector.name());
    let message = format!("this model's workers (connector {connector}) cannot serve {path}");
    Err(Error::new(Kind::InvalidRequest, message))
}

/// SGLang has no `cache_salt` on these endpoints: it would serve what others have cached.
fn check_salt(served: &Served, inbound: &Inbound) -> Result<(), Error> {
    let endpoint = inbound.endpoint;
    let unsalted = matches!(endpoint, Endpoint::Messages | Endpoint::Embeddings);
    if inbound.cache_salt.is_none() || !unsalted || served.config.connector != Connector::Sglang {
        return Ok(());
    }
    let message =
        format!("this model's engines (SGLang) have no `cache_salt` on {}", endpoint.path());
    Err(Error::invalid("cache_salt", message))
}

/// How many samples of a prompt are requests of their own: all of them where each needs a
/// hand-off, and no engine serves any without.
fn samples_apart(served: &Served, inbound: &mut Inbound, limits: &Limits) -> Result<u32, Error> {
    let config = &served.config;
    let n = inbound.options.n;
    if config.connector.serves_alone() || config.flow == Flow::Aggregated || n == 1 {
        return Ok(1);
    }
    let units = inbound.prompts.len() as u64 * u64::from(n);
    if units > u64::from(limits.n_max) {
        let max = limits.n_max;
        let message = format!("`n` times the prompts is {units}; at most {max} (limits.n_max)");
        return Err(Error::invalid("n", message));
    }
    inbound.options.n = 1;
    inbound.options.samples = 1;
    edit_sampling(&mut inbound.body, inbound.endpoint, |sampling| {
        sampling.remove("n");
    })?;
    Ok(n)
}

/// A reason as a label: one of a fixed set of sentences, in lower case with `_`.
fn label(reason: &'static str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
    reason.chars().map(plain).collect()
}

/// The blocks of the exact tokens, or why they cannot be known: the router never guesses. Of
/// whom nothing is shared by the engines, whose chains have other roots, nothing is shared here.
fn tokenize(
    served: &Served,
    body: &JsonObject,
    prompt: Prompt,
    bytes: usize,
    limits: &Limits,
    chain: &mut Chain,
) -> Result<Result<Extent, &'static str>, Error> {
    if bytes > limits.tokenize_max_bytes {
        return Ok(Err("longer than limits.tokenize_max_bytes"));
    }
    if !matches!(body.raw("truncate_prompt_tokens"), None | Some("null")) {
        return Ok(Err("truncate_prompt_tokens"));
    }
    let member = if matches!(prompt, Prompt::Responses) { "input" } else { "messages" };
    let done = match (prompt, &served.prompt) {
        (Prompt::Opaque(reason), _) => return Ok(Err(reason)),
        (Prompt::Tokens(ids), _) => {
            chain.append(&ids);
            Ok(Extent::Whole)
        }
        (_, None) => return Ok(Err("no_tokenizer")),
        (Prompt::Text(text), Some(model)) => {
            let special = body.get::<bool>("add_special_tokens", "true or false")?.unwrap_or(true);
            model.chain_text(&text, special, chain).map(|()| Extent::Whole)
        }
        (prompt, Some(model)) => {
            let fields = chat_fields(body)?;
            tokenize_chat(model, &prompt, fields, chain)
        }
    };
    match done {
        Ok(extent) => Ok(Ok(extent)),
        Err(PromptError::Unsupported(reason)) => Ok(Err(reason)),
        Err(PromptError::Client(message)) => Err(Error::invalid(member, message)),
        Err(PromptError::Internal(message)) => {
            tracing::error!(model = served.name(), error = message, "a prompt cannot be tokenised");
            Ok(Err("tokenizer_failed"))
        }
    }
}

/// The same of what is a chat, or is made one.
fn tokenize_chat(
    model: &PromptModel,
    prompt: &Prompt,
    fields: Map<String, Value>,
    chain: &mut Chain,
) -> Result<Extent, PromptError> {
    let mut fields = match prompt {
        Prompt::Messages => messages::chat_of(&fields)?,
        Prompt::Responses => responses::chat_of(&fields)?,
        _ => fields,
    };
    let view = ChatRequestView::taken_from(&mut fields)?;
    model.chain_chat(view, (unix_ms() / 1000) as i64, chain)
}

/// The body as values, for the template.
fn chat_fields(body: &JsonObject) -> Result<Map<String, Value>, Error> {
    body.members()
        .map(|(key, raw)| {
            let value = scan::value(raw).map_or_else(|| serde_json::from_str(raw), Ok);
            value.map(|value| (key.to_owned(), value)).map_err(|error| strict::locate(&error))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_short(body: String, tokenizing: Tokenizing) -> bool {
        Payload::Json(body.into()).is_short(tokenizing)
    }

    /// A body of a part that is repeated up to so many kilobytes.
    fn body(part: &str, kilobytes: usize) -> String {
        let parts = vec![part; (kilobytes << 10) / (part.len() + 1)];
        format!(r#"{{"model": "m", "messages": [{}]}}"#, parts.join(","))
    }

    #[test]
    fn p10_what_takes_its_time_is_not_prepared_where_it_stands() {
        use Tokenizing::{Fast, None, Slow};

        let prose = format!(r#"{{"role": "user", "content": "{}"}}"#, "some words ".repeat(300));
        for tokenizing in [None, Fast, Slow] {
            assert!(is_short(body("[]", 3), tokenizing), "whatever it is");
            assert!(!is_short(body(&prose, 104), tokenizing), "too long");
            for part in ["[]", r#"{"a":1}"#, "1e5", r#""\n""#] {
                assert!(!is_short(body(part, 64), tokenizing), "{part} {tokenizing:?}");
            }
        }
        let short = [None, Fast, Slow].map(|tokenizing| is_short(body(&prose, 64), tokenizing));
        assert_eq!(short, [true, true, false]);
        // Each message costs a template its time, and nothing else.
        let message = r#"{"role": "user", "content": "yes or no"}"#;
        let short = [None, Fast, Slow].map(|tokenizing| is_short(body(message, 64), tokenizing));
        assert_eq!(short, [true, false, false]);
    }
}
