//! Asks each process of the engine what it is and what it can do.

use std::sync::Arc;
use std::time::Duration;

use splitrail_engine::vllm::identity::{
    self, EVENT_SOURCES_PATH, EventSource, MODELS_PATH, ServedModel, TRIAL_PATH, Trial,
    TrialOutcome, VERSION_PATH,
};
use splitrail_engine::vllm::load::EngineLoad;
use splitrail_proto::v1::Capabilities;
use tokio::sync::watch;

use super::client::{AskError, EngineClient};
use super::poll::Polled;
use super::{Identity, Settings};
use crate::telemetry::Metrics;

/// To answer what costs an engine nothing.
const PATIENCE: Duration = Duration::from_secs(5);
/// To generate one token; an engine that has just begun may be compiling.
const TRIAL_PATIENCE: Duration = Duration::from_secs(60);
/// Between two questions that were not answered.
const PAUSE: Duration = Duration::from_secs(1);
/// Trials that fail again and again come less and less often, up to this.
const PAUSE_MAX: Duration = Duration::from_secs(30);

pub(super) struct Learner<'l> {
    pub(super) client: &'l EngineClient,
    pub(super) settings: &'l Settings,
    pub(super) polled: watch::Receiver<Polled>,
    pub(super) identity: watch::Sender<Option<Arc<Identity>>>,
    pub(super) capabilities: watch::Sender<Capabilities>,
    pub(super) metrics: &'l Metrics,
}

/// What an engine tells without effort.
struct Told {
    version: Option<String>,
    model: ServedModel,
    /// `None` if nobody knows whether it publishes events.
    sources: Option<Vec<EventSource>>,
    figures: EngineLoad,
}

