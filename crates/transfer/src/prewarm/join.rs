//! One worker that is prewarmed: what it has taken over, and what it does next.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_kv::{BlockHash, Tier};
use tokio::task::{AbortHandle, Id};

use super::choose::{
    FetchedPrefix, HotHolders, NextFetch, PrefixOffer, PrewarmTarget, Senders, choose,
    is_needed_by_clients,
};
use super::fetch::{EndedFetch, PrewarmFetch};
use crate::peer_fetch::PeerFetchOutcome;
use splitrail_config::model::PrewarmConfig;
use splitrail_fleet::peer_fetch::can_take;
use splitrail_fleet::{Roster, ServedModel, Worker};
use splitrail_policy::WorkerIndex;
use splitrail_workload::costs::RankScope;
use splitrail_workload::fetches::FetchBounds;

/// How long a worker may have nothing to take over before it counts as prewarmed: blocks and token
/// ids may still become known.
const SETTLED: Duration = Duration::from_secs(2);
/// Minimum pause after a fetch that has brought nothing.
const PAUSE_MIN: Duration = super::BUSY_INTERVAL;
/// How long the events of a worker may take to tell of what a fetch has brought.
const EVENTS_AFTER: Duration = Duration::from_secs(5);
/// Maximum number of fetches of which that is remembered.
const BROUGHT_MAX: usize = 32;
/// The share of a worker's cache up to which it is filled. A full cache would evict what the
/// worker's own requests have brought.
const FILLED_MAX: f64 = 0.9;

/// Why prewarming of a worker ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The worker holds all hot prefixes that other workers can send.
    Done,
    /// The worker has taken over `prewarm.tokens_max` tokens.
    Tokens,
    /// `prewarm.time_max` is over.
    Time,
    /// The worker's cache is full.
    Full,
    /// The worker drains, is down, has restarted or has left, or prewarming was switched off.
    Stopped,
}

impl End {
    /// The end in metrics and logs.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Tokens => "tokens",
            Self::Time => "time",
            Self::Full => "full",
            Self::Stopped => "stopped",
        }
    }
}

/// A worker that is prewarmed, or is going to be.
pub(super) struct Join {
    /// When its start was noticed.
    pub(super) noted: Instant,
    /// When it was first ready.
    pub(super) began: Option<Instant>,
    pub(super) running: Vec<Running>,
    /// The ends of the pauses after fetches.
    pauses: Vec<Instant>,
    /// How often prefixes were tried, by their last block. Each fetch adds one at most.
    tried: HashMap<BlockHash, u32>,
    /// What the last fetches have brought, and until when the worker's events may not tell of it.
    brought: VecDeque<(Instant, FetchedPrefix)>,
    pub(super) prefixes: u32,
    pub(super) tokens: u64,
    /// Since when there is nothing to take over.
    idle_since: Option<Instant>,
}

/// A fetch under way.
pub(super) struct Running {
    pub(super) id: Id,
    pub(super) task: AbortHandle,
    pub(super) source: WorkerIndex,
    pub(super) rank: Option<u16>,
    pub(super) hashes: Arc<[BlockHash]>,
    pub(super) tokens: u64,
}

/// What all workers of a model that are prewarmed look at.
pub(super) struct View<'a> {
    pub(super) served: &'a ServedModel,
    pub(super) roster: &'a Roster,
    /// The bounds that leave a place to fetches for requests.
    pub(super) bounds: FetchBounds,
    pub(super) hot: &'a [HotHolders],
    pub(super) senders: &'a Senders,
    /// The number of fetches of prewarming from each worker.
    pub(super) from: &'a HashMap<WorkerIndex, u32>,
}

/// What becomes of a worker that is prewarmed.
pub(super) enum JoinStep {
    Fetch(PrewarmFetch),
    Wait,
    End(End),
}

