//! Decode first: a decode worker that holds enough of a prompt serves it alone.

use std::sync::Arc;
use std::time::Instant;

use http::HeaderValue;
use splitrail_engine::usage::EngineUsage;

use super::answer::{Answer, Begun, Sending, generate};
use super::attempts::Attempts;
use super::context::{Context, attempt, carried_threshold};
use super::gate::{self, Gate, Need, Verdict, judge};
use super::place::{Placed, Wish, computed, place, sent};
use super::plan::{Plan, Then};
use crate::api::Endpoint;
use crate::config::model::Model;
use crate::error::{Error, Kind};
use crate::fleet::Worker;
use crate::ledger::decisions::DecisionHandle;
use crate::pick::Leg;
use crate::prepare::Unit;

/// What came of trying decode first.
pub(super) enum Tried {
    /// It serves.
    Answered(Begun),
    /// Too little is cached, or nobody can tell; with what the engine said of its tokens.
    Below(Option<EngineUsage>),
    /// The worker failed, and another attempt is allowed.
    Failed,
}

/// Tries decode first. `plan.gate` is the threshold.
///
/// # Errors
/// The attempt's, where no further one is allowed.
pub(super) async fn decode_try(
    context: &Arc<Context>,
    unit: &Unit,
    decision: &DecisionHandle,
    plan: &Plan,
    attempts: &mut Attempts,
) -> Result<Tried, Error> {
    let pool = &context.served.pool;
    let need = Need::new(plan.gate.unwrap_or(0.0), unit.prompt_tokens, pool.block_size());
    loop {
        decision.begin_attempt(plan.name());
        decision.update(|decision| decision.cache_hit_threshold = plan.gate);
        let started = Instant::now();
        let wish = Wish { leg: Leg::Aggregated, excluded: attempts.failed(), blocks: need.blocks };
        let placed = place(context, unit, decision, wish)?;
        if plan.then == Then::Tell && !placed.worker.is_up() {
            let message =
                format!("model {} has no decode worker that is up", context.served.name());
            return Err(Error::new(Kind::NoWorker, message));
        }
        let held = placed.believed_blocks;
        let place = (&*placed.worker, placed.rank);
        let of = (&context.served.config, context.endpoint);
        let (_, verdict) = verdict(of, unit, place, held, &need);
        let decided = match verdict {
            Verdict::Enough(decided) => {
                sent(context, unit, &placed);
                decided
            }
            // If it turns the prompt away, it will not hold it.
            Verdict::Ask(gate) => Some(gate),
            Verdict::TooLittle => {
                note(context, decision, Some(Gate::Router), "skipped");
                return Ok(Tried::Below(None));
            }
            Verdict::Unknown => {
                note(context, decision, None, "unsupported");
                return Ok(Tried::Below(None));
            }
        };
        let answer = send(context, unit, decision, &placed, (&need, decided)).await;
        context.mark("decode_try", started);
        match answer {
            Ok(Answer::Begun(begun)) => {
                computed(context, unit, &placed);
                note(context, decision, decided, "served");
                return Ok(Tried::Answered(begun));
            }
            Ok(Answer::Below(usage)) => {
                // An engine has a say of its own, whoever was to decide.
                let gate = decided.filter(|gate| *gate == Gate::Shim).unwrap_or(Gate::Engine);
                note(context, decision, Some(gate), "rejected");
                return Ok(Tried::Below(usage));
            }
            Err(error) => {
                note(context, decision, decided, "failed");
                attempts.again_elsewhere(context, Leg::Aggregated, &placed.worker, error)?;
                if plan.then != Then::Tell {
                    return Ok(Tried::Failed);
                }
            }
        }
    }
}

/// Who is to say whether a place holds enough, and what follows.
pub(super) fn verdict(
    (config, endpoint): (&Model, Endpoint),
    unit: &Unit,
    (worker, rank): (&Worker, Option<u16>),
    believed_blocks: u32,
    need: &Need,
) -> (Gate, Verdict) {
    let settings = &config.gate;
    // A side-car gates one rank: where the engine chooses, it can only refuse.
    let shim = worker.config.shim && !worker.ranks.are_chosen_by_the_engine();
    let gate = match endpoint.dialect().names_events() {
        // No engine and no side-car has a form of reply there that turns a request away.
        true => Gate::Router,
        false => Gate::of(settings.kind, shim, worker.honours_threshold()),
    };
    let believed = unit.unknown.is_none() && worker.overlap_is_believed(rank);
    (gate, judge(settings, gate, need, believed.then_some(believed_blocks)))
}

async fn send(
    context: &Arc<Context>,
    unit: &Unit,
    decision: &DecisionHandle,
    placed: &Placed,
    (need, gate): (&Need, Option<Gate>),
) -> Result<Answer, Error> {
    let mut envelope = attempt(context, decision);
    let threshold = match gate {
        Some(Gate::Engine) => Some(need.threshold),
        _ => carried_threshold(context, &placed.worker, 0.0),
    };
    if gate == Some(Gate::Shim) {
        let header = gate::header(unit.namespace, placed.rank.unwrap_or(0), need, &unit.hashes);
        envelope.gate = header.and_then(|header| HeaderValue::from_str(&header).ok());
    }
    let sending = Sending { context, unit, decision, envelope: &envelope, placed, threshold };
    generate(&sending, &mut None).await
}

/// Counts and records what came of it.
fn note(
    context: &Arc<Context>,
    decision: &DecisionHandle,
    gate: Option<Gate>,
    outcome: &'static str,
) {
    let gate = gate.map_or("none", Gate::name);
    let labels = [context.served.name(), gate, outcome];
    context.core.metrics.decode_first.with_label_values(&labels).inc();
    decision.update(|decision| {
        decision.gate = Some(gate);
        decision.decode_try = Some(outcome);
    });
}
