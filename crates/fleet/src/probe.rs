//! Probes each worker's health and load.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use splitrail_engine::load::EngineLoad;
use tokio::time::MissedTickBehavior;

use super::engine_facts::KvNames;
use super::learn::{learn, learn_adapters, learn_models_again};
use super::worker::{UnreadyCause, Worker};
use crate::ServedModel;
use splitrail_api::error::{Error, ErrorKind, Fault};
use splitrail_engine_client::{Engine as _, EngineClient};
use tokio::time::Interval;

/// Maximum size in bytes of an engine's `/metrics`. vLLM's metrics take about 60
/// kB, and ten times as much with hundreds of adapters and ranks.
const REPORT_MAX_BYTES: usize = 4 << 20;

/// Maximum size in bytes of the reply to a liveness probe.
const LIVENESS_MAX_BYTES: usize = 64 << 10;

/// Probes one worker until the task is aborted: whether its engine is alive, and its load. A late or
/// missing report of the load says nothing about the engine's life.
pub async fn run(served: Arc<ServedModel>, worker: Arc<Worker>) {
    tokio::join!(follow_liveness(&served, &worker), follow_load(&served, &worker));
}

/// Ticks in the interval of the model's probes.
fn ticks(served: &ServedModel) -> Interval {
    let mut ticks = tokio::time::interval(served.config.health.probe_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Asks whether the engine is alive, and what its configuration leaves out.
async fn follow_liveness(served: &Arc<ServedModel>, worker: &Arc<Worker>) {
    let config = served.config.health;
    let mut ticks = ticks(served);
    let mut learned = None;
    let (mut passed, mut failed) = (0u32, 0u32);
    loop {
        ticks.tick().await;
        let asked = Instant::now();
        // Lookups for prompts remove expired entries too, but without requests only this loop does.
        while served.pool.speculative_index.expire(asked) {
            tokio::task::yield_now().await;
        }
        match ask_alive(served, worker).await {
            // The router had no memory for the reply, which says nothing about the engine.
            Err(error) if error.fault() == Fault::Router => {}
            Err(error) if !has_worked_since(worker, asked, config.probe_interval, &error) => {
                // What the worker caches is unknown now, whether or not this probe noticed the
                // failure first.
                served.pool.speculative_index.forget(worker.index);
                (passed, failed) = (0, failed.saturating_add(1));
                let is_certain = error.is_reply() || error.kind() == ErrorKind::EngineUnreachable;
                if failed >= config.unhealthy_threshold || is_certain {
                    worker.set_probed(false, &error);
                }
            }
            Ok(()) | Err(_) => {
                let process = worker.process();
                let has_load = worker.load(asked).is_some() || worker.load_failure().is_some();
                if has_load
                    && learned != Some(process)
                    && learn(served, worker, config.probe_timeout).await
                {
                    learned = Some(process);
                }
                if learned == Some(process) {
                    learn_adapters(served, worker, config.probe_timeout).await;
                }
                (passed, failed) = (passed.saturating_add(1), 0);
                let back = worker.is_up() || passed >= config.healthy_threshold;
                if back && worker.set_probed(true, "it answers") {
                    // A worker that comes back may have been restarted.
                    served.pool.speculative_index.forget(worker.index);
                }
            }
        }
        if worker.is_unready_for(UnreadyCause::LacksModel) {
            learn_models_again(served, worker, config.probe_timeout).await;
        }
        if worker.is_unready_for(UnreadyCause::RefusesKey) && takes_key(served, worker).await {
            worker.set_unready(UnreadyCause::RefusesKey, false);
        }
    }
}

/// Whether the worker has given a sign of work since a little before a probe that failed: no late
/// probe outweighs that. A reply that says that the engine is dead does.
fn has_worked_since(worker: &Worker, asked: Instant, before: Duration, error: &Error) -> bool {
    let sign = worker.health.progress.sign_at();
    let is_late = !error.is_reply() && error.kind() != ErrorKind::EngineUnreachable;
    is_late && sign.is_some_and(|at| at + before >= asked)
}

/// Asks whether the engine is alive. Engines and proxies that lack the path answer it with another
/// status than those of servers that fail.
async fn ask_alive(served: &ServedModel, worker: &Worker) -> Result<(), Error> {
    let path = worker.engine.kind.paths().liveness;
    let asked = served.client.get_any(worker, path, LIVENESS_MAX_BYTES);
    let reply = tokio::time::timeout(served.config.health.probe_timeout, asked).await;
    let late = |_| Error::new(ErrorKind::EngineTimeout, format!("no reply to {path} in time"));
    let (status, _) = reply.map_err(late)??;
    if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED {
        let what = format!("answers {path} with status {}", status.as_u16());
        return Err(Error::engine(worker.id(), &what).of_reply());
    }
    Ok(())
}

/// Whether the engine takes the router's key again.
async fn takes_key(served: &ServedModel, worker: &Worker) -> bool {
    let path = worker.engine.kind.paths().models;
    let asked = served.client.get_any(worker, path, REPORT_MAX_BYTES);
    let reply = tokio::time::timeout(served.config.health.probe_timeout, asked).await;
    matches!(reply, Ok(Ok((status, _))) if status != StatusCode::UNAUTHORIZED)
}

/// Reads the engine's load.
async fn follow_load(served: &Arc<ServedModel>, worker: &Arc<Worker>) {
    let mut ticks = ticks(served);
    let mut differs = false;
    loop {
        ticks.tick().await;
        let asked = Instant::now();
        let load = match ask_load(worker, &served.client, served.config.health.probe_timeout).await
        {
            Ok(load) => load,
            Err(error) if error.fault() == Fault::Router => continue,
            Err(error) => {
                worker.record_load_failure(&error);
                if error.is_reply() && !worker.ranks.are_known() {
                    worker.ranks.set_count(1);
                }
                continue;
            }
        };
        if worker.health.presence.reports(&load) {
            worker.record_restart();
        }
        if let Some(tokens) = load.block_size {
            differs = tell_block_size(served, worker, tokens, differs);
        }
        tell_kv_format(served, worker, &load);
        worker.ranks.set_count(load.ranks.unwrap_or(1));
        if let Some(asleep) = load.is_asleep {
            worker.set_unready(UnreadyCause::Asleep, asleep);
        }
        worker.set_load(asked, load);
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
    let differs =
        |other: &&Arc<Worker>| worker.is_of_group_of(other) && !worker.stores_kv_as(other);
    if let Some(other) = roster.iter().find(differs) {
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
async fn ask_load(
    worker: &Worker,
    client: &EngineClient,
    patience: Duration,
) -> Result<EngineLoad, Error> {
    let get = client.get(worker, worker.engine.kind.paths().metrics, REPORT_MAX_BYTES);
    let asked = tokio::time::timeout(patience, get).await;
    let late = |_| Error::new(ErrorKind::EngineTimeout, "no reply to /metrics in time");
    Ok(worker.engine.kind.load(asked.map_err(late)??.as_bytes()))
}
