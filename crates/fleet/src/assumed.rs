//! What a model's workers probably hold beyond the blocks that their KV events confirm.
//!
//! There are two kinds of estimates. *Speculative*: a prompt that was just sent to a worker, until the worker's events
//! confirm it; for every worker, for seconds. *Approximate*: what a worker without KV events
//! has computed, for minutes, within its capacity. Estimates influence the choice of a worker. They open no gate, and
//! are part of no figure that is reported or counted as overlap.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use splitrail_kv::{BlockHash, Recent, RecentConfig, RecentOverlaps};

use super::ranks::rank_key;
use super::worker::Worker;
use splitrail_config::model::SpeculativeIndexConfig;
use splitrail_policy::WorkerIndex;

/// The guesses about a model's workers.
#[derive(Debug)]
pub struct Assumed {
    speculative: Option<Guesses>,
    approximate: Option<Guesses>,
}

/// What the two kinds of guesses say of one prompt.
#[derive(Debug, Default)]
pub struct Found {
    /// Leading blocks that were just sent to a worker.
    pub speculative: RecentOverlaps,
    /// Leading blocks that a worker without events has computed.
    pub approximate: RecentOverlaps,
}

/// Blocks assumed of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AssumedBlocks {
    /// Sent to it moments ago.
    pub speculative: usize,
    /// Computed by it lately, while no events told what it holds.
    pub approximate: usize,
}

impl Assumed {
    /// Nothing yet. A lifetime of 0 switches its kind of guesses off.
    pub fn new(config: SpeculativeIndexConfig) -> Self {
        let guesses = |lifetime: Duration| {
            let lifetime_ms = u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX);
            let max_blocks_per_worker = config.blocks_max;
            (lifetime_ms > 0)
                .then(|| Guesses::new(RecentConfig { lifetime_ms, max_blocks_per_worker }))
        };
        Self {
            speculative: guesses(config.speculative_ttl),
            approximate: guesses(config.approximate_ttl),
        }
    }

    /// A prompt is being sent to a worker, and there to a rank, that will hold it then. Of one
    /// that chooses the rank itself nothing can be assumed.
    pub fn sent(&self, now: Instant, worker: &Worker, rank: Option<u16>, hashes: &[BlockHash]) {
        if let Some(speculative) = &self.speculative {
            speculative.record(now, worker, rank, hashes);
        }
    }

    /// A worker has a prompt's KV. Where its events come in, they say so better. An attempt
    /// that failed never comes here: what outlives it are seconds of speculation.
    pub fn computed(&self, now: Instant, worker: &Worker, rank: Option<u16>, hashes: &[BlockHash]) {
        if let Some(approximate) = &self.approximate
            && !worker.overlap_is_believed(rank)
        {
            approximate.record(now, worker, rank, hashes);
        }
    }

    /// What is assumed of a prompt.
    pub fn find(&self, now: Instant, hashes: &[BlockHash], found: &mut Found) {
        let sides = [
            (&self.speculative, &mut found.speculative),
            (&self.approximate, &mut found.approximate),
        ];
        for (guesses, overlaps) in sides {
            match guesses {
                Some(guesses) => guesses.find(now, hashes, overlaps),
                None => overlaps.clear(),
            }
        }
    }

    /// Takes out what has had its time, a bounded amount per call; says whether some is left.
    pub fn expire(&self, now: Instant) -> bool {
        let [first, second] = self.kinds().map(|guesses| guesses.is_some_and(|g| g.expire(now)));
        first || second
    }

    /// A worker began anew, or dropped its cache: nothing is assumed of it.
    pub fn forget(&self, worker: WorkerIndex) {
        for guesses in self.kinds().into_iter().flatten() {
            guesses.forget(worker);
        }
    }

    /// A worker's events come in: what it holds is known.
    pub fn confirmed(&self, worker: WorkerIndex) {
        if let Some(approximate) = &self.approximate {
            approximate.forget(worker);
        }
    }

    /// Blocks that are assumed of a worker.
    pub fn blocks(&self, worker: &Worker) -> AssumedBlocks {
        let [speculative, approximate] =
            self.kinds().map(|guesses| guesses.map_or(0, |guesses| guesses.blocks(worker)));
        AssumedBlocks { speculative, approximate }
    }

    fn kinds(&self) -> [Option<&Guesses>; 2] {
        [self.speculative.as_ref(), self.approximate.as_ref()]
    }
}

/// One kind of guesses.
#[derive(Debug)]
struct Guesses {
    /// Held for a walk along a prompt, which takes steps by what it shares, not by its blocks.
    recent: Mutex<Recent>,
    /// When the next one has had its time; `u64::MAX` if there is none.
    next_expiry_ms: AtomicU64,
    started: Instant,
}

impl Guesses {
    fn new(config: RecentConfig) -> Self {
        Self {
            recent: Mutex::new(Recent::new(config)),
            next_expiry_ms: AtomicU64::new(u64::MAX),
            started: Instant::now(),
        }
    }

    fn record(&self, now: Instant, worker: &Worker, rank: Option<u16>, hashes: &[BlockHash]) {
        if hashes.is_empty() || (rank.is_none() && worker.ranks.are_chosen_by_the_engine()) {
            return;
        }
        // Engines report the sum of all ranks.
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

    fn change<T>(&self, change: impl FnOnce(&mut Recent) -> T) -> T {
        let mut recent = self.lock();
        let changed = change(&mut recent);
        self.next_expiry_ms.store(recent.next_expiry_ms().unwrap_or(u64::MAX), Relaxed);
        changed
    }

    /// A poisoned lock still guards guesses: none of them has to be right.
    fn lock(&self) -> MutexGuard<'_, Recent> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ms(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.started).as_millis()).unwrap_or(u64::MAX)
    }
}
