//! Plans which legs a request needs. This is a pure function.

use splitrail_api::request::Options;
use splitrail_config::model::{HitThreshold, Model, RequestFlow};
use splitrail_policy::threshold::DEFAULT_THRESHOLD_RATIO;

/// The facts about a request from which its legs are planned.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// The flow that the client or the model asks for.
    pub flow: RequestFlow,
    /// The cache hit threshold that the request names, from 0 to 1, if any.
    pub threshold: Option<f64>,
    /// The learned threshold, from 0 to 1, if the router chooses the threshold.
    pub learned: Option<f64>,
    /// Whether a remote prefill is predicted to be faster; `None` if this was not evaluated.
    pub remote_pays: Option<bool>,
    /// The length of the prompt in tokens, if the router knows its tokens.
    pub prompt_tokens: Option<u32>,
    /// How the client wants the request answered.
    pub options: Options,
    /// The longest sequence, in tokens, that an engine that decodes accepts, if one has reported it.
    pub context_tokens: Option<u32>,
    /// Whether no prefill worker returns hand-offs for this endpoint, as past replies showed.
    pub no_hand_off: bool,
}

impl Facts {
    /// Whether the engine that answers will refuse a request that a prefill engine would accept,
    /// because a prefill leg asks for one token only.
    fn only_decode_refuses(&self) -> bool {
        let tokens = self.prompt_tokens.zip(self.options.output.max_tokens);
        let sequence = tokens.map(|(prompt, max)| u64::from(prompt) + u64::from(max));
        let too_long = sequence.zip(self.context_tokens).is_some_and(|(n, max)| n > max.into());
        self.options.refusable || too_long
    }
}

/// The legs of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// The cache hit threshold of a first attempt on a decode worker alone; `then` applies if no
    /// decode worker holds enough of the prompt. `None`: there is no such attempt.
    pub gate: Option<f64>,
    /// The legs after that attempt, or the only legs if there is no such attempt.
    pub then: NextLegs,
}

/// The legs of a request that is not served from a decode worker's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextLegs {
    /// One worker does everything. The reason is given if the flow would have a remote prefill.
    Aggregated(Option<LocalReason>),
    /// Prefill on one worker, decode on another.
    PrefillFirst,
    /// A prefill worker answers alone, because the request asks for one token only.
    OnPrefill,
    /// The client gets a reply with the finish reason `cache_threshold`: too little is cached.
    ThresholdReply,
}

impl Plan {
    /// The name of the planned flow in metrics and records.
    pub fn name(&self) -> &'static str {
        let flow = match (self.gate, self.then) {
            (_, NextLegs::ThresholdReply) => RequestFlow::DecodeOnly,
            (Some(_), _) => RequestFlow::DecodeFirst,
            (None, NextLegs::PrefillFirst) => RequestFlow::PrefillFirst,
            (None, NextLegs::Aggregated(_) | NextLegs::OnPrefill) => RequestFlow::Aggregated,
        };
        flow.name()
    }
}

/// The reason for a local prefill of a request of a P/D model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalReason {
    /// The prompt has at most `local_prefill_max_tokens` tokens.
    ShortPrompt,
    /// The request asks for one token, so there is nothing to decode.
    OneToken,
    /// The reply ended with its first token, and engines return no hand-off for such a reply.
    PrefillEnded,
    /// The prefill engines return no hand-offs for this endpoint.
    NoHandOff,
    /// The request asks for log-probabilities of the prompt, which only the engine that computes
    /// the prompt has.
    PromptLogprobs,
    /// The prompts are embeddings, and the router cannot tell how many prompts there are.
    PromptEmbeds,
    /// The engine may call tools and continue by itself; the engine would send its further prompts
    /// with the hand-off of the first prompt.
    EngineTools,
    /// No decode worker is up to fetch the blocks that a prefill would stage.
    NoDecode,
    /// The engine that answers will refuse the request with an error of its own. A prefill would
    /// leave blocks staged that no worker fetches before the lease ends.
    Refusable,
    /// No prefill leg succeeded, and `on_no_prefill` is `local`.
    NoPrefill,
    /// The cost model of `auto` predicts that a remote prefill is not worth its cost.
    Cheaper,
}

impl LocalReason {
    /// The label in metrics and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::ShortPrompt => "short_prompt",
            Self::OneToken => "one_token",
            Self::PrefillEnded => "prefill_ended",
            Self::NoHandOff => "no_hand_off",
            Self::PromptLogprobs => "prompt_logprobs",
            Self::PromptEmbeds => "prompt_embeds",
            Self::EngineTools => "engine_tools",
            Self::NoDecode => "no_decode",
            Self::Refusable => "refusable",
            Self::NoPrefill => "no_prefill",
            Self::Cheaper => "cheaper",
        }
    }
}

