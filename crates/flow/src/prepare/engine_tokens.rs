//! Tokens of prompts from the engines' `/tokenize`, for models with `tokenizer: engine`.
//!
//! Each prompt costs a round trip before its request is placed. The wait, the number of prompts that
//! wait, and the memory for the block hashes of recent prompts are bounded. A prompt whose tokens do
//! not come is placed by load alone, with the reason in its decision record. The questions are no
//! requests of clients: they are in no ledger, and book nothing.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use splitrail_kv::{BlockHash, Chain};
use tokio::time::timeout_at;

use super::{PreparedRequest, Preparer, Unit};
use crate::decide::adapter_holders::lacking_adapter;
use crate::decide::supporting_workers::{begin, end, leg_for_endpoint};
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_config::model::{EngineTokenizer, TokenizerConfig};
use splitrail_engine::tokenize::reply_ids;
use splitrail_engine_client::{LegHeaders, Shape, TimeoutError};
use splitrail_fleet::{Cluster, LegRequest, ServedModel, Worker, excluded};
use splitrail_policy::Leg;

mod kept;

use kept::{KeptPrompts, Keys};

/// Why tokens are unknown: no engine can be asked.
const NO_ENGINE: &str = "no engine to ask for tokens";
/// `tokenizer.in_flight_max` prompts are waited for.
const BUSY: &str = "too many prompts wait for tokens of engines";
/// `tokenizer.timeout` has passed: for the reply, and for a core to read a long one.
const LATE: &str = "the tokens of the engine came too late";
/// The engine failed, or its reply has no tokens.
const FAILED: &str = "the engine gave no tokens";
/// The engine refused the prompt, as it will refuse the request.
const REFUSED: &str = "the engine refused to tokenise the prompt";

/// The tokens that a prompt may have for each byte of its request, and the number of tokens that a
/// template may add to any prompt. A reply with more is none to this question.
const TOKENS_PER_BYTE: usize = 2;
const TEMPLATE_TOKENS: usize = 65_536;

/// Replies of more than this length are read off the reactor.
const INLINE_MAX_BYTES: usize = 64 << 10;

/// A prompt about which an engine is to be asked.
pub(super) struct Question {
    /// The first unit of the prompt.
    pub(super) unit: usize,
    /// The request to `/tokenize`.
    pub(super) body: Bytes,
    /// The chain of the prompt's blocks, still without tokens.
    pub(super) chain: Chain,
}

/// The tokens of a prompt, as far as placement needs them.
#[derive(Clone)]
pub(super) struct KnownTokens {
    /// The length of the prompt in tokens.
    pub(super) tokens: u32,
    /// The hashes of its full blocks.
    pub(super) hashes: Arc<[BlockHash]>,
}

/// What is kept of each model with `tokenizer: engine`.
#[derive(Default)]
pub(super) struct EngineTokens {
    models: Mutex<HashMap<String, Arc<ModelTokens>>>,
}

/// What is kept of one model.
#[derive(Default)]
struct ModelTokens {
    /// The number of prompts that are waited for.
    in_flight: AtomicUsize,
    /// The number of questions so far: engines are asked in turn.
    turn: AtomicUsize,
    keys: Keys,
    kept: Mutex<KeptPrompts>,
}

/// A prompt that is waited for.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl EngineTokens {
    /// What is kept of a model. Models that are not served any more are forgotten when another one
    /// comes.
    fn of(&self, cluster: &Cluster, served: &ServedModel) -> Arc<ModelTokens> {
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(model) = models.get(served.name()) {
            return Arc::clone(model);
        }
        let serving = cluster.serving();
        models.retain(|name, _| serving.model(name).is_some());
        Arc::clone(models.entry(served.name().to_owned()).or_default())
    }
}

