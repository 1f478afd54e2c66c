//! One model's workers and the index of their KV blocks.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use splitrail_engine::kv_events::OtherGroups;
use splitrail_kv::{BlockHash, Index, IndexConfig, IndexReader, Overlaps, SplitMix64, Tier};
use tokio::sync::watch;

use super::candidates::CandidateBuilder;
use super::exclusion::{Exclusion, excluded};
use super::peer_fetch::list_sources;
use super::ranks::rank_key;
use super::read_back::ReadBack;
use super::refused_workers::RefusedWorkers;
use super::roster::Roster;
use super::speculative_index::{SpeculativeIndex, SpeculativeOverlaps};
use super::waiting::WaitingQueues;
use super::worker::Worker;
use crate::conversations::RecentConversations;
use crate::losses::Losses;
use splitrail_config::model::{Connector, Model, SaturationConfig, SpeculativeIndexConfig};
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::{Candidate, Distance, Leg, LinkScales, Location, Source, WorkerIndex};
use splitrail_workload::calibration::Calibration;
use splitrail_workload::fetches::FetchBounds;
use splitrail_workload::hot::HotStore;

mod block_size;

thread_local! {
    /// Buffers for a lookup in the index, reused so that lookups do not allocate.
    static FOUND: RefCell<(Overlaps, SpeculativeOverlaps)> = RefCell::default();
}

/// Selects the workers that become candidates.
#[derive(Clone, Copy, Debug)]
pub struct CandidateQuery<'a> {
    /// The leg to place.
    pub leg: Leg,
    /// Hashes of the prompt's blocks, from which each candidate's overlap is computed.
    pub hashes: &'a [BlockHash],
    /// The length of the prompt.
    pub prompt_tokens: u64,
    /// Workers that must not take the leg.
    pub exclusions: &'a [Exclusion],
    /// The number of leading blocks that the leg may read back; 0 if it reads nothing.
    pub readable_blocks: u32,
    /// Whether the leg itself may take a prefix from another worker (one shot).
    pub takes_prefix: bool,
    /// Where the worker is that hands over to a decode leg; `None` if the leg takes nothing over.
    pub from: Option<Location>,
    /// The current time.
    pub now: Instant,
}

/// One model's workers and the index of their KV blocks.
pub struct Pool {
    /// The current workers. Changed by `enter` and `leave` only.
    roster: ArcSwap<Roster>,
    /// The number of the next worker. No number is used twice.
    next: AtomicU32,
    /// Held while the roster is changed.
    changing: Mutex<()>,
    /// Tokens per block; 0 until an engine has reported the block size.
    block_size: watch::Sender<u32>,
    /// Whether the block size is that of the engines, since the configuration has none.
    learns_block_size: bool,
    /// The chunk of chunked local attention in tokens, as the model's folder says; 0 if it does not.
    attention_chunk_tokens: AtomicU32,
    /// Written by the tasks that follow workers' events. Prompts are looked up through `reader`.
    index: Mutex<Index>,
    reader: IndexReader,
    /// What workers probably hold beyond the confirmed blocks of `index`.
    pub speculative_index: SpeculativeIndex,
    /// Requests that wait in the router for a worker, if the configuration enables the queue.
    pub waiting: WaitingQueues,
    /// KV that decode workers keep pinned for prefill workers.
    pub read_back: ReadBack,
    /// The conversations that recent prompts belong to.
    pub conversations: RecentConversations,
    /// The prefixes that recent prompts use most, if the model is prewarmed.
    pub hot: HotStore,
    /// What the router has learned about when a remote prefill pays off.
    pub calibration: Calibration,
    /// The load from which a worker is saturated.
    pub saturation: ArcSwap<SaturationConfig>,
    /// The bounds of peer fetches; `None` without peer fetches.
    pub(super) fetch_bounds: ArcSwapOption<FetchBounds>,
    /// Whether the policy uses predicted costs. Reading them takes a lock per worker.
    uses_costs: AtomicBool,
    /// Whether hand-offs bring the states of recurrent layers, whatever the decode worker has.
    hands_over_states: AtomicBool,
    /// What has been learned of hand-offs over other distances than within a zone.
    links: Mutex<LinkScales>,
    /// Counts of cache hits that were lost, by cause.
    pub losses: Losses,
    /// The workers that sources have found and that cannot be added.
    pub refused_workers: RefusedWorkers,
    turns: [AtomicU64; 3],
    draws: AtomicU64,
}

