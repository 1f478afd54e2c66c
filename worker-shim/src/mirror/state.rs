//! The state of a mirror: turns KV events into numbered changes. Has no I/O and no clock; its
//! only randomness is the mirror's id.

use std::collections::BTreeMap;
use std::time::Duration;

use splitrail_kv::{
    AppliedBlocks, BlockHash, FrozenBlocks, Index, IndexConfig, KvEvent, WorkerKey,
};
use tokio::time::Instant;

use super::MirrorConfig;
use super::change_log::{ChangeLog, ChangePosition};
use super::messages::{ChangeMessages, MESSAGE_BLOCKS_MAX};
use super::status::{MirrorStatus, RankStatus};
use super::terms::{Disagreement, HashTerms};

/// Number of blocks after which the lock is released for readers, even within a batch.
const STEP_BLOCKS: usize = 2 * MESSAGE_BLOCKS_MAX;

/// Time for which the measured memory of the index is shown. Measuring takes time proportional to the
/// size of the index, and anyone may ask for the shim's metrics.
const INDEX_BYTES_FRESH: Duration = Duration::from_secs(1);

/// The index, the recent changes, and the state of each rank.
#[derive(Debug)]
pub(crate) struct MirrorState {
    pub(crate) config: MirrorConfig,
    terms: Option<HashTerms>,
    /// The number of agreements on `terms` that still exist.
    agreeing_routers: usize,
    index: Option<Index>,
    pub(crate) log: ChangeLog,
    ranks: BTreeMap<u16, RankState>,
    snapshots: u64,
    /// The memory of the index in bytes, and when it was measured.
    measured: Option<(Instant, usize)>,
}

/// The state of one rank.
#[derive(Debug, Default)]
struct RankState {
    status: RankStatus,
    /// Whether the rank has received its engine's replay at least once.
    synced: bool,
    /// The last batch of a gap. Until it has been applied, the index may be out of date.
    gap_to: Option<u64>,
}

fn key(rank: u16) -> WorkerKey {
    WorkerKey { worker: 0, rank }
}

impl MirrorState {
    pub(crate) fn new(config: MirrorConfig) -> Self {
        let log = ChangeLog::new(config.ring_bytes_max);
        Self {
            config,
            terms: None,
            agreeing_routers: 0,
            index: None,
            log,
            ranks: BTreeMap::new(),
            snapshots: 0,
            measured: None,
        }
    }

    pub(crate) fn position(&self) -> ChangePosition {
        self.log.position()
    }

