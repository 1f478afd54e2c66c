//! Finds the workers of a configuration, and has them inspected.

use std::collections::HashSet;
use std::time::Duration;

use splitrail_config::Config;
use splitrail_config::model::{Discovery, Model};
use splitrail_fleet::discovery::dns;
use splitrail_fleet::models::lone_client;
use splitrail_inspection::{
    Bounds, ModelFacts, Origin, SourceFact, SourceState, SubjectWorker, Subjects, inspect,
};
use splitrail_prompt::PromptModel;
use splitrail_telemetry::Metrics;
use tokio::time::Instant;

/// Maximum time of one look-up in DNS.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(3);

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
    let mut models = Vec::new();
    for (model, prompt) in config.models.iter().zip(prompts) {
        let client = lone_client(model, config, &metrics).map_err(|error| error.to_string())?;
        let (workers, sources) = workers(model, timeout.saturating_sub(begun.elapsed())).await;
        models.push(Subjects { model, client, prompt, workers, sources });
    }
    let total = timeout.saturating_sub(begun.elapsed());
    Ok(inspect(config, models, &Bounds { total, ..Bounds::default() }).await)
}

/// The listed workers of a model, and those that its sources find now at other addresses.
async fn workers(model: &Model, left: Duration) -> (Vec<SubjectWorker>, Vec<SourceFact>) {
    let listed = model.workers.iter().cloned();
    let mut workers: Vec<SubjectWorker> =
        listed.map(|config| SubjectWorker { config, origin: Origin::Listed }).collect();
    let mut urls: HashSet<String> = model.workers.iter().map(|worker| worker.url.clone()).collect();
    let mut sources = Vec::new();
    for source in &model.discovery {
        let name = source.name();
        let state = match source {
            Discovery::Dns(config) => {
                let look_up = dns::find_once(config);
                match tokio::time::timeout(left.min(LOOK_UP_TIMEOUT), look_up).await {
                    Ok(Ok(found)) => {
                        let count = found.len();
                        let new =
                            found.into_iter().filter(|worker| urls.insert(worker.url.clone()));
                        let origin = Origin::Found(name.clone());
                        workers.extend(
                            new.map(|config| SubjectWorker { config, origin: origin.clone() }),
                        );
                        SourceState::Found(count)
                    }
                    Ok(Err(error)) => SourceState::Failed(error.to_string()),
                    Err(_) => SourceState::Failed("DNS does not answer in time".to_owned()),
                }
            }
            Discovery::Shim {} | Discovery::Kubernetes(_) => SourceState::NotAsked,
        };
        sources.push(SourceFact { name, state });
    }
    (workers, sources)
}
