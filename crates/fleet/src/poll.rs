//! Polls each worker's load and health.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use splitrail_engine::vllm::load::EngineLoad;
use tokio::time::MissedTickBehavior;

use super::worker::Worker;
use crate::Served;
use splitrail_api::error::{Error, Fault, Kind};
use splitrail_engine_client::EngineClient;

/// Maximum size in bytes of an engine's `/metrics` or `/v1/models`. vLLM's metrics take about 60
/// kB, and ten times as much with hundreds of adapters and ranks.
const REPORT_MAX_BYTES: usize = 4 << 20;
/// Maximum number of characters of a model name reported by an engine in a log line.
const NAME_MAX_CHARS: usize = 128;

/// Polls one worker until the task is aborted.
pub async fn run(served: Arc<Served>, worker: Arc<Worker>) {
    let config = served.config.health;
    let mut ticks = tokio::time::interval(config.probe_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut block_size_said = false;
    let (mut passed, mut failed, mut started_at_s) = (0u32, 0u32, None);
    let healthy_threshold = config.healthy_threshold;
    loop {
        ticks.tick().await;
        let asked = Instant::now();
        // Lookups for prompts remove expired entries too, but without requests only this loop does.
        while served.pool.assumed.expire(asked) {
            tokio::task::yield_now().await;
        }
        match ask(&worker, &served.client, config.probe_timeout).await {
            Ok(load) => {
                if let Some(tokens) = load.block_size
                    && !served.pool.learn_block_size(tokens)
                    && !std::mem::replace(&mut block_size_said, true)
                {
                    let (worker, block_size) = (worker.id(), served.pool.block_size());
                    tracing::error!(
                        worker,
                        block_size,
                        engine = tokens,
                        "the engine's block size differs from the model's: its blocks cannot be found"
                    );
                }
                if begins_anew(&mut started_at_s, load.started_at_s) {
                    worker.begins_anew();
                }
                worker.ranks.set_count(load.ranks.unwrap_or(1));
                worker.set_load(asked, load);
                if worker.context_tokens().is_none() {
                    learn_context(&served, &worker, config.probe_timeout).await;
                }
                (passed, failed) = (passed.saturating_add(1), 0);
                let back = worker.is_up() || passed >= healthy_threshold;
                if back && worker.set_probed(true, "it answers") {
                    // A worker that comes back may have been restarted.
                    served.pool.assumed.forget(worker.index);
                }
            }
            // The router had no memory for the reply, which says nothing about the engine.
            Err(error) if error.fault() == Fault::Router => {}
            Err(error) => {
                // What the worker caches is unknown now, whether or not this poll noticed the
                // failure first.
                served.pool.assumed.forget(worker.index);
                (passed, failed) = (0, failed.saturating_add(1));
                if failed >= config.unhealthy_threshold {
                    worker.set_probed(false, &error);
                }
            }
        }
    }
}

/// Whether an engine's process differs from the last one that reported its start time.
fn begins_anew(known: &mut Option<f64>, said: Option<f64>) -> bool {
    let Some(said) = said else { return false };
    known.replace(said).is_some_and(|before| before != said)
}

/// Learns the longest sequence, which vLLM reports as `max_model_len` of each model it serves.
async fn learn_context(served: &Served, worker: &Worker, patience: Duration) {
    #[derive(Deserialize)]
    struct Models {
        data: Vec<ModelCard>,
    }
    #[derive(Deserialize)]
    struct ModelCard {
        id: String,
        max_model_len: Option<u32>,
    }
    let get = served.client.get(worker, "/v1/models", REPORT_MAX_BYTES);
    let asked = tokio::time::timeout(patience, get).await;
    let Ok(Ok(text)) = asked else { return };
    let Ok(Models { data }) = serde_json::from_str(&text) else { return };
    // An engine that does not report a limit is not asked again.
    let said = data.iter().filter_map(|card| card.max_model_len).min();
    worker.set_context_tokens(said.unwrap_or(u32::MAX));
    if !data.iter().any(|card| card.id == served.name()) {
        let shown = |id: &str| id.chars().take(NAME_MAX_CHARS).collect::<String>();
        let serves: Vec<_> = data.iter().map(|card| shown(&card.id)).take(8).collect();
        tracing::error!(
            worker = worker.id(),
            model = served.name(),
            ?serves,
            "the engine does not serve this model: requests to it will be refused"
        );
    }
}

/// Requests and parses one load report.
async fn ask(
    worker: &Worker,
    client: &EngineClient,
    patience: Duration,
) -> Result<EngineLoad, Error> {
    let get = client.get(worker, "/metrics", REPORT_MAX_BYTES);
    let asked = tokio::time::timeout(patience, get).await;
    let late = |_| Error::new(Kind::EngineTimeout, "no answer to /metrics in time");
    Ok(EngineLoad::parse(&asked.map_err(late)??))
}
