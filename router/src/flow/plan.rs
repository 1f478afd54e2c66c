//! Which legs a request needs: a pure function.

use crate::api::request::Options;
use crate::config::model::{Connector, Flow, Model};

/// What is known of a request when its legs are planned.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Its prompt's length, if the router knows its tokens.
    pub prompt_tokens: Option<u32>,
    /// How it is to be answered.
    pub options: Options,
    /// The longest sequence that the model's engines take, if they have said it.
    pub context_tokens: Option<u32>,
}

impl Facts {
    /// Whether the answering engine is going to refuse what a prefill engine, which
    /// is asked for one token, would not see.
    fn only_decode_refuses(&self) -> bool {
        let tokens = self.prompt_tokens.zip(self.options.max_tokens);
        let sequence = tokens.map(|(prompt, max)| u64::from(prompt) + u64::from(max));
        let too_long = sequence.zip(self.context_tokens).is_some_and(|(n, max)| n > max.into());
        self.options.refusable || too_long
    }
}

/// The legs of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// One worker does everything; where the flow says otherwise, with the reason.
    Aggregated(Option<LocalReason>),
    /// Prefill on one worker, decode on another.
    PrefillFirst,
}

/// Why a request of a P/D model is prefilled where it is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalReason {
    /// The prompt has at most `local_prefill_max_tokens`.
    ShortPrompt,
    /// Several samples: one hand-off serves one decode.
    Samples,
    /// Log-probabilities of the prompt exist only where it is computed.
    PromptLogprobs,
    /// Prompts that are embeddings: the router cannot tell how many there are.
    PromptEmbeds,
    /// No decode worker is up: nobody would fetch what a prefill stages.
    NoDecode,
    /// The answering engine is going to refuse it, with its own words: a prefill
    /// would leave blocks staged that nobody fetches before their lease ends.
    Refusable,
    /// No prefill worker did its part, and `on_no_prefill` is `local`.
    NoPrefill,
}

impl LocalReason {
    /// The metrics' label.
    pub fn name(self) -> &'static str {
        match self {
            Self::ShortPrompt => "short_prompt",
            Self::Samples => "samples",
            Self::PromptLogprobs => "prompt_logprobs",
            Self::PromptEmbeds => "prompt_embeds",
            Self::NoDecode => "no_decode",
            Self::Refusable => "refusable",
            Self::NoPrefill => "no_prefill",
        }
    }
}

/// Plans a request's legs.
pub fn plan(model: &Model, facts: Facts) -> Plan {
    if model.flow == Flow::Aggregated || model.connector == Connector::None {
        return Plan::Aggregated(None);
    }
    let short = facts.prompt_tokens.is_some_and(|n| n <= model.local_prefill_max_tokens);
    if facts.options.samples > 1 {
        Plan::Aggregated(Some(LocalReason::Samples))
    } else if facts.options.bypasses_cache.is_some() {
        Plan::Aggregated(Some(LocalReason::PromptLogprobs))
    } else if facts.options.embeds {
        Plan::Aggregated(Some(LocalReason::PromptEmbeds))
    } else if short {
        Plan::Aggregated(Some(LocalReason::ShortPrompt))
    } else if facts.only_decode_refuses() {
        Plan::Aggregated(Some(LocalReason::Refusable))
    } else {
        Plan::PrefillFirst
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        let text = "models: [{ name: m, tokenizer: { kind: none }, flow: prefill_first, \
             connector: nixl, block_size: 16, local_prefill_max_tokens: 32, workers: [\
             { id: p, role: prefill, url: 'http://p:1' }, { id: d, role: decode, url: 'http://d:1' }]}]";
        let loaded = crate::config::parse("test.yaml", text, std::path::Path::new("."));
        loaded.unwrap_or_else(|problems| panic!("{problems}")).config.models.remove(0)
    }

    fn facts(change: impl FnOnce(&mut Facts)) -> Facts {
        let options = Options {
            stream: false,
            include_usage: false,
            samples: 1,
            n: 1,
            bypasses_cache: None,
            embeds: false,
            refusable: false,
            max_tokens: Some(50),
        };
        let mut facts = Facts { prompt_tokens: Some(100), options, context_tokens: Some(150) };
        change(&mut facts);
        facts
    }

    #[test]
    fn a_prompt_goes_to_prefill_unless_there_is_a_reason() {
        type Change = fn(&mut Facts);
        let model = model();
        let local = |change: Change| match plan(&model, facts(change)) {
            Plan::Aggregated(reason) => reason,
            Plan::PrefillFirst => None,
        };
        assert_eq!(plan(&model, facts(|_| {})), Plan::PrefillFirst);
        assert_eq!(local(|facts| facts.prompt_tokens = None), None);
        assert_eq!(local(|facts| facts.context_tokens = None), None);
        let reasons: [(Change, LocalReason); 6] = [
            (|facts| facts.prompt_tokens = Some(32), LocalReason::ShortPrompt),
            (|facts| facts.options.samples = 2, LocalReason::Samples),
            (|facts| facts.options.embeds = true, LocalReason::PromptEmbeds),
            (|facts| facts.options.bypasses_cache = Some("x"), LocalReason::PromptLogprobs),
            (|facts| facts.options.max_tokens = Some(51), LocalReason::Refusable),
            (|facts| facts.options.refusable = true, LocalReason::Refusable),
        ];
        for (change, reason) in reasons {
            assert_eq!(local(change), Some(reason));
        }
    }

    #[test]
    fn an_aggregated_model_needs_no_reason() {
        let model = Model { flow: Flow::Aggregated, ..model() };
        assert_eq!(plan(&model, facts(|_| {})), Plan::Aggregated(None));
    }
}
