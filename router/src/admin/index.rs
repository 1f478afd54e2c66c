//! The blocks that the index has of one worker, for comparison with the engine's own list.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use http::StatusCode;
use serde_json::{Map, Value, json};
use splitrail_kv::{FrozenBlocks, Tier, WorkerKey, mix};

use super::context::Admin;
use super::lookup::{WorkerQuery, the_worker};
use super::query::Query;
use super::refusal::{AdminError, Result};
use crate::ingress::reply::json_reply;
use splitrail_fleet::ServedModel;

/// A worker's blocks for each rank: their number and a digest. The digest is the sum (modulo 2^64)
/// of the engine's hashes of all blocks, each processed by SplitMix64's finalizer: it is equal for
/// equal sets, independent of their order.
pub(super) async fn show(
    State(admin): State<Admin>,
    Path(id): Path<String>,
    Query(which): Query<WorkerQuery>,
) -> Result<Response> {
    let serving = admin.core.serving();
    let (served, known) = the_worker(&admin, &serving, &id, which.model.as_deref())?;
    let (worker, model) = (known.worker.index.0, served.name().to_owned());
    let served = Arc::clone(served);
    let permit = Arc::clone(&admin.index_copy).acquire_owned().await;
    let ranks = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        ranks(&served, worker)
    });
    let ranks = ranks.await.map_err(|_| {
        let message = "the index could not be read: a defect";
        AdminError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    })?;
    Ok(json_reply(json!({"model": model, "id": id, "ranks": ranks})))
}

/// What the index has of each rank. Each is copied while the index is locked; the rest is done
/// without the lock.
fn ranks(served: &ServedModel, worker: u32) -> Vec<Value> {
    let keys: Vec<_> = {
        let index = served.pool.index();
        index.workers().filter(|key| key.worker == worker).collect()
    };
    let rank = |key: WorkerKey| {
        let index = served.pool.index();
        let (counts, frozen) = (index.block_counts(key), index.freeze(key));
        drop(index);
        view(key, &counts, &frozen)
    };
    keys.into_iter().map(rank).collect()
}

fn view(key: WorkerKey, counts: &[usize; Tier::COUNT], frozen: &FrozenBlocks) -> Value {
    let (mut names, mut digest) = (0u64, 0u64);
    for run in frozen.runs() {
        for named in run.names.iter() {
            names += 1;
            digest = digest.wrapping_add(mix(named.engine.0));
        }
    }
    let digest = format!("{digest:016x}");
    json!({"rank": key.rank, "names": names, "digest": digest, "blocks": by_tier(counts)})
}

/// Numbers of blocks by the name of their tier.
pub(super) fn by_tier(counts: &[usize; Tier::COUNT]) -> Map<String, Value> {
    let of_tier = |tier: &Tier| (tier.name().to_owned(), counts[*tier as usize].into());
    Tier::ALL.iter().map(of_tier).collect()
}
