//! The context of one request: the data that its prompts share and that every leg needs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use http::HeaderValue;
use prometheus::Histogram;
use splitrail_kv::{HashSeed, Overlap};
use splitrail_telemetry::{LabelledSeries, Metrics};

use super::gate::Need;
use super::place::PlacedLeg;
use super::plan::LocalReason;
use crate::prepare::{Preparer, Unit};
use splitrail_access::Tenant;
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::memory_budget::Charge;
use splitrail_api::name::Name;
use splitrail_api::request::Options;
use splitrail_api::steering::Urgency;
use splitrail_config::model::{KvPath, RequestFlow};
use splitrail_engine_client::LegHeaders;
pub use splitrail_engine_client::ReplyRoom;
use splitrail_fleet::{LegLimit, ServedModel, Worker};
use splitrail_ledger::decisions::{Decision, DecisionHandle};
use splitrail_ledger::leg::{Expectation, LegKind};
use splitrail_ledger::timeline::{LegSpan, PromptClock, Stage, StageTime, Timeline};
use splitrail_workload::Booking;

/// The data that all prompts of one request share.
pub struct Context {
    /// The router's metrics.
    pub metrics: Arc<Metrics>,
    /// The preparer of the request. It also runs work off the reactor.
    pub preparer: Arc<Preparer>,
    /// Seed of the block hashes.
    pub hash_seed: HashSeed,
    /// The model.
    pub served: Arc<ServedModel>,
    /// The charge for the memory that the request holds. What outlives the request and holds its body
    /// keeps the charge.
    pub memory: Arc<Charge>,
    /// The endpoint to which the client sent the request.
    pub endpoint: Endpoint,
    /// How the client wants the request answered: streamed or not, number of samples, and so on.
    pub options: Options,
    /// The flow that is planned for the request.
    pub flow: RequestFlow,
    /// The cache hit threshold that the client asked for, from 0 to 1, if any.
    pub threshold: Option<f64>,
    /// The request id that the client sees.
    pub request_id: Name,
    /// The W3C trace context that is sent to engines: that of the request's span if the request is
    /// traced, and that of the client otherwise. A traced leg replaces it with its own.
    pub traceparent: Option<HeaderValue>,
    /// What belongs to `traceparent`, if the request is traced.
    pub tracestate: Option<HeaderValue>,
    /// The tenant of the request; `None` if the router has no tenants.
    pub tenant: Option<Arc<Tenant>>,
    /// The urgency of the request; it counts while the request waits in the queue.
    pub urgency: Urgency,
    /// The times of the request.
    pub timeline: Arc<Timeline>,
    /// Whether events are passed on as messages of gRPC, so that their members need the types that
    /// they have in OpenAI's API.
    pub converts_events: bool,
    /// What the reply takes of the bound on unread replies of its connection, and of the memory of
    /// its client.
    pub unread: ReplyRoom,
    /// Whether an attempt used a kept connection that had ended, or that carried the reply to
    /// another request. Further attempts then use new connections, because other kept connections
    /// may have the same fault.
    pub distrusts_kept_connections: AtomicBool,
}

/// One prompt of a request, with the data that all of its legs need.
#[derive(Clone, Copy)]
pub(super) struct PromptContext<'a> {
    /// The data that all prompts of the request share.
    pub(super) context: &'a Arc<Context>,
    /// The prepared prompt.
    pub(super) unit: &'a Unit,
    /// The prompt's decision record.
    pub(super) decision: &'a DecisionHandle,
    /// The prompt's clock.
    pub(super) clock: &'a PromptClock,
}

impl PromptContext<'_> {
    /// Records that a stage of the prompt ends now. Returns the present time, which is the start of
    /// the next stage.
    pub(super) fn mark(&self, stage: Stage) -> Instant {
        let now = Instant::now();
        let StageTime { stage: took, hand_off } = self.clock.end_stage(stage, now);
        let Context { metrics, served, options, endpoint, .. } = self.context.as_ref();
        let LabelledSeries { model, series } = served.labelled_series();
        let (name, seconds) = (stage.name(), took.as_secs_f64());
        let stream = if options.stream { "true" } else { "false" };
        match stage {
            Stage::Receive | Stage::Tokenize | Stage::Match | Stage::Pick => {
                series.router_stage(metrics, model, name, seconds);
            }
            Stage::Admit => series.queue_wait(metrics, model, stream, seconds),
            // Requests that generate nothing have no first token.
            _ if endpoint.generates() => {
                series.engine_stage(metrics, model, name, stream, seconds);
            }
            _ => {}
        }
        let follows = options.stream && !served.config.connector.is_concurrent();
        if let Some(hand_off) = hand_off.filter(|_| follows) {
            series.handed_off(metrics, model, hand_off.as_secs_f64());
        }
        now
    }

    /// Begins a leg on a worker.
    pub(super) fn leg(&self, kind: LegKind, worker: &Worker) -> LegSpan {
        self.clock.leg(kind, worker.id(), rand::random)
    }
}