impl Learner<'_> {
    /// Learns until dropped: again whenever the engine is another process.
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
                // What was asked of a process that is gone is of no interest.
                () = another_process(another, process) => {}
            }
        }
    }

    async fn learn(&self, process: u64) {
        let told = self.told().await;
        let identity = Identity {
            model: told.model.name.clone(),
            sources: told.sources.clone().unwrap_or_default(),
        };
        self.say(&told);
        self.capabilities.send_if_modified(|was| replace(was, told.capabilities(self.settings)));
        self.identity.send_if_modified(|was| {
            let changed = was.as_deref() != Some(&identity);
            *was = Some(Arc::new(identity));
            changed
        });
        let ranks = told.figures.ranks.unwrap_or(1);
        let mut outcome = TrialOutcome::default();
        for trial in [Trial::Threshold, Trial::Usage, Trial::Rank] {
            if trial == Trial::Usage && outcome.reports_cached_tokens.is_some() {
                continue;
            }
            // The first process may be at work already: nobody knows how long it will be.
            let found = self.ask(trial, &told.model.name, ranks, process > 1).await;
            outcome.honours_threshold = outcome.honours_threshold.or(found.honours_threshold);
            outcome.reports_cached_tokens =
                outcome.reports_cached_tokens.or(found.reports_cached_tokens);
            outcome.takes_rank_header = outcome.takes_rank_header.or(found.takes_rank_header);
            self.capabilities.send_if_modified(|capabilities| {
                let mut now = capabilities.clone();
                now.honours_threshold = outcome.honours_threshold;
                now.reports_cached_tokens = outcome.reports_cached_tokens;
                now.takes_rank_header = outcome.takes_rank_header;
                replace(capabilities, now)
            });
        }
        self.metrics.engine_learned.inc();
        tracing::info!(
            honours_threshold = ?outcome.honours_threshold,
            reports_cached_tokens = ?outcome.reports_cached_tokens,
            takes_rank_header = ?outcome.takes_rank_header,
            "what the engine can do is known"
        );
    }

    fn say(&self, told: &Told) {
        tracing::info!(
            model = told.model.name,
            version = told.version,
            block_size = told.figures.block_size,
            kv_blocks = told.figures.total_blocks,
            ranks = told.figures.ranks,
            event_sources = told.sources.as_ref().map(Vec::len),
            "the engine is known"
        );
        if told.sources.as_ref().is_none_or(Vec::is_empty) {
            tracing::warn!(
                "the engine publishes no KV events that are known of: routers will not see what \
                 it holds, and x-splitrail-gate is always a miss; start it with --kv-events-config"
            );
        }
    }

    /// Asks for what costs nothing, until there is an answer.
    async fn told(&self) -> Told {
        let mut said = false;
        loop {
            match self.ask_identity().await {
                Ok(told) => return told,
                Err(error) if said => tracing::debug!(%error, "still not known"),
                Err(error) => tracing::warn!(
                    %error,
                    "the engine does not say what it is; if it wants a key: engine_api_key"
                ),
            }
            said = true;
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn ask_identity(&self) -> Result<Told, AskError> {
        let models = self.client.text(MODELS_PATH, PATIENCE).await?;
        let served = identity::served_model(&models).ok_or(AskError::Body)?;
        let model = match &self.settings.model {
            Some(name) => ServedModel { name: name.clone(), ..served },
            None => served,
        };
        let version = optional(self.client.text(VERSION_PATH, PATIENCE).await)?;
        let version = version.as_deref().and_then(identity::version);
        let figures = self.polled.borrow().figures.clone();
        let sources = self.sources(figures.ranks.unwrap_or(1)).await?;
        Ok(Told { version, model, sources, figures })
    }

    async fn sources(&self, ranks: u32) -> Result<Option<Vec<EventSource>>, AskError> {
        let settings = self.settings;
        if let Some(events) = settings.kv_events.clone() {
            let first = EventSource { rank: 0, events, replay: settings.kv_replay.clone() };
            return Ok(Some(identity::of_all_ranks(&[first], ranks)));
        }
        let Some(text) = optional(self.client.text(EVENT_SOURCES_PATH, PATIENCE).await)? else {
            return Ok(None);
        };
        match identity::event_sources(&text, &settings.host) {
            Ok(listed) => Ok(Some(identity::of_all_ranks(&listed, ranks))),
            Err(error) => {
                tracing::error!(%error, "say where they are: kv_events, kv_replay");
                Ok(None)
            }
        }
    }

    /// Makes a trial, until there is an answer; while the engine is idle, if that is asked.
    async fn ask(&self, trial: Trial, model: &str, ranks: u32, when_idle: bool) -> TrialOutcome {
        let mut polled = self.polled.clone();
        let mut pause = PAUSE;
        loop {
            let may_ask = |polled: &Polled| polled.up && (!when_idle || is_idle(&polled.figures));
            if polled.wait_for(may_ask).await.is_err() {
                return TrialOutcome::default();
            }
            let (body, rank) = (trial.body(model), trial.rank(ranks));
            match self.client.post(TRIAL_PATH, rank, body, TRIAL_PATIENCE).await {
                Ok(answer) => match trial.read(answer.status, &answer.body) {
                    Some(outcome) => return outcome,
                    None if matches!(answer.status, 401 | 403) => {
                        tracing::warn!(
                            ?trial,
                            status = answer.status,
                            "the engine wants a key: set engine_api_key to know what it can do"
                        );
                        return TrialOutcome::default();
                    }
                    None => {
                        tracing::debug!(?trial, status = answer.status, "a trial told nothing");
                    }
                },
                Err(error) => tracing::debug!(?trial, %error, "a trial told nothing"),
            }
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }
}

impl Told {
    fn capabilities(&self, settings: &Settings) -> Capabilities {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let follows = self.sources.as_ref().map(|sources| !sources.is_empty());
        let replays = |sources: &Vec<EventSource>| {
            !sources.is_empty() && sources.iter().all(|source| source.replay.is_some())
        };
        let ranks = self.figures.ranks;
        let nixl = self.figures.has_nixl.then(|| "nixl".to_owned());
        Capabilities {
            engine: "vllm".to_owned(),
            engine_version: text(&self.version),
            block_size: self.figures.block_size,
            kv_blocks: self.figures.total_blocks.map(|blocks| blocks / ranks.unwrap_or(1).max(1)),
            ranks,
            context_tokens: self.model.context_tokens,
            honours_threshold: None,
            reports_cached_tokens: None,
            takes_rank_header: None,
            connector: text(&settings.connector.clone().or(nixl)),
            connector_engine_id: text(&settings.connector_engine_id),
            lease_ms: settings.lease.and_then(|lease| u64::try_from(lease.as_millis()).ok()),
            publishes_kv_events: follows,
            replays_kv_events: self.sources.as_ref().map(replays),
            // Without events there is no mirror to ask.
            gates: Some(follows == Some(true)),
            bootstrap: text(&settings.bootstrap),
        }
    }
}

/// Ends when the engine is another process than that.
async fn another_process(mut polled: watch::Receiver<Polled>, process: u64) {
    // Nobody polls any more when this fails: then all of it ends.
    let _ended = polled.wait_for(|polled| polled.process != process).await;
}

/// Whether nothing runs or waits, as far as is known.
fn is_idle(figures: &EngineLoad) -> bool {
    figures.running.unwrap_or(0) + figures.waiting.unwrap_or(0) == 0
}

/// `None` where an engine has no such path.
fn optional(answer: Result<String, AskError>) -> Result<Option<String>, AskError> {
    match answer {
        Ok(text) => Ok(Some(text)),
        Err(AskError::Status(400..500)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether there was anything to replace.
fn replace(was: &mut Capabilities, now: Capabilities) -> bool {
    let changed = *was != now;
    *was = now;
    changed
}