impl Pool {
    /// An empty pool over an empty index. The block size is 0 if an engine is to report it.
    /// `rng_seed` makes the random draws repeatable.
    pub fn new(index: IndexConfig, rng_seed: Option<u64>) -> Self {
        let seed = rng_seed.unwrap_or_else(rand::random);
        let index = Index::new(index);
        Self {
            roster: ArcSwap::from_pointee(Roster::new(Vec::new())),
            next: AtomicU32::new(0),
            changing: Mutex::new(()),
            block_size: watch::Sender::new(index.config().block_size),
            learns_block_size: index.config().block_size == 0,
            attention_chunk_tokens: AtomicU32::new(0),
            reader: index.reader(),
            index: Mutex::new(index),
            speculative_index: SpeculativeIndex::new(SpeculativeIndexConfig::OFF),
            waiting: WaitingQueues::default(),
            read_back: ReadBack::default(),
            conversations: RecentConversations::default(),
            hot: HotStore::default(),
            calibration: Calibration::default(),
            saturation: ArcSwap::default(),
            fetch_bounds: ArcSwapOption::empty(),
            uses_costs: AtomicBool::new(true),
            hands_over_states: AtomicBool::new(false),
            links: Mutex::default(),
            losses: Losses::default(),
            refused_workers: RefusedWorkers::default(),
            turns: Default::default(),
            draws: AtomicU64::new(seed),
        }
    }

    /// Sets the configuration of the speculative index.
    pub fn with_speculative_index(self, config: SpeculativeIndexConfig) -> Self {
        Self { speculative_index: SpeculativeIndex::new(config), ..self }
    }

    /// The current workers.
    pub fn roster(&self) -> Arc<Roster> {
        self.roster.load_full()
    }

