//! Which legs a request needs: a pure function.

use crate::config::model::{Connector, Flow, Model};

/// What is known of a request when its legs are planned.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Its prompt's length, if the router knows its tokens.
    pub prompt_tokens: Option<u32>,
    /// Samples per prompt.
    pub samples: u32,
    /// Whether the engine computes the whole prompt, whatever it has cached.
    pub bypasses_cache: bool,
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
    if facts.samples > 1 {
        Plan::Aggregated(Some(LocalReason::Samples))
    } else if facts.bypasses_cache {
        Plan::Aggregated(Some(LocalReason::PromptLogprobs))
    } else if short {
        Plan::Aggregated(Some(LocalReason::ShortPrompt))
    } else {
        Plan::PrefillFirst
    }
}
