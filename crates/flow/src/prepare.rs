//! Prepares the prompts of a body for placement: parses, tokenises and hashes them.
//!
//! This is pure computation, and its time grows with the length of the body. Small bodies are
//! prepared on the thread that serves the connection, larger ones on the blocking pool, at most one
//! per core, so that the reactor never waits for a prompt.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use bytes::Bytes;
use splitrail_kv::{BlockHash, Chain, Namespace};

use splitrail_access::Tenant;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::form::{self, Boundary, Recording};
use splitrail_api::memory_budget::{self, Allowance, Charge, Memory, MemoryBudget, Meter};
use splitrail_api::request::{Options, Prompt, unknown_model};
use splitrail_api::sampling::edit_sampling;
use splitrail_api::sanitise::RemovedFields;
use splitrail_api::{Endpoint, Inbound, JsonObject, Parts, json};
use splitrail_config::model::{Flow, Limits, Model};
use splitrail_fleet::{Cluster, ServedModel, ServedModels, ServedName};
use splitrail_prompt::Extent;
use splitrail_prompt::watch::{self, Watch};
use splitrail_telemetry::Metrics;

mod cores;
mod engine_tokens;
mod ids;
mod short;
mod tokens;

use cores::Cores;

use engine_tokens::{EngineTokens, Question};
pub use short::{indentation_bytes, is_harmless};
use tokens::Tokens;

/// The reason that is given if only the blocks of a prompt before its first medium are known.
pub const MEDIA_FOLLOWS: &str = "media after the known blocks";

/// Bytes per token by which the load of a prompt with unknown tokens is estimated.
const BYTES_PER_TOKEN: usize = 4;

/// A request that is ready to be placed.
pub struct PreparedRequest {
    /// The model.
    pub served: Arc<ServedModel>,
    /// The endpoint of the request.
    pub endpoint: Endpoint,
    /// How the client wants the request answered.
    pub options: Options,
    /// The cache hit threshold in the body, from 0 to 1, if there is one.
    pub threshold: Option<f64>,
    /// One unit per prompt, or one per sample if `samples_apart` is more than 1.
    pub units: Vec<Unit>,
    /// The number of units per prompt.
    pub samples_apart: u32,
    /// The fields that were removed from the body before it is sent to engines.
    pub removed: RemovedFields,
    /// The charge for the memory of the units.
    pub memory: Charge,
}

impl PreparedRequest {
    /// Counts removed fields and prompts with unknown tokens of a request that is going to be
    /// served.
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
    /// The position of the prompt in its batch, from 0.
    pub prompt_index: usize,
    /// Whether this unit is a further sample of the prompt before it.
    pub further_sample: bool,
    /// The body, without the fields that a leg adds.
    pub body: JsonObject,
    /// The recording, if the body is that of a form.
    pub recording: Option<Recording>,
    /// The length of the prompt in tokens, if all of its tokens are known.
    pub prompt_tokens: Option<u32>,
    /// Why the tokens are not known. [`MEDIA_FOLLOWS`] if the tokens before the first medium are
    /// known.
    pub unknown: Option<&'static str>,
    /// The root of the chain of block hashes, which stands for salt, model, adapter and block size.
    pub namespace: BlockHash,
    /// The hashes of the full blocks, as far as the tokens are known.
    pub hashes: Arc<[BlockHash]>,
    /// The prompt's load in tokens: its length, or an estimate if its tokens are not known.
    pub weight_tokens: u64,
}

impl Unit {
    /// A body of this unit as an engine is sent it.
    pub(crate) fn parts(&self, body: &JsonObject) -> Parts {
        self.recording.as_ref().map_or_else(|| body.to_parts(), |recording| recording.write(body))
    }

    /// Takes over what is known of the prompt's tokens, which `chain` has. Returns the request with
    /// which an engine is to be asked for them, if it is.
    fn learn(
        &mut self,
        tokens: Tokens,
        chain: &Chain,
        block_size: u32,
        kept: &mut Meter<'_>,
    ) -> Result<Option<Bytes>, Error> {
        let length = chain.tokens() as u64;
        match tokens {
            Tokens::Known(Extent::Whole) => {
                self.prompt_tokens = Some(length as u32);
                self.weight_tokens = length;
            }
            Tokens::Known(Extent::BeforeMedia) => {
                self.unknown = Some(MEDIA_FOLLOWS);
                // At least the medium follows.
                self.weight_tokens = self.weight_tokens.max(length + 1);
            }
            Tokens::Unknown(reason) => {
                self.unknown = Some(reason);
                return Ok(None);
            }
            Tokens::OfEngine(request) => {
                // The engine is sent at least one byte for each token, but for those of the template.
                let blocks = request.len() / block_size.max(1) as usize;
                kept.take(request.len() + blocks * size_of::<BlockHash>())?;
                return Ok(Some(request));
            }
        }
        self.hashes = chain.hashes().into();
        kept.take(size_of_val(&*self.hashes))?;
        Ok(None)
    }
}

