//! Finds the workers of a configuration, and has them inspected.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use splitrail_config::Config;
use splitrail_config::model::{Discovery, Model, WorkerConfig};
use splitrail_discovery::dns;
use splitrail_fleet::models::lone_client;
use splitrail_inspection::{
    ModelFacts, Origin, SourceFact, SourceState, SubjectWorker, Subjects, inspect,
};
use splitrail_prompt::PromptModel;
use splitrail_telemetry::Metrics;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Maximum time of a look-up in DNS.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum time in which a connection is opened. It is shorter than that of a question, so that a
/// connection that is not accepted is distinguished from a reply that does not come.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(2500);

/// What the look-ups of sources found, by the places of model and source.
type SourceWorkers = HashMap<(usize, usize), Result<Vec<WorkerConfig>, String>>;

/// Inspects the engines of all models, in the order of the configuration.
///
/// # Errors
/// Says which credential or file for TLS cannot be read.
pub(super) async fn ask(
    config: &Config,
    prompts: Vec<Option<PromptModel>>,
    timeout: Duration,
) -> Result<Vec<ModelFacts>, String> {
    let begun = Instant::now();
    let metrics = Metrics::new().map_err(|error| error.to_string())?;
    let mut looked_up = look_up(&config.models, timeout.min(LOOK_UP_TIMEOUT)).await;
    let mut models = Vec::new();
    for (at, (model, prompt)) in config.models.iter().zip(prompts).enumerate() {
        let mut hasty = model.clone();
        hasty.timeouts.connect = hasty.timeouts.connect.min(CONNECT_TIMEOUT);
        let client = lone_client(&hasty, config, &metrics).map_err(|error| error.to_string())?;
        let found = |source| looked_up.remove(&(at, source));
        let (workers, sources) = workers(model, found);
        models.push(Subjects { model, client, prompt, workers, sources });
    }
    let total = timeout.saturating_sub(begun.elapsed());
    Ok(inspect(config, models, total).await)
}

/// Looks up the names of all sources that are of DNS, at the same time.
async fn look_up(models: &[Model], patience: Duration) -> SourceWorkers {
    let mut look_ups = JoinSet::new();
    for (model_at, model) in models.iter().enumerate() {
        for (source_at, source) in model.discovery.iter().enumerate() {
            let Discovery::Dns(config) = source else { continue };
            let config = config.clone();
            look_ups.spawn(async move {
                let found = tokio::time::timeout(patience, dns::find_once(&config)).await;
                let found = match found {
                    Ok(found) => found.map_err(|error| error.to_string()),
                    Err(_) => Err("DNS does not answer in time".to_owned()),
                };
                ((model_at, source_at), found)
            });
        }
    }
    look_ups.join_all().await.into_iter().collect()
}

/// The listed workers of a model, and those that its sources have found at other addresses.
fn workers(
    model: &Model,
    mut found: impl FnMut(usize) -> Option<Result<Vec<WorkerConfig>, String>>,
) -> (Vec<SubjectWorker>, Vec<SourceFact>) {
    let listed = model.workers.iter().cloned();
    let mut workers: Vec<SubjectWorker> =
        listed.map(|config| SubjectWorker { config, origin: Origin::Listed }).collect();
    let mut urls: HashSet<String> = model.workers.iter().map(|worker| worker.url.clone()).collect();
    let mut sources = Vec::new();
    for (at, source) in model.discovery.iter().enumerate() {
        let name = source.name();
        let state = match found(at) {
            // Shims and Kubernetes report to running routers.
            None => SourceState::NotAsked,
            Some(Err(cause)) => SourceState::Failed(cause),
            Some(Ok(found)) => {
                let count = found.len();
                let origin = Origin::Found(name.clone());
                let new = found.into_iter().filter(|worker| urls.insert(worker.url.clone()));
                workers.extend(new.map(|config| SubjectWorker { config, origin: origin.clone() }));
                SourceState::Found(count)
            }
        };
        sources.push(SourceFact { name, state });
    }
    (workers, sources)
}