/// Plans a request's legs.
pub fn plan(model: &Model, facts: Facts) -> Plan {
    let (said, learned) = match model.cache_hit_threshold {
        Some(HitThreshold::Ratio(ratio)) => (Some(ratio), None),
        Some(HitThreshold::Auto) => (None, facts.learned),
        None => (None, None),
    };
    let threshold = facts.threshold.or(said);
    let gate = match facts.flow {
        RequestFlow::DecodeFirst | RequestFlow::DecodeOnly => {
            Some(threshold.or(learned).unwrap_or(DEFAULT_THRESHOLD_RATIO))
        }
        // Comparing the costs of both ways for each request is better than one threshold for all.
        RequestFlow::Auto => threshold,
        RequestFlow::Aggregated | RequestFlow::PrefillFirst => None,
    };
    if facts.flow == RequestFlow::DecodeOnly {
        return Plan { gate, then: NextLegs::ThresholdReply };
    }
    if facts.flow == RequestFlow::Aggregated || !model.connector.hands_over() {
        return Plan { gate: None, then: NextLegs::Aggregated(None) };
    }
    if !model.connector.serves_alone() {
        return Plan { gate: None, then: NextLegs::PrefillFirst };
    }
    match local_reason(model, facts) {
        Some(LocalReason::OneToken) => Plan { gate, then: NextLegs::OnPrefill },
        Some(reason) => Plan { gate: None, then: NextLegs::Aggregated(Some(reason)) },
        None if gate.is_none() && facts.remote_pays == Some(false) => {
            Plan { gate: None, then: NextLegs::Aggregated(Some(LocalReason::Cheaper)) }
        }
        None => Plan { gate, then: NextLegs::PrefillFirst },
    }
}

