//! What a request costs its tenant, in weighted tokens (`models[].token_weights`).

use splitrail_api::request::Options;
use splitrail_config::model::TokenWeights;
use splitrail_fleet::Served;
use splitrail_flow::prepare::Unit;
use splitrail_ledger::close::Used;

/// What a request may cost, before it is served: its prompts, of which the index knows how much is
/// cached, and the output that it asks for. A prompt whose tokens are not known is estimated by its
/// bytes.
pub(super) fn expected(served: &Served, units: &[Unit], options: &Options, generates: bool) -> u64 {
    let weights = &served.config.token_weights;
    let output = match (generates, options.max_tokens) {
        (false, _) => 0,
        (true, Some(tokens)) => u64::from(tokens),
        (true, None) => weights.output_default,
    };
    let block_size = u64::from(served.pool.block_size());
    units.iter().fold(0, |sum: u64, unit| {
        let cost = output.saturating_mul(weights.output).saturating_mul(options.samples.into());
        if unit.further_sample {
            return sum.saturating_add(cost);
        }
        let prompt = unit.prompt_tokens.map_or(unit.weight_tokens, u64::from);
        let cached = u64::from(served.pool.best_overlap_blocks(&unit.hashes)) * block_size;
        let cached = if options.bypasses_cache.is_some() { 0 } else { cached.min(prompt) };
        sum.saturating_add(cost).saturating_add(prompt_cost(weights, prompt, cached))
    })
}

/// What a request has cost, by the ledger.
pub(super) fn actual(weights: &TokenWeights, used: Used) -> u64 {
    let prompt = prompt_cost(weights, used.prompt_tokens, used.cached_tokens);
    prompt.saturating_add(used.completion_tokens.saturating_mul(weights.output))
}

fn prompt_cost(weights: &TokenWeights, prompt: u64, cached: u64) -> u64 {
    let uncached = prompt.saturating_sub(cached);
    uncached.saturating_mul(weights.uncached).saturating_add(cached.saturating_mul(weights.cached))
}