    /// Adds the worker that `make` returns for the number it is given.
    pub fn enter(&self, make: impl FnOnce(WorkerIndex) -> Worker) -> Arc<Worker> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let worker = Arc::new(make(WorkerIndex(self.next.fetch_add(1, Relaxed))));
        self.roster.store(Arc::new(self.roster.load().with(Arc::clone(&worker))));
        worker
    }

    /// Removes a worker: new legs no longer find it, and its blocks are dropped from the index.
    /// Legs under way continue.
    pub fn leave(&self, worker: &Worker) {
        {
            let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
            self.roster.store(Arc::new(self.roster.load().without(worker.index)));
        }
        // Writers check `gone` while they hold the lock of the index.
        worker.gone.cancel();
        self.index().remove_worker(worker.index.0);
        self.speculative_index.forget(worker.index);
        self.count_block_sizes();
    }

    /// Changes a worker, and the worker that has its place by now if that one is the same process of the
    /// same engine: what a leg finds out about an engine stays known when another description of the
    /// engine has come meanwhile.
    pub fn change_engine(&self, worker: &Worker, change: impl Fn(&Worker)) {
        // A worker that enters either takes over the change, or is in the roster here.
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        change(worker);
        let roster = self.roster.load();
        let later = roster.iter().filter(|other| other.is_later_description_of(worker));
        later.for_each(|later| change(later));
    }

    /// Applies the settings of a pool that a reload may change.
    pub fn configure(&self, model: &Model) {
        self.waiting.configure(model.queue.unwrap_or_default().into());
        self.calibration.configure(model.auto.into());
        self.losses.configure(model.cache_loss_tracking);
        self.saturation.store(Arc::new(model.saturation));
        self.fetch_bounds.store(FetchBounds::of(model).map(Arc::new));
        self.hot.configure(model);
        self.uses_costs.store(model.uses_costs(), Relaxed);
        let hands_over_states = matches!(model.connector, Connector::Nixl | Connector::NixlPush);
        self.hands_over_states.store(hands_over_states, Relaxed);
    }

    /// Uniformly distributed random bits for one decision.
    pub fn draw(&self) -> u64 {
        // All that threads share is the state.
        SplitMix64::new(self.draws.fetch_add(SplitMix64::STEP, Relaxed)).next_u64()
    }

    /// The index, for writers and for what `reader` does not offer. A poisoned lock is still used:
    /// the index keeps its invariants at each step of a change.
    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of choices made for this leg before this one. Counts this one.
    pub fn next_turn(&self, leg: Leg) -> u64 {
        self.turns[leg as usize].fetch_add(1, Relaxed)
    }

    /// The number of choices made for this leg so far. Counts nothing.
    pub fn turn(&self, leg: Leg) -> u64 {
        self.turns[leg as usize].load(Relaxed)
    }

    /// The longest sequence, in tokens, that a worker that decodes accepts, of those that have reported
    /// their limit.
    pub fn context_tokens(&self) -> Option<u32> {
        let roster = self.roster.load();
        let decodes = roster.iter().filter(|worker| worker.serves(Leg::Decode));
        decodes.filter_map(|worker| worker.engine.facts.context_tokens()).max()
    }

    /// The longest sequence, in tokens, that every worker that is up accepts, or else every worker;
    /// `None` if none has reported a limit.
    pub fn least_context_tokens(&self) -> Option<u32> {
        let roster = self.roster.load();
        let least = |counts: fn(&Worker) -> bool| {
            let counted = roster.iter().filter(|worker| counts(worker));
            let reported = counted.filter_map(|worker| worker.engine.facts.context_tokens());
            reported.filter(|tokens| *tokens < u32::MAX).min()
        };
        least(Worker::is_up).or_else(|| least(|_| true))
    }

    /// The longest sequence, in tokens, that any worker accepts; `None` if one has not reported its
    /// limit, or reports none.
    pub fn longest_context_tokens(&self) -> Option<u32> {
        let roster = self.roster.load();
        let reported = roster.iter().map(|worker| worker.engine.facts.context_tokens());
        let longest = reported.collect::<Option<Vec<u32>>>()?.into_iter().max();
        longest.filter(|tokens| *tokens < u32::MAX)
    }

    /// Replaces the contents of `overlaps` by what the index has of each worker, whether or not its
    /// events are trusted.
    pub fn find(&self, hashes: &[BlockHash], overlaps: &mut Overlaps) {
        self.reader.find(hashes, overlaps);
    }

    /// Number of leading blocks of a prompt that the index has of a worker, whether or not its events
    /// are trusted and the worker can use them. With several ranks, the highest number of any rank.
    pub fn indexed_blocks(&self, worker: &Worker, hashes: &[BlockHash]) -> u32 {
        let mut overlaps = Overlaps::new();
        self.reader.find(hashes, &mut overlaps);
        let keys = (0..worker.ranks.count()).map(|rank| rank_key(worker.index, rank));
        keys.map(|key| overlaps.spine_blocks(key)).max().unwrap_or(0)
    }

    /// Whether a worker, or one of its ranks, holds all of these blocks as confirmed by its events,
    /// and can use them.
    pub fn holds(&self, worker: &Worker, rank: Option<u16>, hashes: &[BlockHash]) -> bool {
        let mut overlaps = Overlaps::new();
        self.reader.find(hashes, &mut overlaps);
        let held = overlaps.get(rank_key(worker.index, rank.unwrap_or(0)));
        worker.overlap_is_believed(rank) && held.blocks as usize >= hashes.len()
    }

    /// The largest number of leading blocks of a prompt that the index has of any worker whose events
    /// are trusted.
    pub fn best_overlap_blocks(&self, hashes: &[BlockHash]) -> u32 {
        if hashes.is_empty() {
            return 0;
        }
        let mut overlaps = Overlaps::new();
        self.reader.find(hashes, &mut overlaps);
        let roster = self.roster.load();
        let trusted = roster.iter().filter(|worker| worker.overlap_is_believed(None));
        let keys = trusted
            .flat_map(|worker| (0..worker.ranks.count()).map(|rank| rank_key(worker.index, rank)));
        keys.map(|key| overlaps.get(key).blocks).max().unwrap_or(0)
    }

    /// The number of leading blocks of a prompt that the index has of a worker, on the rank that has
    /// most of them; 0 if the worker's events are not trusted.
    pub fn overlap_blocks_of(&self, worker: &Worker, hashes: &[BlockHash]) -> u32 {
        if hashes.is_empty() || !worker.overlap_is_believed(None) {
            return 0;
        }
        let mut overlaps = Overlaps::new();
        self.reader.find(hashes, &mut overlaps);
        let ranks = (0..worker.ranks.count()).map(|rank| rank_key(worker.index, rank));
        ranks.map(|key| overlaps.get(key).blocks).max().unwrap_or(0)
    }

    /// Number of distinct blocks that the index has of a worker in each tier, summed over its
    /// ranks.
    pub fn block_counts(&self, worker: &Worker) -> [usize; Tier::COUNT] {
        let index = self.index();
        let mut sum = [0; Tier::COUNT];
        for rank in 0..worker.ranks.count() {
            let counts = index.block_counts(rank_key(worker.index, rank));
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        sum
    }

    /// Whether a worker outside `failed` is available for a leg.
    pub fn any_up(&self, leg: Leg, failed: &[Exclusion]) -> bool {
        self.ups(leg, failed, |ups| ups.next().is_some())
    }

    /// Whether a leg has a candidate outside `exclusions`, available or not.
    pub fn has_candidate(&self, leg: Leg, exclusions: &[Exclusion]) -> bool {
        self.roster.load().iter().any(|worker| is_candidate(worker, leg, exclusions))
    }

    /// The worker outside `failed` that is available for a leg, if there is exactly one.
    pub fn last_up(&self, leg: Leg, failed: &[Exclusion]) -> Option<WorkerIndex> {
        self.ups(leg, failed, |ups| ups.next().filter(|_| ups.next().is_none()))
    }

    /// Decode workers whose engine's queue, by their load reports, takes longer than `left`: the
    /// lease of a hand-off would expire before they fetch it.
    pub fn workers_too_late(&self, left: Duration, now: Instant) -> Vec<Exclusion> {
        let roster = self.roster.load();
        let able = roster.iter().filter(|worker| worker.serves(Leg::Decode));
        let late = able.filter(|worker| worker.load.pace.wait(worker.waiting(now)) > left);
        late.map(|worker| Exclusion::new(worker.index, VetoReason::Lease)).collect()
    }

    /// Whether a leg could be placed on any worker, whatever its state.
    pub fn any_left(&self, leg: Leg, exclusions: &[Exclusion]) -> bool {
        self.roster.load().iter().any(|worker| is_candidate(worker, leg, exclusions))
    }

    /// Calls `read` with the workers outside `failed` that are available for a leg.
    fn ups<T>(
        &self,
        leg: Leg,
        failed: &[Exclusion],
        read: impl FnOnce(&mut dyn Iterator<Item = WorkerIndex>) -> T,
    ) -> T {
        let now = Instant::now();
        let roster = self.roster.load();
        let able = roster.iter().filter(|w| w.serves(leg) && w.is_available(leg, now));
        read(
            &mut able.map(|worker| worker.index).filter(|index| excluded(failed, *index).is_none()),
        )
    }

    /// How many times as long as within a zone a hand-off over this distance takes.
    pub fn link_scale(&self, distance: Distance) -> f64 {
        self.links.lock().unwrap_or_else(PoisonError::into_inner).of(distance)
    }

    /// Learns from a hand-off over this distance that took `seconds` and would have taken
    /// `expected_seconds` within a zone.
    pub fn learn_link(&self, distance: Distance, seconds: f64, expected_seconds: f64) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.observe(distance, seconds, expected_seconds);
    }

    /// The bounds of peer fetches; `None` without peer fetches.
    pub fn fetch_bounds(&self) -> Option<FetchBounds> {
        self.fetch_bounds.load().as_deref().copied()
    }

    /// Replaces the contents of a list by the workers that can send leading blocks of a prompt to
    /// another worker. There are none without peer fetches.
    pub fn list_sources(
        &self,
        roster: &Roster,
        hashes: &[BlockHash],
        now: Instant,
        sources: &mut Vec<Source>,
    ) {
        sources.clear();
        let Some(bounds) = self.fetch_bounds().filter(|_| !hashes.is_empty()) else { return };
        FOUND.with_borrow_mut(|(overlaps, _)| {
            self.reader.find(hashes, overlaps);
            list_sources(roster, overlaps, bounds, self.block_size(), now, sources);
        });
    }

    /// Every worker of a roster that serves the leg and is not excluded, in its current state: one
    /// candidate for each rank to which the leg could be pinned.
    pub fn candidates(&self, roster: &Roster, query: CandidateQuery<'_>) -> Vec<Candidate> {
        let mut able = Vec::with_capacity(roster.len());
        self.list_candidates(roster, query, &mut able);
        able
    }

    /// Like `candidates`, but replaces the contents of a list that is reused.
    pub fn list_candidates(
        &self,
        roster: &Roster,
        query: CandidateQuery<'_>,
        able: &mut Vec<Candidate>,
    ) {
        let CandidateQuery {
            leg,
            hashes,
            exclusions,
            readable_blocks,
            takes_prefix,
            from,
            now,
            ..
        } = query;
        able.clear();
        FOUND.with_borrow_mut(|(overlaps, found)| {
            let hands_over_states = self.hands_over_states.load(Relaxed) && has_states(roster);
            // The decode worker computes the last token then, and the prefill worker one more.
            let computed = if hands_over_states && leg == Leg::Prefill { 2 } else { 1 };
            let before_last = query.prompt_tokens.saturating_sub(computed);
            let resumed_max = before_last.checked_div(self.block_size().into()).unwrap_or(0);
            self.reader.find_resumed(hashes, resumed_max as u32, overlaps);
            self.speculative_index.find(now, hashes, found);
            let uses_costs = self.uses_costs.load(Relaxed);
            let busy = **self.saturation.load();
            let fetches = self.fetch_bounds().filter(|_| leg != Leg::Decode);
            let takes_prefix = takes_prefix && !self.read_back.is_distrusted();
            let readable = hashes.get(..readable_blocks as usize).unwrap_or(hashes);
            let links = *self.links.lock().unwrap_or_else(PoisonError::into_inner);
            let builder = CandidateBuilder::new(roster, overlaps, found, busy, uses_costs, now)
                .handed_over(from.unwrap_or_default(), links, hands_over_states && from.is_some())
                .fetching(fetches, takes_prefix, self.block_size())
                .reading(self.read_back.readable_pins(now, readable));
            for worker in roster.iter().filter(|worker| is_candidate(worker, leg, exclusions)) {
                builder.add(worker, leg, able);
            }
        });
    }
}

/// Whether the model has recurrent layers, as the events of any worker say.
fn has_states(roster: &Roster) -> bool {
    let states = OtherGroups::named("mamba");
    roster.iter().any(|worker| worker.kv.event_stats.followed_groups().includes(states))
}

fn is_candidate(worker: &Worker, leg: Leg, exclusions: &[Exclusion]) -> bool {
    let is_able = worker.serves(leg) && !worker.is_quarantined();
    is_able && excluded(exclusions, worker.index).is_none()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
