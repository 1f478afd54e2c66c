//! Read-back at the legs of a request: remembers what decode legs leave pinned, and lets prefill legs
//! read it.
//!
//! The router must know the exact tokens on both sides. The decode engine is asked for the token ids of
//! its prompt and of its reply, and what it says of the prompt must agree with the router's tokenizer.
//! The engine of the reading leg is asked for the ids of its prompt as well.

use std::sync::Arc;
use std::time::Instant;

use serde::Deserialize;
use serde_json::value::RawValue;
use splitrail_kv::{BlockHash, hashes_after};

use crate::context::{Context, PromptContext};
use crate::decide::adapter_holders::adapter_of;
use crate::decide::place::{PlacedLeg, query};
use crate::prepare::Unit;
use crate::reply::migrate::without;
use crate::run::reply_leg::ReplyLeg;
use splitrail_api::error::Error;
use splitrail_api::request::Options;
use splitrail_api::{Endpoint, JsonObject};
use splitrail_fleet::read_back::{NewPin, PinReading, ReadBack};
use splitrail_fleet::{ServedModel, Worker};
use splitrail_ledger::decisions::Decision;
use splitrail_ledger::leg::ReadBackOffer;
use splitrail_policy::{Leg, read_plan};
use splitrail_reply::dialect;
use splitrail_transfer::pinned::{ANY_TOKEN, may_pin, read_pinned, reads_back};
use splitrail_workload::costs::RankScope;
use splitrail_workload::pins::ReadablePin;

/// Why a worker is in quarantine, as `/admin/workers` shows it.
const WRONG_KV: &str = "its cache may hold KV of other tokens: restart its engine, or reset its \
                        prefix cache and undrain it";

/// Whether a decode leg with a hand-off is asked for token ids. Streams are not: their engines say
/// nothing of what they keep pinned.
pub(crate) fn asks_for_ids(sending: &ReplyLeg<'_>) -> bool {
    let PromptContext { context, unit, .. } = sending.prompt;
    let Context { served, endpoint, options, .. } = context.as_ref();
    reads_back(&served.config, *endpoint)
        && *endpoint != Endpoint::Generate
        && !options.stream
        && options.samples == 1
        && unit.unknown.is_none()
        && sending.placed.worker.transfer.read_back.keeps_for_read_back() != Some(false)
}

/// Remembers what the engine of a whole reply, which began to arrive at `since`, keeps pinned, and removes from the reply the token ids
/// that only the router has asked for.
pub(crate) fn keep(sending: &ReplyLeg<'_>, reply: &mut JsonObject, since: Instant) {
    let PromptContext { context, unit, decision, .. } = sending.prompt;
    let served = &context.served;
    if !may_pin(&served.config) {
        return;
    }
    let received =
        |decision: &Decision| decision.ledger.decode.as_ref().is_some_and(|leg| leg.receives);
    // With several samples, another leg has fetched the hand-off.
    if context.options.samples != 1 || !decision.with(received) {
        return;
    }
    keep_pinned(sending, reply, since);
    let asked = unit.body.raw("return_token_ids") == Some("true");
    if reads_back(&served.config, context.endpoint)
        && context.endpoint != Endpoint::Generate
        && !asked
    {
        hide_ids(reply);
    }
}

fn keep_pinned(sending: &ReplyLeg<'_>, reply: &JsonObject, since: Instant) {
    let PromptContext { context, unit, .. } = sending.prompt;
    let (served, holder) = (&context.served, &sending.placed.worker);
    // vLLM's front end finds stop strings and aborts the request, after which the engine keeps nothing
    // of it.
    let shows_absence =
        !dialect::ended(context.endpoint.dialect(), reply) || !has_stop_strings(&unit.body);
    let Some(kv) = read_pinned(served, holder, reply, shows_absence) else { return };
    let known = Sequence::read(context.endpoint, unit, reply);
    let known = known.filter(|known| known.agrees(context, unit));
    let first_token = known.as_ref().and_then(|known| known.tokens.first().copied());
    let hashes = known.filter(|_| reads_back(&served.config, context.endpoint)).map(|known| {
        // The KV of the last token was not computed.
        let tokens = &known.tokens[..known.tokens.len().saturating_sub(1)];
        hashes(context, unit, tokens)
    });
    let new_pin = NewPin {
        kv,
        holder: Arc::clone(holder),
        first_token: first_token.unwrap_or(ANY_TOKEN),
        hashes: hashes.unwrap_or_default(),
        since,
    };
    ReadBack::keep(served, &context.metrics, new_pin);
}