/// A function that makes a body within the limits.
pub type BodyBuilder = Box<dyn FnOnce(&Limits) -> Result<BuiltBody, Error> + Send>;

/// The body of a request as its API hands it over.
pub enum Payload {
    /// An OpenAI body.
    Json(Bytes),
    /// A form with a recording.
    Form(Bytes, Boundary),
    /// A function that makes an OpenAI body, which needs no strict parsing.
    Builder {
        /// The approximate length in bytes of what a template may make of the body.
        bytes: usize,
        /// The result of [`is_harmless`] for its text.
        is_harmless: bool,
        /// The function that makes the body.
        build: BodyBuilder,
    },
}

/// A body that the router made.
pub struct BuiltBody {
    /// The body.
    pub body: JsonObject,
    /// The only prompt, if the prompt is not to be read from the body.
    pub prompt: Option<Prompt>,
}

impl Payload {
    fn bytes(&self) -> usize {
        match self {
            Self::Json(text) | Self::Form(text, _) => text.len(),
            Self::Builder { bytes, .. } => *bytes,
        }
    }

    fn read(
        self,
        endpoint: Endpoint,
        serving: &ServedModels,
        memory: &mut Memory<'_>,
    ) -> Result<Inbound, Error> {
        let limits = &serving.limits;
        let (body, prompt) = match self {
            Self::Json(text) => {
                let charge = |bytes| memory.kept.take(bytes);
                (JsonObject::parse_strictly(text, limits.object_members_max, charge)?, None)
            }
            Self::Form(text, boundary) => {
                let (body, recording) = form::read(&text, &boundary, Boundary::random())?;
                memory.kept.take(body.bytes())?;
                (body, Some(Prompt::Recording(recording)))
            }
            Self::Builder { build, .. } => {
                let BuiltBody { body, prompt } = build(limits)?;
                (body, prompt)
            }
        };
        let opened = |name: &str| -> &[String] {
            let named = named(serving, endpoint, name, None);
            named.map_or(&[], |named| &serving.models[named.model].config.pass_unknown)
        };
        let allowance = Allowance { limits, work: &mut memory.work };
        Inbound::read(endpoint, body, prompt, allowance, opened)
    }
}

/// Prepares requests, with bounds on the memory and the cores that this takes.
pub struct Preparer {
    /// The models that are served.
    pub(crate) cluster: Arc<Cluster>,
    /// The budget for the memory of all requests, `limits.request_memory_max`.
    memory: Arc<MemoryBudget>,
    /// The permits for work off the reactor.
    /// The cores for work off the reactor.
    pub cores: Cores,
    /// What is kept of models whose engines are asked for tokens.
    engine_tokens: EngineTokens,
}

impl Preparer {
    /// A preparer for the models of a cluster.
    pub fn new(cluster: Arc<Cluster>, memory: Arc<MemoryBudget>) -> Self {
        let cores = Cores::new(std::thread::available_parallelism().map_or(1, usize::from));
        Self { cluster, memory, cores, engine_tokens: EngineTokens::default() }
    }

    /// The budget for the memory of all requests, and its bound in bytes.
    pub(crate) fn memory(&self) -> (&Arc<MemoryBudget>, usize) {
        (&self.memory, self.cluster.serving().limits.request_memory_max_bytes)
    }
}

/// Prepares the body of a request of a tenant, or of anyone if the router has no tenants. What it
/// takes is charged to `budget`.
///
/// # Errors
/// An error with status 400 or 404 for a mistake of the client; a 403 if the tenant may not use the
/// model; a refusal if the memory of all requests has reached its bound.
pub async fn prepare(
    preparer: &Arc<Preparer>,
    endpoint: Endpoint,
    payload: Payload,
    tenant: Option<&Arc<Tenant>>,
    budget: &Arc<MemoryBudget>,
) -> Result<PreparedRequest, Error> {
    let serving = preparer.cluster.serving();
    let template_max = serving.limits.template_timeout;
    if short::is_short(&payload, serving.tokenizing) {
        drop(serving);
        let watch = Watch { abandoned: None, template_max };
        let tenant = tenant.map(|tenant| &**tenant);
        let computed = watch::with(watch, || compute(preparer, endpoint, payload, tenant, budget))?;
        return Ok(answered(preparer, computed).await);
    }
    drop(serving);
    let computing = Arc::clone(preparer);
    let (tenant, budget) = (tenant.cloned(), Arc::clone(budget));
    let waiting = WaitingClient::default();
    let watch = Watch { abandoned: Some(Arc::clone(&waiting.is_over)), template_max };
    let bytes = short::prepared_bytes(&payload);
    let work = move || {
        watch::with(watch, || compute(&computing, endpoint, payload, tenant.as_deref(), &budget))
    };
    let computed = preparer.cores.run_off_reactor(bytes, work).await??;
    Ok(answered(preparer, computed).await)
}

