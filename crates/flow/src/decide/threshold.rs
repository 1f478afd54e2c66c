//! The value of `cache_hit_threshold` that a leg carries.

use splitrail_config::model::KvPath;
use splitrail_fleet::{ServedModel, Worker};

use super::gate::Need;
use crate::context::{Context, PromptContext};

/// The value of `cache_hit_threshold` in a leg's body; only the router sets this field. It is
/// `wanted` if the engine supports the field, so that an engine with a default threshold of its own
/// does not reject a request that should not be gated. It is `None` if the engine does not support
/// the field, or if the replies of the endpoint cannot express a rejection.
pub(crate) fn carried_threshold(context: &Context, worker: &Worker, wanted: f64) -> Option<f64> {
    if context.endpoint.dialect().names_events() {
        return None;
    }
    worker.takes_cache_hit_threshold(context.served.config.gate.kind).then_some(wanted)
}

/// The threshold of a decode leg that follows a prefill leg: the model's `preemption_guard`, or 0
/// if the prompt might fail the threshold although it was handed over. With several samples or with
/// shared storage an engine finds only full blocks, and never the last token. vLLM's
/// `ExampleConnector` finds nothing of a prompt with one token more than full blocks.
pub(crate) fn preemption_guard(prompt: PromptContext<'_>) -> f64 {
    let PromptContext { context, unit, decision, .. } = prompt;
    let ServedModel { config, pool, .. } = context.served.as_ref();
    let (guard, block_size) = (config.gate.preemption_guard, pool.block_size());
    let reported = decision
        .with(|decision| decision.ledger.prefill.as_ref().and_then(|leg| leg.prompt_tokens));
    let tokens = unit.prompt_tokens.or(reported);
    let one_more = tokens.is_some_and(|tokens| block_size > 0 && tokens % block_size == 1);
    let is_found = config.connector.kv_path() != KvPath::Stored || !one_more;
    let need = Need::new(guard, tokens, block_size);
    if need.blocks.is_some() && need.possible && is_found { guard } else { 0.0 }
}
