//! Probes each worker's health and load.

use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_engine::load::EngineLoad;
use tokio::time::MissedTickBehavior;

use super::engine_facts::KvNames;
use super::learn::learn;
use super::worker::Worker;
use crate::ServedModel;
use splitrail_api::error::{Error, ErrorKind, Fault};
use splitrail_engine_client::{Engine as _, EngineClient};

/// Maximum size in bytes of an engine's `/metrics`. vLLM's metrics take about 60
/// kB, and ten times as much with hundreds of adapters and ranks.
const REPORT_MAX_BYTES: usize = 4 << 20;

/// Probes one worker until the task is aborted.
pub async fn run(served: Arc<ServedModel>, worker: Arc<Worker>) {
    let config = served.config.health;
    let mut ticks = tokio::time::interval(config.probe_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut differs, mut learned) = (false, None);
    let (mut passed, mut failed) = (0u32, 0u32);
    let healthy_threshold = config.healthy_threshold;
    loop {
        ticks.tick().await;
        let asked = Instant::now();
        // Lookups for prompts remove expired entries too, but without requests only this loop does.
        while served.pool.speculative_index.expire(asked) {
            tokio::task::yield_now().await;
        }
        match ask(&worker, &served.client, config.probe_timeout).await {
            Ok(load) => {
                if worker.health.presence.reports(&load) {
                    worker.record_restart();
                }
                if let Some(tokens) = load.block_size {
                    differs = tell_block_size(&served, &worker, tokens, differs);
                }
                tell_kv_format(&served, &worker, &load);
                worker.ranks.set_count(load.ranks.unwrap_or(1));
                let process = worker.process();
                if learned != Some(process)
                    && learn(&served, &worker, &load, config.probe_timeout).await
                {
                    learned = Some(process);
                }
                worker.set_load(asked, load);
                (passed, failed) = (passed.saturating_add(1), 0);
                let back = worker.is_up() || passed >= healthy_threshold;
                if back && worker.set_probed(true, "it answers") {
                    // A worker that comes back may have been restarted.
                    served.pool.speculative_index.forget(worker.index);
                }
            }
            // The router had no memory for the reply, which says nothing about the engine.
            Err(error) if error.fault() == Fault::Router => {}
            Err(error) => {
                // What the worker caches is unknown now, whether or not this probe noticed the
                // failure first.
                served.pool.speculative_index.forget(worker.index);
                (passed, failed) = (0, failed.saturating_add(1));
                if failed >= config.unhealthy_threshold {
                    worker.set_probed(false, &error);
                }
            }
        }
    }
}

/// Records the block size of an engine, and logs once that it differs from the model's. Returns
/// whether it does.
fn tell_block_size(served: &ServedModel, worker: &Worker, tokens: u32, differed: bool) -> bool {
    let differs = !served.pool.learn_block_size(worker, tokens);
    if differs && !differed {
        tracing::error!(
            model = served.name(),
            worker = worker.id(),
            block_size = served.pool.block_size(),
            engine = tokens,
            "the engine's block size differs from the model's: its blocks cannot be found"
        );
    }
    differs
}

/// Records how an engine stores KV, and logs that KV cannot move between it and others.
fn tell_kv_format(served: &ServedModel, worker: &Worker, load: &EngineLoad) {
    let (dtype, layout) = (load.kv_dtype.clone(), load.kv_layout.clone());
    if !worker.engine.facts.set_kv_names(KvNames { dtype, layout }) {
        return;
    }
    let roster = served.pool.roster();
    if let Some(other) = roster.iter().find(|other| !worker.stores_kv_as(other)) {
        let (own, others) = (worker.engine.facts.kv_names(), other.engine.facts.kv_names());
        tracing::error!(
            model = served.name(),
            worker = worker.id(),
            other = other.id(),
            ?own,
            ?others,
            block_size = worker.engine.facts.block_size(),
            others_block_size = other.engine.facts.block_size(),
            "these engines store KV in another data type, layout or block size: none moves between \
             them, or in one direction only. Start all engines of the model with the same \
             --kv-cache-dtype, KV layout and --block-size"
        );
    }
}

/// Requests and parses one load report.
async fn ask(
    worker: &Worker,
    client: &EngineClient,
    patience: Duration,
) -> Result<EngineLoad, Error> {
    let get = client.get(worker, worker.engine.kind.paths().metrics, REPORT_MAX_BYTES);
    let asked = tokio::time::timeout(patience, get).await;
    let late = |_| Error::new(ErrorKind::EngineTimeout, "no reply to /metrics in time");
    Ok(worker.engine.kind.load(asked.map_err(late)??.as_bytes()))
}
