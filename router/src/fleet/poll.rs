//! Asks each worker for its load, and so learns whether it lives.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use splitrail_engine::vllm::load::EngineLoad;
use tokio::time::MissedTickBehavior;

use super::pool::Worker;
use crate::flow::client::EngineClient;

/// Between two questions to one worker.
const PERIOD: Duration = Duration::from_secs(1);
/// A worker that takes longer to answer is not well.
const PATIENCE: Duration = Duration::from_secs(2);

/// Polls one worker until the task is ended.
pub async fn run(worker: Arc<Worker>, client: EngineClient) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match ask(&worker, &client).await {
            Some(load) => {
                worker.set_load(Instant::now(), load);
                if worker.context_tokens().is_none() {
                    learn_context(&worker, &client).await;
                }
                if worker.set_up(true) {
                    tracing::info!(worker = worker.id(), "worker is up");
                }
            }
            None => {
                if worker.set_up(false) {
                    tracing::warn!(worker = worker.id(), "worker does not answer /metrics");
                }
            }
        }
    }
}

/// vLLM lists the longest sequence as `max_model_len` of each model it serves.
async fn learn_context(worker: &Worker, client: &EngineClient) {
    #[derive(Deserialize)]
    struct Models {
        data: Vec<ModelCard>,
    }
    #[derive(Deserialize)]
    struct ModelCard {
        max_model_len: Option<u32>,
    }
    let asked = tokio::time::timeout(PATIENCE, client.get(worker, "/v1/models")).await;
    let Ok(Ok(text)) = asked else { return };
    let Ok(Models { data }) = serde_json::from_str(&text) else { return };
    // An engine that does not say it is not asked again.
    let said = data.iter().filter_map(|card| card.max_model_len).min();
    worker.set_context_tokens(said.unwrap_or(u32::MAX));
}

/// One question; `None` if it was not answered.
pub async fn ask(worker: &Worker, client: &EngineClient) -> Option<EngineLoad> {
    let text = tokio::time::timeout(PATIENCE, client.get(worker, "/metrics")).await.ok()?.ok()?;
    Some(EngineLoad::parse(&text))
}
