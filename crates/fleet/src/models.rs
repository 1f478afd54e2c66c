//! Builds the served models from a configuration, and keeps unchanged parts at a reload.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::HeaderValue;
use splitrail_api::memory_budget::MemoryBudget;
use splitrail_config::engine_tls::EngineTlsFiles;
use splitrail_config::{
    BlockSize, Config, ContentFormatConfig, HuggingfaceTokenizer, Model, TokenizerConfig,
};
use splitrail_engine::EngineKind;
use splitrail_engine_client::networks::Networks;
use splitrail_engine_client::retry_budget::RetryBudget;
use splitrail_engine_client::{ConnectOptions, EngineClient, ReplyMemory, TlsSettings};
use splitrail_kv::{HashSeed, IndexConfig};
use splitrail_prompt::stamp::{FileStamp, stamp, stamps};
use splitrail_prompt::{ContentFormat, PromptModel, PromptOptions};
use splitrail_settings::log_throttle::LogThrottle;
use splitrail_telemetry::{Metrics, ModelSeries};

use crate::{Pool, ServedModel, ServedModels};

/// Maximum size in bytes of a chat template file; real ones have some ten thousand.
const TEMPLATE_MAX_BYTES: u64 = 4 << 20;

/// Why a model with a valid configuration cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The engines' credential cannot be read.
    #[error("model {model}: the engines' credential: {source}")]
    Secret {
        /// The model's name.
        model: String,
        /// The cause.
        source: splitrail_config::SecretError,
    },
    /// The files for TLS towards engines cannot be used.
    #[error("model {model}: engine_tls.{source}")]
    Tls {
        /// The model's name.
        model: String,
        /// The cause.
        source: splitrail_config::tls::TlsFileError,
    },
    /// The tokenizer cannot be loaded.
    #[error("model {model}: {source}")]
    Tokenizer {
        /// The model's name.
        model: String,
        /// The cause.
        source: splitrail_prompt::LoadError,
    },
    /// The chat template cannot be read.
    #[error("model {model}: the chat template {path}: {source}")]
    ChatTemplate {
        /// The model's name.
        model: String,
        /// The template's file.
        path: String,
        /// The cause.
        source: std::io::Error,
    },
}

/// What all models share.
#[derive(Clone, Copy)]
pub struct SharedParts<'a> {
    /// The budget of memory that requests and replies hold.
    pub memory: &'a Arc<MemoryBudget>,
    /// The router's metrics.
    pub metrics: &'a Metrics,
}

/// How a client proves itself to engines, and how it checks them.
struct EngineTrust {
    authorization: Option<HeaderValue>,
    tls: Arc<TlsSettings>,
}

/// Builds the served models of a configuration. Parts that do not change are taken over from the
/// configuration that is served now (`before`): indexes, bookings, connections, tokenizers.
/// `before` itself is not modified.
///
/// # Errors
/// If a credential, tokenizer or chat template cannot be read.
pub fn models(
    config: &Config,
    common: SharedParts<'_>,
    before: Option<&ServedModels>,
) -> Result<Vec<Arc<ServedModel>>, ModelError> {
    let assembled = config.models.iter().map(|model| {
        let predecessor = before.and_then(|before| Some((before.model(&model.name)?, before)));
        assemble_model(model, config, common, predecessor)
    });
    assembled.collect()
}

