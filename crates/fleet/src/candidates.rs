//! The state of workers at the time of a decision: one candidate for each worker or rank that a leg
//! could be sent to.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use splitrail_engine::load::EngineLoad;
use splitrail_kv::{Overlap, Overlaps, WorkerKey};

use super::peer_fetch::{can_take, takes_prefixes};
use super::ranks::Rank;
use super::ranks::rank_key;
use super::read_back::ReadablePins;
use super::roster::Roster;
use super::shim_report::OtherLoad;
use super::speculative_index::SpeculativeOverlaps;
use super::worker::Worker;
use splitrail_config::model::SaturationConfig;
use splitrail_policy::{Candidate, KvRoom, Leg, LinkScales, Location};
use splitrail_workload::booking::BookedSums;
use splitrail_workload::costs::{RankScope, WorkerCosts};
use splitrail_workload::fetches::FetchBounds;

/// Makes the candidates for one prompt at one time.
pub(super) struct CandidateBuilder<'a> {
    overlaps: &'a Overlaps,
    found: &'a SpeculativeOverlaps,
    /// A worker of the transfer group that is replacing the others, if one is.
    incoming: Option<&'a Worker>,
    /// The load that is assumed of workers whose last report is too old.
    busiest: OtherLoad,
    saturation: SaturationConfig,
    /// Whether the policy uses costs.
    uses_costs: bool,
    /// The bounds of peer fetches, if the leg can have one.
    fetches: Option<FetchBounds>,
    /// Whether the leg can take a prefix by itself.
    takes_prefix: bool,
    /// Tokens per block.
    block_size: u32,
    /// Where the worker is that hands over to a decode leg, and what that does to the time.
    from: Location,
    links: LinkScales,
    /// Whether the leg is given the states of recurrent layers, so that it uses all that the worker holds
    /// in full attention.
    takes_states: bool,
    /// What the leg can read back.
    readable_pins: Option<ReadablePins<'a>>,
    /// The worker with the most blocks of the prompt of which some are in a store.
    store: Overlap,
    now: Instant,
}

/// The load of a worker or of one of its ranks.
struct RankLoad {
    requests: u32,
    prefill_tokens: u64,
    /// The part of `prefill_tokens` that other routers have sent.
    others_tokens: u64,
    active_tokens: u64,
}

/// What a worker or one of its ranks holds of the prompt.
struct HeldBlocks {
    /// The overlap that KV events confirmed; empty if the events are not trusted.
    overlap: Overlap,
    /// Whether the worker's KV events are trusted.
    current: bool,
    sent: u32,
    computed: u32,
    /// The blocks of the overlap if the engine did the opposite with the last block of a hit.
    otherwise: u32,
    /// What a worker with several cache groups holds in full attention; `None` of any other worker.
    spine_blocks: Option<u32>,
}

/// A worker or one of its ranks.
struct RankView<'a> {
    worker: &'a Worker,
    /// The rank that the leg would be pinned to.
    rank: Option<u16>,
    work: RankLoad,
    held: HeldBlocks,
}

impl<'a> CandidateBuilder<'a> {
    pub(super) fn new(
        roster: &'a Roster,
        overlaps: &'a Overlaps,
        found: &'a SpeculativeOverlaps,
        busy: SaturationConfig,
        uses_costs: bool,
        now: Instant,
    ) -> Self {
        let busiest = OtherLoad::busiest(roster.iter().map(|worker| &worker.shim_report), now);
        Self {
            overlaps,
            found,
            incoming: roster.incoming(now),
            busiest,
            saturation: busy,
            uses_costs,
            fetches: None,
            takes_prefix: false,
            block_size: 0,
            from: Location::default(),
            links: LinkScales::default(),
            takes_states: false,
            readable_pins: None,
            store: overlaps.longest_with_store(),
            now,
        }
    }

    /// Has a decode leg take its KV from a worker at this place, and perhaps the states of recurrent
    /// layers.
    pub(super) fn handed_over(self, from: Location, links: LinkScales, takes_states: bool) -> Self {
        Self { from, links, takes_states, ..self }
    }

    /// Lets workers take prefixes from others within these bounds, in blocks of this size.
    pub(super) fn fetching(
        self,
        fetches: Option<FetchBounds>,
        takes_prefix: bool,
        block_size: u32,
    ) -> Self {
        Self { fetches, takes_prefix, block_size, ..self }
    }

    /// Lets workers read back what decode workers keep of the prompt.
    pub(super) fn reading(self, readable_pins: Option<ReadablePins<'a>>) -> Self {
        Self { readable_pins, ..self }
    }