impl ModelTokens {
    fn kept(&self) -> MutexGuard<'_, KeptPrompts> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks engines for the tokens of a request's prompts, and writes them into its units.
pub(super) async fn ask(
    preparer: &Preparer,
    prepared: &mut PreparedRequest,
    questions: Vec<Question>,
) {
    let TokenizerConfig::Engine(config) = &prepared.served.config.tokenizer else { return };
    let model = preparer.engine_tokens.of(&preparer.cluster, &prepared.served);
    let metrics = &preparer.cluster.metrics;
    let answered = questions.into_iter().map(|question| {
        let (prepared, model) = (&*prepared, &model);
        async move {
            let unit = question.unit;
            (unit, one(preparer, prepared, model, config, question).await)
        }
    });
    let answered = join_all(answered).await;
    let samples = prepared.samples_apart as usize;
    for (first, answer) in answered {
        if let Ok((_, source)) = &answer {
            let labels = [prepared.served.name(), source];
            metrics.engine_tokenized_prompts.with_label_values(&labels).inc();
        }
        for unit in prepared.units.iter_mut().skip(first).take(samples) {
            match &answer {
                Ok((known, _)) => {
                    unit.prompt_tokens = Some(known.tokens);
                    unit.weight_tokens = known.tokens.into();
                    unit.hashes = Arc::clone(&known.hashes);
                    unit.unknown = None;
                }
                Err(reason) => unit.unknown = Some(reason),
            }
        }
    }
}

/// The tokens of one prompt and their source, or the reason why they are unknown.
async fn one(
    preparer: &Preparer,
    prepared: &PreparedRequest,
    model: &ModelTokens,
    config: &EngineTokenizer,
    question: Question,
) -> Result<(KnownTokens, &'static str), &'static str> {
    let key = model.keys.of(question.chain.root(), &question.body);
    let found = model.kept().find(key, Instant::now());
    if let Some(known) = found {
        return Ok((known, "kept"));
    }
    let place = Place(&model.in_flight);
    if place.0.fetch_add(1, Relaxed) >= config.in_flight_max as usize {
        return Err(BUSY);
    }
    let PreparedRequest { served, units, .. } = prepared;
    let worker = next_worker(served, &units[question.unit], model).ok_or(NO_ENGINE)?;
    let known = send(preparer, served, &worker, config.timeout, question).await?;
    model.kept().add(key, known.clone(), config.cache_bytes, Instant::now());
    Ok((known, "engine"))
}

/// The engine whose turn it is, among those that are in service and have the endpoint.
fn next_worker(served: &ServedModel, unit: &Unit, model: &ModelTokens) -> Option<Arc<Worker>> {
    let now = Instant::now();
    let without = lacking_adapter(served, &unit.body);
    let (leg, mut lacking) = leg_for_endpoint(served, Endpoint::Tokenize, &without, now).ok()?;
    lacking.extend(without);
    let roster = served.pool.roster();
    let leg_for_endpoint = |worker: &&Arc<Worker>| {
        worker.serves(leg)
            && worker.is_available(leg, now)
            && excluded(&lacking, worker.index).is_none()
    };
    let count = roster.iter().filter(leg_for_endpoint).count();
    let turn = model.turn.fetch_add(1, Relaxed).checked_rem(count)?;
    roster.iter().filter(leg_for_endpoint).nth(turn).cloned()
}

/// Asks one engine.
async fn send(
    preparer: &Preparer,
    served: &ServedModel,
    worker: &Arc<Worker>,
    timeout: Duration,
    question: Question,
) -> Result<KnownTokens, &'static str> {
    const ENDPOINT: Endpoint = Endpoint::Tokenize;
    let Question { body, mut chain, .. } = question;
    let tokens_max = body.len() * TOKENS_PER_BYTE + TEMPLATE_TOKENS;
    let leg_headers = LegHeaders::with_random_id();
    let (leg, client) = (Leg::Aggregated, &served.client);
    begin(worker, leg, ENDPOINT);
    let request =
        LegRequest { client, worker, shape: Shape::whole(ENDPOINT), headers: &leg_headers };
    let late =
        |TimeoutError| Err(Error::new(ErrorKind::EngineTimeout, "tokenizer.timeout has passed"));
    let deadline = tokio::time::Instant::now() + timeout;
    let reply = client.timers.bound(timeout, request.whole(body)).await.unwrap_or_else(late);
    let reply = reply.map(|reply| reply.body);
    end(worker, leg, ENDPOINT, reply.as_ref().err());
    let reply = reply.map_err(|error| reason(worker, &error))?;
    let bytes = reply.len();
    let read = move || {
        let ids = reply_ids(&reply).filter(|ids| !ids.is_empty() && ids.len() <= tokens_max)?;
        chain.append(&ids);
        Some(KnownTokens { tokens: chain.tokens() as u32, hashes: chain.into_hashes().into() })
    };
    let known = match bytes > INLINE_MAX_BYTES {
        true => {
            let read = timeout_at(deadline, preparer.cores.run_off_reactor(bytes, read));
            read.await.map_err(|_| LATE)?.unwrap_or_default()
        }
        false => read(),
    };
    known.ok_or(FAILED)
}

/// Why an engine's error leaves the tokens unknown.
fn reason(worker: &Worker, error: &Error) -> &'static str {
    match error.kind() {
        ErrorKind::EngineLacksPath => NO_ENGINE,
        ErrorKind::EngineRejected(400..=499) | ErrorKind::EngineLacksModel => REFUSED,
        ErrorKind::EngineTimeout => LATE,
        _ => {
            tracing::debug!(worker = worker.id(), %error, "an engine gave no tokens of a prompt");
            FAILED
        }
    }
}
