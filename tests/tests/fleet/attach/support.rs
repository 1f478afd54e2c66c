//! A router to which shims can attach, and what it knows of them.

use std::net::SocketAddr;
use std::sync::Arc;

use splitrail_fleet::ServedModel;
use splitrail_fleet::Worker;
use splitrail_fleet::ranks::rank_key;
use splitrail_proto::v1;
use splitrail_tests::shim::Shim;
use splitrail_tests::{Cluster, Spec};

/// A router with one engine of its own, and further top-level keys.
pub(crate) async fn router(top: &str) -> Cluster {
    router_with(top, "{ drain_delay: 10ms, drain_grace: 5s }").await
}

/// The same with other limits.
pub(crate) async fn router_with(top: &str, limits: &'static str) -> Cluster {
    let (top, model) = (top.to_owned(), "discovery: [{ kind: shim }]".to_owned());
    let spec = Spec { fleet: true, top, model, limits, ..Spec::aggregated(1) };
    Cluster::start(spec).await
}

/// Where shims attach.
pub(crate) fn fleet_address(cluster: &Cluster) -> SocketAddr {
    cluster.running.addresses.fleet.expect("a fleet listener")
}

/// The only model.
pub(crate) fn served(cluster: &Cluster) -> Arc<ServedModel> {
    Arc::clone(&cluster.running.core.serving().models[0])
}

/// A worker by name, if it is there.
pub(crate) fn worker(cluster: &Cluster, id: &str) -> Option<Arc<Worker>> {
    served(cluster).pool.roster().named(id).cloned()
}

/// The names of blocks that the index holds of a worker, in order.
pub(crate) fn held(cluster: &Cluster, id: &str) -> Vec<u64> {
    let Some(worker) = worker(cluster, id) else { return Vec::new() };
    let pool = &served(cluster).pool;
    let index = pool.index();
    let runs = index.snapshot(rank_key(worker.index, 0));
    let mut names: Vec<u64> = Vec::new();
    for run in runs {
        names.extend(run.names.iter().map(|named| named.engine.0));
    }
    names.sort_unstable();
    names
}

/// Whether the index is believed for a worker.
pub(crate) fn is_believed(cluster: &Cluster, id: &str) -> bool {
    worker(cluster, id).is_some_and(|worker| worker.events_are_current())
}

/// Attaches, and fails if that is refused.
pub(crate) async fn attach(cluster: &Cluster, hello: v1::Hello) -> Shim {
    Shim::attach(fleet_address(cluster), hello).await.expect("it may attach")
}
