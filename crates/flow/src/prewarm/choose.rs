//! Which prefix a worker takes over next, and from which worker.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use splitrail_kv::{BlockHash, Tier};

use super::fetch::Plan;
use splitrail_config::model::PrewarmConfig;
use splitrail_fleet::peer_fetch::{FetchBounds, can_take};
use splitrail_fleet::{Roster, Served, Worker};
use splitrail_policy::{Source, WorkerIndex};

/// Maximum number of prefixes that are examined at a time, the most used ones first.
const PREFIXES_MAX: usize = 256;
/// How often a prefix is tried on one worker.
const TRIES_MAX: u32 = 2;
/// The share of a worker's cache up to which it is filled. A full cache would evict what the
/// worker's own requests have brought.
const FILLED_MAX: f64 = 0.9;

/// A worker that is prewarmed, as far as the choice needs it.
pub(super) struct Joining<'a> {
    pub(super) served: &'a Served,
    pub(super) roster: &'a Roster,
    pub(super) worker: &'a Arc<Worker>,
    /// The number of tokens that it may still take over.
    pub(super) tokens_left: u64,
    /// How often prefixes were tried, by their last block.
    pub(super) tried: &'a HashMap<BlockHash, u32>,
    /// The fetches under way to it.
    pub(super) running: Vec<&'a [BlockHash]>,
    /// The blocks that they bring.
    pub(super) arriving_blocks: u64,
    /// The blocks that earlier ones have brought. The worker's KV events for them may be late.
    pub(super) brought_blocks: u64,
    /// The number of fetches of prewarming from each source.
    pub(super) from: &'a HashMap<WorkerIndex, u32>,
    /// The number of fetches so far, which distributes them over the worker's ranks.
    pub(super) turn: u32,
}

/// What a worker that is prewarmed does next.
pub(super) enum Next {
    /// It fetches.
    Fetch(Plan),
    /// It waits: a worker has something better to do.
    Wait,
    /// It holds all hot prefixes that other workers can send.
    Done,
    /// It has no room.
    Full,
}

/// A prefix and a worker that can send it.
struct Offer {
    hashes: Vec<BlockHash>,
    /// Leading blocks that the worker holds.
    held: usize,
    source: Source,
    worth: f64,
}

impl Joining<'_> {
    /// What the worker does next.
    pub(super) fn next(&self, now: Instant) -> Next {
        let Self { served, worker, .. } = self;
        let Some(bounds) = served.pool.fetch_bounds() else { return Next::Done };
        // Requests of clients find a place.
        let reserved = bounds.max_per_worker.saturating_sub(1).max(1);
        let bounds = FetchBounds { max_per_worker: reserved, ..bounds };
        let block_size = served.pool.block_size();
        if !can_take(worker, bounds, block_size, now) || worker.waiting(now) > 0 {
            return Next::Wait;
        }
        let offer = match self.best(bounds, block_size, now) {
            Ok(offer) => offer,
            Err(next) => return next,
        };
        let brought = (offer.hashes.len() - offer.held) as u64;
        if !self.has_room(brought, now) {
            return Next::Full;
        }
        let Some(source) = self.roster.get(offer.source.worker) else { return Next::Wait };
        let rank = worker.ranks.are_pinned().then(|| {
            let count = u32::from(worker.ranks.count()).max(1);
            (self.turn % count) as u16
        });
        Next::Fetch(Plan {
            source: Arc::clone(source),
            source_rank: offer.source.rank,
            fetcher: Arc::clone(worker),
            rank,
            hashes: offer.hashes.into(),
            tokens: brought * u64::from(block_size),
            bounds,
        })
    }

    /// The prefix whose missing blocks are worth most, of those that a worker can send now.
    fn best(&self, bounds: FetchBounds, block_size: u32, now: Instant) -> Result<Offer, Next> {
        let pool = &self.served.pool;
        let PrewarmConfig { tokens_max, fetches_max, .. } = self.served.config.prewarm;
        let size = block_size.max(1) as usize;
        let least = (bounds.min_tokens as usize).div_ceil(size);
        let most = self.tokens_left as usize / size;
        let (mut best, mut waits): (Option<Offer>, bool) = (None, false);
        let mut sources = Vec::new();
        let hottest = pool.hot.hottest(tokens_max as usize / size);
        for prefix in hottest.into_iter().take(PREFIXES_MAX) {
            let held = pool.indexed_blocks(self.worker, &prefix.hashes) as usize;
            pool.list_sources(self.roster, &prefix.hashes, now, &mut sources);
            sources.retain(|source| {
                source.worker != self.worker.index && source.blocks as usize >= held + least
            });
            let able = sources.len();
            sources.retain(|source| self.is_free(source, fetches_max, now));
            waits |= sources.len() < able;
            let Some(source) = self.least_loaded(&sources) else { continue };
            let blocks = (source.blocks as usize).min(held + most);
            let Some(last) = prefix.hashes[..blocks].last().filter(|_| blocks >= held + least)
            else {
                continue;
            };
            // Another fetch brings a part of it.
            if self.running.iter().any(|other| other.get(held) == prefix.hashes.get(held)) {
                waits = true;
                continue;
            }
            let worth = prefix.worth(held, blocks);
            let is_open = self.tried.get(last).is_none_or(|tries| *tries < TRIES_MAX);
            if is_open && best.as_ref().is_none_or(|best| worth > best.worth) {
                let hashes = prefix.hashes[..blocks].to_vec();
                best = Some(Offer { hashes, held, source, worth });
            }
        }
        best.ok_or(if waits { Next::Wait } else { Next::Done })
    }

    /// Whether a source has time: no request waits on it, and prewarming does not use it enough.
    fn is_free(&self, source: &Source, fetches_max: u32, now: Instant) -> bool {
        let used = self.from.get(&source.worker).copied().unwrap_or(0);
        let worker = self.roster.get(source.worker);
        used < fetches_max && worker.is_some_and(|worker| worker.waiting(now) == 0)
    }

    /// Of the sources that hold most, the one with the least load.
    fn least_loaded(&self, sources: &[Source]) -> Option<Source> {
        let load = |source: &&Source| {
            let worker = self.roster.get(source.worker);
            let active = worker.map_or(0, |worker| worker.booked.active_tokens());
            (u32::MAX - source.blocks, source.wait_ns, active)
        };
        sources.iter().min_by_key(load).copied()
    }

    /// Whether the worker's cache has room for more blocks, if its size is known.
    fn has_room(&self, blocks: u64, now: Instant) -> bool {
        let Some(total) = self.worker.load(now).and_then(|load| load.total_blocks) else {
            return true;
        };
        let held = self.served.pool.block_counts(self.worker)[Tier::Device as usize] as u64;
        let held = held.max(self.brought_blocks);
        (held + self.arriving_blocks + blocks) as f64 <= f64::from(total) * FILLED_MAX
    }
}
