//! Which prefix a worker takes over next, and from which worker. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use splitrail_kv::{BlockHash, HotPrefix, WorkerKey, common_blocks};
use splitrail_policy::{KvFormat, WorkerIndex};

/// How often a prefix is tried on one worker.
const TRIES_MAX: u32 = 2;
/// Maximum number of workers and ranks that are considered as sources of one prefix.
const HOLDERS_MAX: usize = 64;

/// A hot prefix, and which workers and ranks hold leading blocks of it by the index.
#[derive(Clone, Debug)]
pub(super) struct HotHolders {
    pub(super) prefix: HotPrefix,
    /// Those that hold most come first.
    pub(super) held: Vec<HeldPrefix>,
}

/// Leading blocks of a prefix on a worker, or on one of its ranks.
#[derive(Clone, Debug)]
pub(super) struct HeldPrefix {
    pub(super) by: WorkerKey,
    pub(super) blocks: usize,
}

/// A worker, or one of its ranks, that can send prefixes, now or later.
#[derive(Clone, Debug)]
pub(super) struct Sender {
    pub(super) worker: WorkerIndex,
    /// The rank, if the worker has several.
    pub(super) rank: Option<u16>,
    /// How its engine stores KV, and its transfer group.
    pub(super) kv_format: KvFormat,
    /// Whether it has time now: it may send, and clients do not need it.
    pub(super) is_free: bool,
    /// How much it has to do.
    pub(super) load: SenderLoad,
}

/// How much a sender has to do. The wait is compared first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SenderLoad {
    /// The time until it can begin to send, in nanoseconds.
    pub(super) wait_ns: u64,
    /// The tokens that are booked on the worker.
    pub(super) booked_tokens: u64,
}

/// All senders of a model.
pub(super) type Senders = HashMap<WorkerKey, Sender>;

/// What a worker that is prewarmed may take, has and has tried.
pub(super) struct PrewarmTarget<'a> {
    pub(super) worker: WorkerIndex,
    /// The rank that takes the prefix; 0 if the worker has only one.
    pub(super) rank: u16,
    /// How its engine stores KV, and its transfer group.
    pub(super) kv_format: KvFormat,
    /// Minimum number of blocks that a fetch must bring.
    pub(super) blocks_min: usize,
    /// Maximum number of blocks that a fetch may bring.
    pub(super) blocks_max: usize,
    /// The number of blocks for which the worker has room.
    pub(super) room_blocks: usize,
    /// How often prefixes were tried, by their last block.
    pub(super) tried: &'a HashMap<BlockHash, u32>,
    /// The prefixes of the fetches under way to the worker.
    pub(super) running: &'a [&'a [BlockHash]],
    /// What the worker holds although its KV events have not told of it yet.
    pub(super) brought: &'a [&'a FetchedPrefix],
    /// The number of fetches of prewarming from each worker.
    pub(super) from: &'a HashMap<WorkerIndex, u32>,
    /// Maximum number of those.
    pub(super) from_max: u32,
}

/// A prefix that a fetch has brought to a rank.
pub(super) struct FetchedPrefix {
    pub(super) rank: u16,
    pub(super) hashes: Arc<[BlockHash]>,
}

/// What a worker that is prewarmed does next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum NextFetch {
    /// The worker fetches this prefix.
    Fetch(PrefixOffer),
    /// The worker waits: another fetch is bringing the prefix, or no worker that holds it may send now.
    Wait,
    /// The worker holds all hot prefixes that other workers can send.
    Done,
    /// The worker has no room.
    Full,
}

/// A prefix and a worker that can send it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PrefixOffer {
    /// The place of the prefix among the hot ones.
    pub(super) at: usize,
    /// Leading blocks of it that are fetched.
    pub(super) blocks: usize,
    /// Those of them that the rank which takes them does not hold.
    pub(super) brought_blocks: usize,
    pub(super) source: WorkerIndex,
    /// The rank that sends it, if the source has several.
    pub(super) source_rank: Option<u16>,
    worth: f64,
}

