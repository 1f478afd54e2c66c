//! Asks each engine process for its identity and its capabilities.

use std::sync::Arc;
use std::time::Duration;

use splitrail_engine::identity::{
    EngineModel, EventSource, TRIAL_PATH, Trial, TrialOutcome, of_all_ranks,
};
use splitrail_engine::load::EngineLoad;
use splitrail_proto::v1::Capabilities;
use tokio::sync::watch;

use super::client::{EngineClient, QueryError};
use super::poll::EnginePoll;
use super::{EngineConfig, EngineIdentity};
use crate::telemetry::Metrics;

/// Timeout for requests that need no computation.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for the generation of one token. An engine that has just started may be compiling.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(60);
/// Delay before the first retry.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Maximum delay between two attempts of a trial.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(30);

/// Learns what an engine is and what it can do.
pub(super) struct Learner<'l> {
    pub(super) client: &'l EngineClient,
    pub(super) settings: &'l EngineConfig,
    pub(super) polled: watch::Receiver<EnginePoll>,
    pub(super) identity: watch::Sender<Option<Arc<EngineIdentity>>>,
    pub(super) capabilities: watch::Sender<Capabilities>,
    pub(super) metrics: &'l Metrics,
}

/// Facts that an engine reports without computation.
struct EngineFacts {
    version: Option<String>,
    model: EngineModel,
    /// `None` if it is unknown whether the engine publishes KV events.
    sources: Option<Vec<EventSource>>,
    figures: EngineLoad,
}