fn assemble_model(
    model: &Model,
    config: &Config,
    common: SharedParts<'_>,
    before: Option<(&Arc<ServedModel>, &ServedModels)>,
) -> Result<Arc<ServedModel>, ModelError> {
    let authorization = authorization(model)?;
    let prompt_files = prompt_files(model);
    let tls = tls_files(model)?;
    let kept = before.map(|(served, serving)| {
        let mut kept = KeptParts::of(served, serving, model, config);
        kept.credential &= served.client.authorization == authorization;
        kept.tls &= served.client.tls.are_current(&tls);
        kept.tokenizer &= served.prompt_files == prompt_files;
        (served, kept)
    });
    if let Some((served, kept)) = kept
        && kept.all()
    {
        return Ok(Arc::clone(served));
    }
    let keep =
        |part: fn(&KeptParts) -> bool| kept.filter(|(_, kept)| part(kept)).map(|(was, _)| was);
    let prompt = match keep(|kept| kept.tokenizer) {
        Some(served) => served.prompt.clone(),
        None => {
            let prompt = load_prompt(model)?;
            for note in prompt.iter().flat_map(|prompt| &prompt.notes) {
                tracing::warn!(model = model.name, note, "tokenizer");
            }
            prompt.map(Arc::new)
        }
    };
    let retry_budget = match keep(|kept| kept.budget) {
        Some(served) => Arc::clone(&served.retry_budget),
        None => Arc::new(RetryBudget::new(model.retries.budget_percent)),
    };
    let client = match keep(|kept| kept.client && kept.credential && kept.tls && kept.budget) {
        Some(served) => served.client.clone(),
        None => {
            let trust = EngineTrust { authorization, tls: TlsSettings::new(tls) };
            new_client(model, config, common, trust, &retry_budget)
        }
    };
    let pool = match keep(|kept| kept.pool) {
        Some(served) => Arc::clone(&served.pool),
        None => Arc::new(pool(model, config)),
    };
    let chunk = prompt.as_ref().and_then(|prompt| prompt.tokenizer.attention_chunk_tokens);
    pool.set_attention_chunk_tokens(chunk);
    Ok(Arc::new(ServedModel {
        config: model.clone(),
        pool,
        prompt,
        prompt_files,
        client,
        retry_budget,
        releases: before.map(|(served, _)| Arc::clone(&served.releases)).unwrap_or_default(),
        mismatch: LogThrottle::default(),
        charges: LogThrottle::default(),
        series: ModelSeries::default(),
        no_prefill: LogThrottle::default(),
        stranded: LogThrottle::default(),
        below_threshold: LogThrottle::default(),
        suspects: Arc::default(),
    }))
}

/// Which parts of a model are kept at a reload.
#[derive(Clone, Copy)]
struct KeptParts {
    config: bool,
    tokenizer: bool,
    client: bool,
    credential: bool,
    tls: bool,
    pool: bool,
    budget: bool,
}

impl KeptParts {
    fn of(served: &ServedModel, serving: &ServedModels, model: &Model, config: &Config) -> Self {
        let (was, bounds) = (&served.config, &serving.limits);
        let limits = &config.limits;
        let tokenizer = was.tokenizer == model.tokenizer && was.engine() == model.engine();
        let client = was.timeouts.connect == model.timeouts.connect
            && bounds.engine_reply_max_bytes == limits.engine_reply_max_bytes
            && bounds.request_memory_max_bytes == limits.request_memory_max_bytes;
        // A worker is asked in the ways of the engine with which it has joined.
        let pool = was.engine() == model.engine()
            && was.block_size == model.block_size
            && was.speculative_index == model.speculative_index
            && bounds.index_blocks_per_worker_max == limits.index_blocks_per_worker_max;
        let budget = was.retries.budget_percent == model.retries.budget_percent;
        let config = serde_json::to_value(was).ok() == serde_json::to_value(model).ok();
        Self { config, tokenizer, client, credential: true, tls: true, pool, budget }
    }

    fn all(self) -> bool {
        let Self { config, tokenizer, client, credential, tls, pool, budget } = self;
        config && tokenizer && client && credential && tls && pool && budget
    }
}

/// A client for the engines of a model that is not served, for example to inspect them. It has a
/// memory budget of its own.
///
/// # Errors
/// If a credential or a file for TLS cannot be read.
pub fn lone_client(
    model: &Model,
    config: &Config,
    metrics: &Metrics,
) -> Result<EngineClient, ModelError> {
    let (authorization, tls) = (authorization(model)?, TlsSettings::new(tls_files(model)?));
    let budget = Arc::new(RetryBudget::new(model.retries.budget_percent));
    let common = SharedParts { memory: &Arc::default(), metrics };
    Ok(new_client(model, config, common, EngineTrust { authorization, tls }, &budget))
}

