//! Prewarming: a prefill worker that has joined or restarted takes over the prefixes that recent
//! prompts use most from the workers that hold them, by peer fetches of the router's own.
//!
//! It serves requests meanwhile: there is nothing to wait for, since every prefix that it has not
//! got yet is computed or fetched as without prewarming. Requests of clients go first. A worker whose
//! engine has a queue, or that sends or takes a prefix for a client's request, begins no fetch of
//! prewarming, and such a fetch never takes the last place for fetches of a worker. Requests that wait
//! in the router hold nothing back: a worker that takes over prefixes shortens their wait. What is
//! fetched is in no ledger, since no client has asked for it.
//!
//! Prompts with a cache salt, and so all prompts of tenants, are not remembered: nothing of them is
//! kept, or sent to a worker, beyond their own requests.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use splitrail_fleet::{Cluster, ServedModel};
use splitrail_telemetry::{TaskName, restart_on_panic};

mod choose;
mod fetch;
mod join;
mod joins;
mod view;

use joins::Joins;

/// Interval at which workers are looked at while one is being prewarmed.
const BUSY_INTERVAL: Duration = Duration::from_millis(50);
/// Interval at which workers are looked at otherwise.
const IDLE_INTERVAL: Duration = Duration::from_millis(250);

/// Prewarms the workers of all models until `stop` is cancelled, and ends when no fetch runs any more.
pub async fn run(cluster: Arc<Cluster>, stop: CancellationToken) {
    let follow = || follow(Arc::clone(&cluster), stop.clone());
    restart_on_panic(TaskName::new("prewarming"), follow).await;
}

async fn follow(cluster: Arc<Cluster>, stop: CancellationToken) {
    let mut models: HashMap<String, Joins> = HashMap::new();
    let fetched = Arc::new(Notify::new());
    while !stop.is_cancelled() {
        let is_busy = look(&cluster, &mut models, &fetched).await;
        tokio::select! {
            () = tokio::time::sleep(if is_busy { BUSY_INTERVAL } else { IDLE_INTERVAL }) => {}
            () = fetched.notified() => {}
            () = stop.cancelled() => {}
        }
    }
    for joins in models.into_values() {
        joins.stopped(&cluster.metrics).await;
    }
}

/// Takes over what has changed. Returns whether a worker is being prewarmed.
async fn look(
    cluster: &Cluster,
    models: &mut HashMap<String, Joins>,
    fetched: &Arc<Notify>,
) -> bool {
    let serving = cluster.serving();
    let is_on = |served: &&Arc<ServedModel>| served.pool.hot.is_on();
    models.retain(|name, joins| {
        let is_kept = serving.model(name).filter(is_on).is_some_and(|served| joins.is_of(served));
        if !is_kept {
            joins.stop(&cluster.metrics);
        }
        is_kept
    });
    let mut is_busy = false;
    for served in serving.models.iter().filter(is_on) {
        served.pool.hot.give_way(serving.limits.request_memory_max_bytes);
        let joins = models.entry(served.name().to_owned());
        let joins = joins.or_insert_with(|| Joins::new(served, fetched));
        is_busy |= joins.look(served, &cluster.metrics).await;
    }
    is_busy
}
