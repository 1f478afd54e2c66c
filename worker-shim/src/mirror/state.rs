//! What a mirror knows. Pure but for the ids that it draws: events in, changes out.

use std::collections::BTreeMap;

use splitrail_kv::{Applied, BlockHash, Frozen, Index, IndexConfig, KvEvent, WorkerKey};

use super::Config;
use super::log::{Head, Log};
use super::status::{RankStatus, Status};
use super::terms::{Disagreement, Terms};
use super::wire::{MESSAGE_BLOCKS_MAX, Messages};

/// Blocks after which readers get their turn, in the middle of a large batch too.
const STEP_BLOCKS: usize = 2 * MESSAGE_BLOCKS_MAX;

/// The index, the last changes, and how each rank stands.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) config: Config,
    terms: Option<Terms>,
    /// Those who have agreed on the terms and are still there.
    parties: usize,
    index: Option<Index>,
    pub(crate) log: Log,
    ranks: BTreeMap<u16, Rank>,
    snapshots: u64,
}

/// How one rank stands.
#[derive(Debug, Default)]
struct Rank {
    status: RankStatus,
    /// It was in step at least once.
    synced: bool,
    /// Batches up to this one are on their way: what is known may be out of date.
    gap_to: Option<u64>,
}

fn key(rank: u16) -> WorkerKey {
    WorkerKey { worker: 0, rank }
}

impl State {
    pub(crate) fn new(config: Config) -> Self {
        let log = Log::new(config.ring_bytes_max);
        let ranks = BTreeMap::new();
        Self { config, terms: None, parties: 0, index: None, log, ranks, snapshots: 0 }
    }

    pub(crate) fn head(&self) -> Head {
        self.log.head()
    }

    /// Adds one who agrees; says whether the mirror begins with it.
    pub(crate) fn join(&mut self, terms: Terms) -> Result<bool, Disagreement> {
        if self.config.seed.is_some_and(|seed| seed != terms.seed) {
            return Err(Disagreement::Pinned);
        }
        match self.terms.as_ref().map(|known| known.agree(&terms)) {
            Some(Ok(())) => {
                self.parties += 1;
                return Ok(false);
            }
            Some(Err(disagreement)) if self.parties > 0 => return Err(disagreement),
            // Nobody is left who would mind.
            Some(Err(_)) | None => {}
        }
        let blocks_max = match usize::try_from(terms.blocks_max) {
            Ok(theirs) if theirs > 0 => theirs.min(self.config.blocks_max),
            _ => self.config.blocks_max,
        };
        let mut index = Index::new(IndexConfig {
            model: terms.model.clone(),
            block_size: terms.block_size,
            seed: terms.seed,
            max_blocks_per_worker: blocks_max,
        });
        index.trace_blocks();
        self.index = Some(index);
        self.terms = Some(terms);
        self.parties = 1;
        self.log.begin_anew();
        for rank in self.ranks.values_mut() {
            rank.begin();
        }
        Ok(true)
    }

    pub(crate) fn leave(&mut self) {
        self.parties -= 1;
    }

    /// These ranks will be followed, and no other.
    pub(crate) fn expect(&mut self, ranks: impl Iterator<Item = u16>) {
        let expected: Vec<u16> = ranks.collect();
        let known: Vec<u16> = self.ranks.keys().copied().collect();
        for rank in known {
            self.forget(rank);
        }
        self.ranks.retain(|rank, _| expected.contains(rank));
        for rank in expected {
            let new =
                Rank { status: RankStatus { rank, ..RankStatus::default() }, ..Rank::default() };
            self.ranks.entry(rank).or_insert(new);
        }
    }

    /// What is known of a rank is not to be believed any more. Where that is anything, the
    /// mirror begins anew; says whether it did.
    pub(crate) fn forget(&mut self, rank: u16) -> bool {
        if let Some(rank) = self.ranks.get_mut(&rank) {
            rank.begin();
        }
        self.void(rank)
    }

    /// The engine's stream begins anew for a reason, while the connection stays.
    pub(crate) fn reset(&mut self, rank: u16, reason: &'static str) {
        self.count_reset(rank, reason);
        if let Some(rank) = self.ranks.get_mut(&rank) {
            (rank.gap_to, rank.status.truncated) = (None, false);
        }
        self.void(rank);
    }

    pub(crate) fn count_reset(&mut self, rank: u16, reason: &'static str) {
        if let Some(Rank { status, .. }) = self.ranks.get_mut(&rank) {
            status.resets += 1;
            status.last_reset = Some(reason);
        }
    }

    fn void(&mut self, rank: u16) -> bool {
        let dropped = self.index.as_mut().map_or(0, |index| index.clear_worker(key(rank)));
        if dropped > 0 {
            self.log.begin_anew();
        }
        dropped > 0
    }

