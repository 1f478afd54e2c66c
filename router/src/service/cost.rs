//! What a request costs its tenant, in weighted tokens (`models[].token_weights`).

use splitrail_api::request::Options;
use splitrail_config::model::TokenWeights;
use splitrail_fleet::ServedModel;
use splitrail_flow::prepare::Unit;
use splitrail_ledger::close::UsedTokens;

/// What a request may cost, before it is served: its prompts, of which the index knows how much is
/// cached, and the most output that an engine may read from its options. A prompt whose tokens are
/// not known is estimated by its bytes.
pub(super) fn expected(
    served: &ServedModel,
    units: &[Unit],
    options: &Options,
    generates: bool,
) -> u64 {
    let weights = &served.config.token_weights;
    let output = match (generates, options.output.upper_bound_tokens) {
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

/// The most tokens that a request can have; `None` if the router does not know.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MostTokens {
    /// Tokens of all prompts.
    prompt: Option<u64>,
    /// Generated tokens of all samples of all prompts.
    completion: Option<u64>,
    /// What was reserved for the prompts, in weighted tokens, if the length of one is not known.
    reserved_for_prompts: u64,
}

impl MostTokens {
    /// What a request can have: the tokens of its prompts by the router's tokenizer, and
    /// `max_tokens` for each sample. For what is not known of these, the longest sequence of any
    /// engine counts. Nothing is known of a request whose engine takes further turns.
    pub(super) fn of(
        served: &ServedModel,
        units: &[Unit],
        options: &Options,
        generates: bool,
    ) -> Self {
        let reserved_for_prompts = match units.iter().any(|unit| unit.prompt_tokens.is_none()) {
            true => expected(served, units, options, false),
            false => 0,
        };
        if options.engine_takes_turns {
            return Self { reserved_for_prompts, ..Self::default() };
        }
        let context_tokens = served.pool.longest_context_tokens();
        let unknown = context_tokens.filter(|_| generates);
        let prompts = units.iter().filter(|unit| !unit.further_sample);
        let prompt = prompts.map(|unit| unit.prompt_tokens.or(unknown).map(u64::from)).sum();
        let samples = u64::from(options.samples).saturating_mul(units.len() as u64);
        let of_sample = match generates {
            true => options.output.upper_bound_tokens.or(context_tokens),
            false => Some(0),
        };
        let completion = of_sample.map(|tokens| u64::from(tokens).saturating_mul(samples));
        Self { prompt, completion, reserved_for_prompts }
    }

    /// What a finished request has cost: what engines have reported, as far as the request can have
    /// it. If they have not reported all, it costs at least what it had reserved: otherwise an engine
    /// without usage would have no limit. If the client left, that is what was reserved for its
    /// prompts, and the generated tokens that had arrived.
    pub(super) fn settled(
        self,
        served: &ServedModel,
        request_id: &str,
        reserved: u64,
        used: UsedTokens,
    ) -> u64 {
        let charged = self.limit(used);
        if charged != used && served.charges.may_log() {
            tracing::warn!(
                model = served.name(),
                request_id,
                prompt_tokens = used.prompt_tokens,
                completion_tokens = used.completion_tokens,
                "an engine reports more tokens than the request can have: its tenant is charged \
                 for what it can have"
            );
        }
        let weights = &served.config.token_weights;
        let reported = actual(weights, charged);
        if used.lacks_begun_prompt() {
            let output = charged.completion_tokens.saturating_mul(weights.output);
            return reported.max(self.reserved_for_prompts.saturating_add(output));
        }
        match used.is_partial() {
            true => reported.max(reserved),
            false => reported,
        }
    }

    /// The tokens of a finished request, no more than it can have.
    fn limit(self, mut used: UsedTokens) -> UsedTokens {
        let least = |tokens: u64, most: Option<u64>| most.map_or(tokens, |most| tokens.min(most));
        used.prompt_tokens = least(used.prompt_tokens, self.prompt);
        used.completion_tokens = least(used.completion_tokens, self.completion);
        used
    }
}

/// What a request has cost, by these tokens.
fn actual(weights: &TokenWeights, used: UsedTokens) -> u64 {
    let cached = used.cached_tokens.min(used.prompt_tokens);
    let prompt = prompt_cost(weights, used.prompt_tokens, cached);
    prompt.saturating_add(used.completion_tokens.saturating_mul(weights.output))
}

fn prompt_cost(weights: &TokenWeights, prompt: u64, cached: u64) -> u64 {
    let uncached = prompt.saturating_sub(cached);
    uncached.saturating_mul(weights.uncached).saturating_add(cached.saturating_mul(weights.cached))
}