impl Learner<'_> {
    /// Runs until dropped. Learns again whenever the engine has restarted.
    pub(super) async fn run(self) {
        let mut polled = self.polled.clone();
        let mut process = 0;
        loop {
            let next = polled.wait_for(|polled| polled.up && polled.process != process).await;
            let Ok(next) = next.map(|polled| polled.process) else { return };
            process = next;
            let another = polled.clone();
            tokio::select! {
                () = self.learn(process) => {}
                // Replies of a process that has ended are of no use.
                () = wait_for_other_process(another, process) => {}
            }
        }
    }

    async fn learn(&self, process: u64) {
        let facts = self.fetch_facts().await;
        let identity = EngineIdentity {
            model: facts.model.name.clone(),
            sources: facts.sources.clone().unwrap_or_default(),
        };
        self.log_facts(&facts);
        self.capabilities.send_if_modified(|was| {
            // The mirror knows them.
            let unfollowed_cache_groups = was.unfollowed_cache_groups.clone();
            let now = facts.capabilities(self.settings);
            replace_if_changed(was, Capabilities { unfollowed_cache_groups, ..now })
        });
        self.identity.send_if_modified(|was| {
            let changed = was.as_deref() != Some(&identity);
            *was = Some(Arc::new(identity));
            changed
        });
        let ranks = facts.figures.ranks.unwrap_or(1);
        let mut outcome = TrialOutcome::default();
        for trial in [Trial::Threshold, Trial::Usage, Trial::Rank] {
            if trial == Trial::Usage && outcome.reports_cached_tokens.is_some() {
                continue;
            }
            // The first process may already be busy for an unknown time, so its trials do not wait
            // until it is idle.
            let found = self.run_trial(trial, &facts.model.name, ranks, process > 1).await;
            outcome.supports_cache_hit_threshold =
                outcome.supports_cache_hit_threshold.or(found.supports_cache_hit_threshold);
            outcome.reports_cached_tokens =
                outcome.reports_cached_tokens.or(found.reports_cached_tokens);
            outcome.takes_rank_header = outcome.takes_rank_header.or(found.takes_rank_header);
            self.capabilities.send_if_modified(|capabilities| {
                let mut now = capabilities.clone();
                now.supports_cache_hit_threshold = outcome.supports_cache_hit_threshold;
                now.reports_cached_tokens = outcome.reports_cached_tokens;
                now.takes_rank_header = outcome.takes_rank_header;
                replace_if_changed(capabilities, now)
            });
        }
        self.metrics.engine_identifications.inc();
        tracing::info!(
            supports_cache_hit_threshold = ?outcome.supports_cache_hit_threshold,
            reports_cached_tokens = ?outcome.reports_cached_tokens,
            takes_rank_header = ?outcome.takes_rank_header,
            "the engine's capabilities are known"
        );
    }

    fn log_facts(&self, facts: &EngineFacts) {
        tracing::info!(
            model = facts.model.name,
            version = facts.version,
            block_size = facts.figures.block_size,
            kv_blocks = facts.figures.total_blocks,
            ranks = facts.figures.ranks,
            event_sources = facts.sources.as_ref().map(Vec::len),
            "the engine's identity is known"
        );
        if facts.sources.as_ref().is_none_or(Vec::is_empty) {
            tracing::warn!(
                "the engine publishes no known KV events: routers will not see what it holds, and \
                 x-splitrail-gate is always a miss; start the engine with --kv-events-config"
            );
        }
    }

    /// Asks for the facts until the engine replies.
    async fn fetch_facts(&self) -> EngineFacts {
        let mut said = false;
        loop {
            match self.query_facts().await {
                Ok(facts) => return facts,
                Err(error) if said => {
                    tracing::debug!(%error, "the engine's identity is still unknown")
                }
                Err(error) => tracing::warn!(
                    %error,
                    "cannot learn the engine's identity; if the engine requires a key, set engine_api_key"
                ),
            }
            said = true;
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    async fn query_facts(&self) -> Result<EngineFacts, QueryError> {
        let engine = self.settings.kind;
        let models = self.client.text(engine.paths().models, TIMEOUT).await?;
        let served = engine.served_model(&models).ok_or(QueryError::Body)?;
        let model = match &self.settings.model {
            Some(name) => EngineModel { name: name.clone(), ..served },
            None => served,
        };
        let version = if_supported(self.client.text(engine.paths().version, TIMEOUT).await)?;
        let version = version.as_deref().and_then(|text| engine.version(text));
        let figures = self.polled.borrow().figures.clone();
        let sources = self.find_event_sources(figures.ranks.unwrap_or(1)).await?;
        Ok(EngineFacts { version, model, sources, figures })
    }

    async fn find_event_sources(&self, ranks: u32) -> Result<Option<Vec<EventSource>>, QueryError> {
        let settings = self.settings;
        if let Some(events) = settings.kv_events.clone() {
            let first = EventSource { rank: 0, events, replay: settings.kv_replay.clone() };
            return Ok(Some(of_all_ranks(&[first], ranks)));
        }
        let path = settings.kind.paths().event_sources;
        let Some(text) = if_supported(self.client.text(path, TIMEOUT).await)? else {
            return Ok(None);
        };
        match settings.kind.event_sources(&text, &settings.host) {
            Ok(listed) => Ok(Some(of_all_ranks(&listed, ranks))),
            Err(error) => {
                tracing::error!(%error, "cannot use the engine's event addresses: set kv_events and kv_replay");
                Ok(None)
            }
        }
    }

    /// Makes a trial, and repeats it until it has a result. With `when_idle`, waits until the
    /// engine is idle.
    async fn run_trial(
        &self,
        trial: Trial,
        model: &str,
        ranks: u32,
        when_idle: bool,
    ) -> TrialOutcome {
        let mut polled = self.polled.clone();
        let mut delay = RETRY_DELAY;
        loop {
            let may_ask =
                |polled: &EnginePoll| polled.up && (!when_idle || is_idle(&polled.figures));
            if polled.wait_for(may_ask).await.is_err() {
                return TrialOutcome::default();
            }
            let (body, rank) = (trial.body(model), trial.rank(ranks));
            match self.client.post(TRIAL_PATH, rank, body, TRIAL_TIMEOUT).await {
                Ok(answer) => match trial.read(answer.status, &answer.body) {
                    Some(outcome) => return outcome,
                    None if matches!(answer.status, 401 | 403) => {
                        tracing::warn!(
                            ?trial,
                            status = answer.status,
                            "the engine requires a key: set engine_api_key so that its capabilities can be learnt"
                        );
                        return TrialOutcome::default();
                    }
                    None => {
                        tracing::debug!(?trial, status = answer.status, "a trial has no result");
                    }
                },
                Err(error) => tracing::debug!(?trial, %error, "a trial has no result"),
            }
            tokio::time::sleep(delay).await;
            delay = (2 * delay).min(RETRY_DELAY_MAX);
        }
    }
}

impl EngineFacts {
    fn capabilities(&self, settings: &EngineConfig) -> Capabilities {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let follows = self.sources.as_ref().map(|sources| !sources.is_empty());
        let replays = |sources: &Vec<EventSource>| {
            !sources.is_empty() && sources.iter().all(|source| source.replay.is_some())
        };
        let ranks = self.figures.ranks;
        let nixl = self.figures.has_nixl.then(|| "nixl".to_owned());
        Capabilities {
            engine: settings.kind.name().to_owned(),
            engine_version: text(&self.version),
            block_size: self.figures.block_size,
            kv_blocks: self.figures.total_blocks.map(|blocks| blocks / ranks.unwrap_or(1).max(1)),
            ranks,
            context_tokens: self.model.context_tokens,
            supports_cache_hit_threshold: None,
            reports_cached_tokens: None,
            takes_rank_header: None,
            connector: text(&settings.connector.clone().or(nixl)),
            connector_engine_id: text(&settings.connector_engine_id),
            lease_ms: settings.lease.and_then(|lease| u64::try_from(lease.as_millis()).ok()),
            publishes_kv_events: follows,
            replays_kv_events: self.sources.as_ref().map(replays),
            // The gate needs a mirror, and the mirror needs events.
            gates: Some(follows == Some(true)),
            bootstrap: text(&settings.bootstrap),
            unfollowed_cache_groups: Vec::new(),
        }
    }
}

/// Waits until the engine is another process than `process`.
async fn wait_for_other_process(mut polled: watch::Receiver<EnginePoll>, process: u64) {
    // The wait fails only if polling has ended, and then everything ends.
    let _ended = polled.wait_for(|polled| polled.process != process).await;
}

/// Whether the engine reports no running or waiting request.
fn is_idle(figures: &EngineLoad) -> bool {
    figures.running.unwrap_or(0) + figures.waiting.unwrap_or(0) == 0
}

/// Turns a status of the 400s into `None`: the engine does not have the path.
fn if_supported(answer: Result<String, QueryError>) -> Result<Option<String>, QueryError> {
    match answer {
        Ok(text) => Ok(Some(text)),
        Err(QueryError::Status(400..500)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Replaces a value. Returns whether it has changed.
fn replace_if_changed(was: &mut Capabilities, now: Capabilities) -> bool {
    let changed = *was != now;
    *was = now;
    changed
}
