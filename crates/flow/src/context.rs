//! The context of one request: what its prompts share, and what every leg needs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use http::HeaderValue;
use prometheus::Histogram;
use splitrail_kv::{HashSeed, Overlap};
use splitrail_telemetry::Metrics;

use super::gate::Need;
use super::place::Placed;
use super::plan::LocalReason;
use crate::prepare::{Preparer, Unit};
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, Kind};
use splitrail_api::name::Name;
use splitrail_api::request::Options;
use splitrail_api::steering::Urgency;
use splitrail_api::text::random_id;
use splitrail_api::unread::Unread;
use splitrail_config::model::{GateKind, RequestFlow};
use splitrail_engine_client::{EngineClient, Envelope, Late};
use splitrail_fleet::Served;
use splitrail_fleet::{Booking, Worker};
use splitrail_ledger::decisions::{Decision, DecisionHandle};
use splitrail_ledger::leg::Expected;
use splitrail_ledger::stages::Stages;

/// What the prompts of one request share.
pub struct Context {
    /// The router's metrics.
    pub metrics: Arc<Metrics>,
    /// Prepared the request, and says when work may run off the reactor.
    pub preparer: Arc<Preparer>,
    /// Seed of the block hashes.
    pub hash_seed: HashSeed,
    /// The model.
    pub served: Arc<Served>,
    /// Where the request came in.
    pub endpoint: Endpoint,
    /// How it is to be answered.
    pub options: Options,
    /// The flow that it is to take.
    pub flow: RequestFlow,
    /// The share of its prompts that it wants cached, if it says so.
    pub threshold: Option<f64>,
    /// The id that the client sees, for logs.
    pub request_id: Name,
    /// W3C trace context.
    pub traceparent: Option<HeaderValue>,
    /// How urgent it is, where it has to wait.
    pub urgency: Urgency,
    /// Times per stage.
    pub stages: Stages,
    /// What is held of its answer.
    pub unread: Arc<Unread>,
    /// Whether an attempt met a kept connection that had ended, or that carried the answer to another
    /// request: further attempts use new connections, since other kept ones may be alike.
    pub distrusts_kept_connections: AtomicBool,
}

/// One prompt of a request, with what all of its legs need.
#[derive(Clone, Copy)]
pub(super) struct PromptContext<'a> {
    /// What the prompts of the request share.
    pub(super) context: &'a Arc<Context>,
    /// The prompt as it was prepared.
    pub(super) unit: &'a Unit,
    /// The prompt's decision record.
    pub(super) decision: &'a DecisionHandle,
}

impl Context {
    /// A stage that began at `started` ends now; says when that is, for the next.
    pub(super) fn mark(&self, stage: &'static str, started: Instant) -> Instant {
        let now = Instant::now();
        let seconds = now.duration_since(started).as_secs_f64();
        self.stages.add(&self.metrics, self.served.labelled_series(), stage, seconds);
        now
    }

    /// The histogram of the time between the events of an answer.
    pub(super) fn inter_token(&self, decision: &DecisionHandle) -> Histogram {
        let flow = decision.with(Decision::flow);
        self.metrics.inter_token.with_label_values(&[self.served.name(), flow])
    }
}

/// Tokens that a worker will have to compute of a prompt, for its booking: what is assumed to be
/// there, or on its way, is not computed again.
pub(super) fn uncached_tokens(context: &Context, unit: &Unit, assumed_blocks: u32) -> u64 {
    let cached = u64::from(assumed_blocks) * u64::from(context.served.pool.block_size());
    unit.weight_tokens.saturating_sub(cached)
}

/// Books a leg that computes its prompt. `observes_prefill_end` says whether it is known when the
/// prompt is computed: how long that takes is learned then.
pub(super) fn book(
    context: &Context,
    unit: &Unit,
    placed: &Placed,
    now: Instant,
    observes_prefill_end: bool,
) -> Booking {
    if let Some(room) = placed.take_room() {
        return room;
    }
    let worker = &placed.worker;
    let uncached = uncached_tokens(context, unit, placed.assumed_blocks);
    let cached = unit.weight_tokens - uncached;
    let work = worker.costs.begin(now, placed.rank, uncached, cached, !observes_prefill_end);
    worker.book(placed.rank, uncached, unit.weight_tokens).with_work(work)
}

/// What the router knows of a leg that it has placed.
pub(super) fn expected(context: &Context, unit: &Unit, placed: &Placed) -> Expected {
    let bypasses_cache = context.options.bypasses_cache.is_some();
    let tokens_known = unit.prompt_tokens.is_some();
    // Of several samples, an engine reports the last: it finds what the first computed.
    let one_sample = context.options.samples == 1;
    let indexed = placed.is_comparable();
    Expected {
        prompt_tokens: unit.prompt_tokens,
        overlap: Overlap { blocks: placed.overlap_blocks, by_tier: placed.overlap_by_tier },
        block_size: context.served.pool.block_size(),
        bypasses_cache,
        comparable: tokens_known && indexed && one_sample && !bypasses_cache,
        epoch: placed.worker.audit.epoch(),
    }
}

