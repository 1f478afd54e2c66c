//! What a model's workers probably hold in addition to the blocks that their KV events confirm.
//!
//! There are two kinds of entries. *Speculative*: a prompt that was just sent to a worker, until
//! the worker's events confirm it; for every worker, for seconds. *Approximate*: what a worker
//! without KV events has computed, for minutes, within its capacity. Entries influence the choice
//! of a worker. They open no gate and do not count in reported overlap.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use splitrail_kv::{BlockHash, RecentConfig, RecentOverlaps, RecentPrompts};

use super::ranks::rank_key;
use super::worker::Worker;
use splitrail_config::model::SpeculativeIndexConfig;
use splitrail_policy::WorkerIndex;

/// The speculative blocks of a model's workers.
#[derive(Debug)]
pub struct SpeculativeIndex {
    speculative: Option<RecentEntries>,
    approximate: Option<RecentEntries>,
}

/// The speculative blocks of one prompt.
#[derive(Debug, Default)]
pub struct SpeculativeOverlaps {
    /// Leading blocks that were just sent to a worker.
    pub speculative: RecentOverlaps,
    /// Leading blocks that a worker without events has computed.
    pub approximate: RecentOverlaps,
}

/// Numbers of speculative blocks of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SpeculativeBlocks {
    /// Blocks of prompts that were just sent to the worker.
    pub speculative: usize,
    /// Blocks that the worker computed recently while no KV events were received.
    pub approximate: usize,
}

impl SpeculativeIndex {
    /// An empty index. A lifetime of 0 disables the respective kind.
    pub fn new(config: SpeculativeIndexConfig) -> Self {
        let entries = |lifetime: Duration| {
            let lifetime_ms = u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX);
            let max_blocks_per_worker = config.blocks_max;
            (lifetime_ms > 0)
                .then(|| RecentEntries::new(RecentConfig { lifetime_ms, max_blocks_per_worker }))
        };
        Self {
            speculative: entries(config.speculative_ttl),
            approximate: entries(config.approximate_ttl),
        }
    }

    /// Records that a prompt is sent to a worker, and to a rank if it is pinned. Nothing is
    /// recorded if the engine chooses the rank.
    pub fn sent(&self, now: Instant, worker: &Worker, rank: Option<u16>, hashes: &[BlockHash]) {
        if let Some(speculative) = &self.speculative {
            speculative.record(now, worker, rank, hashes);
        }
    }

    /// Records that a worker has computed a prompt. Ignored if its events are trusted, since they
    /// are more precise. Not called for failed attempts, of which only the speculative entry
    /// remains for seconds.
    pub fn computed(&self, now: Instant, worker: &Worker, rank: Option<u16>, hashes: &[BlockHash]) {
        if let Some(approximate) = &self.approximate
            && !worker.overlap_is_believed(rank)
        {
            approximate.record(now, worker, rank, hashes);
        }
    }

    /// Looks up the speculative blocks of a prompt.
    pub fn find(&self, now: Instant, hashes: &[BlockHash], found: &mut SpeculativeOverlaps) {
        let sides = [
            (&self.speculative, &mut found.speculative),
            (&self.approximate, &mut found.approximate),
        ];
        for (entries, overlaps) in sides {
            match entries {
                Some(entries) => entries.find(now, hashes, overlaps),
                None => overlaps.clear(),
            }
        }
    }

    /// Removes expired entries, a bounded number per call. Returns whether some are left.
    pub fn expire(&self, now: Instant) -> bool {
        let [first, second] =
            self.kinds().map(|entries| entries.is_some_and(|entries| entries.expire(now)));
        first || second
    }

    /// Removes all entries of a worker that was restarted or dropped its cache.
    pub fn forget(&self, worker: WorkerIndex) {
        for entries in self.kinds().into_iter().flatten() {
            entries.forget(worker);
        }
    }

    /// Removes the approximate entries of a worker whose events are now being received.
    pub fn confirmed(&self, worker: WorkerIndex) {
        if let Some(approximate) = &self.approximate {
            approximate.forget(worker);
        }
    }

    /// The numbers of speculative blocks of a worker.
    pub fn blocks(&self, worker: &Worker) -> SpeculativeBlocks {
        let [speculative, approximate] =
            self.kinds().map(|entries| entries.map_or(0, |entries| entries.blocks(worker)));
        SpeculativeBlocks { speculative, approximate }
    }

    fn kinds(&self) -> [Option<&RecentEntries>; 2] {
        [self.speculative.as_ref(), self.approximate.as_ref()]
    }
}

/// The entries of one kind.
#[derive(Debug)]
struct RecentEntries {
    /// Locked for a walk along a prompt, whose steps depend on shared prefixes rather than on the
    /// number of blocks.
    recent: Mutex<RecentPrompts>,
    /// When the next entry expires; `u64::MAX` if there is none.
    next_expiry_ms: AtomicU64,
    started: Instant,
}

impl RecentEntries {
    fn new(config: RecentConfig) -> Self {
        Self {
            recent: Mutex::new(RecentPrompts::new(config)),
            next_expiry_ms: AtomicU64::new(u64::MAX),
            started: Instant::now(),
        }
    }

    fn record(&self, now: Instant, worker: &Worker, rank: Option<u16>, hashes: &[BlockHash]) {
        if hashes.is_empty() || (rank.is_none() && worker.ranks.are_chosen_by_the_engine()) {
            return;
        }
        // Engines report the total capacity of all ranks.
        let ranks = u32::from(worker.ranks.count());
        let capacity = worker.load(now).and_then(|load| load.total_blocks);
        let capacity = capacity.map(|blocks| (blocks / ranks) as usize);
        let now_ms = self.ms(now);
        let key = rank_key(worker.index, rank.unwrap_or(0));
        self.change(|recent| recent.record(now_ms, key, hashes, capacity));
    }

    fn find(&self, now: Instant, hashes: &[BlockHash], out: &mut RecentOverlaps) {
        match self.next_expiry_ms.load(Relaxed) {
            u64::MAX => out.clear(),
            next if next <= self.ms(now) => self.change(|recent| {
                recent.expire(self.ms(now));
                recent.find(hashes, out);
            }),
            _ => self.lock().find(hashes, out),
        }
    }

    fn expire(&self, now: Instant) -> bool {
        let now_ms = self.ms(now);
        self.next_expiry_ms.load(Relaxed) <= now_ms && self.change(|recent| recent.expire(now_ms))
    }

    fn forget(&self, worker: WorkerIndex) {
        self.change(|recent| recent.forget(worker.0));
    }

    fn blocks(&self, worker: &Worker) -> usize {
        let recent = self.lock();
        let keys = (0..worker.ranks.count()).map(|rank| rank_key(worker.index, rank));
        keys.map(|key| recent.blocks(key)).sum()
    }

    fn change<T>(&self, change: impl FnOnce(&mut RecentPrompts) -> T) -> T {
        let mut recent = self.lock();
        let changed = change(&mut recent);
        self.next_expiry_ms.store(recent.next_expiry_ms().unwrap_or(u64::MAX), Relaxed);
        changed
    }

    /// A poisoned lock is still used: entries need not be correct.
    fn lock(&self) -> MutexGuard<'_, RecentPrompts> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ms(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.started).as_millis()).unwrap_or(u64::MAX)
    }
}