/// The reason for which a request cannot have or does not need a remote prefill, regardless of what
/// is cached.
fn local_reason(model: &Model, facts: Facts) -> Option<LocalReason> {
    let short = facts.prompt_tokens.is_some_and(|n| n <= model.local_prefill_max_tokens);
    if facts.options.bypasses_cache.is_some() {
        Some(LocalReason::PromptLogprobs)
    } else if facts.options.embeds {
        Some(LocalReason::PromptEmbeds)
    } else if facts.options.engine_takes_turns {
        Some(LocalReason::EngineTools)
    } else if short {
        Some(LocalReason::ShortPrompt)
    } else if facts.only_decode_refuses() {
        Some(LocalReason::Refusable)
    } else if facts.options.output.max_tokens == Some(1) {
        Some(LocalReason::OneToken)
    } else if facts.no_hand_off {
        Some(LocalReason::NoHandOff)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use splitrail_api::sampling::OutputLimit;
    use splitrail_config::model::Connector;

    use super::*;

    fn model() -> Model {
        let text = "models: [{ name: m, tokenizer: { kind: none }, flow: prefill_first, \
             connector: nixl, block_size: 16, local_prefill_max_tokens: 32, workers: [\
             { id: p, role: prefill, url: 'http://p:1' }, { id: d, role: decode, url: 'http://d:1' }]}]";
        let loaded = splitrail_config::parse("test.yaml", text, std::path::Path::new("."));
        loaded.unwrap_or_else(|problems| panic!("{problems}")).config.models.remove(0)
    }

    fn facts(change: impl FnOnce(&mut Facts)) -> Facts {
        let output = OutputLimit { max_tokens: Some(50), upper_bound_tokens: Some(50) };
        let options = Options { output, ..Options::PLAIN };
        let mut facts = Facts {
            flow: RequestFlow::PrefillFirst,
            threshold: None,
            learned: None,
            remote_pays: None,
            prompt_tokens: Some(100),
            options,
            context_tokens: Some(150),
            no_hand_off: false,
        };
        change(&mut facts);
        facts
    }

    type Change = fn(&mut Facts);

    #[test]
    fn a_prompt_goes_to_prefill_unless_there_is_a_reason() {
        let model = model();
        let then = |change: Change| plan(&model, facts(change)).then;
        assert_eq!(then(|_| {}), NextLegs::PrefillFirst);
        assert_eq!(then(|facts| facts.prompt_tokens = None), NextLegs::PrefillFirst);
        assert_eq!(then(|facts| facts.context_tokens = None), NextLegs::PrefillFirst);
        assert_eq!(then(|facts| facts.options.samples = 2), NextLegs::PrefillFirst);
        assert_eq!(then(|facts| facts.options.output.max_tokens = Some(1)), NextLegs::OnPrefill);
        let reasons: [(Change, LocalReason); 7] = [
            (|facts| facts.prompt_tokens = Some(32), LocalReason::ShortPrompt),
            (|facts| facts.options.embeds = true, LocalReason::PromptEmbeds),
            (|facts| facts.options.engine_takes_turns = true, LocalReason::EngineTools),
            (|facts| facts.options.bypasses_cache = Some("x"), LocalReason::PromptLogprobs),
            (|facts| facts.options.output.max_tokens = Some(51), LocalReason::Refusable),
            (|facts| facts.options.refusable = true, LocalReason::Refusable),
            (|facts| facts.no_hand_off = true, LocalReason::NoHandOff),
        ];
        for (change, reason) in reasons {
            assert_eq!(then(change), NextLegs::Aggregated(Some(reason)));
        }
    }

    #[test]
    fn workers_that_serve_no_request_alone_always_get_both_legs() {
        let model = Model { connector: Connector::Sglang, ..model() };
        let changes: [Change; 4] = [
            |facts| facts.prompt_tokens = Some(1),
            |facts| facts.options.output.max_tokens = Some(1),
            |facts| facts.options.refusable = true,
            |facts| facts.no_hand_off = true,
        ];
        for change in changes {
            let expected = Plan { gate: None, then: NextLegs::PrefillFirst };
            assert_eq!(plan(&model, facts(change)), expected);
        }
    }

    #[test]
    fn an_aggregated_request_needs_no_reason_and_no_gate() {
        let aggregated = facts(|facts| {
            facts.flow = RequestFlow::Aggregated;
            facts.threshold = Some(0.5);
        });
        let expected = Plan { gate: None, then: NextLegs::Aggregated(None) };
        assert_eq!(plan(&model(), aggregated), expected);
    }

    #[test]
    fn a_request_s_threshold_goes_before_the_model_s_and_that_before_the_default() {
        let gate = |model: &Model, flow, threshold| {
            let facts = facts(|facts| (facts.flow, facts.threshold) = (flow, threshold));
            plan(model, facts).gate
        };
        let said = Model { cache_hit_threshold: Some(HitThreshold::Ratio(0.4)), ..model() };
        for flow in [RequestFlow::DecodeFirst, RequestFlow::DecodeOnly] {
            assert_eq!(gate(&said, flow, Some(0.1)), Some(0.1));
            assert_eq!(gate(&said, flow, None), Some(0.4));
            assert_eq!(gate(&model(), flow, None), Some(0.8));
        }
        let found = Model { cache_hit_threshold: Some(HitThreshold::Auto), ..model() };
        assert_eq!(gate(&found, RequestFlow::DecodeFirst, Some(0.1)), Some(0.1));
        let learned = facts(|facts| {
            (facts.flow, facts.learned) = (RequestFlow::DecodeFirst, Some(0.65));
        });
        assert_eq!(plan(&found, learned).gate, Some(0.65));
        assert_eq!(plan(&said, learned).gate, Some(0.4));
        assert_eq!(gate(&found, RequestFlow::Auto, None), None);
        assert_eq!(gate(&said, RequestFlow::PrefillFirst, Some(0.1)), None);
        assert_eq!(gate(&said, RequestFlow::Auto, None), Some(0.4));
        assert_eq!(gate(&model(), RequestFlow::Auto, None), None);
    }

    #[test]
    fn auto_stays_local_only_where_that_is_cheaper_and_no_threshold_decides() {
        let then = |threshold, pays| {
            let facts = facts(|facts| {
                facts.flow = RequestFlow::Auto;
                (facts.threshold, facts.remote_pays) = (threshold, pays);
            });
            plan(&model(), facts).then
        };
        assert_eq!(then(None, Some(false)), NextLegs::Aggregated(Some(LocalReason::Cheaper)));
        assert_eq!(then(None, Some(true)), NextLegs::PrefillFirst);
        assert_eq!(then(None, None), NextLegs::PrefillFirst);
        assert_eq!(then(Some(0.5), Some(false)), NextLegs::PrefillFirst);
    }

    #[test]
    fn several_samples_try_decode_first_and_what_never_hits_does_not() {
        let plan = |change: Change| {
            let mut facts = facts(change);
            facts.flow = RequestFlow::DecodeFirst;
            plan(&model(), facts)
        };
        let samples = plan(|facts| facts.options.samples = 3);
        assert_eq!((samples.gate, samples.name()), (Some(0.8), "decode_first"));
        let one = plan(|facts| facts.options.output.max_tokens = Some(1));
        assert_eq!((one.gate, one.then), (Some(0.8), NextLegs::OnPrefill));
        let computed = plan(|facts| facts.options.bypasses_cache = Some("x"));
        assert_eq!((computed.gate, computed.name()), (None, "aggregated"));
    }
}
