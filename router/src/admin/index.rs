//! The blocks that the index has of one worker, for comparison with the engine's own list.

use axum::extract::{Path, Query, State};
use axum::response::Response;
use serde_json::{Map, Value, json};
use splitrail_kv::{Frozen, Tier, WorkerKey};

use super::context::Admin;
use super::lookup::{Which, the_worker};
use super::refusal::Result;
use crate::ingress::reply::json_reply;
use splitrail_policy::mix;

/// A worker's blocks for each rank: their number and a digest. The digest is the sum (modulo 2^64)
/// of the engine's hashes of all blocks, each processed by SplitMix64's finalizer: it is equal for
/// equal sets, independent of their order.
pub(super) async fn show(
    State(admin): State<Admin>,
    Path(id): Path<String>,
    Query(which): Query<Which>,
) -> Result<Response> {
    let serving = admin.core.serving();
    let (served, known) = the_worker(&admin, &serving, &id, which.model.as_deref())?;
    let worker = known.worker.index.0;
    // Copied while the index is locked; the rest is done without the lock.
    let ranks: Vec<(WorkerKey, [usize; Tier::COUNT], Frozen)> = {
        let index = served.pool.index();
        let keys: Vec<_> = index.workers().filter(|key| key.worker == worker).collect();
        keys.into_iter().map(|key| (key, index.block_counts(key), index.freeze(key))).collect()
    };
    let ranks: Vec<_> =
        ranks.iter().map(|(key, counts, frozen)| view(*key, counts, frozen)).collect();
    Ok(json_reply(json!({"model": served.name(), "id": id, "ranks": ranks})))
}

fn view(key: WorkerKey, counts: &[usize; Tier::COUNT], frozen: &Frozen) -> Value {
    let (mut names, mut digest) = (0u64, 0u64);
    for run in frozen.runs() {
        for named in run.names.iter() {
            names += 1;
            digest = digest.wrapping_add(mix(named.engine.0));
        }
    }
    let blocks: Map<String, Value> = Tier::ALL
        .iter()
        .map(|tier| (tier.name().to_owned(), counts[*tier as usize].into()))
        .collect();
    json!({"rank": key.rank, "names": names, "digest": format!("{digest:016x}"), "blocks": blocks})
}
