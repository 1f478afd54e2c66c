//! Decode first: a decode worker that holds enough of a prompt serves it alone.

use std::fmt;
use std::sync::Arc;

use http::HeaderValue;
use splitrail_engine::usage::EngineUsage;
use splitrail_kv::estimate_cached_tokens;

use crate::context::{Context, PromptContext};
use crate::decide::attempts::DecodeAttempts;
use crate::decide::gate::{self, Gate, GateDecision, Need, decide};
use crate::decide::place::{
    LegRules, PlacedLeg, place, record_computed_prompt, record_sent_prompt,
};
use crate::decide::plan::{NextLegs, Plan};
use crate::decide::threshold::carried_threshold;
use crate::prepare::Unit;
use crate::run::generate::{Generation, StartedReply, generate};
use crate::run::leg_headers::begin_attempt;
use crate::run::peer_fetch::fetch_planned;
use crate::run::reply_leg::ReplyLeg;
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_config::model::Model;
use splitrail_fleet::Worker;
use splitrail_ledger::decisions::DecisionHandle;
use splitrail_policy::Leg;

/// The result of a decode-first attempt.
pub(crate) enum DecodeTryResult {
    /// The decode worker serves the request alone.
    Answered(StartedReply),
    /// Too little is cached, or this cannot be known. With the usage that the engine reported, if
    /// any.
    BelowThreshold(Option<EngineUsage>),
    /// The worker failed, and another attempt is allowed.
    Failed,
}

/// Tries to serve the request by a decode worker alone. `plan.gate` is the cache hit threshold.
///
/// # Errors
/// The error of the attempt, if no further attempt is allowed.
pub(crate) async fn decode_try(
    prompt: PromptContext<'_>,
    plan: &Plan,
    attempts: &mut DecodeAttempts,
) -> Result<DecodeTryResult, Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let pool = &context.served.pool;
    let need = Need::new(plan.gate.unwrap_or(0.0), unit.prompt_tokens, pool.block_size());
    loop {
        decision.decode_try_begun(plan.name(), plan.gate);
        let alone = LegRules::any(Leg::Aggregated, attempts.failed());
        // A client that is told `cache_threshold` asks what is cached, and not what could be.
        let may_fetch = attempts.may_fetch && plan.then != NextLegs::ThresholdReply;
        let rules = LegRules { blocks: need.blocks, may_fetch, ..alone };
        let mut placed = place(prompt, rules)?;
        if plan.then == NextLegs::ThresholdReply && !placed.worker.is_up() {
            let message =
                format!("model {} has no decode worker that is up", context.served.name());
            return Err(Error::new(ErrorKind::NoWorker, message));
        }
        let PlacedLeg { worker, rank, believed_blocks, .. } = &placed;
        let holder = Holder { worker, rank: *rank, believed_blocks: *believed_blocks };
        let (_, gate_decision) =
            decide_gate(&context.served.config, context.endpoint, unit, holder, &need);
        let ratio = hit_ratio(unit, holder, pool.block_size());
        decision.hit_ratio_estimated(ratio);
        let decided = match gate_decision {
            GateDecision::Enough(decided) => {
                record_sent_prompt(context, unit, &placed);
                decided
            }
            // Not entered in the speculative index: an engine that rejects the prompt will not hold
            // it.
            GateDecision::Ask(gate) => Some(gate),
            GateDecision::TooLittle => {
                note(context, decision, Some(Gate::Router), "skipped");
                let miss = ThresholdMiss { hit_rate: ratio, threshold: need.threshold };
                rejected(context, &placed.worker, Gate::Router, miss);
                return Ok(DecodeTryResult::BelowThreshold(None));
            }
            GateDecision::Unknown => {
                note(context, decision, None, "unsupported");
                return Ok(DecodeTryResult::BelowThreshold(None));
            }
        };
        fetch_planned(prompt, &mut placed, &mut attempts.may_fetch).await;
        match send(prompt, &placed, &need, decided).await {
            Ok(Generation::Started(begun)) => {
                record_computed_prompt(context, unit, &placed);
                note(context, decision, decided, "served");
                return Ok(DecodeTryResult::Answered(begun));
            }
            Ok(Generation::BelowThreshold(usage)) => {
                // The engine can reject a request even if the plan names another gate, or none.
                let gate = decided.filter(|gate| *gate == Gate::Shim).unwrap_or(Gate::Engine);
                note(context, decision, Some(gate), "rejected");
                let hit_rate = decision.hit_ratio_reported(usage.and_then(engine_ratio));
                let miss = ThresholdMiss { hit_rate, threshold: need.threshold };
                rejected(context, &placed.worker, gate, miss);
                return Ok(DecodeTryResult::BelowThreshold(usage));
            }
            Err(error) => {
                note(context, decision, decided, "failed");
                attempts.retry_elsewhere(context, Leg::Aggregated, &placed.worker, error)?;
                if plan.then != NextLegs::ThresholdReply {
                    return Ok(DecodeTryResult::Failed);
                }
            }
        }
    }
}

