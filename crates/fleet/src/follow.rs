//! Starts the tasks that follow one worker: canary, probe, trials and KV events.

use std::sync::Arc;

use splitrail_telemetry::{TaskName, restart_on_panic};
use tokio::task::JoinSet;

use super::claims::WorkerSource;
use super::worker::Worker;
use super::{canary, intake, probe, trial};
use crate::Cluster;
use crate::ServedModel;

/// The tasks that follow a worker. Dropping this ends them.
pub(super) struct Tasks {
    /// Tasks that send requests to the worker, by the model's configuration.
    asking: JoinSet<()>,
    /// The task that follows the worker's KV events. It depends on the pool only, so it outlives
    /// changes of the model's configuration.
    _events: JoinSet<()>,
}

impl Tasks {
    /// Restarts the tasks that send requests, after the model's configuration has changed.
    pub(super) fn ask_anew(
        &mut self,
        cluster: &Arc<Cluster>,
        served: &Arc<ServedModel>,
        worker: &Arc<Worker>,
        leading: WorkerSource,
    ) {
        self.asking = ask(cluster, served, worker, leading);
    }
}

/// Starts the tasks that follow a worker: the canary, the probe, the trials of thresholds and
/// ranks, and the KV events. A shim that is attached replaces all but the canary.
pub(super) fn follow(
    cluster: &Arc<Cluster>,
    served: &Arc<ServedModel>,
    worker: &Arc<Worker>,
    leading: WorkerSource,
) -> Tasks {
    let mut events = JoinSet::new();
    if leading != WorkerSource::Shim && worker.engine.facts.publishes() != Some(false) {
        let (cluster, pool, followed) =
            (Arc::clone(cluster), Arc::clone(&served.pool), worker.clone());
        let model: Arc<str> = served.name().into();
        // The number of ranks is unknown until the worker's first load report.
        worker.ranks.expect();
        events.spawn(supervise("KV events", worker, move || {
            intake::run(cluster.clone(), model.clone(), pool.clone(), followed.clone())
        }));
    }
    Tasks { asking: ask(cluster, served, worker, leading), _events: events }
}

fn ask(
    cluster: &Arc<Cluster>,
    served: &Arc<ServedModel>,
    worker: &Arc<Worker>,
    leading: WorkerSource,
) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    // The canary compares tokens, so it needs the router's tokenizer.
    let is_asked = served.config.canary.enabled && served.prompt.is_some();
    worker.kv.parity.set_asked(is_asked);
    if is_asked {
        let (cluster, served, asked) =
            (Arc::clone(cluster), Arc::clone(served), Arc::clone(worker));
        tasks.spawn(supervise("canary", worker, move || {
            canary::run(Arc::clone(&cluster), Arc::clone(&served), Arc::clone(&asked))
        }));
    }
    if leading == WorkerSource::Shim {
        return tasks;
    }
    let (model, probed) = (Arc::clone(served), Arc::clone(worker));
    tasks.spawn(supervise("load", worker, move || {
        probe::run(Arc::clone(&model), Arc::clone(&probed))
    }));
    if served.asks_for_thresholds() && worker.config.supports_cache_hit_threshold.is_none() {
        let (model, asked) = (Arc::clone(served), Arc::clone(worker));
        tasks.spawn(supervise("threshold", worker, move || {
            trial::run(Arc::clone(&model), Arc::clone(&asked))
        }));
    }
    if worker.config.takes_rank_header.is_none() {
        let (model, asked) = (Arc::clone(served), Arc::clone(worker));
        tasks.spawn(supervise("rank", worker, move || {
            trial::run_rank(Arc::clone(&model), Arc::clone(&asked))
        }));
    }
    tasks
}

/// Runs a task of a worker, and runs it again if it panics: otherwise data from one worker that
/// triggers a bug would leave the worker's state outdated but still in use.
pub(super) fn supervise<R, F>(
    task: &'static str,
    worker: &Worker,
    run: R,
) -> impl Future<Output = ()> + Send + use<R, F>
where
    R: Fn() -> F + Send,
    F: Future<Output = ()> + Send + 'static,
{
    let name = TaskName::of_model(task, worker.model());
    restart_on_panic(TaskName { worker: Some(worker.id().to_owned()), ..name }, run)
}