    /// Adds a worker, or each of its ranks if requests can be pinned to them.
    pub(super) fn add(&self, worker: &Worker, leg: Leg, able: &mut Vec<Candidate>) {
        let load = worker.load(self.now);
        let ranks = match worker.ranks.are_chosen_by_the_router() {
            true => worker.ranks.all(),
            false => Vec::new(),
        };
        if ranks.is_empty() {
            let held = match worker.ranks.are_chosen_by_the_engine() {
                false => self.of_rank(worker, 0, worker.overlap_is_believed(None)),
                true => self.of_whichever_rank(worker),
            };
            let work = self.work(worker, load.as_deref());
            let place = RankView { worker, rank: None, work, held };
            able.push(self.candidate(place, leg, load.as_deref()));
            return;
        }
        let takes_part = worker.takes_part_in_kv_routing();
        let count = ranks.len() as u64;
        for (number, rank) in (0..).zip(&ranks) {
            let current = takes_part && worker.ranks.are_known() && rank.is_current();
            let held = self.of_rank(worker, number, current);
            let work = self.work_of_rank(worker, load.as_deref(), number, rank, count);
            let place = RankView { worker, rank: Some(number), work, held };
            able.push(self.candidate(place, leg, load.as_deref()));
        }
    }

    fn candidate(&self, place: RankView<'_>, leg: Leg, load: Option<&EngineLoad>) -> Candidate {
        let RankView { worker, rank, work, held } = place;
        let HeldBlocks { overlap, current, spine_blocks, .. } = held;
        // Where a worker with several cache groups can resume, only its events say.
        let (sent, computed) = match spine_blocks {
            None => (held.sent, held.computed),
            Some(_) => (0, 0),
        };
        let about_to_hold = |spine: u32| spine.max(held.sent).max(held.computed);
        let whose = match worker.ranks.are_chosen_by_the_engine() {
            true => RankScope::Any(worker.ranks.count().into()),
            false => RankScope::Rank(rank),
        };
        let mut costs = match self.uses_costs {
            true => worker.load.costs.seen(self.now, whose, work.others_tokens),
            false => WorkerCosts::default(),
        };
        if leg == Leg::Decode {
            let scale = self.links.of(self.from.distance(worker.transfer.location));
            costs.coefficients = costs.coefficients.with_hand_off_scale(scale);
        }
        let read = self
            .readable_pins
            .as_ref()
            .and_then(|readable_pins| readable_pins.for_reader(self.now, worker));
        let candidate = Candidate {
            worker: worker.index,
            rank,
            // One that rests is preferred by none, but may serve what no other can.
            up: worker.is_available(leg, self.now) && !worker.health.rest.lasts(self.now),
            busy: self.saturation.is_saturated(
                work.requests,
                work.prefill_tokens,
                load.and_then(|load| load.kv_used_ratio),
            ),
            share: worker.share(self.now),
            is_outgoing: self.incoming.is_some_and(|incoming| !worker.is_of_group_of(incoming)),
            requests: work.requests,
            prefill_tokens: work.prefill_tokens,
            active_tokens: work.active_tokens,
            overlap_blocks: overlap.blocks,
            spine_blocks: spine_blocks.map_or(0, about_to_hold),
            overlap_by_tier: overlap.by_tier,
            overlap_otherwise: held.otherwise,
            overlap_discount: worker.kv.drift.discount(),
            speculative_blocks: 0,
            // Without events the router does not learn when the prompt has been computed.
            underway_blocks: if current { sent.saturating_sub(overlap.blocks) } else { 0 },
            waiting: costs.waiting,
            wait_ns: costs.wait_ns,
            kv_room: kv_room(worker, load),
            busy_share: costs.busy_share,
            can_fetch: self
                .fetches
                .is_some_and(|bounds| can_take(worker, bounds, self.block_size, self.now)),
            fetch_min_tokens: self.fetches.map_or(0, |bounds| bounds.min_tokens),
            one_shot_within_ns: self.one_shot_within_ns(worker),
            link_wait_ns: worker.transfer.fetches.incoming_ns(),
            readable_blocks: read.map_or(0, |found| found.blocks as u32),
            readable_pin: read.map_or(0, |found| found.pin()),
            cache_fill: cache_fill(worker, load),
            kv_format: worker.engine.facts.kv_format(),
            coefficients: costs.coefficients,
        };
        let believed = candidate.believed_blocks();
        Candidate { speculative_blocks: believed.max(sent).max(computed), ..candidate }
    }

    fn one_shot_within_ns(&self, worker: &Worker) -> u64 {
        let within_ns = self.fetches.map_or(0, |bounds| bounds.one_shot_within_ns);
        let can = within_ns > 0 && self.takes_prefix && takes_prefixes(worker, self.now);
        if can { within_ns } else { 0 }
    }

    fn of_rank(&self, worker: &Worker, rank: u16, current: bool) -> HeldBlocks {
        let key = rank_key(worker.index, rank);
        let drops = worker.kv.last_block.is_dropped();
        // Only a current index counts as confirmed.
        let found = if current { self.overlaps_by_rule(key) } else { Default::default() };
        let (overlap, otherwise) = (found[usize::from(drops)], found[usize::from(!drops)].blocks);
        let sent = self.found.speculative.get(key);
        let computed = self.found.approximate.get(key);
        let spine_blocks = self.spine_blocks(key, current);
        HeldBlocks { overlap, current, sent, computed, otherwise, spine_blocks }
    }

    fn spine_blocks(&self, key: WorkerKey, current: bool) -> Option<u32> {
        let is_hybrid = current && !self.takes_states && self.overlaps.has_resume_points(key);
        is_hybrid.then(|| self.overlaps.spine_blocks(key))
    }

