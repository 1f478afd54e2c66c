//! Peer fetches: which workers can send a prefix, and which can take one.
//!
//! A fetch makes a worker compute one token for another worker's request. A source that has lost
//! the prefix computes all of it instead; it then takes part in no fetch for a while, which bounds
//! this work to the fetches that were under way.

use std::time::Instant;

use splitrail_kv::Overlaps;

use super::ranks::rank_key;
use super::roster::Roster;
use super::state::WorkerState;
use super::worker::Worker;
use splitrail_policy::{Leg, Source, loads, nanoseconds};
use splitrail_workload::costs::RankScope;
use splitrail_workload::fetches::FetchBounds;

/// From this used share of its KV cache on, a worker takes no KV from other workers. vLLM 0.32 preempts
/// requests when its cache is full, and one that was to take KV waits for ever afterwards and keeps its
/// blocks.
const KV_USED_MAX: f64 = 0.9;

/// Whether a worker has room for KV from other workers, by its last load report.
pub fn has_room(worker: &Worker, now: Instant) -> bool {
    let used = worker.load(now).and_then(|load| load.kv_used_ratio);
    used.is_none_or(|used| used < KV_USED_MAX)
}

/// Whether a worker can take a prefix from another one now. Requests must be pinned to a rank, or
/// there must be only one: the steps of a fetch meet in one rank's cache.
pub fn can_take(worker: &Worker, bounds: FetchBounds, block_size: u32, now: Instant) -> bool {
    has_block_size(worker, block_size)
        && !worker.ranks.are_chosen_by_the_engine()
        && worker.transfer.fetches.may_take(bounds, now)
        && has_room(worker, now)
}

/// Whether a prefill leg on the worker may take a prefix by itself: its engine has shown that it has
/// `bidirectional_kv_xfer`, and no leg that was to read has failed there lately. An engine without the
/// flag would never answer, and keep the blocks.
pub fn takes_prefixes(worker: &Worker, now: Instant) -> bool {
    worker.takes_part_in_kv_routing()
        && worker.transfer.read_back.keeps_for_read_back() == Some(true)
        && worker.transfer.read_back.may_read(now)
        && has_room(worker, now)
}

/// The engine's block size is not known to be another one.
fn has_block_size(worker: &Worker, block_size: u32) -> bool {
    worker.engine.facts.block_size().is_none_or(|tokens| tokens == block_size)
}

/// The leg whose circuit breaker also counts failures of the worker as a source.
fn leg_of(worker: &Worker) -> Leg {
    if worker.serves(Leg::Prefill) { Leg::Prefill } else { Leg::Decode }
}

/// Lists the workers and ranks that can send leading blocks of a prompt now. Only blocks count that
/// the worker's events have confirmed, and only on workers that keep what the index promises of them.
pub(super) fn list_sources(
    roster: &Roster,
    overlaps: &Overlaps,
    bounds: FetchBounds,
    block_size: u32,
    now: Instant,
    sources: &mut Vec<Source>,
) {
    for worker in roster.iter() {
        if !can_send(worker, bounds, block_size, now) {
            continue;
        }
        let pinned = worker.ranks.are_chosen_by_the_router();
        for number in 0..worker.ranks.count() {
            let rank = pinned.then_some(number);
            let overlap = overlaps.get(rank_key(worker.index, number));
            let enough = |blocks: u32| {
                u64::from(blocks) * u64::from(block_size) >= u64::from(bounds.min_tokens)
            };
            if !enough(overlap.blocks) || !worker.overlap_is_believed(rank) {
                continue;
            }
            let seen = worker.load.costs.seen(now, RankScope::Rank(rank), 0);
            let wait_ns = seen.wait_ns.saturating_add(worker.transfer.fetches.outgoing_ns());
            let kv_format = worker.engine.facts.kv_format();
            // Without the blocks in its slower tiers, a worker can send at once.
            for (blocks, load) in loads(overlap.by_tier, &seen.coefficients, block_size) {
                if enough(blocks) {
                    let wait_ns = wait_ns.saturating_add(nanoseconds(load));
                    sources.push(Source { worker: worker.index, rank, blocks, wait_ns, kv_format });
                }
            }
        }
    }
}

/// Whether a worker can send prefixes at all, be it now or after a pause.
pub fn is_able_to_send(worker: &Worker, block_size: u32) -> bool {
    has_block_size(worker, block_size)
        && !worker.ranks.are_chosen_by_the_engine()
        && worker.takes_part_in_kv_routing()
        && (worker.state().takes_work() || worker.state() == WorkerState::Ejected)
}

/// Whether a worker can send a further prefix now.
pub fn can_send(worker: &Worker, bounds: FetchBounds, block_size: u32, now: Instant) -> bool {
    is_able_to_send(worker, block_size)
        && worker.kv.drift.discount() <= 0.0
        && worker.is_available(leg_of(worker), now)
        && worker.transfer.fetches.may_send(bounds, now)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