/// The headers of a traced leg, whose engine continues the trace from the leg.
pub(super) fn traced(leg_headers: LegHeaders, leg: &LegSpan) -> LegHeaders {
    match leg.traceparent().and_then(|header| HeaderValue::try_from(header).ok()) {
        Some(header) => LegHeaders { traceparent: Some(header), ..leg_headers },
        None => leg_headers,
    }
}

impl Context {
    /// The histogram of the time between the events of a reply.
    pub(super) fn inter_token(&self, decision: &DecisionHandle) -> Histogram {
        let flow = decision.with(Decision::flow);
        self.served.series.inter_token(&self.metrics, self.served.name(), flow)
    }
}

/// The number of prompt tokens that a worker will have to compute, for its booking. Tokens of
/// speculative blocks are not counted, because they are cached or about to be cached.
pub(super) fn uncached_tokens(context: &Context, unit: &Unit, speculative_blocks: u32) -> u64 {
    let cached = u64::from(speculative_blocks) * u64::from(context.served.pool.block_size());
    unit.weight_tokens.saturating_sub(cached)
}

/// Books a leg that computes its prompt. `observes_prefill_end` says whether the router will see
/// when the prefill ends; only then is the cost model trained with the duration.
pub(super) fn book(
    context: &Context,
    unit: &Unit,
    placed: &PlacedLeg,
    now: Instant,
    observes_prefill_end: bool,
) -> Booking {
    if let Some(room) = placed.take_room() {
        return room;
    }
    let worker = &placed.worker;
    let uncached = uncached_tokens(context, unit, placed.speculative_blocks);
    let cached = unit.weight_tokens - uncached;
    let work = worker.costs.begin(now, placed.rank, uncached, cached, !observes_prefill_end);
    let work = work.loading(placed.overlap_by_tier, context.served.pool.block_size());
    let work = work.reading(placed.read_tokens);
    worker.book(placed.rank, uncached, unit.weight_tokens).with_work(work)
}

/// What the router expects of a leg that it has placed: length, overlap, and whether the engine's
/// count of cached tokens can be compared with the index.
pub(super) fn expected(context: &Context, unit: &Unit, placed: &PlacedLeg) -> Expectation {
    let bypasses_cache = context.options.bypasses_cache.is_some();
    let tokens_known = unit.prompt_tokens.is_some();
    // An engine reports the cached tokens of the last sample, which finds the blocks that the first
    // sample computed. So the count of several samples cannot be compared.
    let several_samples = context.options.samples > 1;
    let indexed = placed.is_comparable();
    Expectation {
        prompt_tokens: unit.prompt_tokens,
        overlap: Overlap { blocks: placed.overlap_blocks, by_tier: placed.overlap_by_tier },
        overlap_is_upper_bound: placed.worker.overlap_is_upper_bound(),
        fetched_blocks: placed.fetched_blocks,
        recomputed_tokens: placed.recomputed_tokens,
        block_size: context.served.pool.block_size(),
        bypasses_cache,
        several_samples,
        comparable: tokens_known && indexed && !several_samples && !bypasses_cache,
        epoch: placed.worker.usage_stats.epoch(),
    }
}

/// The limit of a leg whose first event or hand-off is waited for.
pub(super) fn first_token_limit(context: &Context) -> LegLimit {
    let duration = context.served.config.timeouts.first_token;
    LegLimit { duration, key: "timeouts.first_token" }
}

/// The limit of a leg with a whole reply.
pub(super) fn reply_limit(context: &Context) -> LegLimit {
    LegLimit { duration: context.served.config.timeouts.reply, key: "timeouts.reply" }
}