fn new_client(
    model: &Model,
    config: &Config,
    SharedParts { memory, metrics }: SharedParts<'_>,
    EngineTrust { authorization, tls }: EngineTrust,
    retry_budget: &Arc<RetryBudget>,
) -> EngineClient {
    let limits = &config.limits;
    let networks = Networks::new(&config.fleet.networks);
    let options = ConnectOptions { connect: model.timeouts.connect, networks, tls };
    let memory = ReplyMemory {
        budget: Arc::clone(memory),
        max_bytes: limits.request_memory_max_bytes,
        shed: metrics.shed.clone(),
    };
    let (reply_max_bytes, budget) = (limits.engine_reply_max_bytes, Arc::clone(retry_budget));
    EngineClient::new(options, authorization, reply_max_bytes, memory, budget)
}

fn tls_files(model: &Model) -> Result<EngineTlsFiles, ModelError> {
    let tls = EngineTlsFiles::read(&model.engine_tls.clone().unwrap_or_default());
    tls.map_err(|source| ModelError::Tls { model: model.name.clone(), source })
}

fn authorization(model: &Model) -> Result<Option<HeaderValue>, ModelError> {
    let resolved = model.engine_api_key.as_ref().map(|secret| secret.resolve()).transpose();
    let failed = |source| ModelError::Secret { model: model.name.clone(), source };
    Ok(resolved.map_err(failed)?.map(|secret| secret.bearer()))
}

fn pool(model: &Model, config: &Config) -> Pool {
    // 0: an engine will report it.
    let block_size = match model.block_size {
        BlockSize::Tokens(tokens) => tokens,
        BlockSize::Auto => 0,
    };
    let index = IndexConfig {
        model: model.name.clone(),
        block_size,
        seed: HashSeed(config.hash_seed),
        max_blocks_per_worker: config.limits.index_blocks_per_worker_max,
    };
    let pool = Pool::new(index, config.rng_seed).with_speculative_index(model.speculative_index);
    pool.configure(model);
    pool
}

/// Loads a model's tokenizer and chat template, if it has them.
///
/// # Errors
/// If a configured tokenizer or chat template cannot be loaded.
pub fn load_prompt(model: &Model) -> Result<Option<PromptModel>, ModelError> {
    let TokenizerConfig::Huggingface(tokenizer) = &model.tokenizer else { return Ok(None) };
    let name = || model.name.clone();
    let options = prompt_options(tokenizer, model.engine());
    let options = options.map_err(|(path, source)| ModelError::ChatTemplate {
        model: name(),
        path,
        source,
    })?;
    let loaded = PromptModel::load(&tokenizer.path, options);
    loaded.map(Some).map_err(|source| ModelError::Tokenizer { model: name(), source })
}

/// The prompt options, which must match those of the model's engines; or the file that cannot be
/// read, and why.
fn prompt_options(
    tokenizer: &HuggingfaceTokenizer,
    engine: EngineKind,
) -> Result<PromptOptions, (String, std::io::Error)> {
    let read = |path: &PathBuf| {
        let text = read_template(path);
        text.map_err(|error| (path.display().to_string(), error))
    };
    Ok(PromptOptions {
        engine,
        chat_template: tokenizer.chat_template.as_ref().map(read).transpose()?,
        content_format: match tokenizer.chat_template_content_format {
            ContentFormatConfig::Auto => None,
            ContentFormatConfig::String => Some(ContentFormat::String),
            ContentFormatConfig::Openai => Some(ContentFormat::OpenAi),
        },
        default_kwargs: tokenizer.default_chat_template_kwargs.clone(),
        exclude_tools_when_tool_choice_none: tokenizer.exclude_tools_when_tool_choice_none,
    })
}

fn read_template(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let file = splitrail_settings::process::open_regular(path)?;
    file.take(TEMPLATE_MAX_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > TEMPLATE_MAX_BYTES {
        return Err(std::io::Error::other(format!("longer than {TEMPLATE_MAX_BYTES} bytes")));
    }
    Ok(text)
}

/// Stamps of the files that determine how the model's prompts become tokens.
fn prompt_files(model: &Model) -> Vec<FileStamp> {
    let TokenizerConfig::Huggingface(tokenizer) = &model.tokenizer else { return Vec::new() };
    let mut files = stamps(&tokenizer.path);
    files.extend(tokenizer.chat_template.clone().and_then(stamp));
    files
}
