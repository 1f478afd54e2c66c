//! Stores blocks that arrive before their parent: keeps them aside, and joins them later.

use super::observe::Observer;
use super::waiting_events::{BLOCKS_MAX, WaitingEvent};
use super::{AppliedBlocks, Index, TokenBlocks, WorkerKey};
use crate::event::{EngineHash, StoredBlock, Tier};

impl Index {
    /// Keeps blocks whose parent the worker is not known to hold.
    pub(super) fn keep_aside(
        &mut self,
        worker: WorkerKey,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
        tier: Tier,
    ) -> AppliedBlocks {
        let all = blocks.len();
        let (Some(parent), 1..=BLOCKS_MAX) = (parent, all) else {
            return AppliedBlocks { orphaned: all, ..AppliedBlocks::default() };
        };
        if self.admit(worker).is_none() {
            return AppliedBlocks { over_limit: all, ..AppliedBlocks::default() };
        }
        let Some(worker) = self.workers.get_mut(&worker) else {
            return AppliedBlocks::default();
        };
        // Blocks of a wrong size can never be stored. They wait without their tokens, whose number
        // is not bounded.
        let whole = self.config.block_size as usize;
        let kept = blocks.iter().map(|block| match block.tokens.len() == whole {
            true => block.clone(),
            false => StoredBlock { tokens: Vec::new(), ..*block },
        });
        let blocks = kept.collect();
        let orphaned =
            worker.waiting_events.keep(WaitingEvent { parent, blocks, tier, removed: Vec::new() });
        AppliedBlocks { aside: all, orphaned, ..AppliedBlocks::default() }
    }

    /// Stores waiting blocks whose parent is now known.
    pub(super) fn join(
        &mut self,
        worker: WorkerKey,
        observer: &mut impl Observer,
    ) -> AppliedBlocks {
        let mut applied = AppliedBlocks::default();
        while let Some(known) = self.workers.get_mut(&worker) {
            if known.waiting_events.is_empty() {
                break;
            }
            let names = &known.names;
            let Some(waiting) = known.waiting_events.take(|parent| names.find(parent.0).is_some())
            else {
                break;
            };
            let WaitingEvent { parent, blocks, tier, removed } = waiting;
            if let Some(before) = self.hash_of(worker, parent) {
                let run = TokenBlocks { blocks: &blocks, tier };
                applied += self.store_tokens(worker, Some(parent), before, run, observer);
            }
            // These copies were counted when they were removed.
            self.remove_telling(worker, &removed, tier, observer);
        }
        applied
    }
}