/// Chooses the prefix whose missing blocks are worth most, of those that a worker can send now.
pub(super) fn choose(need: &PrewarmTarget<'_>, hot: &[HotHolders], senders: &Senders) -> NextFetch {
    let mut best: Option<PrefixOffer> = None;
    let mut other = NextFetch::Done;
    for (at, hot) in hot.iter().enumerate() {
        match need.look(at, hot, senders) {
            NextFetch::Fetch(offer) if best.is_none_or(|best| offer.worth > best.worth) => {
                best = Some(offer);
            }
            NextFetch::Fetch(_) | NextFetch::Done => {}
            NextFetch::Full => other = NextFetch::Full,
            NextFetch::Wait if other == NextFetch::Done => other = NextFetch::Wait,
            NextFetch::Wait => {}
        }
    }
    best.map_or(other, NextFetch::Fetch)
}

impl PrewarmTarget<'_> {
    /// What the worker would do if this were the only prefix.
    fn look(&self, at: usize, hot: &HotHolders, senders: &Senders) -> NextFetch {
        let hashes = &hot.prefix.hashes[..];
        let (own, others): (Vec<_>, Vec<_>) =
            hot.held.iter().partition(|held| held.by.worker == self.worker.0);
        let of_rank = |rank| self.held(hashes, &own, rank);
        // A prefix is brought to one rank only; what that rank lacks of it may be more than what all
        // of them lack.
        let ranks = own.iter().map(|held| held.by.rank);
        let ranks = ranks.chain(self.brought.iter().map(|brought| brought.rank));
        let held = ranks.map(of_rank).max().unwrap_or(0);
        let held_here = of_rank(self.rank);
        let least = held + self.blocks_min.max(1);
        let able = others.into_iter().take_while(|held| held.blocks >= least);
        let able = able.take(HOLDERS_MAX);
        let able = able.filter_map(|held| Some((held.blocks, senders.get(&held.by)?)));
        let able = able.filter(|(_, sender)| sender.kv_format.fits(self.kv_format));
        let able: Vec<(usize, &Sender)> = able.collect();
        let reach = held_here.saturating_add(self.blocks_max);
        let is_open = |blocks: usize| {
            let tries = self.tried.get(&hashes[blocks - 1]);
            tries.is_none_or(|tries| *tries < TRIES_MAX)
        };
        let most = able.iter().map(|(blocks, _)| *blocks).max().unwrap_or(0).min(reach);
        if most < least || !is_open(most) {
            return NextFetch::Done;
        }
        let reach = reach.min(held_here.saturating_add(self.room_blocks));
        if reach < least {
            return NextFetch::Full;
        }
        // Another fetch brings a part of it.
        let is_coming = self.running.iter().any(|other| other.get(held) == hashes.get(held));
        let free = able.iter().filter(|(_, sender)| {
            sender.is_free && self.from.get(&sender.worker).is_none_or(|used| *used < self.from_max)
        });
        let free = free.min_by_key(|(blocks, sender)| (usize::MAX - blocks, sender.load));
        let Some((blocks, sender)) = free.filter(|_| !is_coming) else { return NextFetch::Wait };
        let blocks = (*blocks).min(reach);
        if !is_open(blocks) {
            return NextFetch::Wait;
        }
        NextFetch::Fetch(PrefixOffer {
            at,
            blocks,
            brought_blocks: blocks - held_here,
            source: sender.worker,
            source_rank: sender.rank,
            worth: hot.prefix.worth(held, blocks),
        })
    }

    /// Leading blocks of a prefix that a rank of the worker holds.
    fn held(&self, hashes: &[BlockHash], own: &[&HeldPrefix], rank: u16) -> usize {
        let indexed = own.iter().filter(|held| held.by.rank == rank).map(|held| held.blocks);
        let brought = self.brought.iter().filter(|brought| brought.rank == rank);
        let brought = brought.map(|brought| common_blocks(hashes, &brought.hashes));
        indexed.chain(brought).max().unwrap_or(0)
    }
}

/// Whether clients need a worker, so that it sends and takes nothing for prewarming: requests wait in
/// its engine's queue, or not all of its fetches in a direction are of prewarming.
pub(super) fn is_needed_by_clients(waiting: u64, fetches: u32, of_prewarming: u32) -> bool {
    waiting > 0 || fetches > of_prewarming
}

#[cfg(test)]
mod tests;