/// Begins an attempt. Each attempt has an id of its own: the request ids of an engine must be
/// unique, and with the client's id a client could refer to the request of another client.
pub(super) fn attempt(context: &Context, decision: &DecisionHandle) -> LegHeaders {
    decision.attempt_begun();
    leg_headers(context)
}

/// Headers for a leg, with an id that no other request has.
pub(super) fn leg_headers(context: &Context) -> LegHeaders {
    LegHeaders {
        traceparent: context.traceparent.clone(),
        tracestate: context.tracestate.clone(),
        fresh: context.distrusts_kept_connections.load(Relaxed),
        ..LegHeaders::with_random_id()
    }
}

/// The value of `cache_hit_threshold` in a leg's body; only the router sets this field. It is
/// `wanted` if the engine supports the field, so that an engine with a default threshold of its own
/// does not reject a request that should not be gated. It is `None` if the engine does not support
/// the field, or if the replies of the endpoint cannot express a rejection.
pub(super) fn carried_threshold(context: &Context, worker: &Worker, wanted: f64) -> Option<f64> {
    if context.endpoint.dialect().names_events() {
        return None;
    }
    worker.takes_cache_hit_threshold(context.served.config.gate.kind).then_some(wanted)
}

/// The threshold of a decode leg that follows a prefill leg: the model's `preemption_guard`, or 0
/// if the prompt might fail the threshold although it was handed over. With several samples or with
/// shared storage an engine finds only full blocks, and never the last token. vLLM's
/// `ExampleConnector` finds nothing of a prompt with one token more than full blocks.
pub(super) fn preemption_guard(prompt: PromptContext<'_>) -> f64 {
    let PromptContext { context, unit, decision, .. } = prompt;
    let ServedModel { config, pool, .. } = context.served.as_ref();
    let (guard, block_size) = (config.gate.preemption_guard, pool.block_size());
    let said =
        decision.with(|decision| decision.ledger().prefill().and_then(|leg| leg.prompt_tokens));
    let tokens = unit.prompt_tokens.or(said);
    let one_more = tokens.is_some_and(|tokens| block_size > 0 && tokens % block_size == 1);
    let is_found = config.connector.kv_path() != KvPath::Stored || !one_more;
    let need = Need::new(guard, tokens, block_size);
    if need.blocks.is_some() && need.possible && is_found { guard } else { 0.0 }
}

/// The name of the planned flow of a request, as in metrics and records. The decision record has
/// the flow that the request took in the end.
pub fn flow_name(context: &Context) -> &'static str {
    context.flow.name()
}

/// Records and counts a P/D request whose prompt is computed by the worker that answers.
pub(super) fn prefill_made_local(prompt: PromptContext<'_>, reason: LocalReason) {
    prompt.clock.hand_off_lost();
    let is_new = prompt.decision.prefill_made_local(reason.name());
    count_local(prompt.context, reason, is_new);
}

/// Records and counts a P/D request whose prefill leg was answered without a hand-off.
pub(super) fn nothing_handed_over(prompt: PromptContext<'_>, reason: LocalReason) {
    prompt.clock.hand_off_lost();
    let is_new = prompt.decision.nothing_handed_over(reason.name());
    count_local(prompt.context, reason, is_new);
}

/// Counts a request once: `is_new` is false for a further attempt with the same reason.
fn count_local(context: &Context, reason: LocalReason, is_new: bool) {
    if is_new {
        let labels = [context.served.name(), reason.name()];
        context.metrics.local_prefills.with_label_values(&labels).inc();
    }
}

/// Whether the model's retry budget allows a further attempt; if so, the attempt is counted and
/// logged.
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
    retried(context, leg, worker, error);
    true
}

/// Counts and logs a further attempt. After a failure of a kept connection, further attempts use new
/// connections.
pub(super) fn retried(context: &Context, leg: &'static str, worker: &Worker, error: &Error) {
    if matches!(error.kind(), ErrorKind::ForeignReply | ErrorKind::StaleConnection) {
        context.distrusts_kept_connections.store(true, Relaxed);
    }
    let labels = [context.served.name(), leg, error.outcome()];
    context.metrics.retries.with_label_values(&labels).inc();
    tracing::warn!(model = labels[0], leg, worker = worker.id(), %error, "trying another worker");
}