/// A request whose prompts are known as far as the router can tell, and the questions to engines that
/// are open.
type OpenPreparation = (PreparedRequest, Vec<Question>);

/// The request once engines have been asked for the tokens of its prompts, if they are to be.
async fn answered(
    preparer: &Preparer,
    (mut prepared, questions): OpenPreparation,
) -> PreparedRequest {
    if !questions.is_empty() {
        // Boxed so that requests of other models do not grow.
        Box::pin(engine_tokens::ask(preparer, &mut prepared, questions)).await;
    }
    prepared
}

/// Marks that a client waits for its request to be prepared. Dropping it stops the work.
#[derive(Default)]
struct WaitingClient {
    is_over: Arc<AtomicBool>,
}

impl Drop for WaitingClient {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
    }
}

fn compute(
    preparer: &Preparer,
    endpoint: Endpoint,
    payload: Payload,
    tenant: Option<&Tenant>,
    budget: &Arc<MemoryBudget>,
) -> Result<OpenPreparation, Error> {
    let cluster = &preparer.cluster;
    let serving = cluster.serving();
    let limits = &serving.limits;
    let refuse = || memory_budget::shed(&cluster.metrics.shed);
    let meter = || Meter::new(budget.charge(), limits.request_memory_max_bytes, &refuse);
    let mut memory = Memory { kept: meter(), work: meter() };
    let mut inbound = payload.read(endpoint, &serving, &mut memory)?;
    let (served, adapter) = address(&serving, &mut inbound, tenant)?;
    let samples_apart = samples_apart(&served, &mut inbound, limits)?;
    let namespace = Namespace {
        salt: inbound.cache_salt.as_deref(),
        model: served.name(),
        adapter: adapter.as_deref(),
        block_size: served.pool.block_size(),
    };
    let mut units = Vec::with_capacity(inbound.prompts.len());
    let mut questions = Vec::new();
    for (prompt_index, (prompt, raw)) in
        std::mem::take(&mut inbound.prompts).into_iter().enumerate()
    {
        if watch::is_abandoned() {
            return Err(Error::new(ErrorKind::ClientGone, "the client left"));
        }
        let mut body = inbound.body.clone();
        if let Some(raw) = raw {
            body.set_piece("prompt", raw);
        }
        let weight = prompt_bytes(endpoint, &body);
        let recording = match &prompt {
            Prompt::Recording(recording) => Some(recording.clone()),
            _ => None,
        };
        let weight_tokens = recording.as_ref().map(Recording::weight_tokens);
        let mut chain = Chain::new(&namespace, cluster.hash_seed);
        let mut unit = Unit {
            prompt_index,
            further_sample: false,
            prompt_tokens: None,
            unknown: None,
            namespace: chain.root(),
            hashes: Arc::default(),
            weight_tokens: weight_tokens.unwrap_or((weight / BYTES_PER_TOKEN) as u64),
            body,
            recording,
        };
        let allowance = Allowance { limits, work: &mut memory.work };
        let tokens = tokens::tokenize(&served, &unit.body, prompt, weight, allowance, &mut chain)?;
        if let Some(body) = unit.learn(tokens, &chain, namespace.block_size, &mut memory.kept)? {
            questions.push(Question { unit: units.len(), body, chain });
        }
        memory.kept.take(samples_apart as usize * size_of::<Unit>())?;
        let further = |unit: &Unit| Unit { further_sample: true, ..unit.clone() };
        let samples: Vec<Unit> = (1..samples_apart).map(|_| further(&unit)).collect();
        units.push(unit);
        units.extend(samples);
    }
    let Inbound { options, threshold, removed, .. } = inbound;
    let memory = memory.kept.into_charge();
    let prepared = PreparedRequest {
        served,
        endpoint,
        options,
        threshold,
        units,
        samples_apart,
        removed,
        memory,
    };
    Ok((prepared, questions))
}

