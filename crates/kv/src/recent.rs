//! Speculative blocks: those of recently routed prompts, until events say more.
//!
//! There are two uses. *Speculative*: a prompt that was just sent to a worker will be in its cache
//! before its events say so; prompts with the same prefix that arrive meanwhile should follow it.
//! Such entries live for seconds. *Approximate*: for an engine without events no better information
//! exists; what was sent to it counts as held for a time, as long as the engine has room. Both
//! are estimates: they may influence the choice of a worker, and never the cached tokens that are
//! reported to a client.
//!
//! A block belongs to the last prompt that contained it. Of prompts with a common prefix, the later
//! one has the common blocks, so only the end of the earlier one is left; and blocks are removed,
//! for their age or for room, from the end. So no block is ever listed without those before it, and
//! each is listed once: memory is proportional to the blocks listed, however often they are
//! renewed. A common prefix is found and renewed as a whole (`runs`): a prompt costs one step for
//! each run that it consists of, and a copy of its new blocks, but no step for each block.

use std::collections::{BTreeMap, BTreeSet};

use crate::hash::BlockHash;
use crate::index::WorkerKey;
use crate::runs::{RunId, Runs};

mod found;
mod runs;

pub use found::RecentOverlaps;
use runs::Holders;

/// Bounds on the age and the number of speculative blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecentConfig {
    /// Time for which the blocks of a routed prompt are listed, in milliseconds.
    pub lifetime_ms: u64,
    /// Maximum number of speculative blocks of one worker, unless its capacity is known to be
    /// less.
    pub max_blocks_per_worker: usize,
}

/// Maximum number of expired blocks that one call removes, so that no single request pays for all
/// others.
pub const EXPIRED_BLOCKS_MAX: usize = 4096;

/// The recently routed prompts.
#[derive(Debug)]
pub struct RecentPrompts {
    config: RecentConfig,
    runs: Runs<Holders>,
    /// Prompts that still have a block, by number: the oldest, which expires first, is first.
    routed: BTreeMap<u64, RoutedPrompt>,
    workers: BTreeMap<WorkerKey, WorkerPrompts>,
    /// Number of prompts so far.
    count: u64,
    /// The latest time of any call; it never decreases.
    now_ms: u64,
}

/// The prompts that were recently routed to one worker.
#[derive(Debug, Default)]
struct WorkerPrompts {
    /// Its prompts in [`RecentPrompts::routed`].
    numbers: BTreeSet<u64>,
    /// Number of speculative blocks.
    blocks: usize,
}

#[derive(Clone, Copy, Debug)]
struct RoutedPrompt {
    worker: WorkerKey,
    expires_ms: u64,
    /// The run with its last blocks.
    tail: RunId,
}

impl RecentPrompts {
    /// Without any prompt.
    pub fn new(config: RecentConfig) -> Self {
        Self {
            config,
            runs: Runs::default(),
            routed: BTreeMap::new(),
            workers: BTreeMap::new(),
            count: 0,
            now_ms: 0,
        }
    }

    /// Notes that a prompt was sent to a worker; `capacity_blocks` is the worker's capacity, if it
    /// has been reported. Blocks beyond the bound replace those sent longest ago.
    pub fn record(
        &mut self,
        now_ms: u64,
        worker: WorkerKey,
        hashes: &[BlockHash],
        capacity_blocks: Option<usize>,
    ) {
        self.expire(now_ms);
        let bound = capacity_blocks.unwrap_or(usize::MAX).min(self.config.max_blocks_per_worker);
        let hashes = &hashes[..hashes.len().min(bound)];
        if hashes.is_empty() {
            return;
        }
        self.count += 1;
        let number = self.count;
        let (known, last) = self.renew(worker, number, hashes);
        let prompts = self.workers.entry(worker).or_default();
        let rest = &hashes[known..];
        let tail = match (last, rest) {
            (Some(last), []) => last,
            (last, rest) => self.runs.append(last, rest, vec![(worker, number)]),
        };
        prompts.blocks += rest.len();
        prompts.numbers.insert(number);
        let excess = prompts.blocks.saturating_sub(bound);
        let expires_ms = self.now_ms.saturating_add(self.config.lifetime_ms);
        self.routed.insert(number, RoutedPrompt { worker, expires_ms, tail });
        self.make_room(worker, excess);
    }