/// Bounds a call to an engine; `key` names the limit in the error. Callers pin large calls: one
/// that is handed on by value is moved, and takes its room, once more in each future around it.
pub(super) async fn within<T>(
    client: &EngineClient,
    limit: Duration,
    worker: &Worker,
    key: &str,
    call: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    client.timers().bound(limit, call).await.unwrap_or_else(|Late| {
        let message = format!("worker {} took longer than {key} ({limit:?})", worker.id());
        Err(Error::new(Kind::EngineTimeout, message))
    })
}

/// Begins an attempt. Each has an id of its own: an engine's request ids must be
/// unique, and a client's would let it reach for another's.
pub(super) fn attempt(context: &Context, decision: &DecisionHandle) -> Envelope {
    decision.attempt_begun();
    let request_id = HeaderValue::from_str(&random_id());
    Envelope {
        // Hexadecimal digits are always a header value.
        request_id: request_id.unwrap_or_else(|_| HeaderValue::from_static("splitrail")),
        traceparent: context.traceparent.clone(),
        gate: None,
        rank: None,
        prefill_tokens: None,
        fresh: context.distrusts_kept_connections.load(Relaxed),
    }
}

/// The threshold that a leg's body carries, which nobody but the router sets: `wanted`
/// where the engine honours the field, so that an engine with a default of its own never
/// turns away what was not to be gated; nothing where it does not, or where its replies have
/// no form for that.
pub(super) fn carried_threshold(context: &Context, worker: &Worker, wanted: f64) -> Option<f64> {
    if context.endpoint.dialect().names_events() {
        return None;
    }
    let told = context.served.config.gate.kind == GateKind::Engine;
    worker.honours_threshold().unwrap_or(told).then_some(wanted)
}

/// The threshold of a decode leg that follows its prefill: the model's guard, but nothing
/// where a prompt that was handed over might not pass it. Several samples and a storage find
/// full blocks only, and never the last token.
pub(super) fn preemption_guard(prompt: PromptContext<'_>) -> f64 {
    let PromptContext { context, unit, decision } = prompt;
    let guard = context.served.config.gate.preemption_guard;
    let said =
        decision.with(|decision| decision.ledger().prefill().and_then(|leg| leg.prompt_tokens));
    let need = Need::new(guard, unit.prompt_tokens.or(said), context.served.pool.block_size());
    if need.blocks.is_some() && need.possible { guard } else { 0.0 }
}

/// The flow that a request is meant to take, as in metrics and records; what it
/// took in the end is in its decision.
pub fn flow_name(context: &Context) -> &'static str {
    context.flow.name()
}

/// Records and counts a P/D request that is prefilled by the worker that answers.
pub(super) fn prefill_made_local(
    context: &Context,
    decision: &DecisionHandle,
    reason: LocalReason,
) {
    let is_new = decision.prefill_made_local(reason.name());
    count_local(context, reason, is_new);
}

/// Counts a P/D request whose prefill leg was answered without a hand-off.
pub(super) fn nothing_handed_over(
    context: &Context,
    decision: &DecisionHandle,
    reason: LocalReason,
) {
    let is_new = decision.nothing_handed_over(reason.name());
    count_local(context, reason, is_new);
}

/// A further attempt with the same reason is still the same request and is not counted.
fn count_local(context: &Context, reason: LocalReason, is_new: bool) {
    if is_new {
        let labels = [context.served.name(), reason.name()];
        context.metrics.local_prefills.with_label_values(&labels).inc();
    }
}

/// Whether the model's budget allows a further attempt; counts and logs it if so. An attempt
/// after a kept connection failed gets a new one.
pub(super) fn may_retry(
    context: &Context,
    leg: &'static str,
    worker: &Worker,
    error: &Error,
) -> bool {
    if !context.served.retry_budget.withdraw() {
        let labels = [context.served.name(), leg];
        context.metrics.retries_refused.with_label_values(&labels).inc();
        return false;
    }
    if matches!(error.kind(), Kind::ForeignAnswer | Kind::StaleConnection) {
        context.distrusts_kept_connections.store(true, Relaxed);
    }
    let labels = [context.served.name(), leg, error.outcome()];
    context.metrics.retries.with_label_values(&labels).inc();
    let request_id = &context.request_id;
    tracing::warn!(request_id = &**request_id, model = labels[0], leg, worker = worker.id(), %error, "trying another worker");
    true
}