    /// Adds a router's hash settings. Returns whether this starts a new mirror.
    pub(crate) fn agree(&mut self, terms: HashTerms) -> Result<bool, Disagreement> {
        if self.config.seed.is_some_and(|seed| seed != terms.seed) {
            return Err(Disagreement::Pinned);
        }
        match self.terms.as_ref().map(|known| known.check_equal(&terms)) {
            Some(Ok(())) => {
                self.agreeing_routers += 1;
                return Ok(false);
            }
            Some(Err(disagreement)) if self.agreeing_routers > 0 => return Err(disagreement),
            // No earlier agreement exists any more.
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
        index.enable_holds();
        self.index = Some(index);
        self.terms = Some(terms);
        self.agreeing_routers = 1;
        self.log.start_new_mirror();
        for rank in self.ranks.values_mut() {
            rank.reset_progress();
        }
        Ok(true)
    }

    pub(crate) fn end_agreement(&mut self) {
        self.agreeing_routers -= 1;
    }

    /// Sets the ranks that are followed.
    pub(crate) fn expect(&mut self, ranks: impl Iterator<Item = u16>) {
        let expected: Vec<u16> = ranks.collect();
        let known: Vec<u16> = self.ranks.keys().copied().collect();
        for rank in known {
            self.forget(rank);
        }
        self.ranks.retain(|rank, _| expected.contains(rank));
        for rank in expected {
            let new = RankState {
                status: RankStatus { rank, ..RankStatus::default() },
                ..RankState::default()
            };
            self.ranks.entry(rank).or_insert(new);
        }
    }

    /// Discards what is known of a rank. Returns whether this started a new mirror, which it does
    /// if the rank had any blocks.
    pub(crate) fn forget(&mut self, rank: u16) -> bool {
        if let Some(rank) = self.ranks.get_mut(&rank) {
            rank.reset_progress();
        }
        self.clear(rank)
    }

    /// Discards the blocks of a rank whose stream restarts while its connection stays.
    pub(crate) fn reset(&mut self, rank: u16, reason: &'static str) {
        self.count_reset(rank, reason);
        if let Some(rank) = self.ranks.get_mut(&rank) {
            (rank.gap_to, rank.status.truncated) = (None, false);
        }
        self.clear(rank);
    }

    pub(crate) fn count_reset(&mut self, rank: u16, reason: &'static str) {
        if let Some(RankState { status, .. }) = self.ranks.get_mut(&rank) {
            status.resets += 1;
            status.last_reset = Some(reason);
        }
    }

    fn clear(&mut self, rank: u16) -> bool {
        let dropped = self.index.as_mut().map_or(0, |index| index.clear_worker(key(rank)));
        if dropped > 0 {
            self.log.start_new_mirror();
        }
        dropped > 0
    }

    /// Applies as many events as fit into one step. Returns their effect and the remaining events.
    pub(crate) fn apply<'a>(
        &mut self,
        rank: u16,
        engine_time_s: f64,
        events: &'a [KvEvent],
    ) -> (AppliedBlocks, &'a [KvEvent]) {
        let mut sum = AppliedBlocks::default();
        let Some(index) = &mut self.index else {
            return (sum, &[]);
        };
        let mut messages = ChangeMessages::default();
        let mut rest = events;
        while let [event, behind @ ..] = rest
            && messages.blocks() < STEP_BLOCKS
        {
            // Routers are told of the spine alone.
            let is_beside =
                matches!(event, KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. });
            if !is_beside {
                sum += index.apply_observed(key(rank), event, &mut |change| messages.add(change));
            }
            rest = behind;
        }
        for changes in messages.into_messages() {
            self.log.push(u32::from(rank), engine_time_s, changes);
        }
        if let Some(RankState { status, .. }) = self.ranks.get_mut(&rank) {
            status.truncated |= sum.over_limit > 0;
            status.rejected += (sum.orphaned + sum.malformed + sum.over_limit) as u64;
        }
        (sum, rest)
    }

    /// Records that a batch has been applied completely.
    pub(crate) fn finish_batch(&mut self, rank: u16, sequence: u64) {
        if let Some(rank) = self.ranks.get_mut(&rank)
            && rank.gap_to.is_some_and(|gap_to| sequence >= gap_to)
        {
            rank.gap_to = None;
        }
    }

    /// Records that batches before this one are missing. They may still arrive.
    pub(crate) fn record_gap(&mut self, rank: u16, sequence: u64) {
        if let Some(rank) = self.ranks.get_mut(&rank) {
            rank.gap_to = Some(sequence);
            rank.status.gaps += 1;
        }
    }

    pub(crate) fn count_rejected(&mut self, rank: u16, count: usize) {
        if let Some(rank) = self.ranks.get_mut(&rank) {
            rank.status.rejected += count as u64;
        }
    }

    /// Sets whether the engine's events reach the mirror.
    pub(crate) fn set_current(&mut self, rank: u16, current: bool) {
        if let Some(rank) = self.ranks.get_mut(&rank) {
            rank.status.current = current;
            rank.synced |= current;
        }
    }

    /// Whether every rank has received its engine's replay at least once.
    pub(crate) fn has_caught_up(&self) -> bool {
        !self.ranks.is_empty() && self.ranks.values().all(|rank| rank.synced)
    }

    /// Whether the engine's events reach the mirror without a gap.
    pub(crate) fn is_current(&self, rank: u16) -> bool {
        self.ranks.get(&rank).is_some_and(|rank| rank.status.current && rank.gap_to.is_none())
    }

    pub(crate) fn holds(&self, rank: u16, blocks: u32, last: BlockHash) -> bool {
        let index = self.index.as_ref().filter(|_| self.is_current(rank));
        blocks == 0 || index.is_some_and(|index| index.holds(key(rank), blocks, last))
    }

    /// The number of further blocks of a rank that fit.
    pub(crate) fn room(&self, rank: u16) -> usize {
        self.index.as_ref().map_or(0, |index| index.room(key(rank)))
    }

    /// The maximum number of blocks of each rank.
    pub(crate) fn blocks_max(&self) -> usize {
        self.index.as_ref().map_or(0, |index| index.limit())
    }

    /// The number of blocks of a rank in all tiers.
    pub(crate) fn blocks(&self, rank: u16) -> usize {
        let counts = self.index.as_ref().map(|index| index.block_counts(key(rank)));
        counts.map_or(0, |counts| counts.iter().sum())
    }

    /// Copies the blocks of every rank.
    pub(crate) fn freeze(&mut self) -> Vec<(u16, FrozenBlocks)> {
        self.snapshots += 1;
        let Some(index) = &self.index else {
            return Vec::new();
        };
        index.workers().map(|worker| (worker.rank, index.freeze(worker))).collect()
    }

    /// The memory of the index in bytes, as it was at most [`INDEX_BYTES_FRESH`] ago.
    fn index_bytes(&mut self, now: Instant) -> usize {
        let is_fresh = |measured: Instant| now.duration_since(measured) < INDEX_BYTES_FRESH;
        match self.measured {
            Some((measured, bytes)) if is_fresh(measured) => bytes,
            _ => {
                let bytes = self.index.as_ref().map_or(0, Index::bytes);
                self.measured = Some((now, bytes));
                bytes
            }
        }
    }

    pub(crate) fn status(&mut self, now: Instant) -> MirrorStatus {
        let index_bytes = self.index_bytes(now);
        let (ring_changes, ring_bytes) = self.log.kept();
        let ranks = self.ranks.values().map(|rank| {
            let index = self.index.as_ref();
            let blocks = index.map(|index| index.block_counts(key(rank.status.rank)));
            let current = rank.status.current && rank.gap_to.is_none();
            RankStatus { blocks: blocks.unwrap_or_default(), current, ..rank.status.clone() }
        });
        MirrorStatus {
            mirror_id: self.log.mirror_id().to_owned(),
            sequence: self.log.position().sequence,
            ring_changes,
            ring_bytes,
            index_bytes,
            snapshots: self.snapshots,
            ranks: ranks.collect(),
        }
    }
}

impl RankState {
    /// Resets the flags of a rank of which nothing is known.
    fn reset_progress(&mut self) {
        (self.status.current, self.status.truncated, self.gap_to) = (false, false, None);
    }
}