    /// Assigns the leading blocks of a prompt that are already in some run to the prompt's new
    /// number; returns their number and the run that ends with the last of them.
    fn renew(
        &mut self,
        worker: WorkerKey,
        number: u64,
        hashes: &[BlockHash],
    ) -> (usize, Option<RunId>) {
        let prompts = self.workers.entry(worker).or_default();
        let (mut known, mut last) = (0, None);
        while let Some((mut run, alike)) = self.runs.next(last, &hashes[known..]) {
            if alike < self.runs.get(run).blocks.len() {
                run = self.runs.cut(run, alike);
            }
            match self.runs.give(run, worker, number) {
                None => prompts.blocks += alike,
                // Later prompts own everything before this: nothing is left of that prompt.
                Some(before) if self.routed.get(&before).is_some_and(|it| it.tail == run) => {
                    self.routed.remove(&before);
                    prompts.numbers.remove(&before);
                }
                Some(_) => {}
            }
            known += alike;
            last = Some(run);
        }
        (known, last)
    }

    /// How many leading blocks of a prompt are listed for each worker, including blocks that have
    /// expired and are not removed yet.
    pub fn find(&self, hashes: &[BlockHash], out: &mut RecentOverlaps) {
        out.clear();
        let (mut known, mut last) = (0, None);
        while let Some((at, alike)) = self.runs.next(last, &hashes[known..]) {
            known += alike;
            let run = self.runs.get(at);
            match last {
                None => out.begin(&run.note, known as u32),
                Some(_) => out.deepen(&run.note, known as u32),
            }
            if alike < run.blocks.len() {
                return;
            }
            last = Some(at);
        }
    }

    /// Removes this many blocks of a worker, from the ends of its oldest prompts.
    fn make_room(&mut self, worker: WorkerKey, mut excess: usize) {
        while excess > 0 {
            let oldest = self.workers.get(&worker).and_then(|prompts| prompts.numbers.first());
            let Some(oldest) = oldest.copied() else { return };
            excess -= self.trim(oldest, excess);
        }
    }

    /// Removes expired blocks, at most [`EXPIRED_BLOCKS_MAX`] per call; returns whether some are
    /// left.
    pub fn expire(&mut self, now_ms: u64) -> bool {
        self.now_ms = self.now_ms.max(now_ms);
        let mut budget = EXPIRED_BLOCKS_MAX;
        while let Some((&oldest, routed)) = self.routed.first_key_value() {
            if routed.expires_ms > self.now_ms {
                return false;
            }
            if budget == 0 {
                return true;
            }
            budget -= self.trim(oldest, budget);
        }
        false
    }

    /// When the next prompt expires, in milliseconds; `None` if there is none.
    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.routed.first_key_value().map(|(_, routed)| routed.expires_ms)
    }

    /// Removes up to this many blocks from a prompt's end, as an engine evicts; returns their
    /// number.
    fn trim(&mut self, number: u64, most: usize) -> usize {
        let Some(routed) = self.routed.get_mut(&number) else { return 0 };
        let worker = routed.worker;
        let (gone, tail) = self.runs.trim(routed.tail, worker, number, most);
        match tail {
            Some(tail) => routed.tail = tail,
            None => {
                self.routed.remove(&number);
            }
        }
        if let Some(prompts) = self.workers.get_mut(&worker) {
            prompts.blocks -= gone;
            if tail.is_none() {
                prompts.numbers.remove(&number);
            }
            if prompts.blocks == 0 {
                self.workers.remove(&worker);
            }
        }
        gone
    }

    /// Drops all prompts of a worker, because it is gone or has restarted.
    pub fn forget(&mut self, worker: u32) {
        let ranks = WorkerKey { worker, rank: 0 }..=WorkerKey { worker, rank: u16::MAX };
        while let Some((_, prompts)) = self.workers.range(ranks.clone()).next() {
            let Some(oldest) = prompts.numbers.first().copied() else { return };
            self.trim(oldest, usize::MAX);
        }
    }

    /// Number of speculative blocks of a worker.
    pub fn blocks(&self, worker: WorkerKey) -> usize {
        self.workers.get(&worker).map_or(0, |prompts| prompts.blocks)
    }

    /// Number of listed blocks over all workers: equal to the number of speculative blocks, however
    /// often these were renewed.
    pub fn listed_blocks(&self) -> usize {
        self.runs.listed_blocks()
    }
}
