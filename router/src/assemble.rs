//! From a validated configuration to a core that serves it.

use std::sync::Arc;

use splitrail_kv::{HashSeed, IndexConfig};

use crate::config::{BlockSize, Config, Model, TokenizerConfig};
use crate::core::{Core, Seldom, Served};
use crate::fleet::budget::RetryBudget;
use crate::fleet::{Networks, Pool};
use crate::flow::client::EngineClient;
use crate::flow::staged::Releases;
use crate::ledger::book::Book;
use crate::prompt::{PromptModel, PromptOptions};
use crate::telemetry::metrics::Metrics;

/// Why a configuration that is valid by itself cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum AssembleError {
    /// A credential cannot be had.
    #[error("model {model}: the engines' credential: {source}")]
    Secret {
        /// The model's name.
        model: String,
        /// Why.
        source: crate::config::SecretError,
    },
    /// A tokenizer cannot be loaded.
    #[error("model {model}: {source}")]
    Tokenizer {
        /// The model's name.
        model: String,
        /// Why.
        source: crate::prompt::LoadError,
    },
    /// The ledger file cannot be written.
    #[error("{0}")]
    Ledger(std::io::Error),
    /// A defect.
    #[error("{0}")]
    Defect(String),
}

/// Builds everything that serves a configuration; nothing is bound yet.
///
/// # Errors
/// What cannot be had from outside: credentials, tokenizers, the ledger file.
pub fn assemble(config: Config) -> Result<Arc<Core>, AssembleError> {
    let seed = HashSeed(config.hash_seed);
    let limits = config.limits.clone();
    let draw_seed = config.draw_seed;
    let networks = Networks::new(&config.fleet.networks);
    let mut models = Vec::with_capacity(config.models.len());
    for model in config.models {
        models.push(Arc::new(assemble_model(model, &limits, &networks, seed, draw_seed)?));
    }
    let metrics = Metrics::new().map_err(|error| AssembleError::Defect(error.to_string()))?;
    let ledger = Book::open(&config.ledger, &metrics).map_err(AssembleError::Ledger)?;
    Ok(Arc::new(Core::new(models, limits, seed, metrics, ledger).with_fleet(config.fleet)))
}

fn assemble_model(
    model: Model,
    limits: &crate::config::Limits,
    networks: &Networks,
    seed: HashSeed,
    draw_seed: Option<u64>,
) -> Result<Served, AssembleError> {
    let name = &model.name;
    let authorization = model.engine_api_key.as_ref().map(|secret| secret.resolve()).transpose();
    let authorization = authorization
        .map_err(|source| AssembleError::Secret { model: name.clone(), source })?
        .map(|secret| secret.bearer());
    let bytes_max = limits.engine_reply_max_bytes;
    let client =
        EngineClient::new(model.timeouts.connect, authorization, bytes_max, networks.clone());
    let prompt = load_prompt(&model)?;
    for note in prompt.iter().flat_map(PromptModel::notes) {
        tracing::warn!(model = name, note, "tokenizer");
    }
    // 0: an engine will say it.
    let block_size = match model.block_size {
        BlockSize::Tokens(tokens) => tokens,
        BlockSize::Auto => 0,
    };
    let index = IndexConfig {
        model: name.clone(),
        block_size,
        seed,
        max_blocks_per_worker: limits.index_blocks_per_worker_max,
    };
    let pool = Pool::new(index, draw_seed).assuming(model.assumed);
    Ok(Served {
        retry_budget: RetryBudget::new(model.retries.budget_percent),
        config: model,
        pool: Arc::new(pool),
        prompt,
        client,
        releases: Releases::default(),
        mismatch: Seldom::default(),
        no_prefill: Seldom::default(),
    })
}

/// Loads a model's tokenizer and chat template, if it has them.
///
/// # Errors
/// If there is a tokenizer that cannot be loaded.
pub fn load_prompt(model: &Model) -> Result<Option<PromptModel>, AssembleError> {
    let TokenizerConfig::Huggingface { path } = &model.tokenizer else { return Ok(None) };
    let loaded = PromptModel::load(path, PromptOptions::default());
    let failed = |source| AssembleError::Tokenizer { model: model.name.clone(), source };
    loaded.map(Some).map_err(failed)
}
