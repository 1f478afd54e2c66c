//! Stored blocks whose parent is not there (yet): kept for a while, joined when it
//! comes, dropped when they become too many.

use std::collections::VecDeque;

use super::observe::Observer;
use super::{Applied, Index, WorkerKey};
use crate::event::{EngineHash, StoredBlock, Tier};

/// Events that one worker can have waiting.
const EVENTS_MAX: usize = 64;
/// Blocks that one worker can have waiting, over all its events.
const BLOCKS_MAX: usize = 4096;

/// One worker's events that wait for their parent, oldest first.
#[derive(Debug, Default)]
pub(super) struct Aside {
    waiting: VecDeque<Waiting>,
    blocks: usize,
}

#[derive(Debug)]
struct Waiting {
    parent: EngineHash,
    blocks: Vec<StoredBlock>,
    tier: Tier,
    /// Copies that were removed meanwhile; no more than there are blocks.
    removed: Vec<EngineHash>,
}

impl Aside {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Keeps an event; says how many blocks had to go for it.
    fn keep(&mut self, waiting: Waiting) -> usize {
        self.blocks += waiting.blocks.len();
        self.waiting.push_back(waiting);
        let mut dropped = 0;
        while self.waiting.len() > EVENTS_MAX || self.blocks > BLOCKS_MAX {
            let Some(oldest) = self.waiting.pop_front() else { break };
            self.blocks -= oldest.blocks.len();
            dropped += oldest.blocks.len();
        }
        dropped
    }

    /// Takes out an event whose parent is `known`.
    fn take(&mut self, known: impl Fn(EngineHash) -> bool) -> Option<Waiting> {
        let at = self.waiting.iter().position(|waiting| known(waiting.parent))?;
        let waiting = self.waiting.remove(at)?;
        self.blocks -= waiting.blocks.len();
        Some(waiting)
    }

    /// A copy was removed; says whether it was one that waits.
    pub(super) fn remove(&mut self, name: EngineHash, tier: Tier) -> bool {
        let waits = |waiting: &&mut Waiting| {
            let stored = waiting.blocks.iter().filter(|block| block.hash == name).count();
            let removed = waiting.removed.iter().filter(|removed| **removed == name).count();
            waiting.tier == tier && stored > removed
        };
        let Some(waiting) = self.waiting.iter_mut().find(waits) else {
            return false;
        };
        waiting.removed.push(name);
        true
    }

    pub(super) fn bytes(&self) -> usize {
        let tokens = |waiting: &Waiting| {
            waiting.blocks.iter().map(|b| size_of_val(b) + b.tokens.len() * 4).sum::<usize>()
        };
        self.waiting.iter().map(tokens).sum()
    }
}

impl Index {
    /// Keeps blocks whose parent the worker is not known to hold.
    pub(super) fn keep_aside(
        &mut self,
        worker: WorkerKey,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
        tier: Tier,
    ) -> Applied {
        let all = blocks.len();
        let (Some(parent), 1..=BLOCKS_MAX) = (parent, all) else {
            return Applied { orphaned: all, ..Applied::default() };
        };
        if self.admit(worker).is_none() {
            return Applied { over_limit: all, ..Applied::default() };
        }
        let Some(worker) = self.workers.get_mut(&worker) else {
            return Applied::default();
        };
        // What can never be stored waits without its tokens, of which there is no bound.
        let whole = self.config.block_size as usize;
        let kept = blocks.iter().map(|block| match block.tokens.len() == whole {
            true => block.clone(),
            false => StoredBlock { tokens: Vec::new(), ..*block },
        });
        let blocks = kept.collect();
        let orphaned = worker.aside.keep(Waiting { parent, blocks, tier, removed: Vec::new() });
        Applied { aside: all, orphaned, ..Applied::default() }
    }

    /// Stores what has waited for blocks that are there now.
    pub(super) fn join(&mut self, worker: WorkerKey, observer: &mut impl Observer) -> Applied {
        let mut applied = Applied::default();
        while let Some(known) = self.workers.get_mut(&worker) {
            if known.aside.is_empty() {
                break;
            }
            let names = &known.names;
            let Some(waiting) = known.aside.take(|parent| names.find(parent.0).is_some()) else {
                break;
            };
            let Waiting { parent, blocks, tier, removed } = waiting;
            if let Some(before) = self.hash_of(worker, parent) {
                let blocks = (&blocks[..], tier);
                applied += self.store_tokens(worker, Some(parent), before, blocks, observer);
            }
            // They were counted when they were removed.
            self.remove_telling(worker, &removed, tier, observer);
        }
        applied
    }
}
