//! What prewarming sees of a model: which prefixes are hot, who holds them, and who can send them.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Instant;

use splitrail_kv::Overlaps;

use super::choose::{HeldPrefix, HotHolders, Sender, SenderLoad, Senders, is_needed_by_clients};
use splitrail_fleet::peer_fetch::{can_send, is_able_to_send};
use splitrail_fleet::ranks::rank_key;
use splitrail_fleet::{Roster, ServedModel};
use splitrail_policy::WorkerIndex;
use splitrail_workload::costs::RankScope;
use splitrail_workload::fetches::FetchBounds;

/// Maximum number of hot prefixes that are looked at, those of most worth first.
const PREFIXES_MAX: usize = 256;

/// Looks up the hot prefixes of a model and who holds them. Takes some milliseconds if there are many.
pub(super) fn look_up(served: &ServedModel) -> Vec<HotHolders> {
    let pool = &served.pool;
    let blocks_max = served.config.prewarm.tokens_max / pool.block_size().max(1);
    let mut overlaps = Overlaps::new();
    let hottest = pool.hot.hottest(blocks_max as usize, PREFIXES_MAX).into_iter();
    let hot = hottest.map(|prefix| {
        pool.find(&prefix.hashes, &mut overlaps);
        let held = overlaps.iter();
        let held = held.map(|(by, overlap)| HeldPrefix { by, blocks: overlap.blocks as usize });
        let mut held: Vec<HeldPrefix> = held.collect();
        held.sort_by_key(|held| Reverse(held.blocks));
        HotHolders { prefix, held }
    });
    hot.collect()
}

/// Lists the workers and ranks that can send prefixes, now or later. `from` is the number of fetches
/// of prewarming from each worker.
pub(super) fn list_senders(
    served: &ServedModel,
    roster: &Roster,
    bounds: FetchBounds,
    from: &HashMap<WorkerIndex, u32>,
    now: Instant,
) -> Senders {
    let block_size = served.pool.block_size();
    let mut senders = Senders::new();
    for worker in roster.iter().filter(|worker| is_able_to_send(worker, block_size)) {
        let own = from.get(&worker.index).copied().unwrap_or(0);
        let is_free = can_send(worker, bounds, block_size, now)
            && !is_needed_by_clients(worker.waiting(now), worker.transfer.fetches.sending(), own);
        let booked_tokens = worker.load.booked.active_tokens();
        for number in 0..worker.ranks.count() {
            let rank = worker.ranks.are_chosen_by_the_router().then_some(number);
            let queue_ns = worker.load.costs.seen(now, RankScope::Rank(rank), 0).wait_ns;
            let wait_ns = queue_ns.saturating_add(worker.transfer.fetches.outgoing_ns());
            let sender = Sender {
                worker: worker.index,
                rank,
                kv_format: worker.engine.facts.kv_format(),
                is_free: is_free && worker.overlap_is_believed(rank),
                load: SenderLoad { wait_ns, booked_tokens },
            };
            senders.insert(rank_key(worker.index, number), sender);
        }
    }
    senders
}
