//! The models that a configuration serves, each with its workers, tokenizer and policy.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use splitrail_settings::log_throttle::LogThrottle;
use splitrail_telemetry::{LabelledSeries, ModelSeries};
use splitrail_workload::suspects::Suspects;

use super::pool::Pool;
use super::releases::Releases;
use super::worker::Worker;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_config::model::{Config, GateKind, Limits, Model, RequestFlow};
use splitrail_engine_client::EngineClient;
use splitrail_engine_client::hosts::Hosts;
use splitrail_engine_client::retry_budget::RetryBudget;
use splitrail_prompt::PromptModel;
use splitrail_prompt::stamp::FileStamp;

/// One model with everything that serves it.
pub struct ServedModel {
    /// The model's configuration.
    pub config: Model,
    /// The model's workers and their index.
    pub pool: Arc<Pool>,
    /// Tokenizer and chat template, if a tokenizer is configured.
    pub prompt: Option<Arc<PromptModel>>,
    /// Stamps of the files that `prompt` was read from, to detect changes at a reload.
    pub prompt_files: Vec<FileStamp>,
    /// The HTTP client for the model's engines.
    pub client: EngineClient,
    /// The model's budget for retries.
    pub retry_budget: Arc<RetryBudget>,
    /// Prompts that have failed alike on two workers.
    pub suspects: Arc<Suspects>,
    /// The tasks that free hand-offs which no decode worker will fetch.
    pub releases: Arc<Releases>,
    /// Limits log lines about mismatches of token counts.
    pub mismatch: LogThrottle,
    /// Limits log lines about usage beyond what a request can have.
    pub charges: LogThrottle,
    /// Limits log lines about requests for which no remote prefill was possible.
    pub no_prefill: LogThrottle,
    /// Limits log lines about decode legs whose KV never comes.
    pub stranded: LogThrottle,
    /// Limits log lines at `info` about prompts below the cache hit threshold.
    pub below_threshold: LogThrottle,
    /// The metric series of the model that every request updates.
    pub series: ModelSeries,
}

impl ServedModel {
    /// Whether the router needs to know if the model's engines support `cache_hit_threshold`.
    pub fn asks_for_thresholds(&self) -> bool {
        let config = &self.config;
        let gated = |flow| {
            matches!(flow, RequestFlow::DecodeFirst | RequestFlow::DecodeOnly | RequestFlow::Auto)
        };
        // Decode legs after a prefill carry the preemption guard in every flow. With connectors
        // whose legs form a pair, an engine cannot be tried: one leg alone is never answered.
        let guard = config.gate.preemption_guard > 0.0 && config.connector.serves_alone();
        let guarded = |flow: RequestFlow| guard && flow.hands_over();
        config.gate.kind == GateKind::Auto
            && config.flows().any(|flow| gated(flow) || guarded(flow))
    }

    /// Accepts a hand-off of `worker` only if the host that it names belongs to the fleet, to
    /// `hand_off_networks`, or is `peer`, the address that sent it.
    ///
    /// # Errors
    /// The hand-off names another host.
    pub fn admit_host(
        &self,
        worker: &Worker,
        host: &str,
        peer: Option<IpAddr>,
    ) -> Result<(), Error> {
        let networks = &self.config.hand_off_networks;
        // The worker itself may have left the fleet since the prefill leg was sent.
        let own =
            || Hosts::new([&worker.address.authority].into_iter()).admit(host, peer, networks);
        if self.pool.roster().hosts.admit(host, peer, networks) || own() {
            return Ok(());
        }
        let message = format!(
            "worker {} handed over from a host outside the fleet (see hand_off_networks)",
            worker.id()
        );
        Err(Error::new(ErrorKind::ForeignHandOff, message))
    }

    /// The configured name, which is also the label in metrics.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The metric series with their common label.
    pub fn labelled_series(&self) -> LabelledSeries<'_> {
        LabelledSeries { model: self.name(), series: &self.series }
    }
}

/// What a model name used by clients refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedName {
    /// The index of the model in `ServedModels::models`.
    pub model: usize,
    /// The adapter, if the name is that of an adapter.
    pub adapter: Option<String>,
}

/// Whether and how fast the router tokenises prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TokenizerSpeed {
    /// The router does not tokenise: no tokenizer is configured.
    None,
    /// Text prompts are tokenised in less than a millisecond.
    Fast,
    /// Prompts are tokenised by the slower reference implementation.
    Slow,
}

/// What one configuration serves. Replaced as a whole when the configuration changes.
pub struct ServedModels {
    /// The models, in the configuration's order.
    pub models: Vec<Arc<ServedModel>>,
    /// The names that clients use: models, aliases and adapters.
    pub names: BTreeMap<String, ServedName>,
    /// The limits of the configuration.
    pub limits: Limits,
    /// How the model with the slowest tokenizer handles prompts.
    pub tokenizing: TokenizerSpeed,
    /// The whole configuration.
    pub config: Arc<Config>,
}

impl ServedModels {
    /// Whether a name is of use to clients: a model, or an adapter that a worker may have.
    pub fn may_serve(&self, named: &ServedName) -> bool {
        let adapter = named.adapter.as_deref();
        adapter.is_none_or(|name| self.models[named.model].pool.may_have_adapter(name))
    }

    /// The models of a configuration, with the names by which clients find them.
    pub fn new(models: Vec<Arc<ServedModel>>, config: Arc<Config>) -> Self {
        let mut names = BTreeMap::new();
        for (model, served) in models.iter().enumerate() {
            let config = &served.config;
            for name in std::iter::once(&config.name).chain(&config.aliases) {
                names.insert(name.clone(), ServedName { model, adapter: None });
            }
            for adapter in &config.adapters {
                names.insert(adapter.clone(), ServedName { model, adapter: Some(adapter.clone()) });
            }
        }
        let of = |served: &Arc<ServedModel>| match &served.prompt {
            None => TokenizerSpeed::None,
            Some(prompt) if prompt.tokenizer.is_fast() => TokenizerSpeed::Fast,
            Some(_) => TokenizerSpeed::Slow,
        };
        let tokenizing = models.iter().map(of).max().unwrap_or(TokenizerSpeed::None);
        Self { models, names, limits: config.limits.clone(), tokenizing, config }
    }

    /// The model with this configured name. Aliases are not considered.
    pub fn model(&self, name: &str) -> Option<&Arc<ServedModel>> {
        self.models.iter().find(|served| served.name() == name)
    }
}
