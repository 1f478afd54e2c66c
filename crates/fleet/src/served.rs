//! The models that a configuration serves, each with its workers, tokenizer and policy.

use std::collections::BTreeMap;
use std::sync::Arc;

use splitrail_telemetry::{LabelledSeries, LogThrottle, ModelSeries};

use super::pool::Pool;
use super::releases::Releases;
use splitrail_config::model::{Config, GateKind, Limits, Model, RequestFlow};
use splitrail_engine_client::EngineClient;
use splitrail_engine_client::retry_budget::RetryBudget;
use splitrail_prompt::PromptModel;
use splitrail_prompt::stamp::FileStamp;

/// One model with everything that serves it.
pub struct Served {
    /// Its configuration.
    pub config: Model,
    /// Its workers and their index.
    pub pool: Arc<Pool>,
    /// Tokenizer and chat template, if it has them.
    pub prompt: Option<Arc<PromptModel>>,
    /// The files that it was read from, as they were.
    pub prompt_files: Vec<FileStamp>,
    /// The way to its engines.
    pub client: EngineClient,
    /// What is left for retries.
    pub retry_budget: Arc<RetryBudget>,
    /// Hand-offs that nobody is going to use, on their way to be freed.
    pub releases: Arc<Releases>,
    /// When a mismatch of token counts was last logged.
    pub mismatch: LogThrottle,
    /// When a prefill that could not be had was last logged.
    pub no_prefill: LogThrottle,
    /// When a prompt of which too little is cached was last logged at `info`.
    pub below_threshold: LogThrottle,
    /// Series of its metrics that every request touches.
    pub series: ModelSeries,
}

impl Served {
    /// Whether its engines must be asked if they honour `cache_hit_threshold`.
    pub fn asks_for_thresholds(&self) -> bool {
        let config = &self.config;
        let gated = |flow: &RequestFlow| {
            matches!(flow, RequestFlow::DecodeFirst | RequestFlow::DecodeOnly | RequestFlow::Auto)
        };
        let own = RequestFlow::from(config.flow);
        // Decode legs after a prefill carry the guard in every flow. Halves of pairs cannot be
        // asked: alone they never answer.
        let guard = config.gate.preemption_guard > 0.0 && config.connector.serves_alone();
        let guarded = |flow: &RequestFlow| guard && flow.hands_over();
        config.gate.kind == GateKind::Auto
            && std::iter::once(&own)
                .chain(&config.request_flows)
                .any(|flow| gated(flow) || guarded(flow))
    }

    /// Its configured name, the metrics' label.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Its series, with the label that they have in common.
    pub fn labelled_series(&self) -> LabelledSeries<'_> {
        LabelledSeries { model: self.name(), series: &self.series }
    }
}

/// What a name that clients use stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// The model's place.
    pub model: usize,
    /// The adapter, if the name is one.
    pub adapter: Option<String>,
}

/// What becomes of prompts here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tokenizing {
    /// Nothing: no tokenizer is configured.
    None,
    /// They are tokenised in less than a millisecond, if they are of words.
    Fast,
    /// They are tokenised by the reference.
    Slow,
}

/// What a configuration says is served: replaced as a whole when it changes.
pub struct Serving {
    /// The models, in the configuration's order.
    pub models: Vec<Arc<Served>>,
    /// Names, aliases and adapters.
    pub names: BTreeMap<String, Named>,
    /// Bounds.
    pub limits: Limits,
    /// What the slowest of all models does with prompts.
    pub tokenizing: Tokenizing,
    /// The whole configuration.
    pub config: Arc<Config>,
}

impl Serving {
    /// These models, as a configuration says.
    pub fn new(models: Vec<Arc<Served>>, config: Arc<Config>) -> Self {
        let mut names = BTreeMap::new();
        for (model, served) in models.iter().enumerate() {
            let config = &served.config;
            for name in std::iter::once(&config.name).chain(&config.aliases) {
                names.insert(name.clone(), Named { model, adapter: None });
            }
            for adapter in &config.adapters {
                names.insert(adapter.clone(), Named { model, adapter: Some(adapter.clone()) });
            }
        }
        let of = |served: &Arc<Served>| match &served.prompt {
            None => Tokenizing::None,
            Some(prompt) if prompt.tokenizer().is_fast() => Tokenizing::Fast,
            Some(_) => Tokenizing::Slow,
        };
        let tokenizing = models.iter().map(of).max().unwrap_or(Tokenizing::None);
        Self { models, names, limits: config.limits.clone(), tokenizing, config }
    }

    /// The model of a configured name.
    pub fn model(&self, name: &str) -> Option<&Arc<Served>> {
        self.models.iter().find(|served| served.name() == name)
    }
}