impl Join {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            noted: now,
            began: None,
            running: Vec::new(),
            pauses: Vec::new(),
            tried: HashMap::new(),
            brought: VecDeque::new(),
            prefixes: 0,
            tokens: 0,
            idle_since: None,
        }
    }

    /// Takes over the outcome of a fetch that took so long. Returns its tokens; `None` if it is no
    /// fetch of this worker.
    pub(super) fn note_ended(
        &mut self,
        id: Id,
        ended: EndedFetch,
        link_share: f64,
        now: Instant,
    ) -> Option<u64> {
        let EndedFetch { outcome, took } = ended;
        let at = self.running.iter().position(|running| running.id == id)?;
        let Running { rank, hashes, tokens, .. } = self.running.swap_remove(at);
        let tries = self.tried.entry(*hashes.last()?).or_default();
        if outcome.has_blocks() {
            *tries = u32::MAX;
            (self.prefixes, self.tokens) = (self.prefixes + 1, self.tokens + tokens);
            let brought = FetchedPrefix { rank: rank.unwrap_or(0), hashes };
            self.brought.push_back((now + EVENTS_AFTER, brought));
            if self.brought.len() > BROUGHT_MAX {
                self.brought.pop_front();
            }
        } else if outcome != PeerFetchOutcome::Full {
            *tries = tries.saturating_add(1);
        }
        self.pauses.push(now + pause(took, link_share, outcome.has_blocks()));
        Some(tokens)
    }

    /// Whether it may have another fetch under way.
    pub(super) fn has_place(&mut self, config: &PrewarmConfig, now: Instant) -> bool {
        self.pauses.retain(|end| *end > now);
        self.running.len() + self.pauses.len() < config.fetches_max as usize
    }

    /// What the worker does next, if it has a place for a fetch.
    pub(super) fn step(&mut self, worker: &Arc<Worker>, view: &View<'_>, now: Instant) -> JoinStep {
        let (served, bounds) = (view.served, view.bounds);
        let block_size = served.pool.block_size().max(1);
        let arriving: u64 = self.running.iter().map(|running| running.tokens).sum();
        let tokens_max = u64::from(served.config.prewarm.tokens_max);
        let tokens_left = tokens_max.saturating_sub(self.tokens + arriving);
        let is_idle = self.running.is_empty();
        if tokens_left < u64::from(bounds.min_tokens) {
            return if is_idle { JoinStep::End(End::Tokens) } else { JoinStep::Wait };
        }
        let choice = if self.is_held_back(worker, bounds, block_size, now) {
            NextFetch::Wait
        } else {
            let in_time = tokens_in_time(worker, served.config.timeouts.peer_fetch, now);
            self.brought.retain(|(until, _)| *until > now);
            let brought: Vec<&FetchedPrefix> =
                self.brought.iter().map(|(_, brought)| brought).collect();
            let running: Vec<&[BlockHash]> =
                self.running.iter().map(|running| &*running.hashes).collect();
            choose(
                &PrewarmTarget {
                    worker: worker.index,
                    rank: self.rank(worker).unwrap_or(0),
                    kv_format: worker.engine.facts.kv_format(),
                    blocks_min: bounds.min_tokens.div_ceil(block_size) as usize,
                    blocks_max: (tokens_left.min(in_time) / u64::from(block_size)) as usize,
                    room_blocks: self.room_blocks(worker, served, now),
                    tried: &self.tried,
                    running: &running,
                    brought: &brought,
                    from: view.from,
                    from_max: served.config.prewarm.fetches_max,
                },
                view.hot,
                view.senders,
            )
        };
        let since = match choice {
            NextFetch::Done if is_idle => *self.idle_since.get_or_insert(now),
            _ => {
                self.idle_since = None;
                now
            }
        };
        match choice {
            NextFetch::Fetch(offer) => {
                self.plan(offer, worker, view).map_or(JoinStep::Wait, JoinStep::Fetch)
            }
            NextFetch::Full if is_idle => JoinStep::End(End::Full),
            NextFetch::Done if now >= since + SETTLED => JoinStep::End(End::Done),
            NextFetch::Full | NextFetch::Done | NextFetch::Wait => JoinStep::Wait,
        }
    }

    /// Whether the worker may take nothing now, or clients need it.
    fn is_held_back(
        &self,
        worker: &Worker,
        bounds: FetchBounds,
        block_size: u32,
        now: Instant,
    ) -> bool {
        let (taken, own) = (worker.transfer.fetches.taking(), self.running.len() as u32);
        !can_take(worker, bounds, block_size, now)
            || is_needed_by_clients(worker.waiting(now), taken, own)
    }

    /// The rank that takes the next prefix, if the worker has several.
    fn rank(&self, worker: &Worker) -> Option<u16> {
        let turn = self.prefixes.wrapping_add(self.running.len() as u32);
        let count = u32::from(worker.ranks.count()).max(1);
        worker.ranks.are_chosen_by_the_router().then(|| (turn % count) as u16)
    }

    /// The number of blocks for which the worker's cache has room; any number if its size is unknown.
    fn room_blocks(&self, worker: &Worker, served: &ServedModel, now: Instant) -> usize {
        let Some(total) = worker.load(now).and_then(|load| load.total_blocks) else {
            return usize::MAX;
        };
        let size = served.pool.block_size().max(1) as usize;
        let held = served.pool.block_counts(worker)[Tier::Device as usize];
        // The worker's events for what was brought may be late.
        let held = held.max(self.tokens as usize / size);
        let arriving = self.running.iter().map(|running| running.tokens as usize / size);
        ((f64::from(total) * FILLED_MAX) as usize).saturating_sub(held + arriving.sum::<usize>())
    }

    fn plan(
        &self,
        offer: PrefixOffer,
        worker: &Arc<Worker>,
        view: &View<'_>,
    ) -> Option<PrewarmFetch> {
        let block_size = u64::from(view.served.pool.block_size());
        Some(PrewarmFetch {
            source: Arc::clone(view.roster.get(offer.source)?),
            source_rank: offer.source_rank,
            fetcher: Arc::clone(worker),
            rank: self.rank(worker),
            hashes: view.hot.get(offer.at)?.prefix.hashes.get(..offer.blocks)?.into(),
            tokens: offer.brought_blocks as u64 * block_size,
            bounds: view.bounds,
        })
    }
}

/// The pause after a fetch that took so long, so that fetches take no more than this share of the time.
fn pause(took: Duration, link_share: f64, has_blocks: bool) -> Duration {
    let share = link_share.clamp(0.01, 1.0);
    let pause = took.mul_f64((1.0 - share) / share);
    if has_blocks { pause } else { pause.max(PAUSE_MIN) }
}

/// The number of tokens that a worker is predicted to take in half of the time that a fetch may take:
/// one that takes too long fails, and neither worker takes part in a fetch for a while.
fn tokens_in_time(worker: &Worker, timeout: Duration, now: Instant) -> u64 {
    let costs = worker.load.costs.seen(now, RankScope::Rank(None), 0).coefficients;
    let seconds = (timeout.as_secs_f64() / 2.0 - costs.fetch_seconds(0)).max(0.0);
    (seconds / costs.fetch_link_seconds(1)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_keep_fetches_to_their_share_of_the_time_however_long_they_take() {
        let took = Duration::from_secs(5);
        assert_eq!(pause(took, 0.5, true), took);
        assert_eq!(pause(took, 0.01, true), Duration::from_secs(495));
        assert_eq!(pause(took, 1.0, true), Duration::ZERO);
        assert_eq!(pause(Duration::ZERO, 1.0, false), PAUSE_MIN, "it is not tried again at once");
    }
}
