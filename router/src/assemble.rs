//! From a validated configuration to a core that serves it.

use std::sync::Arc;
use std::time::Duration;

use http::uri::Authority;
use splitrail_kv::{HashSeed, Index, IndexConfig};

use crate::config::{BlockSize, Config, Model, TokenizerConfig};
use crate::core::{Core, Served};
use crate::fleet::{Pool, Worker, poll};
use crate::flow::client::EngineClient;
use crate::prompt::{PromptModel, PromptOptions};

/// How long `block_size: auto` waits for an engine that says it.
const BLOCK_SIZE_PATIENCE: Duration = Duration::from_secs(300);

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
    /// No engine said its block size.
    #[error(
        "model {model}: `block_size: auto`, but no worker reported one within {} s",
        BLOCK_SIZE_PATIENCE.as_secs()
    )]
    BlockSize {
        /// The model's name.
        model: String,
    },
    /// A defect.
    #[error("{0}")]
    Defect(String),
}

/// Builds everything that serves a configuration; nothing is bound yet.
///
/// # Errors
/// What cannot be had from outside: credentials, tokenizers, engines' block sizes.
pub async fn assemble(config: Config) -> Result<Arc<Core>, AssembleError> {
    let seed = HashSeed(config.hash_seed);
    let limits = config.limits.clone();
    let draw_seed = config.draw_seed;
    let mut models = Vec::with_capacity(config.models.len());
    for model in config.models {
        models.push(Arc::new(assemble_model(model, &limits, seed, draw_seed).await?));
    }
    let core = Core::new(models, limits, seed);
    core.map(Arc::new).map_err(|error| AssembleError::Defect(error.to_string()))
}

async fn assemble_model(
    model: Model,
    limits: &crate::config::Limits,
    seed: HashSeed,
    draw_seed: Option<u64>,
) -> Result<Served, AssembleError> {
    let name = &model.name;
    let authorization = model.engine_api_key.as_ref().map(|secret| secret.resolve()).transpose();
    let authorization = authorization
        .map_err(|source| AssembleError::Secret { model: name.clone(), source })?
        .map(|secret| secret.bearer());
    let client =
        EngineClient::new(model.timeouts.connect, authorization, limits.engine_reply_max_bytes);
    let prompt = match &model.tokenizer {
        TokenizerConfig::None {} => None,
        TokenizerConfig::Huggingface { path } => {
            let loaded = PromptModel::load(path, PromptOptions::default());
            let prompt = loaded
                .map_err(|source| AssembleError::Tokenizer { model: name.clone(), source })?;
            for note in prompt.notes() {
                tracing::warn!(model = name, note, "tokenizer");
            }
            Some(prompt)
        }
    };
    let mut workers = Vec::with_capacity(model.workers.len());
    for (index, config) in model.workers.iter().cloned().enumerate() {
        let authority = authority(&config.url).ok_or_else(|| {
            AssembleError::Defect(format!(
                "worker {}: url {} was not checked",
                config.id, config.url
            ))
        })?;
        workers.push(Arc::new(Worker::new(index, config, authority)));
    }
    let block_size = match model.block_size {
        BlockSize::Tokens(tokens) => tokens,
        BlockSize::Auto => ask_block_size(name, &workers, &client).await?,
    };
    let index = Index::new(IndexConfig {
        model: name.clone(),
        block_size,
        seed,
        max_blocks_per_worker: limits.index_blocks_per_worker_max,
    });
    let pool = Pool::new(workers, block_size, index, draw_seed);
    Ok(Served { config: model, pool, prompt, client })
}

fn authority(url: &str) -> Option<Authority> {
    url.parse::<http::Uri>().ok()?.into_parts().authority
}

/// Asks the workers in turn until one says its block size.
async fn ask_block_size(
    model: &str,
    workers: &[Arc<Worker>],
    client: &EngineClient,
) -> Result<u32, AssembleError> {
    let ask = async {
        loop {
            for worker in workers {
                if let Some(tokens) = poll::ask(worker, client).await.and_then(|l| l.block_size) {
                    tracing::info!(model, worker = worker.id(), block_size = tokens, "block size");
                    return tokens;
                }
            }
            tracing::info!(model, "waiting for a worker that says its block size");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    let answer = tokio::time::timeout(BLOCK_SIZE_PATIENCE, ask).await;
    answer.map_err(|_| AssembleError::BlockSize { model: model.to_owned() })
}