/// Whether a request has strings that end its reply.
fn has_stop_strings(body: &JsonObject) -> bool {
    let is_set = |raw: Option<&str>| raw.is_some_and(|raw| !matches!(raw, "null" | "[]"));
    let sampling = body.raw("sampling_params").map(JsonObject::parse_str);
    is_set(body.raw("stop"))
        || is_set(body.raw("stop_sequences"))
        || matches!(sampling, Some(Ok(sampling)) if is_set(sampling.raw("stop")))
}

fn hashes(context: &Context, unit: &Unit, tokens: &[u32]) -> Vec<BlockHash> {
    hashes_after(unit.namespace, context.hash_seed, context.served.pool.block_size(), tokens)
}

/// The tokens of a prompt and of its reply.
struct Sequence {
    tokens: Vec<u32>,
    /// The number of tokens of the prompt.
    prompt: usize,
}

/// The token ids in the choice of a whole reply.
#[derive(Deserialize)]
struct ChoiceTokens {
    token_ids: Option<Vec<u32>>,
    prompt_token_ids: Option<Vec<u32>>,
}

impl Sequence {
    /// The tokens by the engine's own account. The ids of a prompt that consists of ids are in the
    /// request.
    fn read(endpoint: Endpoint, unit: &Unit, reply: &JsonObject) -> Option<Self> {
        let choices: Vec<ChoiceTokens> = serde_json::from_str(reply.raw("choices")?).ok()?;
        let [ChoiceTokens { token_ids, prompt_token_ids }] =
            <[ChoiceTokens; 1]>::try_from(choices).ok()?;
        let list = |raw: Option<&str>| serde_json::from_str::<Vec<u32>>(raw?).ok();
        let prompt = match endpoint {
            Endpoint::Completions => prompt_token_ids,
            Endpoint::Generate => list(unit.body.raw("token_ids")),
            _ => list(reply.raw("prompt_token_ids")),
        };
        let mut tokens = prompt?;
        let prompt = tokens.len();
        tokens.extend(token_ids?);
        Some(Self { tokens, prompt })
    }

    /// Whether the engine's prompt is the prompt that the router has tokenised.
    fn agrees(&self, context: &Context, unit: &Unit) -> bool {
        agrees(context, unit, &self.tokens[..self.prompt])
    }
}

/// Whether the engine's tokens of a prompt are those of the router. Tokens after the last full block
/// are only counted: they are in no block that is read.
fn agrees(context: &Context, unit: &Unit, prompt: &[u32]) -> bool {
    unit.prompt_tokens == Some(prompt.len() as u32)
        && hashes(context, unit, prompt)[..] == unit.hashes[..]
}

/// Sets the members with token ids to null, which they are if nobody asks for them.
fn hide_ids(reply: &mut JsonObject) {
    const IDS: [&str; 2] = ["token_ids", "prompt_token_ids"];
    let choices = reply.raw("choices").map(serde_json::from_str::<Vec<Box<RawValue>>>);
    if let Some(Ok(choices)) = choices {
        let choices = choices.iter().map(|raw| match JsonObject::parse_str(raw.get()) {
            Ok(choice) => without(choice, &IDS).to_string(),
            Err(_) => raw.get().to_owned(),
        });
        let choices = choices.collect::<Vec<_>>().join(",");
        reply.set("choices", format!("[{choices}]"));
    }
    if reply.raw("prompt_token_ids").is_some() {
        reply.set("prompt_token_ids", "null");
    }
}

/// The number of leading blocks that a prefill leg of a prompt may read back, if a decode worker keeps
/// them; 0 if it may read nothing.
pub(crate) fn readable_blocks(
    served: &ServedModel,
    endpoint: Endpoint,
    unit: &Unit,
    options: Options,
) -> u32 {
    let may_read = reads_back(&served.config, endpoint)
        && unit.unknown.is_none()
        && options.bypasses_cache.is_none();
    let tokens = unit.prompt_tokens.filter(|_| may_read).unwrap_or(0);
    // An engine always computes the last token.
    let most = tokens.saturating_sub(1).checked_div(served.pool.block_size()).unwrap_or(0);
    most.min(unit.hashes.len() as u32)
}

/// What a prefill leg of a prompt on a worker would read of `readable_blocks` leading blocks, if a
/// decode worker keeps them and reading is predicted to be faster than computing. `held_blocks` are
/// the leading blocks that the worker holds or is about to hold.
pub(crate) fn readable(
    served: &ServedModel,
    unit: &Unit,
    worker: &Worker,
    held_blocks: u32,
    readable_blocks: u32,
) -> Option<ReadablePin> {
    if !worker.takes_part_in_kv_routing() {
        return None;
    }
    let now = Instant::now();
    let prompt = unit.hashes.get(..readable_blocks as usize)?;
    let found = served.pool.read_back.find(now, prompt, worker)?;
    let adapter = adapter_of(served, &unit.body);
    let roster = served.pool.roster();
    if !roster.get(found.holder)?.agrees_on(adapter.as_deref(), worker) {
        return None;
    }
    let costs = worker.load.costs.seen(now, RankScope::Rank(None), 0).coefficients;
    let query = query(&served.pool, unit, Leg::Prefill, 0, 0);
    read_plan(&costs, &query, held_blocks, found.blocks as u32).map(|_| found)
}