    /// Applies as many events as make one step; returns what they changed, and those that
    /// are left.
    pub(crate) fn apply<'a>(
        &mut self,
        rank: u16,
        engine_time_s: f64,
        events: &'a [KvEvent],
    ) -> (Applied, &'a [KvEvent]) {
        let mut sum = Applied::default();
        let Some(index) = &mut self.index else {
            return (sum, &[]);
        };
        let mut messages = Messages::default();
        let mut rest = events;
        while let [event, behind @ ..] = rest
            && messages.blocks() < STEP_BLOCKS
        {
            sum += index.apply_observed(key(rank), event, &mut |change| messages.add(change));
            rest = behind;
        }
        for changes in messages.into_messages() {
            self.log.push(u32::from(rank), engine_time_s, changes);
        }
        if let Some(Rank { status, .. }) = self.ranks.get_mut(&rank) {
            status.truncated |= sum.over_limit > 0;
            status.rejected += (sum.orphaned + sum.malformed + sum.over_limit) as u64;
        }
        (sum, rest)
    }

    /// A batch is applied in whole.
    pub(crate) fn applied(&mut self, rank: u16, sequence: u64) {
        if let Some(rank) = self.ranks.get_mut(&rank)
            && rank.gap_to.is_some_and(|gap_to| sequence >= gap_to)
        {
            rank.gap_to = None;
        }
    }

    /// Batches before this one are missing, and may come yet.
    pub(crate) fn gap(&mut self, rank: u16, sequence: u64) {
        if let Some(rank) = self.ranks.get_mut(&rank) {
            rank.gap_to = Some(sequence);
            rank.status.gaps += 1;
        }
    }

    pub(crate) fn reject(&mut self, rank: u16, count: usize) {
        if let Some(rank) = self.ranks.get_mut(&rank) {
            rank.status.rejected += count as u64;
        }
    }

    /// The engine's events reach the mirror, or do not.
    pub(crate) fn set_current(&mut self, rank: u16, current: bool) {
        if let Some(rank) = self.ranks.get_mut(&rank) {
            rank.status.current = current;
            rank.synced |= current;
        }
    }

    /// Every rank was in step at least once.
    pub(crate) fn is_caught_up(&self) -> bool {
        !self.ranks.is_empty() && self.ranks.values().all(|rank| rank.synced)
    }

    /// The engine's events reach the mirror, and none is missing.
    pub(crate) fn is_current(&self, rank: u16) -> bool {
        self.ranks.get(&rank).is_some_and(|rank| rank.status.current && rank.gap_to.is_none())
    }

    pub(crate) fn holds(&self, rank: u16, blocks: u32, last: BlockHash) -> bool {
        let index = self.index.as_ref().filter(|_| self.is_current(rank));
        blocks == 0 || index.is_some_and(|index| index.holds(key(rank), blocks, last))
    }

    /// How many more blocks of a rank can be mirrored, and how many at all.
    pub(crate) fn room(&self, rank: u16) -> (usize, usize) {
        self.index.as_ref().map_or((0, 0), |index| index.room(key(rank)))
    }

    /// Blocks of a rank, per tier.
    pub(crate) fn blocks(&self, rank: u16) -> usize {
        let counts = self.index.as_ref().map(|index| index.block_counts(key(rank)));
        counts.map_or(0, |counts| counts.iter().sum())
    }

    /// A copy of every rank's blocks.
    pub(crate) fn freeze(&mut self) -> Vec<(u16, Frozen)> {
        self.snapshots += 1;
        let Some(index) = &self.index else {
            return Vec::new();
        };
        index.workers().map(|worker| (worker.rank, index.freeze(worker))).collect()
    }

    pub(crate) fn status(&self) -> Status {
        let (ring_changes, ring_bytes) = self.log.kept();
        let ranks = self.ranks.values().map(|rank| {
            let index = self.index.as_ref();
            let blocks = index.map(|index| index.block_counts(key(rank.status.rank)));
            let current = rank.status.current && rank.gap_to.is_none();
            RankStatus { blocks: blocks.unwrap_or_default(), current, ..rank.status.clone() }
        });
        Status {
            mirror_id: self.log.mirror_id().to_owned(),
            sequence: self.log.head().sequence,
            ring_changes,
            ring_bytes,
            index_bytes: self.index.as_ref().map_or(0, Index::bytes),
            snapshots: self.snapshots,
            ranks: ranks.collect(),
        }
    }
}

impl Rank {
    /// Nothing is known of it.
    fn begin(&mut self) {
        (self.status.current, self.status.truncated, self.gap_to) = (false, false, None);
    }
}