    /// What a worker or rank can use if its engine keeps the last block of a hit, and if it drops it.
    fn overlaps_by_rule(&self, key: WorkerKey) -> [Overlap; 2] {
        if self.takes_states {
            return [self.overlaps.spine(key); 2];
        }
        let found = self.overlaps.with_and_without_last_block(key);
        // What a store has of other cache groups than full attention is not known.
        if self.overlaps.has_resume_points(key) {
            return found;
        }
        found.map(|overlap| overlap.with_store(self.store))
    }

    /// For a worker that chooses the rank itself: the blocks that all ranks hold. No block is
    /// speculative, because the router does not know to which rank prompts went.
    fn of_whichever_rank(&self, worker: &Worker) -> HeldBlocks {
        let current = worker.overlap_is_believed(None);
        let drops = worker.kv.last_block.is_dropped();
        let of_rank =
            |rank| self.overlaps_by_rule(rank_key(worker.index, rank))[usize::from(drops)];
        let ranks = (0..worker.ranks.count()).filter(|_| current);
        let overlap = ranks.map(of_rank).min_by_key(|overlap| overlap.blocks).unwrap_or_default();
        let keys = (0..worker.ranks.count()).map(|rank| rank_key(worker.index, rank));
        let spine_blocks = keys.filter_map(|key| self.spine_blocks(key, current)).min();
        let otherwise = overlap.blocks;
        HeldBlocks { overlap, current, sent: 0, computed: 0, otherwise, spine_blocks }
    }

    /// The load of a worker; with several ranks, the mean load of one rank, rounded up.
    fn work(&self, worker: &Worker, load: Option<&EngineLoad>) -> RankLoad {
        let reported = load.map_or(0, |load| load.running.unwrap_or(0) + load.waiting.unwrap_or(0));
        let others = worker.shim_report.others(self.now, self.busiest);
        let work = booked_and(&worker.load.booked, others, reported);
        match u64::from(worker.ranks.count()) {
            1 => work,
            ranks => RankLoad {
                requests: u64::from(work.requests).div_ceil(ranks) as u32,
                prefill_tokens: work.prefill_tokens.div_ceil(ranks),
                others_tokens: work.others_tokens.div_ceil(ranks),
                active_tokens: work.active_tokens.div_ceil(ranks),
            },
        }
    }

    /// The load of a rank. The router's own part is known for each rank, the engine may report its
    /// part for each rank, and the part of other routers is divided evenly.
    fn work_of_rank(
        &self,
        worker: &Worker,
        load: Option<&EngineLoad>,
        number: u16,
        rank: &Rank,
        ranks: u64,
    ) -> RankLoad {
        let others = worker.shim_report.others(self.now, self.busiest);
        let others = OtherLoad {
            requests: u64::from(others.requests).div_ceil(ranks) as u32,
            prefill_tokens: others.prefill_tokens.div_ceil(ranks),
            active_tokens: others.active_tokens.div_ceil(ranks),
        };
        let reported = load.and_then(|load| load.requests_by_rank.get(usize::from(number)));
        booked_and(&rank.booked, others, reported.copied().unwrap_or(0))
    }
}

/// The room in the KV cache of a worker, or of each of its ranks, as the engine last reported it. What
/// the router has booked says less, because requests share blocks.
fn kv_room(worker: &Worker, load: Option<&EngineLoad>) -> KvRoom {
    let known = load.and_then(|load| Some((load.total_blocks?, load.kv_used_ratio?)));
    let block_size = worker.engine.facts.block_size();
    let Some(((blocks, used_ratio), block_size)) = known.zip(block_size) else {
        return KvRoom::default();
    };
    let ranks = f64::from(worker.ranks.count().max(1));
    let total_tokens = f64::from(blocks) * f64::from(block_size) / ranks;
    let used_tokens = total_tokens * used_ratio;
    KvRoom {
        free_tokens: (total_tokens - used_tokens) as u64,
        used_tokens: used_tokens as u64,
        kept_seconds: worker.load.booked.kept().as_secs_f64(),
    }
}

/// The share of a worker's KV cache that the index has blocks of. Without the engine's capacity, workers
/// are compared by their numbers of blocks, as shares of a cache that none of them fills.
fn cache_fill(worker: &Worker, load: Option<&EngineLoad>) -> f64 {
    let blocks = load.and_then(|load| load.total_blocks).unwrap_or(u32::MAX);
    (worker.kv.held_blocks.load(Relaxed) as f64 / f64::from(blocks.max(1))).min(1.0)
}

fn booked_and(booked: &BookedSums, others: OtherLoad, reported: u64) -> RankLoad {
    let requests = booked.requests().saturating_add(others.requests);
    RankLoad {
        requests: requests.max(u32::try_from(reported).unwrap_or(u32::MAX)),
        prefill_tokens: booked.prefill_tokens().saturating_add(others.prefill_tokens),
        others_tokens: others.prefill_tokens,
        active_tokens: booked.active_tokens().saturating_add(others.active_tokens),
    }
}

#[cfg(test)]
mod tests;