/// A worker or one of its ranks, with what it holds of a prompt.
#[derive(Clone, Copy)]
pub(crate) struct Holder<'a> {
    pub(crate) worker: &'a Worker,
    /// The data-parallel rank, if the leg is pinned to one.
    pub(crate) rank: Option<u16>,
    /// Leading blocks of the prompt that the worker holds, as far as they count (see drift).
    pub(crate) believed_blocks: u32,
}

/// Decides which gate checks whether a worker or rank holds enough of the prompt, and what to
/// do with that worker.
pub(crate) fn decide_gate(
    config: &Model,
    endpoint: Endpoint,
    unit: &Unit,
    holder: Holder<'_>,
    need: &Need,
) -> (Gate, GateDecision) {
    let Holder { worker, rank, believed_blocks } = holder;
    let settings = &config.gate;
    // A shim gates one rank. If the engine chooses the rank itself, the shim can only reject.
    let shim = worker.config.shim && !worker.ranks.are_chosen_by_the_engine();
    let gate = match endpoint.dialect().names_events() {
        // On these endpoints no engine or shim has a form of reply that rejects a request.
        true => Gate::Router,
        false => Gate::of(settings.kind, shim, worker.supports_cache_hit_threshold()),
    };
    let believed = unit.unknown.is_none() && worker.overlap_is_believed(rank);
    let mut decision = decide(settings, gate, need, believed.then_some(believed_blocks));
    // The engine may be unable to use what it holds.
    let opens = matches!(decision, GateDecision::Enough(Some(_)) | GateDecision::Ask(Gate::Shim));
    if opens && worker.overlap_is_upper_bound() {
        decision = GateDecision::Unknown;
    }
    (gate, decision)
}

/// The share of a prompt's tokens, from 0 to 1, that a worker or rank finds cached according to the
/// index; `None` if the index is not trusted for it, is an upper bound, or the prompt's tokens are not known. An engine
/// finds only whole blocks, and never the last token.
pub(crate) fn hit_ratio(unit: &Unit, holder: Holder<'_>, block_size: u32) -> Option<f64> {
    let Holder { worker, rank, believed_blocks } = holder;
    let tokens = unit.prompt_tokens.filter(|tokens| *tokens > 0 && block_size > 0)?;
    let is_exact = worker.overlap_is_believed(rank) && !worker.overlap_is_upper_bound();
    let is_believed = unit.unknown.is_none() && is_exact;
    let cached = estimate_cached_tokens(believed_blocks, tokens, block_size);
    is_believed.then(|| f64::from(cached) / f64::from(tokens))
}

/// The share of a prompt's tokens that an engine reports as cached.
fn engine_ratio(usage: EngineUsage) -> Option<f64> {
    let cached = usage.cached_tokens.filter(|_| usage.prompt_tokens > 0)?;
    Some(f64::from(cached) / f64::from(usage.prompt_tokens))
}

/// Logs that a worker holds too little of a prompt to serve it alone: at `info` at most twice a
/// minute per model, since a cold prompt is an ordinary event, and at `debug` otherwise.
fn rejected(context: &Context, worker: &Worker, gate: Gate, miss: ThresholdMiss) {
    let (model, worker, gate) = (context.served.name(), worker.id(), gate.name());
    if context.served.below_threshold.may_log() {
        tracing::info!(
            model,
            worker,
            gate,
            "{miss} (at this level at most twice a minute; each request at debug; \
             decode_first_total counts)"
        );
    } else {
        tracing::debug!(model, worker, gate, "{miss}");
    }
}

/// By how much a prompt missed its threshold, as the log shows it.
struct ThresholdMiss {
    /// The share of the prompt that is cached, from 0 to 1, if it is known.
    hit_rate: Option<f64>,
    threshold: f64,
}

impl fmt::Display for ThresholdMiss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threshold = self.threshold;
        // A rate above the threshold comes from an index that is out of date, so it is not shown.
        match self.hit_rate.filter(|rate| *rate < threshold) {
            Some(rate) => {
                write!(f, "cache hit rate {rate:.3} < threshold {threshold:.3}, rejected")
            }
            None => write!(f, "cache hit rate not known, below threshold {threshold:.3}, rejected"),
        }
    }
}

async fn send(
    prompt: PromptContext<'_>,
    placed: &PlacedLeg,
    need: &Need,
    gate: Option<Gate>,
) -> Result<Generation, Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let mut leg_headers = begin_attempt(context, decision);
    let threshold = match gate {
        Some(Gate::Engine) => Some(need.threshold),
        _ => carried_threshold(context, &placed.worker, 0.0),
    };
    if gate == Some(Gate::Shim) {
        let header = gate::header(unit.namespace, placed.rank.unwrap_or(0), need, &unit.hashes);
        leg_headers.gate = header.and_then(|header| HeaderValue::from_str(&header).ok());
    }
    let sending = ReplyLeg { prompt, leg_headers: &leg_headers, placed, threshold };
    generate(&sending, &mut None).await
}

/// Counts and records the outcome of the attempt.
fn note(
    context: &Arc<Context>,
    decision: &DecisionHandle,
    gate: Option<Gate>,
    outcome: &'static str,
) {
    let gate = gate.map_or("none", Gate::name);
    let labels = [context.served.name(), gate, outcome];
    context.metrics.decode_first.with_label_values(&labels).inc();
    decision.decode_tried(gate, outcome);
}