/// Finds the model and the adapter of a request, checks that the tenant and the model's engines allow
/// the request, and gives the body the names and the salt that engines know.
fn address(
    serving: &ServedModels,
    inbound: &mut Inbound,
    tenant: Option<&Tenant>,
) -> Result<(Arc<ServedModel>, Option<String>), Error> {
    let endpoint = inbound.endpoint;
    let ServedName { model, adapter } = named(serving, endpoint, &inbound.model_name, tenant)?;
    let served = Arc::clone(&serving.models[model]);
    if let Some(tenant) = tenant {
        let name = if inbound.model_name.is_empty() { served.name() } else { &inbound.model_name };
        tenant.check_model(name)?;
        separate(inbound, tenant);
    }
    // Engines know the model by its configured name and an adapter by the adapter's name.
    let engine_name = adapter.as_deref().unwrap_or(served.name());
    inbound.body.set("model", json::quote(engine_name));
    check_engine(&served, inbound)?;
    check_salt(&served, inbound)?;
    Ok((served, adapter))
}

/// Bytes of JSON in the members that hold the prompt; 0 if the model computes no prompt.
fn prompt_bytes(endpoint: Endpoint, body: &JsonObject) -> usize {
    let members = if endpoint.computes() { endpoint.prompt_members() } else { &[] };
    members.iter().map(|member| body.raw(member).map_or(0, str::len)).sum()
}

/// The model and adapter of the name in a request. On endpoints without a model the name may be
/// left out if only one model is served. The error for an unknown name lists those that the tenant
/// may use.
fn named(
    serving: &ServedModels,
    endpoint: Endpoint,
    name: &str,
    tenant: Option<&Tenant>,
) -> Result<ServedName, Error> {
    if name.is_empty() && !endpoint.names_model() {
        return match serving.models.len() {
            1 => Ok(ServedName { model: 0, adapter: None }),
            _ => Err(Error::invalid("model", "`model` is missing")),
        };
    }
    serving.names.get(name).cloned().ok_or_else(|| {
        let may_use = |name: &&String| tenant.is_none_or(|tenant| tenant.may_use(name));
        let known: Vec<String> = serving.names.keys().filter(may_use).cloned().collect();
        unknown_model(name, &known)
    })
}

/// Refuses what the model's engines do not have: an endpoint, or, if they serve no request alone,
/// tools that an engine calls by itself. Its further prompts would have the room of the first one.
fn check_engine(served: &ServedModel, inbound: &Inbound) -> Result<(), Error> {
    let config = &served.config;
    if inbound.endpoint == Endpoint::Generate && !config.engine().generates_from_ids() {
        let message = "this model's engines (SGLang) do not offer /inference/v1/generate; \
                       /v1/completions takes token ids as `prompt`";
        return Err(Error::new(ErrorKind::NotOffered, message));
    }
    let takes_turns = inbound.endpoint.generates() && inbound.options.engine_takes_turns;
    if takes_turns && !serves_alone(config) {
        let message = "this model's workers serve prompts in pairs, and so none with tools that an \
                       engine calls by itself";
        return Err(Error::invalid("tools", message));
    }
    Ok(())
}

/// Whether one worker can serve a request of the model.
fn serves_alone(config: &Model) -> bool {
    config.connector.serves_alone() || config.flow == Flow::Aggregated
}

/// Separates the cached blocks of a tenant's request from those of other cache groups.
fn separate(inbound: &mut Inbound, tenant: &Tenant) {
    // No engine has a salt for recordings.
    if inbound.endpoint.computes() && !inbound.endpoint.transcribes() {
        let salt = tenant.salt(inbound.cache_salt.as_deref());
        inbound.body.set("cache_salt", json::quote(&salt));
        inbound.cache_salt = Some(salt);
    }
}

/// Refuses a `cache_salt` on endpoints where SGLang ignores it, because the client would share
/// cached blocks with others.
fn check_salt(served: &ServedModel, inbound: &Inbound) -> Result<(), Error> {
    let endpoint = inbound.endpoint;
    let unsalted = endpoint == Endpoint::Messages || endpoint.computes() && !endpoint.generates();
    if inbound.cache_salt.is_none() || !unsalted || served.config.engine().salts_all_endpoints() {
        return Ok(());
    }
    let message =
        format!("this model's engines (SGLang) have no `cache_salt` on {}", endpoint.path());
    Err(Error::invalid("cache_salt", message))
}

/// The number of samples of a prompt that are sent as requests of their own: all samples if the
/// connector needs a hand-off for each of them, and otherwise 1.
fn samples_apart(
    served: &ServedModel,
    inbound: &mut Inbound,
    limits: &Limits,
) -> Result<u32, Error> {
    let config = &served.config;
    let n = inbound.options.n;
    if serves_alone(config) || n == 1 {
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

/// The label of a reason (one of a fixed set of sentences), in lower case with `_`.
fn label(reason: &'static str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
    reason.chars().map(plain).collect()
}