/// Takes what a prefill leg reads, if there is something.
pub(crate) fn take(
    prompt: PromptContext<'_>,
    placed: &PlacedLeg,
    readable_blocks: u32,
) -> Option<PinReading> {
    let PromptContext { context, unit, .. } = prompt;
    let (served, held_blocks) = (&context.served, placed.speculative_blocks);
    let found = readable(served, unit, &placed.worker, held_blocks, readable_blocks)?;
    ReadBack::take(served, &context.metrics, found)
}

/// What the ledger records of it.
pub(crate) fn offer(context: &Context, reading: &PinReading) -> Option<ReadBackOffer> {
    let tokens = reading.blocks() as u32 * context.served.pool.block_size();
    let worker = reading.holder()?.id().into();
    Some(ReadBackOffer { worker, tokens })
}

/// Checks that the engine of a leg that has read KV from another worker computed the prompt that the
/// router knows.
///
/// # Errors
/// If it did not: what was read belongs to other tokens. No leg of the model reads any more, and the
/// worker is in quarantine.
pub(crate) fn check_tokens(
    prompt: PromptContext<'_>,
    worker: &Worker,
    reply: &JsonObject,
) -> Result<(), Error> {
    let PromptContext { context, unit, .. } = prompt;
    if context.endpoint == Endpoint::Generate {
        return Ok(());
    }
    let known = Sequence::read(context.endpoint, unit, reply);
    if known.is_some_and(|known| known.agrees(context, unit)) {
        return Ok(());
    }
    let served = &context.served;
    served.pool.read_back.distrust();
    tracing::error!(
        model = served.name(),
        worker = worker.id(),
        "a prefill worker has read KV for a prompt of which it counts other tokens than the router, \
         and its cache may hold that KV under wrong hashes. It gets no work until its engine is \
         restarted, or its prefix cache is reset (POST /reset_prefix_cache) and then the worker is \
         undrained. No prefill leg of the model reads KV from other workers any more: check \
         tokenizer, chat template and engine flags"
    );
    served.pool.change_engine(worker, |worker| worker.quarantine(WRONG_KV));
    Err(Error::engine(worker.id(), "has read KV of other tokens than those of its prompt"))
}

/// Counts how a leg that was to read back has ended. A leg that is dropped before it has an outcome was
/// cancelled.
pub(crate) struct ReadBackCount<'a> {
    context: &'a Context,
    /// The outcome for the metric; `None` if the leg was not sent.
    pub(crate) outcome: Option<&'static str>,
}

impl<'a> ReadBackCount<'a> {
    pub(crate) fn new(context: &'a Context) -> Self {
        Self { context, outcome: Some("cancelled") }
    }
}

impl Drop for ReadBackCount<'_> {
    fn drop(&mut self) {
        if let Some(outcome) = self.outcome {
            let labels = [self.context.served.name(), outcome];
            self.context.metrics.read_backs.with_label_values(&labels).inc();
        }
    }
}

/// The outcome of a leg that was to read back and has succeeded, by the engine's count of cached tokens.
pub(crate) fn read(
    prompt: PromptContext<'_>,
    worker: &Worker,
    cached_tokens: Option<u32>,
) -> &'static str {
    let PromptContext { context, decision, .. } = prompt;
    worker.transfer.read_back.ended(true, Instant::now());
    let Some(cached_tokens) = cached_tokens else { return "unknown" };
    let leg = decision.with(|decision| decision.ledger.prefill.clone());
    let tokens = leg.map_or(0, |leg| leg.read_back_tokens(cached_tokens));
    if tokens == 0 {
        return "not_needed";
    }
    let read = context.metrics.read_back_tokens.with_label_values(&[context.served.name()]);
    read.inc_by(tokens.into());
    "read"
}

/// Records that a leg that was to read KV from another worker failed.
pub(crate) fn read_failed(served: &ServedModel, worker: &Worker, now: Instant) {
    if worker.transfer.read_back.ended(false, now) {
        let what = "a prefill leg that was to read KV from another worker failed: none reads on this \
                    worker for a while. Does its engine have bidirectional_kv_xfer and \
                    kv_load_failure_policy fail?";
        tracing::warn!(model = served.name(), worker = worker.id(), "{what}");
    }
}
